"""What a lookup is asked and answers: a prompt (tokens, keys, what stands at spans), and what of it was found."""

from bisect import bisect_right
from typing import Final

import numpy as np
from librt.vecs import vec
from mypy_extensions import i32, i64

from ...arguments import shown
from ...errors import InvalidArgument
from ...keys import (
    ExtraKey,
    canonical_keys,
    is_under_spans,
    plain_keys,
    require_spans_within,
    spans_by_block,
    spans_of,
)
from ..tokens import MAX_TOKEN, PackedTokens, first_below_zero, pack_tokens

#: Behind every block of a prompt.
NO_MORE: Final[i64] = 1099511627776
#: No positions; never changed.
NOWHERE: Final[list[int]] = []


class Prompt:
    """words: the tokens, packed in blocks. keys: extra keys that hold for every block, in one order, as plain tuples.

    spans: for each block that a span overlaps, what stands there, in a form that is compared whole; `span_blocks`
    are these blocks, ascending. is_checked: False while it is not known that all numbers are tokens.
    """

    def __init__(
        self,
        words: vec[i64],
        num_tokens: i64,
        keys: tuple[object, ...],
        spans: dict[int, tuple[object, ...]],
        is_checked: bool = True,
    ) -> None:
        self.words = words
        self.num_tokens = num_tokens
        self.keys = keys
        self.spans = spans
        self.span_blocks = sorted(spans) if spans else []
        self.is_checked = is_checked
        #: Lengths, in tokens, at which the caller wants checkpoints, and at which waiting prompts diverge.
        self.checkpoints = NOWHERE
        self.branches = NOWHERE
        #: Length of the prefix whose state the caller supplies; 0 for none.
        self.external_state_tokens: i64 = 0
        #: The number of its tenant, -1 until the admission has looked it up.
        self.tenant: i64 = -1

    def require_tokens(self, first_word: i64) -> None:
        """Raise `InvalidArgument` for a number from a word on that is no token, which no call has looked at. O(tokens).

        Numbers before it equal what is cached without spans, which are tokens.
        """
        if self.is_checked:
            return
        self.is_checked = True
        place, number = first_below_zero(self.words, first_word)
        if place >= 0:
            raise _no_span(place, number, place)

    def next_span_block(self, position: i64) -> i64:
        """The first block behind `position` that a span overlaps, or one behind all. O(log spans)."""
        index = bisect_right(self.span_blocks, int(position))
        return self.span_blocks[index] if index < len(self.span_blocks) else NO_MORE


class Hit:
    """The cached beginning of a prompt. It holds nothing: it is true until the cache changes.

    root: what stands before the prompt's first block (`PrefixIndex.root`); 0 while nothing was cached under its keys.
    blocks: ids of the leading blocks that the index knows, as `PrefixIndex.find_under` returned them.
    num_usable: how many of them can be taken: computed ones and those of one owner (`joins`), or, with layer groups,
        those of which every group has its blocks (`store.grouped`).
    num_known: how many of them count as cached where a miss is explained; what is behind is looked for in evictions.
    first_pending: the first of them that is still being computed; `num_usable` where none is.
    places: with layer groups, for each group a block at each place, minus a CPU block, or 0 for none.
    state: with a state group, the blocks of the state at the end of the hit, which the first step loads.
    num_served: how many of the blocks could be taken if there were a state behind each; `num_usable` without a group.
    external_state_tokens: of the prompt. lacks_state: whether the hit ends where no state is cached, because the
        caller supplies one further on.
    sources, num_alike: where the hit goes on inside the next block: blocks, one for each group, that begin with the
        same `num_alike` tokens.
    """

    def __init__(self, root: i64, blocks: vec[i32], external_state_tokens: i64 = 0) -> None:
        num_found: i64 = len(blocks)
        self.root = root
        self.blocks = blocks
        self.num_usable = num_found
        self.num_known = num_found
        self.first_pending = num_found
        self.places: list[vec[i64]] = []
        self.state: list[int] = []
        self.num_served: i64 = 0
        self.external_state_tokens = external_state_tokens
        self.lacks_state = False
        self.sources: list[int] = []
        self.num_alike: i64 = 0


def make_prompt(token_ids: object, extra_keys: object, block_size: int) -> Prompt:
    """Check and pack what a caller calls a prompt. Raises `InvalidArgument`. O(tokens + blocks under spans)."""
    packed = pack_tokens(token_ids, block_size)
    keys = canonical_keys(extra_keys) if has_items(extra_keys) else ()
    if not keys:
        return Prompt(packed.words, packed.num_tokens, (), {})
    num_tokens = int(packed.num_tokens)
    spans = spans_of(keys)
    require_spans_within(spans, num_tokens)
    by_block: dict[int, tuple[object, ...]] = {}
    by_block.update(spans_by_block(spans, block_size, -(-num_tokens // block_size)))
    return Prompt(packed.words, packed.num_tokens, plain_keys(keys), by_block)


class Chunk:
    """Tokens and keys that were read and checked, before it is known where in a prompt they stand."""

    def __init__(self, packed: PackedTokens, keys: tuple[ExtraKey, ...]) -> None:
        self.packed = packed
        self.keys = keys

    def at(self, first_block: i64, block_size: int) -> Prompt:
        """The tokens as blocks of a prompt from `first_block` on; spans and blocks count from there.

        Spans may reach out of the tokens on both sides. Raises `InvalidArgument` for a token below 0 where no span
        stands: nothing would tell what it stands for. O(spans + blocks under them + placeholders).
        """
        packed = self.packed
        if packed.placeholders is not None:
            self._require_spans_at(packed.placeholders, int(first_block) * block_size)
        if not self.keys:
            return Prompt(packed.words, packed.num_tokens, (), {}, packed.is_checked)
        num_blocks = -(-int(packed.num_tokens) // block_size)
        by_block: dict[int, tuple[object, ...]] = {}
        by_block.update(spans_by_block(spans_of(self.keys), block_size, num_blocks, int(first_block)))
        return Prompt(packed.words, packed.num_tokens, plain_keys(self.keys), by_block)

    def _require_spans_at(self, placeholders: dict[int, int], first_token: int) -> None:
        covered = is_under_spans(spans_of(self.keys), [first_token + index for index in placeholders])
        for index, is_covered in zip(placeholders, covered, strict=True):
            if not is_covered:
                raise _no_span(index, placeholders[index], first_token + index)


def _no_span(index: int, number: int, position: int) -> InvalidArgument:
    return InvalidArgument(
        f"token_ids[{index}] is {shown(number)}, and no Span of extra_keys stands at position {position}; a token is "
        f"from 0 to {MAX_TOKEN}"
    )


def make_chunk(token_ids: object, extra_keys: object, block_size: int, checks_later: bool = False) -> Chunk:
    """Check and pack tokens from anywhere in a prompt, placeholders below 0 included. Raises `InvalidArgument`.

    checks_later: whether `Prompt.require_tokens` may check them, which is less work behind a hit.
    """
    has_keys = has_items(extra_keys)
    packed = pack_tokens(token_ids, block_size, True, checks_later and not has_keys)
    return Chunk(packed, canonical_keys(extra_keys) if has_keys else ())


def has_tokens(token_ids: object) -> bool:
    """False for an empty list or array."""
    if isinstance(token_ids, (list, tuple)):
        return len(token_ids) > 0
    return not isinstance(token_ids, np.ndarray) or token_ids.size > 0


def has_items(extra_keys: object) -> bool:
    """False for an empty tuple, the most common case, without a call into interpreted code."""
    return not isinstance(extra_keys, tuple) or len(extra_keys) > 0
