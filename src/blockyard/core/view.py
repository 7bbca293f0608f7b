"""Everything that can be asked of a cache, and how it is put together."""

import numpy as np
import numpy.typing as npt
from mypy_extensions import i64

from ..answers import AllocationEvent, CacheStats, Holding, MissCauses, Residency
from ..arguments import require_int, shown
from ..config import CacheConfig
from ..errors import InvalidArgument, OverBudget, not_enough_memory
from ..hash_seeds import hash_seed_or_drawn
from .admitting import Admitting
from .arrays import view_i32, view_i64, zeros_i64
from .block import KVCacheBlock
from .block_ledger import BlockLedger
from .block_pool import BlockPool, ManagedPool
from .block_table import BlockTable
from .branching import Branching
from .checking import check_mapping, check_sequences
from .children import Children
from .committing import Committing
from .ending import Ending
from .gate import Gate
from .history import AllocationHistory
from .joining import Joining
from .lease import BlockLease
from .mapping import Mapping, num_pages
from .misses import MissLog, StoredMisses
from .observer import Clock
from .plan import whole_table
from .policies import make_policy
from .policies.caught import CaughtPolicy
from .policies.retention import Retention
from .prompt import Prompt
from .reserving import NO_TOKEN, Reserving
from .residency import ResidencySampler
from .sequences import SequenceTable, read_handles
from .swapping import Swapping


