"""A step as rank 0 sends it to the others: its plans (`PlanSender`) and drafts, as one bytes object.

Its head has the number of the step and a digest of this message and all before it, so that a rank that missed or
changed one is found at that step.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...config import CacheConfig
from ...core.plan import PlanReceiver, PlanSender, StepPlan, SwapPlan
from ...errors import DivergedRank, InvalidArgument, RankError
from ...storage import MoveLists
from ..moves import lists_of
from ..runner import ForwardBatch

FORMAT = 2
_HEAD = struct.Struct("<BxxxxxxxQ16s")
#: How many plans there are, which of them is run (-1 for none), how many drafts.
_COUNTS = struct.Struct("<qqq")
_NONE = -1


class _Chain:
    """The steps so far, from one side. start: what all ranks agreed on."""

    def __init__(self, start: bytes) -> None:
        self.digest = hashlib.blake2b(start, digest_size=16).digest()
        self.num_steps = 0

    def add(self, body: bytes | memoryview) -> None:
        """Take the next step into the digest. O(bytes)."""
        self.digest = hashlib.blake2b(body, key=self.digest, digest_size=16).digest()
        self.num_steps += 1


class StepSender:
    """Rank 0's side: makes the bytes of each step, for all the other ranks. config: of the cache."""

    def __init__(self, start: bytes, config: CacheConfig) -> None:
        self._chain = _Chain(start)
        self._plans = PlanSender(config)

    def to_bytes(self, plans: Sequence[SwapPlan], batch: ForwardBatch | None) -> bytes:
        """The next step's message. plans: whose moves are still to be carried out, in order. O(what changed).

        batch: None where blocks move and nothing is computed.
        """
        run = None if batch is None else batch.plan
        whole = list(plans) if run is None or any(plan is run for plan in plans) else [*plans, run]
        place = next((place for place, plan in enumerate(whole) if plan is run), _NONE)
        parts = [self._plans.to_bytes(plan, moves_only=plan is not run) for plan in whole]
        drafts = _drafts(batch)
        sizes = np.array([len(part) for part in parts], "<i8").tobytes()
        body = b"".join([_COUNTS.pack(len(parts), place, len(drafts)), sizes, drafts.tobytes(), *parts])
        self._chain.add(body)
        return _HEAD.pack(FORMAT, self._chain.num_steps, self._chain.digest) + body


class StepReceiver:
    """Another rank's side: reads what rank 0 made, every message in order. config: as on rank 0."""

    def __init__(self, start: bytes, config: CacheConfig) -> None:
        self._chain = _Chain(start)
        self._groups = config.layer_groups
        self._plans = PlanReceiver(config)

    @property
    def num_steps(self) -> int:
        """Messages so far."""
        return self._chain.num_steps

    def from_bytes(self, message: bytearray) -> tuple[list[MoveLists], ForwardBatch | None]:
        """The next step's moves, in order, and what is computed then. O(bytes).

        Raises `RankError` if it is not the message that follows those before.
        """
        if len(message) < _HEAD.size:
            raise RankError(f"got a step of {len(message)} bytes; its head has {_HEAD.size}")
        form, number, digest = _HEAD.unpack_from(message)
        if form != FORMAT:
            raise RankError(f"got a step of format {form}; it reads format {FORMAT}")
        body = memoryview(message)[_HEAD.size :]
        self._chain.add(body)
        if (number, digest) != (self._chain.num_steps, self._chain.digest):
            raise RankError(
                f"diverged at step {number}: the digest of all steps is {self._chain.digest.hex()} after "
                f"{self._chain.num_steps} steps here, {digest.hex()} on rank 0"
            )
        try:
            return self._read(body)
        except (ValueError, struct.error, InvalidArgument, DivergedRank) as error:
            raise RankError(f"got step {number}, which cannot be read: {error}") from error

    def _read(self, body: memoryview) -> tuple[list[MoveLists], ForwardBatch | None]:
        count, run, num_drafts = _COUNTS.unpack_from(body)
        sizes = np.frombuffer(body, "<i8", count, _COUNTS.size)
        at = _COUNTS.size + sizes.nbytes
        drafts = np.frombuffer(body, "<i8", num_drafts, at)
        at += drafts.nbytes
        moves, batch = [], None
        for place, size in enumerate(sizes.tolist()):
            plan = self._plans.from_bytes(body[at : at + size])
            at += size
            moves += lists_of(plan)
            if place == run and isinstance(plan, StepPlan):
                # No rank but 0 needs logits. Made here: the plan is stale once the next one is read.
                batch = ForwardBatch.of(plan, self._groups, np.zeros(len(plan.num_scheduled), np.int64), drafts)
        return moves, batch


def _drafts(batch: ForwardBatch | None) -> NDArray[np.int64]:
    """The tokens of a step that the cache does not know."""
    if batch is None or batch.plan is None:
        return np.empty(0, np.int64)
    return batch.token_ids[batch.plan.input_ids < 0].astype("<i8")
