"""Causes of prefix-cache misses, one for each token that has to be computed."""

from collections import OrderedDict
from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...answers import MissCauses
from ...errors import InvalidArgument
from ...ids import NO_CONTENT, NULL_BLOCK
from ..arrays import zeros_i64
from ..blocks.observer import PoolObserver
from ..index.hashing import root_hash
from ..index.prefix_index import PrefixIndex
from ..index.prompt import Hit, Prompt

#: Evictions are remembered in a table of this many slots for each block of the pool, and at least 256.
SLOTS_A_BLOCK: Final = 4
FEWEST_SLOTS: Final = 256
#: Slots per set; an eviction replaces the oldest of its set. With one slot, every fifth eviction of the pool's last
#: turnover would be overwritten; with four, about one in a hundred.
WAYS: Final[i64] = 4
#: Number of first blocks remembered with their extra keys.
MAX_FIRST_BLOCKS: Final = 65536


class Misses(PoolObserver):
    """The causes of misses of a cache that does not track them: none. Also the interface of `MissLog`."""

    def explain(
        self,
        prompt: Prompt,  # noqa: ARG002
        found: Hit,  # noqa: ARG002
        hittable: i64,  # noqa: ARG002
        hit: i64,  # noqa: ARG002
        resumed: bool,  # noqa: ARG002
    ) -> list[int]:
        """Return the number of a prompt's tokens for each cause, in the order of `MissCauses.FIELDS`.

        Args:
            prompt: the prompt.
            found: its lookup in the index. With a pool below the index, blocks that were found but are not hit were
                evicted from that pool; the first `num_served` only lack a state.
            hittable: leading blocks that could be hit.
            hit: leading tokens that were hit.
            resumed: True if the request ran before and was preempted.
        """
        return []

    def store_causes(self, row: i64, causes: list[int]) -> None:
        """Store the causes of the prompt in a row."""

    def note_first(self, words: vec[i64], num_tokens: i64, root: i64, block_size: i64) -> None:
        """Record that a prompt with these first tokens is cached under `root`."""

    def clear(self, row: i64) -> None:
        """Record that a row was forked, so it has no prompt that is counted separately."""

    def count(self, row: i64, num_hit: i64, resumed: bool) -> None:
        """Add a prompt's causes to the totals. Hits of a resumed request are not counted.

        Args:
            row: the row of its sequence.
            num_hit: tokens that were hit in the end; less than before if the producer was freed before it had computed
                all.
            resumed: True if the request ran before and was preempted.
        """

    def of_row(self, row: i64) -> MissCauses:  # noqa: ARG002
        """Return the causes of the prompt in a row. Raises `InvalidArgument` unless misses are tracked."""
        raise InvalidArgument(
            "track_misses is False; set ObserveConfig(track_misses=True) to record the causes of misses"
        )

    def in_all(self) -> MissCauses:
        """Return the causes of all prompts that were counted. Raises `InvalidArgument` unless misses are tracked."""
        raise InvalidArgument(
            "track_misses is False; set ObserveConfig(track_misses=True) to record the causes of misses"
        )


