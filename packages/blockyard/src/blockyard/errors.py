"""Everything Blockyard raises, as a tree with two main branches.

    BlockyardError
    ├── CapacityError          expected while serving: wait, preempt, or refuse
    │   ├── OutOfBlocks        not enough free blocks now
    │   ├── OutOfRows          as many sequences run as the table has rows
    │   ├── OverBudget         more blocks would be retained than the budget allows
    │   ├── NotEnoughMemory    the system has no memory for arrays of this size (also a MemoryError)
    │   └── NeverFits          would not fit even an empty cache
    ├── LogicError             a bug in the caller
    │   ├── UnknownSequence    a handle that is not, or no longer, running
    │   ├── DoubleFree         a lease or block freed twice
    │   ├── ForeignBlock       a lease of another pool
    │   ├── SequenceNotReady   a call that the sequence's state does not allow yet
    │   ├── StepsInFlight      a step reserved while as many are in flight as may be
    │   ├── StalePlan          a plan read after the cache has moved on
    │   ├── StaleBlocks        blocks that no longer hold what was found or cached in them
    │   ├── DivergedRank       a rank that has missed, doubled or altered a plan
    │   ├── ConcurrentCall     a call that arrived while another one runs on the same cache
    │   └── PolicyError        an eviction policy raised, or named a block that is not idle
    ├── HandoffError           keys and values cannot be handed from one cache to another
    │   ├── PeerMismatch       the two sides differ in what cannot be converted
    │   └── StaleOffer         an offer or transfer that has ended: expired, released, of an earlier start
    ├── InvalidArgument        a value outside its limits (also a ValueError)
    ├── InvariantError         check() found a broken invariant
    ├── MissingExtra           an optional dependency is absent (also an ImportError)
    ├── ModelError             a model that cannot be loaded or served, or whose step broke
    ├── PublisherError         KV events cannot be published
    ├── RankError              ranks of a tensor-parallel engine that disagree, or one that has ended
    └── TraceError             a trace that cannot be read, or asks what cannot be done

A call that raises has changed nothing.
"""

from __future__ import annotations


class BlockyardError(Exception):
    """All errors of the package are below this one."""


class CapacityError(BlockyardError):
    """The request is sound, the memory is not there. Expected while serving."""


class OutOfBlocks(CapacityError):
    """There are not enough free blocks now; `num_needed` and `num_free` say by how much."""

    def __init__(self, message: str, num_needed: int = 0, num_free: int = 0) -> None:
        super().__init__(message)
        self.num_needed = num_needed
        self.num_free = num_free


class OutOfRows(CapacityError):
    """No row is free: as many sequences run as the block table has rows (`max_num_seqs`)."""


class OverBudget(CapacityError):
    """More blocks would be retained than `retention_blocks` allows; none of them is."""


class NeverFits(CapacityError):
    """The request does not fit an empty pool: the cache, or its tenant's share of it, is too small."""


class NotEnoughMemory(CapacityError, MemoryError):
    """The system has no memory for the arrays of a pool of this size; the message names their bytes."""


def not_enough_memory(text: str, cause: Exception) -> NotEnoughMemory:
    """Return the error for a lack of memory, with its cause: compiled code cannot say `raise ... from`."""
    error = NotEnoughMemory(text)
    error.__cause__ = cause
    return error


class LogicError(BlockyardError):
    """The caller has a bug; retrying does not help."""


class UnknownSequence(LogicError):
    """The handle names no running sequence: never allocated here, freed already, or of another manager."""


class DoubleFree(LogicError):
    """A lease was freed twice."""


class ForeignBlock(LogicError):
    """A lease was given to a pool that did not hand it out."""


class SequenceNotReady(LogicError):
    """The sequence's state does not allow the call yet."""


class StepsInFlight(LogicError):
    """There are as many steps in flight as `max_steps_in_flight` allows: one must end before the next is reserved."""


class StalePlan(LogicError):
    """A plan's live arrays were asked for after the cache had changed."""


class StaleBlocks(LogicError):
    """Blocks no longer hold what was found or cached in them; the first `num_still_cached` of them do."""

    def __init__(self, message: str, num_still_cached: int = 0) -> None:
        super().__init__(message)
        self.num_still_cached = num_still_cached


class DivergedRank(LogicError):
    """A plan's bytes do not continue what this rank has read: it has missed, doubled or altered one."""


class ConcurrentCall(LogicError):
    """A call arrived while another one runs on the same cache, from the inside or from another thread."""


class PolicyError(LogicError):
    """An eviction policy raised, or named a block that is not idle. The pool is whole; the policy must be replaced."""


class HandoffError(BlockyardError):
    """Keys and values cannot be handed from one cache to another; what was held for it is free again."""


class PeerMismatch(HandoffError):
    """The two sides differ in what cannot be converted; the message names both values."""


class StaleOffer(HandoffError):
    """The offer or transfer has ended, so its blocks may hold something else by now. Nothing of it may be used."""


class InvalidArgument(BlockyardError, ValueError):
    """An argument is outside its limits; the message names it, its value and the limit."""


class InvariantError(BlockyardError):
    """`check()` found a broken invariant. This is a bug in Blockyard; please report it."""


class MissingExtra(BlockyardError, ImportError):
    """An optional dependency is absent; the message names the extra to install."""


class ModelError(BlockyardError):
    """The model cannot be loaded or served, or its step broke; the message says which."""


class TraceError(BlockyardError):
    """The trace cannot be read, or asks what cannot be done; the message names the line."""


class RankError(BlockyardError):
    """A rank of a tensor-parallel engine has ended, or does not agree with the others; the message says which."""


class PublisherError(BlockyardError):
    """KV events cannot be published: an endpoint that cannot be bound, or a thread that has ended."""
