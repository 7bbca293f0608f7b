"""The exceptions that Blockyard raises.

    BlockyardError
    ├── CapacityError          expected while serving: wait, preempt, or reject the request
    │   ├── OutOfBlocks        not enough free blocks now
    │   ├── OutOfRows          max_num_seqs sequences are already running
    │   ├── OverBudget         more blocks would be retained than the budget allows
    │   ├── NotEnoughMemory    the system cannot allocate arrays of this size (also a MemoryError)
    │   └── NeverFits          would not fit even in an empty cache
    ├── LogicError             a bug in the caller
    │   ├── UnknownSequence    the handle of no running sequence
    │   ├── DoubleFree         a lease or block freed twice
    │   ├── ForeignBlock       a lease of another pool
    │   ├── SequenceNotReady   a call that the sequence's state does not allow yet
    │   ├── StepsInFlight      max_steps_in_flight steps are already in flight
    │   ├── StalePlan          a plan read after the cache has changed
    │   ├── StaleBlocks        blocks whose cached content has changed
    │   ├── DivergedRank       a rank skipped, repeated or altered a plan
    │   ├── ConcurrentCall     a call during another call on the same cache
    │   └── PolicyError        an eviction policy raised, or chose a block that is not idle
    ├── HandoffError           keys and values cannot be handed from one cache to another
    │   ├── PeerMismatch       the two caches differ in a way that cannot be converted
    │   └── StaleOffer         an offer or transfer that has expired, was released, or predates a restart
    ├── InvalidArgument        a value outside its limits (also a ValueError)
    ├── InvariantError         check() found a broken invariant
    ├── MissingExtra           an optional dependency is not installed (also an ImportError)
    ├── ModelError             a model cannot be loaded or served, or a step of it failed
    ├── PublisherError         KV events cannot be published
    ├── RankError              a rank of a tensor-parallel engine ended, or ranks disagree
    └── TraceError             a trace cannot be read, or contains impossible requests

A call that raises changes nothing.
"""

from __future__ import annotations


class BlockyardError(Exception):
    """Base class of all errors of the package."""


class CapacityError(BlockyardError):
    """The request is valid, but there is no room for it now. Expected while serving."""


class OutOfBlocks(CapacityError):
    """There are not enough free blocks now. `num_needed` and `num_free` are the two counts."""

    def __init__(self, message: str, num_needed: int = 0, num_free: int = 0) -> None:
        super().__init__(message)
        self.num_needed = num_needed
        self.num_free = num_free


class OutOfRows(CapacityError):
    """No row of the block table is free: `max_num_seqs` sequences are running."""


class OverBudget(CapacityError):
    """More blocks would be retained than `retention_blocks` allows. None of them was retained."""


class NeverFits(CapacityError):
    """The request does not fit even in an empty pool, or exceeds what its tenant may ever hold."""


class NotEnoughMemory(CapacityError, MemoryError):
    """The system cannot allocate the arrays of a pool of this size; the message has their bytes."""


def not_enough_memory(text: str, cause: Exception) -> NotEnoughMemory:
    """Return the error with its cause set. Compiled code does not support `raise ... from`."""
    error = NotEnoughMemory(text)
    error.__cause__ = cause
    return error


class LogicError(BlockyardError):
    """The caller has a bug; retrying does not help."""


class UnknownSequence(LogicError):
    """The handle belongs to no running sequence: it is of another manager, invalid, or freed."""


class DoubleFree(LogicError):
    """A lease was freed twice."""


class ForeignBlock(LogicError):
    """A lease was passed to a pool that did not create it."""


class SequenceNotReady(LogicError):
    """The sequence's state does not allow the call yet."""


class StepsInFlight(LogicError):
    """`max_steps_in_flight` steps are in flight. End one before reserving the next."""


class StalePlan(LogicError):
    """A plan's live arrays were read after the cache had changed."""


class StaleBlocks(LogicError):
    """Blocks no longer hold the content that was found or cached. The first `num_still_cached` of them do."""

    def __init__(self, message: str, num_still_cached: int = 0) -> None:
        super().__init__(message)
        self.num_still_cached = num_still_cached


class DivergedRank(LogicError):
    """The bytes of a plan do not continue those that this rank read before: a plan was skipped, repeated or altered."""


class ConcurrentCall(LogicError):
    """A call was made during another call on the same cache, from a callback or another thread."""


class PolicyError(LogicError):
    """An eviction policy raised, or chose a block that is not idle. The pool is intact; replace the policy."""


class HandoffError(BlockyardError):
    """Keys and values cannot be handed from one cache to another. Blocks held for the transfer were freed."""


class PeerMismatch(HandoffError):
    """The two caches differ in a way that cannot be converted; the message has both values."""


class StaleOffer(HandoffError):
    """The offer or transfer has ended, so its blocks may hold other content. Discard all data received."""


class InvalidArgument(BlockyardError, ValueError):
    """An argument is outside its limits; the message has its name, its value and the limit."""


class InvariantError(BlockyardError):
    """`check()` found a broken invariant. This is a bug in Blockyard; please report it."""


class MissingExtra(BlockyardError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""


class ModelError(BlockyardError):
    """The model cannot be loaded or served, or a step failed; the message says which."""


class TraceError(BlockyardError):
    """The trace cannot be read, or contains an impossible request; the message has the line."""


class RankError(BlockyardError):
    """A rank of a tensor-parallel engine ended, or disagrees with the others; the message says which."""


class PublisherError(BlockyardError):
    """KV events cannot be published: an endpoint cannot be bound, or the publisher's thread has ended."""
