"""The interface says what a tier is asked, what a job is, what comes of it, and why objects are missed or refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from blockyard.arguments import require_int, shown
from blockyard.errors import InvalidArgument

#: Bytes of an object's name, of a layout's id and of a digest of tokens.
NAME_BYTES = 16
MAX_JOB_ID = 2**63 - 1
#: Objects are larger than nothing, and small enough that one is read in one go.
MAX_OBJECT_BYTES = 2**30


class Cause(Enum):
    """A cause says why an object was not loaded or stored, or why a job was refused; its text is for people."""

    #: The place has no object of this name.
    ABSENT = "absent"
    #: It was known to be there, and is gone: evicted or dropped by another.
    GONE = "gone"
    #: A checksum or the header is wrong, or there is no header: torn, flipped bits, zeros, no object at all.
    DAMAGED = "damaged"
    #: It has fewer or more bytes than its header says.
    TRUNCATED = "truncated"
    #: It is a sound object with another name, as where files were exchanged.
    FOREIGN = "foreign"
    #: It was made from another model, dtype, block size, heads, rank or group.
    OTHER_LAYOUT = "other layout"
    #: It has this name, and other tokens.
    OTHER_TOKENS = "other tokens"
    #: It is sound, and its length is not that of the buffer.
    OTHER_LENGTH = "other length"
    #: It was written by another version of the format.
    OTHER_VERSION = "other version"
    #: No room: the disk, the quota, the memory of the server, or the budget.
    FULL = "full"
    #: No permission, or the wrong password.
    DENIED = "denied"
    #: The place does not answer, or answers with an error.
    UNREACHABLE = "unreachable"
    #: As many jobs or bytes wait as may.
    QUEUE_FULL = "queue full"
    #: The place was slow or dead a moment ago, and is left alone for a while.
    CIRCUIT_OPEN = "circuit open"
    #: The tier was closed.
    CLOSED = "closed"


#: An object with one of these causes is useless to all, so the reader that finds it drops it.
BAD_OBJECT = frozenset({Cause.DAMAGED, Cause.TRUNCATED, Cause.FOREIGN, Cause.OTHER_VERSION})
#: These say that the place is ill, and count towards an open circuit.
ILL_PLACE = frozenset({Cause.FULL, Cause.DENIED, Cause.UNREACHABLE})


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Objects that are stored or loaded in one go, all or nothing.

    id: the caller's number, 0 to 2**63 - 1, of no other job that runs.
    layout: the id of the layout that all of them have (`layout_id`), 16 bytes.
    names: of each object, 16 bytes (`object_names`). tokens: the digest of each one's own tokens, 16 bytes.
    buffers: the bytes of each object, contiguous, or a list of such pieces that follow one another. The tier reads
    them (store) or writes them (load) from the call on until `finished` tells of the job, and not after.

    Raises `InvalidArgument` for a value outside its limits.
    """

    id: int
    layout: bytes
    names: Sequence[bytes]
    tokens: Sequence[bytes]
    buffers: Sequence[Any]

    def __post_init__(self) -> None:
        require_int("id", self.id, 0, MAX_JOB_ID)
        require_name("layout", self.layout)
        for name, given in (("names", self.names), ("tokens", self.tokens), ("buffers", self.buffers)):
            if not isinstance(given, Sequence):
                raise InvalidArgument(f"{name} is {shown(given)}; it must be a sequence")
        if not self.names or not len(self.names) == len(self.tokens) == len(self.buffers):
            raise InvalidArgument(
                f"names has {len(self.names)} items, tokens {len(self.tokens)}, buffers {len(self.buffers)}; "
                "a job has as many of each, at least one"
            )
        require_names("names", self.names)
        require_names("tokens", self.tokens)
        if len(set(self.names)) < len(self.names):
            raise InvalidArgument("names has a name twice; a job has each object once")


