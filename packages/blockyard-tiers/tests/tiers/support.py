"""Shared by tests of tiers: objects whose names determine their bytes, and waiting for transfers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from hashlib import shake_128
from typing import Any

from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_tiers import Cause, Tier, Transfer, TransferResult, layout_id

LAYOUT = layout_id(model="a", dtype="float16", rank=0)
OTHER_LAYOUT = layout_id(model="b", dtype="float16", rank=0)


def name_of(number: int, layout: bytes = LAYOUT) -> bytes:
    return shake_128(b"name" + layout + number.to_bytes(8, "little")).digest(16)


def tokens_of(number: int) -> bytes:
    return shake_128(b"tokens" + number.to_bytes(8, "little")).digest(16)


def size_of(number: int) -> int:
    """Return the payload bytes of an object: mostly small, sometimes large."""
    return (1, 100, 4096, 5000, 70_000)[number % 5] + number % 7


def payload_of(number: int, layout: bytes = LAYOUT) -> bytes:
    """Return the only bytes that a load of this name may return."""
    return shake_128(b"payload" + layout + number.to_bytes(8, "little")).digest(size_of(number))


def store_transfer(identity: int, numbers: list[int], layout: bytes = LAYOUT) -> Transfer:
    names, tokens = [name_of(each, layout) for each in numbers], [tokens_of(each) for each in numbers]
    return Transfer(identity, layout, names, tokens, [payload_of(each, layout) for each in numbers])


def load_transfer(identity: int, numbers: list[int], layout: bytes = LAYOUT) -> Transfer:
    """Return a load into buffers full of another request's bytes, some of them in pieces."""
    names, tokens = [name_of(each, layout) for each in numbers], [tokens_of(each) for each in numbers]
    buffers: list[Any] = [bytearray(b"\xaa" * size_of(each)) for each in numbers]
    for place, number in enumerate(numbers):
        if number % 3 == 0 and size_of(number) > 2:
            cut = random.Random(number).randrange(1, size_of(number))
            buffers[place] = [bytearray(b"\xaa" * cut), bytearray(b"\xaa" * (size_of(number) - cut))]
    return Transfer(identity, layout, names, tokens, buffers)


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def bytes_in(buffer: Any) -> bytes:
    return b"".join(buffer) if isinstance(buffer, list) else bytes(buffer)


def require_right(transfer: Transfer, numbers: list[int], result: TransferResult, layout: bytes = LAYOUT) -> None:
    """Require that a load returned the stored bytes, or zeros and causes, or was not started and changed nothing."""
    filler = b"\xaa" if {Cause.CLOSED, Cause.CIRCUIT_OPEN} & set(result.causes.values()) else b"\0"
    for number, buffer in zip(numbers, transfer.buffers, strict=True):
        wanted = payload_of(number, layout) if result.is_done else filler * size_of(number)
        assert bytes_in(buffer) == wanted, (number, result)


def wait_for(tier: Tier, identity: int) -> TransferResult:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        for result in tier.take_results():
            if result.id == identity:
                return result
        time.sleep(0.0005)
    raise AssertionError(f"transfer {identity} has not ended")


def store(tier: Tier, numbers: list[int], layout: bytes = LAYOUT) -> TransferResult:
    assert tier.store(store_transfer(1, numbers, layout)) is None
    return wait_for(tier, 1)


def load(tier: Tier, numbers: list[int], layout: bytes = LAYOUT) -> dict[int, Cause]:
    """Load objects, require that they are right, and return the causes of misses by number."""
    transfer = load_transfer(2, numbers, layout)
    assert tier.load(transfer) is None
    result = wait_for(tier, 2)
    require_right(transfer, numbers, result, layout)
    return {numbers[place]: cause for place, cause in result.causes.items()}


def known(tier: Tier, numbers: list[int]) -> int:
    names = [name_of(each) for each in numbers]
    return answered(lambda: tier.longest_prefix(names)).num_found


def first_known(tier: Tier, numbers: list[int]) -> int:
    names = [name_of(each) for each in numbers]
    return answered(lambda: tier.first_present(names)).position


def answered(ask: Callable[[], Any]) -> Any:
    """Return the final answer of a lookup."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        found = ask()
        if found.is_final:
            return found
        time.sleep(0.0005)
    raise AssertionError("the backend has not answered")
