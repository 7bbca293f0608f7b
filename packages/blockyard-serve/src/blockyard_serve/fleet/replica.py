"""A replica is an engine in a process of its own, as Ray Serve runs it. It knows nothing of the others."""

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
from .asks import ReplicaAsk
from .token_load import TOKEN_LOAD

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

#: Seconds without a token after which a replica says that it is there all the same.
BEAT = 1.0
#: Seconds from one message of a stream to the next, at least: tokens that come sooner go together.
GATHER = 0.02
#: Seconds from one heartbeat of an idle replica's KV events to the next.
EVENTS_BEAT = 1.0
#: Seconds that tiers may take to have a prompt that is handed over; then it is computed again, or as much as they lack.
STORE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """Says what a replica is made of. threads: torch's. capacity: its queue.

    is_local: whether its ports are on loopback; else they are on its node's address, for ingresses of other nodes.
    arguments: returns those of `Engine.from_pretrained`, in the replica's process: what they open belongs to it.
    traces: where spans of requests go (`otlp_tracer`), None for nowhere. num_prefills: how many replicas, the first by
    rank, compute prompts for the others.
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
    """Is an engine that answers asks; its methods run in one loop, the engine in a thread of its own."""

    def __init__(self, engine: Engine, capacity: int, model_name: str, tracer: Tracer | None = None) -> None:
        self._model = ServedModel.of(engine)
        spans = None if tracer is None else RequestTracer(tracer, engine.cache.block_size, model_name)
        self._thread = EngineThread(engine, capacity, model_name, status_seconds=0, tracer=spans)
        self._thread.start()
        self._num_pool_tokens = engine.cache.config.num_blocks * engine.cache.block_size
        self._num_tokens_asked = 0

    @property
    def token_load(self) -> float:
        """Return the tokens of its requests, answers at their longest, over those that its pool takes."""
        return self._num_tokens_asked / self._num_pool_tokens

    @property
    def thread(self) -> EngineThread:
        """Return the engine's thread."""
        return self._thread

    async def model(self) -> ServedModel:
        """Return the sizes by which requests are planned; they are the same of all replicas."""
        return self._model

    async def generate(self, ask: ReplicaAsk) -> AsyncGenerator[list[Event], None]:
        """Yield what happens as lists, until a result or an error; an empty list each second in which nothing does.

        One that hands over ends behind its first tokens.
        """
        mailbox = Mailbox()
        prompt = EncodedPrompt(ask.prompt, self._model.vocab_size)
        tenant = self._model.limits.roster.number_of(plain_keys(ask.extra_keys))
        rest: dict[str, Any] = {"name": ask.name, "session": ask.session, "given": ask.given, "tenant": tenant}
        if self._thread.tracer is not None:
            rest["parent"] = self._thread.tracer.context_of(ask.trace)
        job = Job(prompt, ask.sampling, ask.priority, 0, mailbox, time.perf_counter(), ask.extra_keys, **rest)
        try:
            self._thread.submit([job])
        except ApiError as error:
            yield [error]
            return
        num_tokens = len(ask.token_ids) + ask.max_tokens
        self._num_tokens_asked += num_tokens
        try:
            async with aclosing(_gathered(mailbox)) as gathered:
                async for events in gathered:
                    yield events
                    last = events[-1] if events else None
                    if ask.hands_over and isinstance(last, NewToken) and last.finish_reason is None:
                        self._thread.cancel([job])
                        await self._stored(ask)
                        return
        finally:
            self._num_tokens_asked -= num_tokens
            self._thread.cancel([job])

    async def _stored(self, ask: ReplicaAsk) -> None:
        """Wait until the engine's tiers have stored what was computed of a prompt, for `STORE_SECONDS` at most."""

        def is_storing(engine: Any) -> bool:
            return engine.offload is not None and engine.offload.is_storing(ask.prompt, ask.extra_keys)

        end = time.monotonic() + STORE_SECONDS
        while await asyncio.wrap_future(self._thread.ask(is_storing)) and time.monotonic() < end:
            await asyncio.sleep(GATHER / 4)

    async def ask(self, call: Callable[[Engine], Any]) -> Any:
        """Return what `call` says of the engine, asked between two steps, or the error for the client."""
        try:
            return await asyncio.wrap_future(self._thread.ask(call))
        except ApiError as error:
            return error

    async def held(self, prompts: Sequence[NDArray[np.int32]]) -> tuple[list[int], str]:
        """Return how many leading tokens of each prompt the cache has, and what is wrong with the cache, "" as a rule.

        Asked between two steps. O(blocks).
        """

        def look(engine: Any) -> tuple[list[int], str]:
            found = [engine.cache.num_cached_tokens(prompt) for prompt in prompts]
            try:
                engine.cache.check()
            except InvariantError as error:
                return found, str(error)
            leaks = not engine.has_unfinished and engine.cache.num_used_blocks
            return found, "blocks are held, and nothing runs" if leaks else ""

        return await asyncio.wrap_future(self._thread.ask(look))


class EngineReplica(Replica):
    """Is a replica as Ray Serve makes it."""

    def __init__(self, plan: ReplicaPlan) -> None:
        if plan.is_local:
            listen_on_loopback()
        import torch

        torch.set_num_threads(plan.threads)
        port = f"tcp://{'127.0.0.1' if plan.is_local else _node_address()}:*"
        events = {"endpoint": port, "replay_endpoint": port, "heartbeat": EVENTS_BEAT}
        arguments = {**plan.arguments(), "kv_events": events}
        engine = Engine.from_pretrained(plan.path, dtype=getattr(torch, plan.dtype), device=plan.device, **arguments)
        tracer = None if plan.traces is None else otlp_tracer(plan.traces)
        super().__init__(engine, plan.capacity, plan.model_name, tracer)
        assert engine.kv_events is not None
        self._endpoints = [engine.kv_events.endpoint, engine.kv_events.replay_endpoint]
        self._num_prefills = plan.num_prefills

    def record_replica_metadata(self) -> dict[str, Any]:
        """Say where the KV events are, which the router follows, and whether this one computes prompts for others.

        Ray gives a replica that takes the place of a dead one its rank.
        """
        from ray.serve import get_replica_context

        does_prefill = get_replica_context().rank.rank < self._num_prefills
        return {"kv": self._endpoints, "pid": os.getpid(), "prefill": does_prefill}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report the load by which the fleet may grow and shrink."""
        return {TOKEN_LOAD: self.token_load}

    def check_health(self) -> None:
        """Raise where the engine serves no more; Ray then replaces this replica."""
        if self._thread.refusal is not None:
            raise RuntimeError(self._thread.refusal)

    async def inspect(self, prompts: Sequence[NDArray[np.int32]]) -> tuple[str, int, list[int], str]:
        """Return this replica's name and process, and what `held` does."""
        from ray.serve import get_replica_context

        return str(get_replica_context().replica_id.unique_id), os.getpid(), *await self.held(prompts)


async def _gathered(mailbox: Mailbox) -> AsyncGenerator[list[Event], None]:
    """Yield a job's events, those within `GATHER` seconds together."""
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


def _node_address() -> str:
    import ray

    address = str(ray.util.get_node_ip_address())
    return f"[{address}]" if ":" in address else address


def listen_on_loopback() -> None:
    """Have the one port that Ray 2.60 opens on all addresses, a replica's of gRPC, opened on this machine's own."""
    from ray.serve._private import replica

    opened = getattr(replica, "add_port_to_grpc_server", None)
    if opened is not None:
        replica.add_port_to_grpc_server = lambda server, _: opened(server, "127.0.0.1:0")
