"""States of hybrid models are objects beside the blocks of their prompts: their names, and where one may stand."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

from ..keys import ExtraKey, Span
from .tier import NAME_BYTES

#: Boundaries before a prompt's end that are asked for one by one; of those before them, powers of two.
_MOST_NEAR = 200


def state_name(layout: bytes, block: bytes) -> bytes:
    """Returns the name of the state behind a block, from the name that the block has among keys and values."""
    return sha256(b"state" + layout + block).digest()[:NAME_BYTES]


def places_between(first: int, stop: int, step: int, block_size: int) -> Iterator[int]:
    """Goes over the boundaries behind block `first`, up to `stop`, that may have a state, the last one first.

    All are multiples of `step` blocks.
    """
    place, near = stop - stop % step, _MOST_NEAR
    while place > first and near > 0:
        yield place
        place, near = place - step, near - 1
    power = 2**30
    while power > first * block_size and power >= block_size:
        if power // block_size <= place and power % (step * block_size) == 0:
            yield power // block_size
        power //= 2


def keys_before(extra_keys: tuple[ExtraKey, ...], num_tokens: int) -> tuple[ExtraKey, ...] | None:
    """Returns the keys of a prompt's first tokens; None where a span goes on behind them."""
    if any(isinstance(key, Span) and key.start < num_tokens < key.end for key in extra_keys):
        return None
    return tuple(key for key in extra_keys if not isinstance(key, Span) or key.end <= num_tokens)
