"""Lookups of a prompt's cached prefix, and caching of a lease's blocks."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i32, i64

from ...arguments import require_int
from ...errors import ForeignBlock, InvalidArgument, StaleBlocks
from ...ids import NO_CONTENT, NULL_BLOCK
from ..arrays import view_i32, zeros_i64
from ..face import refuse_pickle, refuse_subclass
from ..index.hashing import root_hash
from ..index.prefix_index import PrefixIndex
from ..index.prompt import Chunk, Prompt
from .lease import BlockLease
from .ledger import BlockLedger


class FoundBlocks:
    """The cached prefix of a prompt, as returned by `BlockPool.find_cached_blocks`. It does not hold the blocks.

    It stores the content id of each block. Content ids are never reused, so `BlockPool.hold` can refuse blocks whose
    content has changed since.
    """

    def __init__(self, ledger: BlockLedger, blocks: vec[i32], contents: vec[i64]) -> None:
        self._ledger = ledger
        self._blocks = blocks
        self._contents = contents

    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """Return the ids, int32 (n,), read-only, without a copy."""
        return view_i32(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in the blocks."""
        return len(self._blocks) * self._ledger.block_size

    @property
    def num_idle(self) -> int:
        """Return how many of the blocks are free. Holding them takes as many free blocks. O(blocks)."""
        return int(self._ledger.count_idle(self._blocks, len(self._blocks)))

    def first(self, num_blocks: object) -> "FoundBlocks":
        """Return the first `num_blocks` of them. O(num_blocks). Raises `InvalidArgument` if there are fewer."""
        count = require_int("num_blocks", num_blocks, 0, len(self._blocks))
        return FoundBlocks(self._ledger, self._blocks[:count], self._contents[:count])

    def __repr__(self) -> str:
        return f"<FoundBlocks {[int(block) for block in self._blocks]}>"

    def __init_subclass__(cls) -> None:
        """Refuse subclasses: the class is compiled."""
        raise refuse_subclass("FoundBlocks")

    def __reduce__(self) -> str:
        raise refuse_pickle("a FoundBlocks", "send its `block_ids`")


