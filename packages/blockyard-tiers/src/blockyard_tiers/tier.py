"""The interface of tiers: transfers, their results, and the causes of misses and refusals."""

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
MAX_TRANSFER_ID = 2**63 - 1
#: Largest object: it can be read in one call.
MAX_OBJECT_BYTES = 2**30


class Cause(Enum):
    """Why an object was not loaded or stored, or a transfer was refused. Values are texts for people."""

    #: The backend has no object of this name.
    ABSENT = "absent"
    #: The object was present and is no longer: evicted, or deleted by another engine.
    GONE = "gone"
    #: The checksum or the header is wrong or missing: a torn write, flipped bits, zeros, other data.
    DAMAGED = "damaged"
    #: The object has fewer or more bytes than its header says.
    TRUNCATED = "truncated"
    #: A valid object with another name, as after files were swapped.
    FOREIGN = "foreign"
    #: The object is of another model, dtype, block size, heads, rank or group.
    OTHER_LAYOUT = "other layout"
    #: The object has this name, but other tokens.
    OTHER_TOKENS = "other tokens"
    #: The object is valid, but its length is not the buffer's.
    OTHER_LENGTH = "other length"
    #: The object was written by another version of the format.
    OTHER_VERSION = "other version"
    #: No space: on the disk, in the quota, in the server's memory, or in the budget.
    FULL = "full"
    #: No permission, or a wrong password.
    DENIED = "denied"
    #: The backend does not answer, or answers with an error.
    UNREACHABLE = "unreachable"
    #: The limit of waiting transfers or bytes is reached.
    QUEUE_FULL = "queue full"
    #: The backend was failing a moment ago, and is not used for a while.
    CIRCUIT_OPEN = "circuit open"
    #: The tier was closed.
    CLOSED = "closed"


