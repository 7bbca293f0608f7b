"""The store of a hybrid model: layer groups with blocks, and the states of the other layers."""

from mypy_extensions import i64

from ...config import CacheConfig
from ..blocks.ledger import BlockLedger
from ..index.prompt import Hit
from ..sequences.table import SequenceTable
from .grouped import GroupedStore
from .state_group import StateGroup
from .transfers import Transfers


class HybridStore(GroupedStore):
    """A grouped store whose hits end at a state: each method adds what `states` takes."""

    def __init__(
        self, config: CacheConfig, token_blocks: BlockLedger, sequences: SequenceTable, hash_seed: int
    ) -> None:
        super().__init__(config, token_blocks, sequences, hash_seed)
        self.states = StateGroup(config, self.pool, token_blocks, sequences)
        self.has_states = True
        self.cut_limit = "a state cannot be cut"

    def limit(self, hit: Hit) -> None:
        """Cut a hit to the longest one that ends at a state, or up to where one is supplied from outside."""
        super().limit(hit)
        served = hit.num_served * self.block_size
        limit = served
        reached: i64 = -1
        while limit > 0 and reached != limit:
            reached = self.states.hits.reach(self.token_blocks.index, hit, limit)
            limit = self.reach(hit, reached)
        if limit < hit.external_state_tokens:
            before = (hit.external_state_tokens - 1) // self.alignment * self.alignment
            reached = self.reach(hit, min(served, before))
            hit.lacks_state = reached > limit
            limit = reached
        if limit == 0 or hit.lacks_state:
            hit.state = []
        hit.num_usable = limit // self.block_size

    def num_needed(self, hit: Hit, num_tokens: i64) -> i64:
        return super().num_needed(hit, num_tokens) + self.states.hits.num_idle(hit)

    def num_needed_behind_others(self, hit: Hit, num_tokens: i64) -> i64:
        if hit.state:
            # All of the state counts, because its other holders may release it before.
            return max(self.num_least(num_tokens), self.num_needed(hit, num_tokens)) + i64(len(hit.state))
        return super().num_needed_behind_others(hit, num_tokens)

    def num_most(self, num_rows: i64, num_tokens: i64) -> i64:
        most_states = num_tokens // self.alignment + num_rows
        return super().num_most(num_rows, num_tokens) + self.states.num_parts * most_states

    def taken_by(self, hit: Hit) -> list[int]:
        return super().taken_by(hit) + hit.state

    def hold_hits(self, row: i64, hit: Hit) -> None:
        super().hold_hits(row, hit)
        self.states.hits.hold(row, hit)

    def unhold_hits(self, row: i64) -> None:
        self.states.hits.unhold(row)
        super().unhold_hits(row)

    def blocks_of(self, token_block: i64) -> list[int]:  # noqa: ARG002
        """Return none: inside a block there is no state."""
        return []

    def cached_for(self, token_block: i64) -> list[int]:
        content = self.token_blocks.index.content_of(token_block)
        return super().cached_for(token_block) + self.states.hits.find(content)

    def grow_groups(self, row: i64, start: i64, end: i64, transfers: Transfers) -> bool:
        if not super().grow_groups(row, start, end, transfers):
            return False
        self.states.begin(row, end, transfers)
        return True

    def note_ready(self, row: i64) -> None:
        if self.states.is_filled(row):
            super().note_ready(row)

    def slide_row(self, row: i64, computed: i64) -> None:
        for group in self.groups:
            if group.window > 0:
                last = min(group.first_needed(computed), group.num_blocks[row])
                self.states.note_leaving(row, group, last)
        super().slide_row(row, computed)

    def fork(self, row: i64, child: i64) -> None:
        super().fork(row, child)
        self.states.fork(row, child)

    def shortest_cut(self, row: i64) -> i64:
        return max(super().shortest_cut(row), self.states.shortest_cut(row))

    def close(self, row: i64) -> None:
        self.states.end(row, self.groups)
        super().close(row)
        self.states.close(row)
