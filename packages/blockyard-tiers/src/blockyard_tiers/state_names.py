"""Names of state objects, and the positions at which a prompt may have a state."""

from __future__ import annotations

from hashlib import sha256

from blockyard.keys import ExtraKey, Span

from .tier import NAME_BYTES

#: Checkpoint positions before a prompt's end that are searched first.
_MAX_NEAR = 200


def state_name(layout: bytes, block: bytes) -> bytes:
    """Return the name of the state after a block, given the name of the block's object."""
    return sha256(b"state" + layout + block).digest()[:NAME_BYTES]


def near_positions(first: int, stop: int, step: int) -> range:
    """Return the checkpoint positions after block `first` that are nearest to block `stop`, the last one first.

    Positions count blocks and are multiples of `step`.
    """
    last = stop - stop % step
    return range(last, max(last - step * _MAX_NEAR, first), -step)


def early_positions(first: int, stop: int, step: int, block_size: int) -> list[int]:
    """Return positions after block `first` up to block `stop` that are powers of two in tokens, the last one first."""
    powers = [2**exponent for exponent in range(30, -1, -1)]
    return [
        power // block_size
        for power in powers
        if power % (step * block_size) == 0 and first < power // block_size <= stop
    ]


def keys_before(extra_keys: tuple[ExtraKey, ...], num_tokens: int) -> tuple[ExtraKey, ...] | None:
    """Return the extra keys of a prompt's first tokens; None if a span continues after them."""
    if any(isinstance(key, Span) and key.start < num_tokens < key.end for key in extra_keys):
        return None
    return tuple(key for key in extra_keys if not isinstance(key, Span) or key.end <= num_tokens)
