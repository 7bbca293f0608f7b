"""What a batch of prompts hits, held while an eviction policy is asked for victims."""

from mypy_extensions import i64

from ..ids import NULL_BLOCK
from .block_ledger import BlockLedger
from .hit import Hit
from .mapping import Mapping


class HitHolder:
    """Holds what look-ups find, block after block, until `let_go` frees all of it, or `undo` puts it back."""

    def __init__(self, pool: BlockLedger, mapping: Mapping | None) -> None:
        self.pool = pool
        self.mapping = mapping
        self._held: list[int] = []
        self._held_on_cpu: list[int] = []

    def hold(self, hit: Hit) -> i64:
        """Hold what can be taken of a hit. Returns how many of its blocks were idle."""
        idle: i64 = 0
        if self.mapping is None:
            for position in range(hit.num_usable):
                idle += self._hold_block(i64(hit.blocks[position]))
            return idle
        for number, group in enumerate(self.mapping.groups):
            num_tokens = hit.num_usable * self.mapping.page_size
            places = hit.places[number]
            for place in range(group.first_needed(num_tokens), num_tokens // group.block_size):
                if places[place] > NULL_BLOCK:
                    idle += self._hold_block(places[place])
                elif self.mapping.cpu is not None:
                    self.mapping.cpu.share_one(-places[place])
                    self._held_on_cpu.append(int(-places[place]))
        return idle

    def _hold_block(self, block: i64) -> i64:
        was_idle: i64 = 1 if self.pool.ref_cnt[block] == 0 else 0
        self.pool.share_one(block)
        self._held.append(int(block))
        return was_idle

    def num_distinct(self) -> int:
        """Different blocks of the pool that are held."""
        return len(set(self._held))

    def let_go(self) -> None:
        """Free all, the last first."""
        for block in reversed(self._held):
            self.pool.release_one(block)
        if self.mapping is not None and self.mapping.cpu is not None:
            for block in reversed(self._held_on_cpu):
                self.mapping.cpu.release_one(block)

    def undo(self) -> None:
        """Put every block back where it was in the queue, if no other was taken since."""
        for block in reversed(self._held):
            self.pool.unshare_one(block)
        if self.mapping is not None and self.mapping.cpu is not None:
            for block in reversed(self._held_on_cpu):
                self.mapping.cpu.unshare_one(block)
