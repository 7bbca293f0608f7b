"""Input and result of a lookup: a prompt (tokens, extra keys, spans), and its cached prefix."""

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

#: Greater than any block number.
NO_MORE: Final[i64] = 1099511627776
#: The empty list of positions; never modified.
NOWHERE: Final[list[int]] = []


class Prompt:
    """A prompt in packed form.

    Attributes:
        words: packed tokens, in blocks.
        num_tokens: number of tokens.
        keys: extra keys of the whole request, in canonical order, as plain tuples.
        spans: spans by block.
        span_blocks: these blocks, ascending.
        is_checked: whether all tokens are known to be valid.
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
        """Raise `InvalidArgument` for an invalid token from word `first_word` on, unless all were checked. O(tokens).

        Tokens before it equal cached ones without spans, so they are valid.
        """
        if self.is_checked:
            return
        self.is_checked = True
        place, number = first_below_zero(self.words, first_word)
        if place >= 0:
            raise _no_span(place, number, place)

    def next_span_block(self, position: i64) -> i64:
        """Return the first block after `position` with a span, or `NO_MORE`. O(log spans)."""
        index = bisect_right(self.span_blocks, int(position))
        return self.span_blocks[index] if index < len(self.span_blocks) else NO_MORE


class Hit:
    """The cached prefix of a prompt. It holds no blocks, and is valid until the cache changes.

    Attributes:
        root: root of the prompt's keys (`PrefixIndex.root`); 0 if nothing was cached under them.
        blocks: ids of the leading indexed blocks (`PrefixIndex.find_under`).
        num_usable: how many of these can be hit: computed ones and those of one producer (`joins`), or, with layer
            groups, those that every group holds (`store.grouped`).
        num_known: how many of these count as cached when misses are explained; later ones are looked up in the
            evictions.
        first_pending: position of the first of these that is still to be computed; `num_usable` if none is.
        places: with layer groups, for each group and position a block, minus a CPU block, or 0 for none.
        state: with a state group, the blocks of the state at the end of the hit, which the first step loads.
        num_served: how many blocks could be hit if every position had a state; `num_usable` without states.
        external_state_tokens: as in the prompt.
        lacks_state: True if the hit ends without a cached state, because the caller supplies one further on.
        sources: if the hit ends inside the next block, one block per layer group that begins with the same tokens.
        num_alike: number of these tokens.
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
    """Check and pack a caller's prompt. O(tokens + blocks under spans). Raises `InvalidArgument`."""
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
    """Checked tokens and keys whose position in the prompt is not known yet."""

    def __init__(self, packed: PackedTokens, keys: tuple[ExtraKey, ...]) -> None:
        self.packed = packed
        self.keys = keys

    def at(self, first_block: i64, block_size: int) -> Prompt:
        """Return the tokens as blocks of a prompt from `first_block` on, which is the origin of its spans and blocks.

        A span may extend past the tokens on both sides. O(spans + blocks under them + placeholders). Raises
        `InvalidArgument` for a token below 0 that no span covers.
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

    With `checks_later`, tokens are checked by `Prompt.require_tokens`, and only those that were not hit.
    """
    has_keys = has_items(extra_keys)
    packed = pack_tokens(token_ids, block_size, True, checks_later and not has_keys)
    return Chunk(packed, canonical_keys(extra_keys) if has_keys else ())


def has_tokens(token_ids: object) -> bool:
    """Return False for an empty list or array."""
    if isinstance(token_ids, (list, tuple)):
        return len(token_ids) > 0
    return not isinstance(token_ids, np.ndarray) or token_ids.size > 0


def has_items(extra_keys: object) -> bool:
    """Return False for an empty tuple, the most common case, without a call of interpreted code."""
    return not isinstance(extra_keys, tuple) or len(extra_keys) > 0