def find_full(ledger: BlockLedger, prompt: Prompt) -> vec[i32]:
    """Return the cached full blocks of a prompt's prefix; all of the prompt may be hit. O(blocks found).

    Raises `InvalidArgument` for an invalid token, if the tokens were not checked before.
    """
    found = ledger.index.find_prompt(prompt, prompt.num_tokens // i64(ledger.block_size))
    prompt.require_tokens(i64(len(found)) * ledger.index.rows.num_words)
    return found


def found_blocks(ledger: BlockLedger, prompt: Prompt) -> FoundBlocks:
    """Return the blocks of `find_full` with the content id of each."""
    blocks = find_full(ledger, prompt)
    count = i64(len(blocks))
    identity = ledger.index.identity
    contents = zeros_i64(int(count))
    for position in range(count):
        contents[position] = identity[2 * i64(blocks[position])]
    return FoundBlocks(ledger, blocks, contents)


def require_found(ledger: BlockLedger, found: FoundBlocks, count: i64) -> None:
    """Check that the first `count` blocks still have the content with which they were found.

    Raises `ForeignBlock` if another pool found them, and `StaleBlocks` if one has changed.
    """
    if found._ledger is not ledger:
        raise ForeignBlock(f"{found!r} was found in another pool")
    if count > len(found._blocks):
        raise InvalidArgument(f"num_blocks is {count}; found has {len(found._blocks)} blocks")
    identity = ledger.index.identity
    for position in range(count):
        block = i64(found._blocks[position])
        if identity[2 * block] != found._contents[position]:
            raise StaleBlocks(
                f"block {block} at position {position} no longer holds what was found in it; look up again",
                int(position),
            )


def cache_prompt(ledger: BlockLedger, lease: BlockLease, prompt: Prompt, first: i64, num_full: i64) -> None:
    """Cache the blocks of a lease as the first `num_full` blocks of a prompt; `first` of them are cached already."""
    if lease._first_block > 0:
        raise InvalidArgument(f"lease begins with block {lease._first_block} of its prompt; use cache_next_blocks")
    _check_cacheable(ledger, lease, first, num_full)
    if first > 0:
        _check_prefix(ledger.index, lease, prompt, first)
    ledger.index.make_room(num_full)
    still = num_still_cached(ledger, lease)
    root = ledger.index.root(prompt.keys) if first == 0 else NO_CONTENT
    ledger.index_prompt(prompt, first, num_full, lease._blocks, 0, 0, root)
    _set_cached(ledger, lease, max(still, num_full))


def _set_cached(ledger: BlockLedger, lease: BlockLease, num_cached: i64) -> None:
    lease._num_cached = num_cached
    lease._num_sure = num_cached
    lease._losses = ledger.num_losses


def _check_cacheable(ledger: BlockLedger, lease: BlockLease, num_cached: i64, num_full: i64) -> None:
    if num_full > lease._count:
        raise InvalidArgument(f"token_ids fill {num_full} blocks; the lease has {lease._count}")
    blocks = lease._blocks
    index = ledger.index
    ref_cnt = ledger.ref_cnt
    for position in range(num_full):
        block = blocks[position]
        cached = index.is_cached(i64(block))
        if cached != (position < num_cached):
            state = "already" if cached else "not"
            raise InvalidArgument(
                f"num_cached_blocks is {num_cached}, but block {block} at position {position} is {state} cached"
            )
        if not cached and ref_cnt[i64(block)] > 1:
            _refuse_shared(ledger, lease, position)
        if block == NULL_BLOCK:
            _refuse_null(position)


def _refuse_shared(ledger: BlockLedger, lease: BlockLease, position: i64) -> None:
    block = i64(lease._blocks[position])
    raise InvalidArgument(
        f"lease {lease._serial} has block {block} at position {position}, which is held "
        f"{ledger.ref_cnt[block]} times; only a block that the lease holds alone can be given a content"
    )


def _refuse_null(position: i64) -> None:
    raise InvalidArgument(f"the lease has released its block at position {position}, so it cannot cache a block there")


def _check_prefix(index: PrefixIndex, lease: BlockLease, prompt: Prompt, num_cached: i64) -> None:
    """Refuse a lease whose leading blocks cache other tokens, because later blocks would continue a wrong prefix."""
    found = index.find_prompt(prompt, num_cached)
    for position in range(num_cached):
        block = i64(lease._blocks[position])
        wanted = i64(found[position]) if position < i64(len(found)) else NULL_BLOCK
        if index.content_of(block) != index.content_of(wanted):
            raise InvalidArgument(f"token_ids differ from what block {block} at position {position} caches")


def num_still_cached(ledger: BlockLedger, lease: BlockLease) -> i64:
    """Return how many leading blocks that the lease has cached are cached now, released positions included.

    O(1), but O(blocks) in the first call after blocks that may be held lost their content.
    """
    if lease._losses == ledger.num_losses:
        return lease._num_sure
    for position in range(lease._num_sure):
        block = i64(lease._blocks[position])
        if block != NULL_BLOCK and not ledger.index.is_cached(block):
            return position
    return lease._num_sure


def cache_next(ledger: BlockLedger, lease: BlockLease, chunk: Chunk, start: i64) -> None:
    """Cache the blocks of a lease from position `start` on as the full blocks of a chunk."""
    still = num_still_cached(ledger, lease)
    _require_position(lease, still, start)
    prompt = chunk.at(lease._first_block + start, ledger.block_size)
    num_full = prompt.num_tokens // i64(ledger.block_size)
    if start + num_full > lease._count:
        raise InvalidArgument(f"token_ids fill {num_full} blocks after the first {start}; the lease has {lease._count}")
    before = _Before(ledger, lease, start)
    for number in range(num_full):
        _require_cacheable(ledger, lease, start + number, prompt.words, number)
    ledger.index.make_room(num_full)
    same = _num_same(ledger.index, lease, start, prompt, num_full, before)
    if same < num_full:
        _index_from(ledger, lease, start, prompt, same, num_full, before)
    _set_cached(ledger, lease, max(still, start + num_full))


def _require_position(lease: BlockLease, still: i64, start: i64) -> None:
    """Refuse a position past the blocks that the lease has cached, or past the first that has lost its content."""
    if start > lease._num_cached:
        raise InvalidArgument(f"num_cached_blocks is {start}; only the first {still} blocks of the lease are cached")
    if start > still:
        raise StaleBlocks(
            f"lease {lease._serial} had cached {lease._num_cached} blocks; block {lease._blocks[still]} at "
            f"position {still} is no longer cached: continue from there (num_cached_blocks={still})",
            int(still),
        )


class _Before:
    """The content before a position of a lease with its chained hash, or the root of the prompt."""

    def __init__(self, ledger: BlockLedger, lease: BlockLease, position: i64) -> None:
        #: Whether it is the root of the prompt's keys, which may not exist yet; then content is 0.
        self.is_root = lease._first_block + position == 0
        self.content: i64 = NO_CONTENT
        self.chain: i64 = 0
        #: A block that has the content; 0 if none is known.
        self.block: i64 = NULL_BLOCK
        block = i64(lease._blocks[position - 1]) if position > 0 else NULL_BLOCK
        if block != NULL_BLOCK:
            self.block = block
            self.content = ledger.index.content_of(block)
            self.chain = ledger.index.chain_hash[block]
        elif not self.is_root and lease._anchor == position:
            self.content = lease._before
            self.chain = lease._before_hash
        if self.content == NO_CONTENT and not self.is_root:
            raise InvalidArgument(
                f"lease {lease._serial} does not know the content before block {lease._first_block + position} of the "
                "prompt, because it was not cached when the lease was split off: cache the other part first, then "
                "split"
            )


def _require_cacheable(ledger: BlockLedger, lease: BlockLease, position: i64, words: vec[i64], number: i64) -> None:
    """Refuse a block that has other holders or caches other tokens.

    A cached block may be given the same tokens again; so may a shared block that the lease had cached with them before
    it lost its content.
    """
    block = i64(lease._blocks[position])
    if block == NULL_BLOCK:
        _refuse_null(position)
    cached = ledger.index.is_cached(block)
    if cached or ledger.ref_cnt[block] > 1:
        rows = ledger.index.rows
        if (cached or position < lease._num_cached) and rows.equal(words, number * rows.num_words, block):
            return
        if not cached:
            _refuse_shared(ledger, lease, position)
        raise InvalidArgument(
            f"token_ids differ from what block {block} at position {position} caches; copy_on_write it to write into it"
        )


def _num_same(index: PrefixIndex, lease: BlockLease, start: i64, prompt: Prompt, num_full: i64, before: _Before) -> i64:
    """Return how many blocks from `start` already cache these tokens after `before`, and advance `before` past them."""
    parent = index.known_root(prompt.keys) if before.is_root else before.content
    for number in range(num_full):
        block = i64(lease._blocks[start + number])
        if number in prompt.spans:
            parent = index.known_root((int(parent), prompt.spans[number]))
        if not index.is_cached(block) or parent == NO_CONTENT or index.parent_of(block) != parent:
            return number
        parent = index.content_of(block)
        before.is_root = False
        before.block = block
        before.content = parent
        before.chain = index.chain_hash[block]
    return num_full


def _index_from(
    ledger: BlockLedger, lease: BlockLease, start: i64, prompt: Prompt, first: i64, last: i64, before: _Before
) -> None:
    """Index blocks `first` to `last` of the tokens after `before`.

    Blocks after one that lost its content are relinked.
    """
    for number in range(first, last):
        block = i64(lease._blocks[start + number])
        if ledger.index.is_cached(block):
            ledger.index.remove(block)
            ledger.num_losses += 1
    if before.is_root:
        before.content = ledger.index.root(prompt.keys)
        before.chain = root_hash(before.content)
    block = NULL_BLOCK if before.is_root else ledger.index.representative(before.content, before.chain, before.block)
    ledger.index_after(prompt, first, last, lease._blocks, start, 0, before.content, before.chain, block)