class CacheView:
    """The parts of a cache, and what they can tell without changing anything. `KVCacheManager` adds the calls."""

    def __init__(self, config: object) -> None:
        if not isinstance(config, CacheConfig):
            raise InvalidArgument(f"config is {shown(config)}; it must be a CacheConfig")
        self._config = config
        try:
            self._build(config)
        except MemoryError as error:
            raise not_enough_memory(f"num_blocks is {config.num_blocks}; the system has no memory for the cache", error)

    def _build(self, config: CacheConfig) -> None:
        size = config.hash_block_size
        pages = num_pages(config) if config.is_mapped else config.num_blocks
        seed = hash_seed_or_drawn(config.hash_seed)
        self._gate = Gate()
        self._pages = BlockLedger(pages, size, size, config.enable_prefix_caching, seed)
        self._block_size: i64 = size
        self._sequences = SequenceTable(config.max_num_seqs, config.max_blocks_per_seq, size)
        self._mapping = Mapping(config, self._pages, self._sequences, seed) if config.is_mapped else None
        self._ledger: BlockLedger = self._pages if self._mapping is None else self._mapping.pool
        self._pool: BlockPool = ManagedPool(self._ledger, self._gate)
        self._cpu_pool: BlockPool | None = None
        if self._mapping is not None and self._mapping.cpu is not None:
            self._cpu_pool = ManagedPool(self._mapping.cpu, self._gate)
        self._joining = Joining(self._sequences, self._pages, size)
        interruption = self._gate.interruption
        self._admitting = Admitting(config, self._pages, self._sequences, self._joining, self._mapping, interruption)
        self._reserving = Reserving(self._pages, self._sequences, self._joining, self._mapping, config.max_model_len)
        self._committing = Committing(self._pages, self._sequences, self._joining, self._mapping, config.max_model_len)
        self._ending = Ending(self._pages, self._sequences, self._joining, self._mapping)
        self._gate.deferred.append(self._ending)
        self._branching = Branching(self._pages, self._sequences, self._joining, self._mapping, self._ending)
        self._swapping = self._make_swapping()
        self._clock = Clock()
        self._history: AllocationHistory | None = None
        self._residency: ResidencySampler | None = None
        self._retention: Retention | None = None
        self._observe()
        self._install_policy(config.eviction_policy)

    def _make_swapping(self) -> Swapping | None:
        if self._mapping is None or self._mapping.cpu is None:
            return None
        return Swapping(self._mapping, self._mapping.cpu, self._sequences, self._gate.interruption)

    def _observe(self) -> None:
        """Set up whoever is to be told what happens to blocks; where nobody is, nothing is told."""
        config = self._config
        if config.history_size > 0:
            self._history = AllocationHistory(config.history_size, self._ledger.queue, self._clock)
            self._ending.history = self._history
            self._ledger.watch(self._history)
        if config.residency_sample > 0:
            self._residency = ResidencySampler(config.residency_sample, self._clock)
            self._ledger.watch(self._residency)
        if config.track_misses:
            misses = MissLog(self._pages.index, config.num_blocks, config.hash_block_size)
            self._admitting.misses = misses
            self._pages.watch(misses)
            if self._mapping is not None:
                self._ledger.watch(StoredMisses(misses, self._mapping.pool))
        if config.partial_hits:
            self._pages.index.children = Children(self._pages.num_blocks)

    def _install_policy(self, policy: object) -> None:
        """Least recently used needs no policy: it is the order of the free queue."""
        num_blocks = int(self._ledger.capacity)
        caught = CaughtPolicy(make_policy(policy, num_blocks), num_blocks, self._gate.interruption)
        retention: Retention | None = None
        if self._config.retention_blocks > 0:
            retention = Retention(caught, num_blocks)
            self._ledger.choose_by(retention, caught)
        elif isinstance(policy, str) and policy == "lru":
            self._ledger.choose_by(None, None)
        else:
            self._ledger.choose_by(caught, caught)
        self._retention = retention

    def _note(self, action: str, holder: str) -> None:
        """Say to the history what is being done, and for whom."""
        if self._history is not None:
            self._history.actor = f"{action} {holder}" if holder else action

    # What is there.

    @property
    def config(self) -> CacheConfig:
        """What the cache was made of."""
        return self._config

    @property
    def pool(self) -> BlockPool:
        """The pool of blocks that have keys and values."""
        return self._pool

    @property
    def block_size(self) -> int:
        """Tokens that are hashed and compared together; of a cache without layer groups, tokens a block."""
        return int(self._block_size)

    def num_tokens(self, seq: object) -> int:
        """Known tokens of a sequence. O(1)."""
        return int(self._sequences.num_tokens[self._sequences.row_of(seq)])

    def num_computed_tokens(self, seq: object) -> int:
        """Tokens whose keys and values are there, or will be when the sequence gets its slots. O(1)."""
        return int(self._sequences.num_computed[self._sequences.row_of(seq)])

    def token_ids(self, seq: object) -> npt.NDArray[np.int32]:
        """The known tokens of a sequence, int32 (num_tokens,), a copy. O(tokens)."""
        self._gate.enter("token_ids")
        try:
            row = self._sequences.row_of(seq)
            num_tokens = int(self._sequences.num_tokens[row])
            pending = self._sequences.pending_token[row]
            stored = num_tokens if pending == NO_TOKEN else num_tokens - 1
            tokens = self._pages.block_tokens(self._sequences.row_blocks(row), stored)
            return tokens if pending == NO_TOKEN else np.append(tokens, np.int32(pending))
        finally:
            self._gate.leave()

    def block_ids(self, seq: object, group: object = 0) -> npt.NDArray[np.int32]:
        """The blocks of a sequence in order, int32 (n,), a copy. O(blocks). 0 stands behind a sliding window."""
        self._gate.enter("block_ids")
        try:
            table = self._table(group)
            return view_i32(table.row_blocks(self._sequences.row_of(seq)))
        finally:
            self._gate.leave()

    def num_owned_blocks(self, seqs: object) -> npt.NDArray[np.int64]:
        """Blocks that each sequence holds alone, int64 (B,): what preempting it would free. O(blocks)."""
        self._gate.enter("num_owned_blocks")
        try:
            rows = self._sequences.rows_of(read_handles(seqs))
            owned = zeros_i64(len(rows))
            ref_cnt = self._ledger.ref_cnt
            for index in range(i64(len(rows))):
                for source in self._sequences.copy_from[rows[index]]:
                    if ref_cnt[i64(source)] == 1:
                        owned[index] += 1
                for table in self._reserving.tables:
                    first = rows[index] * table.width
                    for position in range(first, first + table.num_blocks[rows[index]]):
                        if ref_cnt[i64(table.blocks[position])] == 1:
                            owned[index] += 1
            return view_i64(owned)
        finally:
            self._gate.leave()

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """All rows, int32 (max_num_seqs, blocks of max_model_len), padded with 0: read-only, live, without a copy.

        The first layer group's, where there are several; see `group_table`.
        """
        return whole_table(self._reserving.tables[0])

    def group_table(self, group: object) -> npt.NDArray[np.int32]:
        """`block_table` of one layer group."""
        return whole_table(self._table(group))

    def _table(self, group: object) -> BlockTable:
        tables = self._reserving.tables
        return tables[require_int("group", group, 0, len(tables) - 1)]

    def is_swapped_out(self, seq: object) -> bool:
        """Whether a sequence's blocks are in the CPU pool. O(1)."""
        return self._sequences.is_swapped[self._sequences.row_of(seq)] != 0

    @property
    def cpu_pool(self) -> BlockPool | None:
        """The CPU pool; None without one."""
        return self._cpu_pool

    @property
    def generation(self) -> int:
        """How often the cache was reset. A block of an earlier generation never hits. O(1)."""
        return int(self._pages.index.num_generations)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones included. O(1)."""
        return self._pool.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody holds. O(1)."""
        return self._pool.num_used_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that a prompt can hit. O(1)."""
        return self._pool.num_cached_blocks

    @property
    def usage(self) -> float:
        """Share of the usable blocks in use, 0 to 1. O(1)."""
        return self._pool.usage

    @property
    def num_seqs(self) -> int:
        """Running sequences. O(1)."""
        return int(self._sequences.max_num_seqs - self._sequences.num_free_rows)

    def running(self) -> dict[int, str]:
        """The running sequences and their holders: at the end of work, the leak report. O(max_num_seqs)."""
        self._gate.enter("running")
        try:
            sequences = self._sequences
            return {int(sequences.handle[i64(row)]): sequences.holders[row] for row in sequences.live_rows()}
        finally:
            self._gate.leave()

    def stats(self) -> CacheStats:
        """Counters since the start and the state now. O(max_num_seqs). It may be asked at any time."""
        copied = self._reserving.num_copied_blocks if self._mapping is None else self._mapping.num_copied_blocks
        return CacheStats(
            num_prompt_tokens=int(self._admitting.num_prompt_tokens),
            num_hit_tokens=int(self._admitting.num_hit_tokens),
            num_evicted_blocks=int(self._ledger.num_evicted_blocks),
            num_copied_blocks=int(copied),
            peak_used_blocks=int(self._ledger.peak_used_blocks),
            num_free_blocks=self.num_free_blocks,
            num_used_blocks=self.num_used_blocks,
            num_cached_blocks=self.num_cached_blocks,
            num_running_seqs=self.num_seqs,
            num_wasted_slots=self._num_wasted_slots(),
            num_resumed_tokens=int(self._admitting.num_resumed_tokens),
            num_resumed_hit_tokens=int(self._admitting.num_resumed_hit_tokens),
        )

    def _num_wasted_slots(self) -> int:
        wasted: i64 = 0
        for row in self._sequences.live_rows():
            if self._sequences.is_swapped[i64(row)] == 0:
                for table in self._reserving.tables:
                    slots = table.num_blocks[i64(row)] * table.block_size
                    wasted += max(slots - self._sequences.num_tokens[i64(row)], 0)
        return int(wasted)

    def block(self, block_id: object) -> KVCacheBlock:
        """One block as people see it, with the sequences that hold it. O(all held blocks)."""
        number = require_int("block_id", block_id, 0, int(self._ledger.capacity) - 1)
        self._gate.enter("block")
        try:
            block = self._pool._describe(number)
            for row in self._sequences.live_rows():
                for table in self._reserving.tables:
                    if block.block_id and block.block_id in view_i32(table.row_blocks(i64(row))):
                        block.holders.append(self._sequences.name(i64(row)))
                if block.block_id in self._sequences.copy_from[i64(row)]:
                    block.holders.append(self._sequences.name(i64(row)))
            return block
        finally:
            self._gate.leave()

    # Why, and who.

    def miss_causes(self, seq: object) -> MissCauses:
        """What became of the tokens of a sequence's prompt when it was allocated. O(1).

        Raises `InvalidArgument` unless the config says `track_misses=True`.
        """
        row = self._sequences.row_of(seq)
        self._require_misses()
        causes = self._sequences.causes[row]
        return MissCauses(*causes) if causes else MissCauses(0, 0, 0, 0, 0, 0, -1)

    def miss_totals(self) -> MissCauses:
        """The same for all prompts allocated so far. O(1)."""
        return MissCauses(*self._require_misses().totals)

    def _require_misses(self) -> MissLog:
        misses = self._admitting.misses
        if misses is None:
            raise InvalidArgument("track_misses is False; the causes of misses are known with track_misses=True")
        return misses

    def history(self) -> list[AllocationEvent]:
        """The latest `history_size` events of the pool, oldest first. O(history_size). Empty when it is off."""
        self._gate.enter("history")
        try:
            return [] if self._history is None else self._history.events()
        finally:
            self._gate.leave()

    def residency(self) -> Residency:
        """How long sampled blocks live, lie idle and wait for reuse. O(1).

        Raises `InvalidArgument` unless the config has a `residency_sample`.
        """
        if self._residency is None:
            raise InvalidArgument("residency_sample is 0; blocks are followed with residency_sample=1 or more")
        return self._residency.residency()

    def leak_report(self) -> list[Holding]:
        """Who holds which blocks now: sequences, swapped ones included, and leases. O(held blocks).

        At the end of work, what it names was not given back. It changes nothing and ends nothing.
        """
        self._gate.enter("leak_report")
        try:
            sequences = [self._holding(i64(row)) for row in self._sequences.live_rows()]
            return sequences + [_lease_holding(lease) for lease in self._pool.leases()]
        finally:
            self._gate.leave()

    def _holding(self, row: i64) -> Holding:
        sequences = self._sequences
        blocks: list[int] = []
        cpu_blocks: list[int] = []
        for table in self._reserving.tables:
            blocks += [int(block) for block in table.row_blocks(row) if block != 0]
        if self._mapping is not None and self._mapping.cpu is not None:
            for group in self._mapping.groups:
                found = [int(group.cpu_block_at(row, place)) for place in range(group.num_blocks[row])]
                cpu_blocks += [block for block in found if block != 0]
        blocks += sequences.copy_from[row]
        kind = "swapped sequence" if sequences.is_swapped[row] != 0 else "sequence"
        handle = int(sequences.handle[row])
        return Holding(kind, handle, sequences.holders[row], int(sequences.num_tokens[row]), blocks, cpu_blocks)

    def _cached_blocks(self, prompt: Prompt) -> list[int]:
        """The blocks of the pool that hold the longest cached beginning of a prompt, all layer groups'."""
        found = self._pages.find(prompt, prompt.num_tokens // self._block_size)
        blocks: list[int] = []
        for position in range(found):
            page = i64(self._pages.index.found[position])
            if self._mapping is None:
                blocks.append(int(page))
            else:
                blocks += self._mapping.held_for(self._pages.index.content_of(page))
        return blocks

    def _retain(self, blocks: list[int], priority: int, expires_at: float | None) -> int:
        retention = self._retention
        if retention is None:
            raise InvalidArgument("retention_blocks is 0; retain needs a budget of blocks in the config")
        budget = self._config.retention_blocks
        new = len([block for block in blocks if not retention.is_retained(block)]) if priority > 0 else 0
        if retention.num_retained + new > budget:
            raise OverBudget(
                f"retain: {new} more blocks would be retained; {retention.num_retained} of {budget} are already"
            )
        if self._ledger.chooser is not None and self._ledger.chooser.caught.failure:
            raise self._ledger.chooser.error()
        for block in blocks:
            retention.set_priority(block, priority, expires_at)
        return len(blocks)

    def check(self) -> None:
        """Verify the laws on the live manager; see `checking`. O(num_blocks + table). Raises `InvariantError`."""
        self._gate.enter("check")
        try:
            self._pages.check()
            leases = self._pool.leases()
            if self._mapping is None:
                check_sequences(self._pages, leases, self._sequences, True)
            else:
                check_sequences(self._pages, [], self._sequences, False)
                check_mapping(self._mapping, leases, self._cpu_pool.leases() if self._cpu_pool is not None else [])
        finally:
            self._gate.leave()


def _lease_holding(lease: BlockLease) -> Holding:
    return Holding("lease", lease.serial, lease.holder, 0, list(lease), [])