class MissLog(Misses):
    """Remembers evictions by the chained hash of their content, and the extra keys of first blocks.

    This only explains misses: a hash collision or an overwritten entry can make an explanation wrong, but never a hit.
    The table is set-associative and bounded, so a very old eviction is reported as never seen.
    """

    def __init__(self, index: PrefixIndex, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        self.index = index
        self.block_size: i64 = block_size
        size = FEWEST_SLOTS
        while size < SLOTS_A_BLOCK * num_blocks:
            size *= 2
        self._mask: i64 = size - WAYS
        self._hash = zeros_i64(size)
        self._when = zeros_i64(size)
        #: Evicted contents: blocks after an image are known by the content before them.
        self._content = zeros_i64(size)
        self._num_evictions: i64 = 0
        self._first_blocks: OrderedDict[int, i64] = OrderedDict()
        self.totals = zeros_i64(int(NUM_CAUSES))
        self.totals[YOUNGEST] = -1
        #: Tokens by cause of the prompt in each row, `NUM_CAUSES` items a row.
        self._of_rows = zeros_i64(max_num_seqs * int(NUM_CAUSES))

    def on_evict(self, block: i64) -> None:
        """Remember the content of `block`. O(1)."""
        self.remember(self.index.chain_hash[block], self.index.content_of(block))

    def remember(self, name: i64, content: i64) -> None:
        """Record the eviction of a content; `name` is its chained hash."""
        self._num_evictions += 1
        slot = self._slot(name)
        if slot < 0:
            slot = self._oldest(name)
        self._hash[slot] = name
        self._when[slot] = self._num_evictions
        self._content[slot] = content

    def _slot(self, name: i64) -> i64:
        """Return the slot of an eviction; -1 for none."""
        first = (name >> 7) & self._mask
        for slot in range(first, first + WAYS):
            if self._hash[slot] == name and self._when[slot] > 0:
                return slot
        return -1

    def _oldest(self, name: i64) -> i64:
        """Return the slot for a new eviction: an empty one of its set, or the one of the oldest eviction."""
        first = (name >> 7) & self._mask
        oldest = first
        for slot in range(first + 1, first + WAYS):
            if self._when[slot] < self._when[oldest]:
                oldest = slot
        return oldest

    def age(self, name: i64) -> i64:
        """Return how many evictions there were since this content was evicted; -1 if that is unknown."""
        slot = self._slot(name)
        return self._num_evictions - self._when[slot] if slot >= 0 else -1

    def explain(self, prompt: Prompt, found: Hit, hittable: i64, hit: i64, resumed: bool) -> list[int]:
        size = self.block_size
        causes = [0] * len(MissCauses.FIELDS)
        causes[HIT] = int(hit)
        causes[TAIL] = int(prompt.num_tokens - max(hittable * size, hit))
        missed = max(hittable * size - hit, 0)
        causes[YOUNGEST] = -1
        if resumed:
            causes[RECOMPUTED] = int(missed)
        elif missed > 0:
            without = max(min(found.num_served, hittable) * size - hit, 0)
            causes[NO_STATE] = int(without)
            self._split(prompt, hittable, found.blocks[: found.num_known], hit + without, found.root, causes)
        return causes

    def _split(self, prompt: Prompt, hittable: i64, blocks: vec[i32], hit: i64, root: i64, causes: list[int]) -> None:
        size = self.block_size
        found = i64(len(blocks))
        hashed = self._hash_missing(prompt, blocks, hittable, root)
        other = found == 0 and self._first_blocks.get(self._first_hash(prompt.words), root) != root
        for position in range(hit // size, hittable):
            age: i64 = -1
            if position < found:
                age = self.age(stored_name(self.index.content_of(i64(blocks[position]))))
            elif position < hashed:
                age = self.age(self.index.hashes[position])
            if age >= 0 and (causes[YOUNGEST] < 0 or age < causes[YOUNGEST]):
                causes[YOUNGEST] = int(age)
            cause = EVICTED if age >= 0 or position < found else OTHER_KEYS if other else NEVER_SEEN
            causes[cause] += int(min((position + 1) * size - hit, size))

    def _hash_missing(self, prompt: Prompt, blocks: vec[i32], hittable: i64, root: i64) -> i64:
        """Hash the blocks of a prompt after the known ones, up to `hittable`. Return the end of the hashed blocks.

        Hashes are those that the blocks had when they were cached. At spans the chain restarts from the content before
        them, which is known while it is indexed or its eviction is remembered.
        """
        index = self.index
        first = i64(len(blocks))
        before = i64(blocks[first - 1]) if first > 0 else NULL_BLOCK
        content = index.content_of(before) if first > 0 else root
        chain = index.chain_hash[before] if first > 0 else root_hash(root)
        while first < hittable:
            if first in prompt.spans:
                content = index.known_root((int(content), prompt.spans[first]))
                if content == NO_CONTENT:
                    return first
                chain = root_hash(content)
            last = min(prompt.next_span_block(first), hittable)
            index.hash_run(prompt.words, first, last, chain)
            chain = index.hashes[last - 1]
            slot = self._slot(chain)
            content = self._content[slot] if slot >= 0 else NO_CONTENT
            first = last
        return first

    def _first_hash(self, words: vec[i64]) -> int:
        """Return a hash of a prompt's first block, independent of its keys.

        The index's buffer of hashes is not used.
        """
        return int(self.index.hash_alone(words))

    def note_first(self, words: vec[i64], num_tokens: i64, root: i64, block_size: i64) -> None:
        if num_tokens >= block_size:
            name = self._first_hash(words)
            self._first_blocks.pop(name, 0)
            if len(self._first_blocks) >= MAX_FIRST_BLOCKS:
                self._first_blocks.popitem(last=False)
            self._first_blocks[name] = root

    def store_causes(self, row: i64, causes: list[int]) -> None:
        for position in range(NUM_CAUSES):
            self._of_rows[row * NUM_CAUSES + position] = causes[position]

    def clear(self, row: i64) -> None:
        for position in range(NUM_CAUSES):
            self._of_rows[row * NUM_CAUSES + position] = 0
        self._of_rows[row * NUM_CAUSES + YOUNGEST] = -1

    def of_row(self, row: i64) -> MissCauses:
        return _answer(self._of_rows[row * NUM_CAUSES : (row + 1) * NUM_CAUSES])

    def in_all(self) -> MissCauses:
        return _answer(self.totals)

    def count(self, row: i64, num_hit: i64, resumed: bool) -> None:
        first = row * NUM_CAUSES
        causes = self._of_rows
        lost = causes[first + HIT] - num_hit
        if lost > 0:
            causes[first + HIT] = num_hit
            causes[first + (RECOMPUTED if resumed else NEVER_SEEN)] += lost
        for position in range(NUM_CAUSES):
            if position != YOUNGEST and not (resumed and position == HIT):
                self.totals[position] += causes[first + position]


def _answer(causes: vec[i64]) -> MissCauses:
    return MissCauses(*[int(number) for number in causes])


def stored_name(content: i64) -> i64:
    """Return the key of content that lost its block but not its token block."""
    return root_hash(content)


HIT: Final[i64] = MissCauses.FIELDS.index("num_hit")
TAIL: Final[i64] = MissCauses.FIELDS.index("num_tail")
NEVER_SEEN: Final[i64] = MissCauses.FIELDS.index("num_never_seen")
EVICTED: Final[i64] = MissCauses.FIELDS.index("num_evicted")
OTHER_KEYS: Final[i64] = MissCauses.FIELDS.index("num_other_keys")
RECOMPUTED: Final[i64] = MissCauses.FIELDS.index("num_recomputed")
NO_STATE: Final[i64] = MissCauses.FIELDS.index("num_no_state")
YOUNGEST: Final[i64] = MissCauses.FIELDS.index("evicted_ago")
NUM_CAUSES: Final[i64] = len(MissCauses.FIELDS)
