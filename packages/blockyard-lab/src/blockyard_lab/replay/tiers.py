"""Replays a trace through the real manager and the real `Offload`, over tiers that store names but no bytes.

Loads, evictions and stores are decided by the same code as in an engine. Only times are modelled: transfers by latency
and bandwidth, computing by tokens. Requests run one after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from blockyard import KVCacheManager
from blockyard.arguments import require_int
from blockyard.config import CacheConfig
from blockyard.errors import InvalidArgument
from blockyard_tiers import (
    Cause,
    FirstMatch,
    ObjectIndex,
    Offload,
    Prefix,
    TierStats,
    TierUse,
    Transfer,
    TransferResult,
)

from ..trace import Trace, TraceRequest
from .expansion import Expansion
from .result import REPORT_EVERY, explain_misfit
from .tier_result import TierHits, TierReplayResult

_DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class TierModel:
    """A tier: its size, write policy (as in `TierUse`), eviction policy and speed. Loads never wait for stores.

    Args:
        num_bytes: size.
        write: write policy.
        policy: eviction policy.
        bytes_per_second: bandwidth.
        seconds: latency of a transfer.

    Raises:
        InvalidArgument: for a value outside its limits.
    """

    num_bytes: int
    write: str = "through"
    policy: str = "lru"
    bytes_per_second: float = math.inf
    seconds: float = 0.0

    def __post_init__(self) -> None:
        require_int("num_bytes", self.num_bytes, 1, 2**60)
        if not self.bytes_per_second > 0 or not 0 <= self.seconds < math.inf:
            raise InvalidArgument(
                f"bytes_per_second is {self.bytes_per_second!r} and seconds {self.seconds!r}; bytes_per_second must be "
                "above 0, seconds 0 or more"
            )


class SimulatedTier:
    """A `Tier` with a size, an eviction policy and a clock, but without bytes. O(objects) per call."""

    def __init__(self, name: str, model: TierModel, object_bytes: int, clock: Callable[[], float]) -> None:
        self.name = name
        self.model = model
        self.stored_bytes = 0
        self._object_bytes = object_bytes
        self._clock = clock
        self._index = ObjectIndex(model.num_bytes, 2**40, model.policy)
        self._ends: list[tuple[float, TransferResult]] = []
        #: When the last load (True) and the last store (False) end. Each waits only for its own kind.
        self._free_at = {True: 0.0, False: 0.0}

    def store(self, transfer: Transfer) -> Cause | None:
        new = [name for name in transfer.names if name not in self._index]
        if len(transfer.names) * self._object_bytes > self.model.num_bytes:
            return Cause.FULL
        self._index.evict(len(new) * self._object_bytes)
        self._index.add(new, [self._object_bytes] * len(new))
        self._index.use(transfer.names)
        self.stored_bytes += len(new) * self._object_bytes
        self._end(transfer, False, {}, len(new))
        return None

    def load(self, transfer: Transfer) -> Cause | None:
        missing = {place: Cause.GONE for place, name in enumerate(transfer.names) if name not in self._index}
        if not missing:
            self._index.use(transfer.names)
        self._end(transfer, True, missing, len(transfer.names))
        return None

    def _end(self, transfer: Transfer, is_load: bool, causes: dict[int, Cause], num_objects: int) -> None:
        num_bytes = num_objects * self._object_bytes
        seconds = self.model.seconds + num_bytes / self.model.bytes_per_second
        end = self._free_at[is_load] = max(self._free_at[is_load], self._clock()) + seconds
        self._ends.append((end, TransferResult(transfer.id, causes, num_bytes, end - self._clock())))

    def longest_prefix(self, names: Sequence[bytes]) -> Prefix:
        return Prefix(self._index.prefix(names), True)

    def first_present(self, names: Sequence[bytes]) -> FirstMatch:
        return FirstMatch(next((place for place, name in enumerate(names) if name in self._index), len(names)), True)

    def drop(self, names: Sequence[bytes]) -> Cause | None:
        self._index.forget(names)
        return None

    def take_results(self) -> list[TransferResult]:
        done = [result for end, result in self._ends if end <= self._clock()]
        self._ends = [each for each in self._ends if each[0] > self._clock()]
        return done

    def next_end(self) -> float:
        """Return when the next transfer ends; infinity if there is none."""
        return min((end for end, _ in self._ends), default=math.inf)

    def stats(self) -> TierStats:
        evicted, num_objects, num_bytes = self._index.num_evicted, len(self._index), self._index.num_bytes
        return TierStats(
            stored_bytes=self.stored_bytes, num_evicted=evicted, num_objects=num_objects, object_bytes=num_bytes
        )

    def close(self, timeout: float = 0.0) -> bool:  # noqa: ARG002
        return True


@dataclass(slots=True)
class _NoBytes:
    """KV storage without contents."""

    object_bytes: int
    num_rows: int
    _byte: bytearray = field(default_factory=lambda: bytearray(1))

    def layout(self) -> Mapping[str, Any]:
        return {"lab": True}

    def buffer(self, row: int) -> memoryview:  # noqa: ARG002
        return memoryview(self._byte)

    def read(self, block_ids: npt.NDArray[np.int32], rows: Sequence[int]) -> None: ...

    def write(self, block_ids: npt.NDArray[np.int32], rows: Sequence[int]) -> None: ...


def _config(num_blocks: int, block_size: int, policy: str, max_model_len: int) -> CacheConfig:
    return CacheConfig(
        num_blocks,
        block_size=block_size,
        max_num_seqs=1,
        max_model_len=max_model_len,
        watermark=0.0,
        hash_seed=0,
        eviction_policy=policy,
    )


class RunnableTrace:
    """A trace without the requests that a `TierReplay` with these arguments refuses."""

    def __init__(self, trace: Trace, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self.name, self.hash_block_size, self.skips = trace.name, trace.hash_block_size, trace.skips
        self._trace = trace
        self._config = _config(num_blocks, block_size, "lru", max_model_len)

    def __iter__(self) -> Iterator[TraceRequest]:
        return (request for request in self._trace if not explain_misfit(self._config, request))


class TierReplay:
    """A pool with tiers below it.

    Args:
        num_blocks: blocks of the pool, including the null block.
        tiers: the tiers, nearest first.
        bytes_per_token: bytes of keys and values per token, all layers together.
        block_size: tokens per block.
        policy: the pool's eviction policy.
        seconds_per_token: time to compute a prompt token.
        max_model_len: longest request in tokens.
        buffer_blocks: host buffers for transfers, half of them for loads.

    Raises:
        InvalidArgument: for a value outside its limits.
    """

    def __init__(
        self,
        num_blocks: int,
        tiers: Sequence[TierModel],
        *,
        bytes_per_token: int,
        block_size: int = 16,
        policy: str = "lru",
        seconds_per_token: float = 5e-5,
        max_model_len: int = 131_072,
        buffer_blocks: int = 2**15,
    ) -> None:
        object_bytes = block_size * require_int("bytes_per_token", bytes_per_token, 1, 2**40)
        if not 0 < seconds_per_token < math.inf:
            raise InvalidArgument(f"seconds_per_token is {seconds_per_token!r}; it must be above 0")
        self.now = 0.0
        self.cache = KVCacheManager(_config(num_blocks, block_size, policy, max_model_len))
        self.tiers = [
            SimulatedTier(f"tier {number}", model, object_bytes, lambda: self.now)
            for number, model in enumerate(tiers, 1)
        ]
        self._uses = [TierUse(tier, tier.model.write) for tier in self.tiers]
        self._seconds_per_token = seconds_per_token
        self._offload = Offload(
            self.cache, _NoBytes(object_bytes, buffer_blocks), self._uses, {}, clock=lambda: self.now
        )
        self._offload.note_computed(1, seconds_per_token)

    def run(self, trace: Trace, on_request: Callable[[int], None] | None = None) -> TierReplayResult:
        """Serve every request, and run the manager's `check()` at the end. O(tokens).

        Args:
            trace: any trace.
            on_request: called now and then with the number of finished requests.
        """
        expansion, last = Expansion(trace), 0.0
        tokens = pooled = refused = number = 0
        seconds = 0.0
        for number, request in enumerate(trace, 1):
            last = max(last, request.arrival)
            self.now = max(self.now, request.arrival)
            if explain_misfit(self.cache.config, request):
                refused += 1
                continue
            hits, took = self.serve(expansion.prompt(request), expansion.output(request))
            tokens, pooled, seconds = tokens + request.num_prompt_tokens, pooled + hits[0], seconds + took
            if on_request is not None and number % REPORT_EVERY == 0:
                on_request(number)
        self.cache.check()
        return TierReplayResult(
            num_requests=number - refused,
            num_refused=refused,
            num_prompt_tokens=tokens,
            num_pool_tokens=pooled,
            tiers=tuple(self._hits(use, tier, last) for use, tier in zip(self._uses, self.tiers, strict=True)),
            missed=dict(self._offload.missed_tokens),
            mean_seconds=seconds / max(number - refused, 1),
        )

    def _hits(self, use: TierUse, tier: SimulatedTier, seconds: float) -> TierHits:
        stats = tier.stats()
        a_day = stats.stored_bytes * _DAY / seconds if seconds > 0 else None
        return TierHits(use.num_hit_tokens, stats.stored_bytes, a_day, stats.num_evicted, stats.object_bytes)

    def serve(self, prompt: npt.NDArray[np.int32], output: npt.NDArray[np.int32]) -> tuple[list[int], float]:
        """Serve one request to its end.

        Returns:
            Prompt tokens found in the pool and in each tier, and seconds to the first token.
        """
        offload, cache, key, began = self._offload, self.cache, object(), self.now
        before = [use.num_hit_tokens for use in self._uses]
        offload.poll()
        tokens = prompt.tolist()
        while offload.prepare(key, tokens):
            self.now = max(self.now, min(tier.next_end() for tier in self.tiers))
            offload.poll()
        seq = cache.allocate(prompt)
        pooled = int(cache.num_computed_tokens(seq))
        offload.fill(key, seq)
        first = int(cache.num_computed_tokens(seq))
        self.now += (len(tokens) - first) * self._seconds_per_token
        took = self.now - began
        self._step(key, seq, tokens, len(tokens) - first, output[:1])
        self._step(key, seq, [*tokens, *output.tolist()], len(output), output[1:].reshape(1, -1))
        cache.free(seq)
        offload.poll()
        offload.forget(key)
        return [pooled, *(use.num_hit_tokens - old for use, old in zip(self._uses, before, strict=True))], took

    def _step(self, key: object, seq: int, tokens: list[int], count: int, new: npt.NDArray[np.int32]) -> None:
        """Compute the last `count` of `tokens` and append `new`. As in `replay`, the last token is computed too."""
        plan = self.cache.reserve(seq, count)
        self._offload.save(key, seq, tokens, len(tokens))
        self.cache.commit(seq, plan.num_scheduled, new)
