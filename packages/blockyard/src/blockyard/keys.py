"""Extra keys: everything besides the tokens that affects the keys and values of a block.

Each kind is a type, so a LoRA adapter never matches a salt of the same name. `LoRA` and `CacheSalt` apply to a whole
request. A `Span` applies to the blocks that it overlaps, so prompts with different images share the text before them.
All text must be valid Unicode because block names and messages contain it.

`canonical_keys` validates keys; the other functions expect its result.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .arguments import require_int, require_str, require_unicode, shown
from .errors import InvalidArgument

MAX_POSITION = 2**27
MAX_SPANS = 2**16


@dataclass(frozen=True, slots=True)
class LoRA:
    """The LoRA adapter of a request.

    Attributes:
        name: name of the adapter.
        path: origin of its weights, or another mark of their version. Weights reloaded under the same name from another
            path are another adapter and share no blocks with the old one.
    """

    name: str
    path: str = ""

    def __post_init__(self) -> None:
        require_unicode("name", require_str("name", self.name))
        require_unicode("path", require_str("path", self.path))


@dataclass(frozen=True, slots=True)
class CacheSalt:
    """A tenant's secret: only requests with the same salt share blocks."""

    value: str

    def __post_init__(self) -> None:
        require_unicode("value", require_str("value", self.value))


@dataclass(frozen=True, slots=True)
class Span:
    """A range of the prompt that is not text but an image, a sound, ...

    Images of equal size have equal placeholder tokens, so hits also compare the content. Spans may overlap (a video and
    its sound); each block compares all spans that reach into it.

    Attributes:
        content: identifies the item, for example a hash of its bytes and preprocessing; not empty.
        start: position of its first token in the prompt; 0 to 2**27 - 1.
        length: number of its tokens; 1 to 2**27.
        kind: kind of the item; spans of different kinds never match.

    Raises:
        InvalidArgument: a value is outside its limits.
    """

    content: str
    start: int
    length: int
    kind: str = "image"

    def __post_init__(self) -> None:
        _require_text("content", self.content)
        _require_text("kind", self.kind)
        # Stored as plain integers: numpy's would compare equal and still not be what an encoder takes.
        object.__setattr__(self, "start", require_int("start", self.start, 0, MAX_POSITION - 1))
        object.__setattr__(self, "length", require_int("length", self.length, 1, MAX_POSITION))

    @property
    def end(self) -> int:
        """Return the position after its last token."""
        return self.start + self.length


#: An extra key of any kind.
ExtraKey = LoRA | CacheSalt | Span

#: A span relative to a block: (kind, content, start relative to the block's first token, length). The start is negative
#: if the span begins in an earlier block. The length is included because content cut to another length is another item.
BlockSpan = tuple[str, str, int, int]

_KINDS = (CacheSalt, LoRA, Span)


def _require_text(name: str, value: object) -> None:
    if not require_unicode(name, require_str(name, value)):
        raise InvalidArgument(f"{name} is ''; it must not be empty")


def canonical_keys(extra_keys: object) -> tuple[ExtraKey, ...]:
    """Return the keys in canonical order: salt, adapter, then spans by start. O(k log k).

    Raises:
        InvalidArgument: an item is not an extra key; there are two adapters, two salts, the same span twice, or more
            than 65,536 spans.
    """
    if not isinstance(extra_keys, (tuple, list)):
        raise InvalidArgument(f"extra_keys is {shown(extra_keys)}; it must be a tuple of LoRA, CacheSalt and Span")
    for key in extra_keys:
        # The very types: a subclass could run code of its own when it is hashed or compared.
        if type(key) not in _KINDS:
            raise InvalidArgument(f"extra_keys holds {shown(key)}; its items must be LoRA, CacheSalt or Span")
    keys = tuple(sorted(extra_keys, key=_order))
    _require_single(keys)
    return keys


def _order(key: ExtraKey) -> tuple[int, int, int, str, str]:
    if isinstance(key, Span):
        return (2, key.start, key.length, key.kind, key.content)
    return (0 if isinstance(key, CacheSalt) else 1, 0, 0, "", "")


def _require_single(keys: tuple[ExtraKey, ...]) -> None:
    """Reject keys that occur twice; in canonical order these are neighbours."""
    for key, following in itertools.pairwise(keys):
        if key == following:
            raise InvalidArgument(f"extra_keys holds {key!r} twice; give each key once")
        if type(key) is type(following) and not isinstance(key, Span):
            raise InvalidArgument(f"extra_keys holds {key!r} and {following!r}; give at most one of a kind")
    if len(keys) > MAX_SPANS and len(spans_of(keys)) > MAX_SPANS:
        raise InvalidArgument(f"extra_keys holds {len(spans_of(keys))} spans; the limit is {MAX_SPANS}")