#: Objects with one of these causes are useless to everyone, so a reader deletes them.
BAD_OBJECT = frozenset({Cause.DAMAGED, Cause.TRUNCATED, Cause.FOREIGN, Cause.OTHER_VERSION})
#: Failures of the backend itself. Repeated ones open the circuit breaker.
BACKEND_FAILURES = frozenset({Cause.FULL, Cause.DENIED, Cause.UNREACHABLE})


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """Objects to store or load together, all or nothing.

    Args:
        id: the caller's number, 0 to 2**63 - 1, unique among the tier's running transfers.
        layout: id of the layout of all objects (`layout_id`), 16 bytes.
        names: name of each object, 16 bytes (`object_names`).
        digests: digest of each object's own tokens, 16 bytes.
        buffers: for each object, contiguous bytes, or a list of buffers that follow one another. The tier reads them
            (store) or writes them (load) from the call until `take_results` returns the transfer's result.

    Raises:
        InvalidArgument: a value is outside its limits.
    """

    id: int
    layout: bytes
    names: Sequence[bytes]
    digests: Sequence[bytes]
    buffers: Sequence[Any]

    def __post_init__(self) -> None:
        require_int("id", self.id, 0, MAX_TRANSFER_ID)
        require_name("layout", self.layout)
        for name, given in (("names", self.names), ("digests", self.digests), ("buffers", self.buffers)):
            if not isinstance(given, Sequence):
                raise InvalidArgument(f"{name} is {shown(given)}; it must be a sequence")
        if not self.names or not len(self.names) == len(self.digests) == len(self.buffers):
            raise InvalidArgument(
                f"names has {len(self.names)} items, digests {len(self.digests)}, buffers {len(self.buffers)}; "
                "a transfer has equally many of each, at least one"
            )
        require_names("names", self.names)
        require_names("digests", self.digests)
        if len(set(self.names)) < len(self.names):
            raise InvalidArgument("names has a name twice; a transfer has each object once")


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Result of a transfer: all objects were transferred if `causes` is empty, otherwise none.

    After a failed load all buffers are zeros, so that they cannot be taken for another object's bytes. If the load was
    not started (CLOSED, CIRCUIT_OPEN), they are unchanged.

    Attributes:
        id: the transfer's id.
        causes: cause of each object that failed, by its position.
        num_bytes: bytes of all objects.
        seconds: time in the tier, including waiting.
    """

    id: int
    causes: dict[int, Cause]
    num_bytes: int
    seconds: float

    @property
    def is_done(self) -> bool:
        """True if all objects were stored, or loaded and verified."""
        return not self.causes


@dataclass(frozen=True, slots=True)
class Prefix:
    """Number of names that are present, from the first on. is_final: False while the backend is queried for more."""

    num_found: int
    is_final: bool


@dataclass(frozen=True, slots=True)
class FirstMatch:
    """Position of the first name that is present; the number of names if none is. is_final: as of `Prefix`."""

    position: int
    is_final: bool


@dataclass(slots=True)
class TierStats:
    """Statistics of a tier since it was opened. Seconds are thread time, bytes are payloads."""

    num_stored: int = 0
    num_loaded: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    store_seconds: float = 0.0
    load_seconds: float = 0.0
    #: Objects that were not loaded, objects that were not stored, and transfers that were refused, by cause.
    load_misses: Counter[Cause] = field(default_factory=Counter)
    store_failures: Counter[Cause] = field(default_factory=Counter)
    refusals: Counter[Cause] = field(default_factory=Counter)
    num_evicted: int = 0
    #: Objects and bytes that are known to be present now.
    num_objects: int = 0
    object_bytes: int = 0
    #: Transfers and bytes that wait or run, and the longest running time among them.
    num_waiting: int = 0
    waiting_bytes: int = 0
    longest_seconds: float = 0.0
    #: Whether the circuit breaker of stores, and of loads, is open.
    is_store_failing: bool = False
    is_load_failing: bool = False


@runtime_checkable
class Tier(Protocol):
    """Keeps objects by name in a backend below the GPU's memory: files, a server, a bucket, a peer. Thread-safe.

    No call waits for the backend: transfers are queued for the tier's threads, and `take_results` returns their results
    later. A hit is exact; everything else is a miss with its cause.
    """

    @property
    def name(self) -> str:
        """The tier's address, for people and for metrics."""

    def store(self, transfer: Transfer) -> Cause | None:
        """Queue a transfer that stores objects. Return None, or the cause of a refusal. O(objects).

        An object that is present already is not written again. Raises `InvalidArgument` for a bad buffer or the id of a
        running transfer; nothing was queued then.
        """

    def load(self, transfer: Transfer) -> Cause | None:
        """Queue a transfer that loads objects into its buffers, before all waiting stores. Return None, or the cause.

        Raises as `store` does.
        """

    def longest_prefix(self, names: Sequence[bytes]) -> Prefix:
        """Return how many of `names` are present, from the first on, as far as the tier knows now. O(names).

        If the tier does not know about the next name, it queries the backend in the background, and a later call knows
        more. A load may still miss. Raises `InvalidArgument` for an invalid name.
        """

    def first_present(self, names: Sequence[bytes]) -> FirstMatch:
        """Return the first of `names` that is present, as far as the tier knows now. O(names).

        Used for states, since a prompt needs its last one. Queries the backend as `longest_prefix` does.
        """

    def drop(self, names: Sequence[bytes]) -> Cause | None:
        """Forget objects, and delete them in the background. Return None, or the cause of a refusal. O(names)."""

    def take_results(self) -> list[TransferResult]:
        """Return the results of transfers that ended since the last call, the first to end first. O(transfers)."""

    def stats(self) -> TierStats:
        """Return a copy of the tier's statistics. O(causes)."""

    def close(self, timeout: float = 10.0) -> bool:
        """End the tier, and return whether all running transfers ended within `timeout` seconds.

        Waiting transfers fail as CLOSED.
        """


def require_name(argument: str, name: object) -> bytes:
    """Return `name` if it is 16 bytes. Raises `InvalidArgument`."""
    if type(name) is not bytes or len(name) != NAME_BYTES:
        raise InvalidArgument(f"{argument} is {shown(name)}; it must be {NAME_BYTES} bytes")
    return name


def require_data(data: object) -> None:
    """Raise `InvalidArgument` unless `data` is bytes-like: `bytes`, `bytearray` or `memoryview`."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidArgument(f"data is {shown(data)}; it must be bytes")


def require_num_bytes(num_bytes: object) -> None:
    """Raise `InvalidArgument` unless `num_bytes` is None or an integer of at least 0."""
    if num_bytes is not None and not (type(num_bytes) is int and 0 <= num_bytes < 2**63):
        raise InvalidArgument(f"num_bytes is {shown(num_bytes)}; it must be None or an integer from 0 on")


def require_names(argument: str, names: Sequence[bytes]) -> None:
    """Raise `InvalidArgument`, with the position, unless all of `names` are 16 bytes. O(names)."""
    if not isinstance(names, Sequence):
        raise InvalidArgument(f"{argument} is {shown(names)}; it must be a sequence of names")
    for position, name in enumerate(names):
        if type(name) is not bytes or len(name) != NAME_BYTES:
            require_name(f"{argument}[{position}]", name)
