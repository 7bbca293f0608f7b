"""A replica: an engine in a separate process, run by Ray Serve. Replicas do not know each other."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvariantError
from blockyard.keys import plain_keys
from blockyard_engine import Engine, NewToken
from blockyard_engine.prompt_encoding import EncodedPrompt

from ..errors import ApiError
from ..jobs.engine_thread import EngineThread
from ..jobs.job import Event, Job, Mailbox
from ..jobs.served_model import ServedModel
from ..jobs.tracing import RequestTracer
from ..otlp import otlp_tracer
from .replica_request import ReplicaRequest
from .token_load import TOKEN_LOAD

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

#: Seconds without a token after which a replica sends an empty message.
BEAT = 1.0
#: Minimum of seconds between two messages of a stream; tokens in between are sent together.
GATHER = 0.02
#: Seconds between two heartbeats of an idle replica's KV events.
EVENTS_BEAT = 1.0
#: Seconds for tiers to store a prompt that is handed over; what they lack then is computed again.
STORE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """The arguments of a replica.

    Attributes:
        model_name: label of the metrics.
        dtype: data type of the weights.
        device: device of the model.
        threads: number of torch's threads.
        capacity: completions that may wait and run together.
        is_local: whether to open ports on loopback only; otherwise on the node's address, for other nodes.
        arguments: returns the arguments of `Engine.from_pretrained`; called in the replica's process.
        traces: collector for spans of requests (`otlp_tracer`), if any.
        num_prefills: number of replicas, the first by rank, that prefill for the others.
    """

    path: str
    model_name: str
    dtype: str
    device: str
    threads: int
    capacity: int
    is_local: bool
    arguments: Callable[[], dict[str, Any]]
    traces: str | None = None
    num_prefills: int = 0


class Replica:
    """Serves one engine. Methods run on one event loop, the engine in its own thread.

    Args:
        capacity: completions that may wait and run together.
        model_name: label of the metrics.
        tracer: receives spans of requests, if any.
    """

    def __init__(self, engine: Engine, capacity: int, model_name: str, tracer: Tracer | None = None) -> None:
        self._model = ServedModel.of(engine)
        spans = None if tracer is None else RequestTracer(tracer, engine.cache.block_size, model_name)
        self._thread = EngineThread(engine, capacity, model_name, status_seconds=0, tracer=spans)
        self._thread.start()
        self._num_pool_tokens = engine.cache.config.num_blocks * engine.cache.block_size
        self._num_tokens_in_flight = 0

    @property
    def token_load(self) -> float:
        """Tokens of its requests, answers at full length, relative to the tokens that its pool can hold."""
        return self._num_tokens_in_flight / self._num_pool_tokens

    @property
    def thread(self) -> EngineThread:
        """The engine thread."""
        return self._thread

    async def model(self) -> ServedModel:
        """Return the sizes for planning requests. All replicas have the same."""
        return self._model

    async def generate(self, request: ReplicaRequest) -> AsyncGenerator[list[Event], None]:
        """Yield lists of events until a result or an error; an empty list after each second without one.

        A request that hands over ends after its first tokens.
        """
        mailbox = Mailbox()
        prompt = EncodedPrompt(request.prompt, self._model.vocab_size)
        tenant = self._model.limits.roster.number_of(plain_keys(request.extra_keys))
        rest: dict[str, Any] = {
            "name": request.name,
            "session": request.session,
            "answer_prefix": request.answer_prefix,
            "tenant": tenant,
        }
        if self._thread.tracer is not None:
            rest["parent"] = self._thread.tracer.context_of(request.trace)
        job = Job(
            prompt, request.sampling, request.priority, 0, mailbox, time.perf_counter(), request.extra_keys, **rest
        )
        try:
            self._thread.submit([job])
        except ApiError as error:
            yield [error]
            return
        num_tokens = len(request.token_ids) + request.max_tokens
        self._num_tokens_in_flight += num_tokens
        try:
            async with aclosing(_gathered(mailbox)) as gathered:
                async for events in gathered:
                    yield events
                    last = events[-1] if events else None
                    if request.hands_over and isinstance(last, NewToken) and last.finish_reason is None:
                        self._thread.cancel([job])
                        await self._wait_stored(request)
                        return
        finally:
            self._num_tokens_in_flight -= num_tokens
            self._thread.cancel([job])

    async def _wait_stored(self, request: ReplicaRequest) -> None:
        """Wait until the tiers have stored the request's prompt, for at most `STORE_SECONDS`."""

        def is_storing(engine: Any) -> bool:
            return engine.offload is not None and engine.offload.is_storing(request.prompt, request.extra_keys)

        end = time.monotonic() + STORE_SECONDS
        while await asyncio.wrap_future(self._thread.call(is_storing)) and time.monotonic() < end:
            await asyncio.sleep(GATHER / 4)

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Return the result of `function`, called with the engine between two steps, or its `ApiError`."""
        try:
            return await asyncio.wrap_future(self._thread.call(function))
        except ApiError as error:
            return error

    async def held(self, prompts: Sequence[NDArray[np.int32]]) -> tuple[list[int], str]:
        """Return how many leading tokens of each prompt the cache has, and its problem, "" for none.

        Reads the cache between two steps. O(blocks).
        """

        def look(engine: Any) -> tuple[list[int], str]:
            found = [engine.cache.num_cached_tokens(prompt) for prompt in prompts]
            try:
                engine.cache.check()
            except InvariantError as error:
                return found, str(error)
            leaks = not engine.has_unfinished and engine.cache.num_used_blocks
            return found, "blocks are held although no request runs" if leaks else ""

        return await asyncio.wrap_future(self._thread.call(look))


class EngineReplica(Replica):
    """A replica that Ray Serve starts from a plan."""

    def __init__(self, plan: ReplicaPlan) -> None:
        if plan.is_local:
            listen_on_loopback()
        import torch

        torch.set_num_threads(plan.threads)
        port = "tcp://127.0.0.1:*"
        if not plan.is_local:
            import ray

            address = str(ray.util.get_node_ip_address())
            port = f"tcp://[{address}]:*" if ":" in address else f"tcp://{address}:*"
        events = {"endpoint": port, "replay_endpoint": port, "heartbeat": EVENTS_BEAT}
        arguments = {**plan.arguments(), "kv_events": events}
        engine = Engine.from_pretrained(plan.path, dtype=getattr(torch, plan.dtype), device=plan.device, **arguments)
        tracer = None if plan.traces is None else otlp_tracer(plan.traces)
        super().__init__(engine, plan.capacity, plan.model_name, tracer)
        assert engine.kv_events is not None
        self._endpoints = [engine.kv_events.endpoint, engine.kv_events.replay_endpoint]
        self._num_prefills = plan.num_prefills

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the endpoints of the KV events, for the router, and whether this replica prefills for others.

        Ray gives the rank of a dead replica to the one that replaces it.
        """
        from ray.serve import get_replica_context

        does_prefill = get_replica_context().rank.rank < self._num_prefills
        return {"kv": self._endpoints, "pid": os.getpid(), "prefill": does_prefill}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load that the autoscaling policy uses."""
        return {TOKEN_LOAD: self.token_load}

    def check_health(self) -> None:
        """Raise if the engine does not serve; Ray then replaces this replica."""
        if self._thread.refusal is not None:
            raise RuntimeError(self._thread.refusal)

    async def inspect(self, prompts: Sequence[NDArray[np.int32]]) -> tuple[str, int, list[int], str]:
        """Return this replica's name and process id, and the result of `held`."""
        from ray.serve import get_replica_context

        return str(get_replica_context().replica_id.unique_id), os.getpid(), *await self.held(prompts)


async def _gathered(mailbox: Mailbox) -> AsyncGenerator[list[Event], None]:
    """Yield a job's events; those within `GATHER` seconds together."""
    loop = asyncio.get_running_loop()
    next_at, is_over = loop.time(), False
    while not is_over:
        await asyncio.sleep(max(next_at - loop.time(), 0))
        try:
            async with asyncio.timeout(BEAT):
                events = [event for _, event in await mailbox.take()]
        except TimeoutError:
            events = []
        is_over = not all(isinstance(event, NewToken) for event in events)
        next_at = loop.time() + GATHER
        yield events


def listen_on_loopback() -> None:
    """Bind the gRPC port of a replica, which Ray 2.60 opens on all addresses, to loopback."""
    from ray.serve._private import replica

    opened = getattr(replica, "add_port_to_grpc_server", None)
    if opened is not None:
        replica.add_port_to_grpc_server = lambda server, _: opened(server, "127.0.0.1:0")
