"""What a policy knows of one content, packed into one integer: when it was last used, and signs of what comes next."""

from typing import Final

from mypy_extensions import i64

#: Classes of contents that are likely to be used again at the same rate. A chain is what one request leaves behind.
#: New chains, by the blocks they added: up to 1, up to 4, fewer than 32, more.
NEW: Final[i64] = 0
#: Chains that continue a chain, by how often that happened (once, twice, more) and by the blocks added (up to 4, more).
CONTINUED: Final[i64] = 4
#: The last block of a new chain and of a continued one: often a block that the next request will cut differently.
END: Final[i64] = 10
#: Contents below which chains have parted, by the number of requests that did so: 1, 2 or 3, up to 7, ... 128 and more.
SHARED: Final[i64] = 12
NUM_CLASSES: Final[i64] = 20

#: At most this many continuations are distinguished, and this many requests that share a content counted.
MOST_TURNS: Final[i64] = 3
MOST_SHARED: Final[i64] = 255


def pack(time: i64, kind: i64, turn: i64, is_end: bool, shared: i64) -> i64:
    """time: below 2**46. kind: the class. turn: 0 to 3. is_end: one of the last two of its chain. shared: 0 to 255."""
    return (((time * 32 + kind) * 4 + turn) * 2 + (i64(1) if is_end else i64(0))) * 256 + shared


def time_of(state: i64) -> i64:
    """When the content was last let go, in blocks let go before it."""
    return state >> 16


def class_of(state: i64) -> i64:
    """One of `NUM_CLASSES`."""
    return (state >> 11) & 31


def turn_of(state: i64) -> i64:
    """How often its chain had been continued, at most 3."""
    return (state >> 9) & 3


def is_end_of(state: i64) -> bool:
    """Whether it was one of the last two of its chain."""
    return (state & 256) != 0


def shared_of(state: i64) -> i64:
    """How many requests used it and went another way below it, at most 255."""
    return state & 255


def chain_class(turn: i64, added: i64) -> i64:
    """The class of a chain that was continued `turn` times and added this many blocks last."""
    if turn > 0:
        return CONTINUED + 2 * (turn - 1) + (1 if added > 4 else 0)
    if added <= 1:
        return NEW
    if added <= 4:
        return NEW + 1
    return NEW + (2 if added < 32 else 3)


def shared_class(shared: i64) -> i64:
    """The class of a content that `shared` requests, at least 1, have in common."""
    kind = SHARED
    while shared > 1:
        shared >>= 1
        kind += 1
    return kind