@dataclass(frozen=True, slots=True)
class Outcome:
    """An outcome says what came of a job: it is done where no object has a cause, and otherwise nothing of it counts.

    id: the job's. causes: of each object that failed, by its position. num_bytes: of all objects. seconds: in the tier,
    waiting included. After a load that failed all buffers are zeros, so that no bytes are taken for another object's;
    where it was not begun (CLOSED, CIRCUIT_OPEN) they were not touched.
    """

    id: int
    causes: dict[int, Cause]
    num_bytes: int
    seconds: float

    @property
    def is_done(self) -> bool:
        """Says whether all objects were stored, or loaded and found right."""
        return not self.causes


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix says how many names are there, from the first on. is_final: False while the place is asked for more."""

    num_found: int
    is_final: bool


@dataclass(frozen=True, slots=True)
class First:
    """This is the position of the first name that is there, their number where none is. is_final: as of `Prefix`."""

    place: int
    is_final: bool


@dataclass(slots=True)
class TierStats:
    """This tells what a tier did since it was opened. Seconds are its threads', bytes those of payloads."""

    num_stored: int = 0
    num_loaded: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    store_seconds: float = 0.0
    load_seconds: float = 0.0
    #: Objects that were not loaded, not stored, and jobs that were refused at once, by cause.
    load_misses: Counter[Cause] = field(default_factory=Counter)
    store_failures: Counter[Cause] = field(default_factory=Counter)
    refused: Counter[Cause] = field(default_factory=Counter)
    num_evicted: int = 0
    #: Objects and bytes that are known to be there now.
    num_objects: int = 0
    object_bytes: int = 0
    #: Jobs and bytes that wait or run, and the seconds of the one that runs longest.
    num_waiting: int = 0
    waiting_bytes: int = 0
    longest_seconds: float = 0.0
    #: Whether stores, and loads, are refused because the place is ill.
    is_store_open: bool = False
    is_load_open: bool = False


@runtime_checkable
class Tier(Protocol):
    """A tier keeps objects by their names in a place below the GPU's memory: files, a server, a bucket, a peer.

    No call waits for the place: jobs are queued for threads of the tier, and `finished` tells of them later. A hit is
    exact or it is a miss with its cause. Calls may come from several threads.
    """

    @property
    def name(self) -> str:
        """Returns the tier's address, for people and for metrics."""

    def store(self, job: Job) -> Cause | None:
        """Take a job to store objects; None where it was taken, or the cause of its refusal. O(objects).

        An object that is there already is not written again. Raises `InvalidArgument` for a bad buffer or an id that
        runs; nothing was taken then.
        """

    def load(self, job: Job) -> Cause | None:
        """Take a job to load objects into its buffers, before all waiting stores; None, or the cause. As `store`."""

    def longest_prefix(self, names: Sequence[bytes]) -> Prefix:
        """Returns how many of `names` are there, from the first on, as far as the tier knows now. O(names).

        Where it does not know about the next one, it asks the place in the background, and a later call knows more.
        An answer is no promise: a load may still miss. Raises `InvalidArgument` for what is no name.
        """

    def first_of(self, names: Sequence[bytes]) -> First:
        """Returns which of `names` is the first that is there, as far as the tier knows now; as `longest_prefix`.

        For states, of which a prompt needs the one that stands furthest back. O(names).
        """

    def drop(self, names: Sequence[bytes]) -> Cause | None:
        """Forget objects, and have them removed in the background; None, or the cause of a refusal. O(names)."""

    def finished(self) -> list[Outcome]:
        """Returns the jobs that ended since the last call, in the order in which they ended. O(jobs)."""

    def stats(self) -> TierStats:
        """Returns what the tier did so far, as a copy. O(causes)."""

    def close(self, timeout: float = 10.0) -> bool:
        """End the tier: jobs that wait fail as CLOSED, those that run end within `timeout` seconds; whether all did."""


def require_name(argument: str, name: object) -> bytes:
    """Returns `name` if it is 16 bytes. Raises `InvalidArgument`."""
    if type(name) is not bytes or len(name) != NAME_BYTES:
        raise InvalidArgument(f"{argument} is {shown(name)}; it must be {NAME_BYTES} bytes")
    return name


def require_names(argument: str, names: Sequence[bytes]) -> None:
    """Raises `InvalidArgument` unless all of `names` are 16 bytes, and says at which position. O(names)."""
    if not isinstance(names, Sequence):
        raise InvalidArgument(f"{argument} is {shown(names)}; it must be a sequence of names")
    for position, name in enumerate(names):
        if type(name) is not bytes or len(name) != NAME_BYTES:
            require_name(f"{argument}[{position}]", name)
