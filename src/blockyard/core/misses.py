"""Why a prompt did not hit: every token that has to be computed has a cause."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ..answers import MissCauses
from .arrays import zeros_i64
from .hashing import root_hash
from .observer import PoolObserver
from .prefix_index import PrefixIndex

#: Evictions are remembered in a table of so many slots for each block of the pool, newer ones over older ones.
SLOTS_A_BLOCK: Final = 4
#: As many first blocks are remembered with the keys they were cached under.
MAX_FIRST_BLOCKS: Final = 65536


class MissLog(PoolObserver):
    """Remembers what was evicted, by the chained hash of its content, and under which keys prompts began.

    It explains; it decides nothing. A hash that two contents share, or a slot that was overwritten, can make an
    explanation wrong, never a hit. The table is direct-mapped and bounded, so a very old eviction reads "never seen".
    """

    def __init__(self, index: PrefixIndex, num_blocks: int) -> None:
        self.index = index
        size = 1
        while size < SLOTS_A_BLOCK * num_blocks:
            size *= 2
        self._mask: i64 = size - 1
        self._hash = zeros_i64(size)
        self._when = zeros_i64(size)
        self._num_evictions: i64 = 0
        self._first_blocks: OrderedDict[int, i64] = OrderedDict()
        self.totals = [0] * len(MissCauses.FIELDS)

    def evicting(self, block: i64) -> None:
        """Remember the content of `block`. O(1)."""
        self.remember(self.index.chain_hash[block])

    def remember(self, chain_hash: i64) -> None:
        """The content of this chained hash is evicted now."""
        self._num_evictions += 1
        slot = (chain_hash >> 7) & self._mask
        self._hash[slot] = chain_hash
        self._when[slot] = self._num_evictions

    def age(self, chain_hash: i64) -> i64:
        """Evictions since the content of this hash was evicted, 0 for the latest; -1 if that is not remembered."""
        slot = (chain_hash >> 7) & self._mask
        if self._hash[slot] != chain_hash or self._when[slot] == 0:
            return -1
        return self._num_evictions - self._when[slot]

    def explain(
        self, words: vec[i64], num_tokens: i64, found: i64, hit: i64, root: i64, block_size: i64, resumed: bool
    ) -> list[int]:
        """Tokens by cause, in the order of `MissCauses.FIELDS`, of a prompt whose first `hit` tokens were taken.

        found: leading blocks that the index knows; those of them that were not taken are evicted from the pool below.
        """
        hittable = (num_tokens - 1) // block_size
        causes = [0] * len(MissCauses.FIELDS)
        causes[HIT] = int(hit)
        causes[TAIL] = int(num_tokens - max(hittable * block_size, hit))
        missed = max(hittable * block_size - hit, 0)
        causes[YOUNGEST] = -1
        if resumed:
            causes[RECOMPUTED] = int(missed)
        elif missed > 0:
            self._split(words, found, hit, hittable, root, block_size, causes)
        return causes

    def _split(
        self, words: vec[i64], found: i64, hit: i64, hittable: i64, root: i64, block_size: i64, causes: list[int]
    ) -> None:
        chain = root_hash(root) if found == 0 else self.index.chain_hash[i64(self.index.found[found - 1])]
        self.index.hash_run(words, found, hittable, chain)
        other = found == 0 and self._first_blocks.get(self._first_hash(words), root) != root
        for position in range(hit // block_size, hittable):
            tokens = min((position + 1) * block_size - hit, block_size)
            age = self.age(self.index.hashes[position]) if position >= found else i64(-1)
            if age >= 0 and (causes[YOUNGEST] < 0 or age < causes[YOUNGEST]):
                causes[YOUNGEST] = int(age)
            cause = EVICTED if age >= 0 or position < found else OTHER_KEYS if other else NEVER_SEEN
            causes[cause] += int(tokens)

    def _first_hash(self, words: vec[i64]) -> int:
        """A hash of a prompt's first block alone, whatever its keys. It leaves the index's room for hashes alone."""
        return int(self.index.hash_alone(words))

    def note_first(self, words: vec[i64], num_tokens: i64, root: i64, block_size: i64) -> None:
        """A prompt that begins with these tokens is cached under `root`."""
        if num_tokens >= block_size:
            name = self._first_hash(words)
            self._first_blocks.pop(name, 0)
            if len(self._first_blocks) >= MAX_FIRST_BLOCKS:
                self._first_blocks.popitem(last=False)
            self._first_blocks[name] = root

    def count(self, causes: Iterable[int]) -> None:
        """Add a prompt's causes to the totals."""
        for position, tokens in enumerate(causes):
            if position == YOUNGEST:
                self.totals[position] = -1
            else:
                self.totals[position] += tokens


HIT: Final = MissCauses.FIELDS.index("num_hit")
TAIL: Final = MissCauses.FIELDS.index("num_tail")
NEVER_SEEN: Final = MissCauses.FIELDS.index("num_never_seen")
EVICTED: Final = MissCauses.FIELDS.index("num_evicted")
OTHER_KEYS: Final = MissCauses.FIELDS.index("num_other_keys")
RECOMPUTED: Final = MissCauses.FIELDS.index("num_recomputed")
YOUNGEST: Final = MissCauses.FIELDS.index("evicted_ago")