def request_keys(keys: tuple[ExtraKey, ...]) -> tuple[LoRA | CacheSalt, ...]:
    """Return the keys that apply to the whole prompt. O(k)."""
    return tuple(key for key in keys if not isinstance(key, Span))


def plain_keys(keys: tuple[ExtraKey, ...]) -> tuple[tuple[str, ...], ...]:
    """Return `request_keys` as tuples of strings, which hash and compare without running Python code. O(k)."""
    return tuple(
        ("salt", key.value) if isinstance(key, CacheSalt) else ("lora", key.name, key.path)
        for key in request_keys(keys)
    )


def spans_of(keys: tuple[ExtraKey, ...]) -> tuple[Span, ...]:
    """Return the spans, in order of their start. O(k)."""
    return tuple(key for key in keys if isinstance(key, Span))


def block_spans(spans: tuple[Span, ...], block_index: int, block_size: int) -> tuple[BlockSpan, ...]:
    """Return the spans that overlap one block, relative to it; () for a block of text. O(spans).

    Two blocks of equal tokens have equal keys and values only if these tuples, and those of all blocks before, are
    equal.

    Args:
        spans: spans in canonical order.
        block_index: number of the block in the prompt, from 0.
        block_size: tokens per block.

    >>> block_spans((Span("cat", 6, 4),), 1, 4), block_spans((Span("cat", 6, 4),), 2, 4)
    ((('image', 'cat', 2, 4),), (('image', 'cat', -2, 4),))
    """
    first = block_index * block_size
    last = first + block_size
    return tuple(
        (span.kind, span.content, span.start - first, span.length)
        for span in spans
        if span.start < last and span.end > first
    )


def spans_by_block(
    spans: Iterable[Span], block_size: int, num_blocks: int, first_block: int = 0
) -> dict[int, tuple[BlockSpan, ...]]:
    """Return `block_spans` of each block that has any, for `num_blocks` blocks from `first_block`.

    The keys count from `first_block`. O(spans + blocks they overlap).
    """
    found: dict[int, list[BlockSpan]] = {}
    for span in spans:
        first = max(span.start // block_size, first_block)
        for block in range(first, min(-(-span.end // block_size), first_block + num_blocks)):
            seen = (span.kind, span.content, span.start - block * block_size, span.length)
            found.setdefault(block - first_block, []).append(seen)
    return {block: tuple(items) for block, items in found.items()}


def cut_spans(spans: dict[int, tuple[Any, ...]], num_tokens: int, block_size: int) -> dict[int, tuple[Any, ...]]:
    """Return the spans by block after the prompt is truncated to `num_tokens`. O(blocks).

    A span that crosses the cut becomes an item that no prompt can name, because its beginning was computed as part of
    the whole item, and other tokens may follow it.

    >>> cut_spans({0: (("image", "cat", 2, 4),), 1: (("image", "cat", -2, 4),)}, 3, 4)
    {0: (('image', 'cat', 2, 4, 'cut at', 3),)}
    """
    last, inside = divmod(num_tokens, block_size)
    kept = {block: items for block, items in spans.items() if block < last}
    begun = [item for item in spans.get(last, ()) if item[2] < inside]
    if begun:
        kept[last] = tuple((*item[:4], "cut at", inside) if item[2] + item[3] > inside else item for item in begun)
    return kept


def is_under_spans(spans: Iterable[Span], positions: Iterable[int]) -> list[bool]:
    """Return whether a span covers each of these ascending positions. O(positions + spans log spans)."""
    ends: list[bool] = []
    left = sorted(spans, key=lambda span: span.start, reverse=True)
    reach = 0
    for position in positions:
        while left and left[-1].start <= position:
            reach = max(reach, left.pop().end)
        ends.append(position < reach)
    return ends


def require_spans_within(spans: Iterable[Span], num_tokens: int) -> None:
    """Raise `InvalidArgument` if a span ends after the prompt's `num_tokens` tokens. O(spans)."""
    for span in spans:
        if span.end > num_tokens:
            raise InvalidArgument(
                f"extra_keys holds {span!r}, which ends at position {span.end}; the prompt has {num_tokens} tokens"
            )
