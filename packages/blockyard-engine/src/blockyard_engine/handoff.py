"""Disaggregated prefill with the reference engine: connectors that hand computed prompts from engine to engine.

    from blockyard_engine.handoff import DecodeConnector, PrefillConnector

`blockyard_engine.parallel` has the messages and the transports; docs/parallel.md shows both together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockyard.answers import Admission
from blockyard.errors import InvalidArgument
from blockyard.keys import ExtraKey

from .decoding.sampler import Choice
from .engine import Engine
from .parallel import HandoffReceiver, HandoffSender, HeadShards, Offer, PeerInfo, Transfer
from .parallel.tensors import KVPort
from .prompt_encoding import EncodedPrompt, Prompt
from .request import Request
from .results import GenerationResult, NewToken, StepReport
from .sampling import SamplingParams

__all__ = ["DecodeConnector", "PrefillConnector", "PrefillResult"]


def peer_info(engine: Engine, name: str, incarnation: int) -> PeerInfo:
    """Return the handshake's description of an engine's cache. The engine must have one rank."""
    if engine.num_ranks != 1:
        raise InvalidArgument(f"engine has {engine.num_ranks} ranks; a connector needs an engine with 1")
    if engine.shape.index is not None:
        raise InvalidArgument(
            "the engine's model has index keys, which cannot be handed over; serve it with one engine"
        )
    tensors, groups = engine.kv_cache, range(engine.kv_cache.places.num_groups)
    places = tensors.places
    return PeerInfo.of(
        engine.cache.config,
        name,
        incarnation,
        dtype=str(tensors.dtype).removeprefix("torch."),
        num_layers=tensors.num_layers,
        head_size=tensors.head_size,
        value_size=tensors.value_size,
        shards=HeadShards.even(tensors.num_kv_heads),
        layout=tensors.layout.value,
        state_tensors=() if engine.state_slots is None else engine.state_slots.describe(),
        layer_groups=tuple(
            tuple(layer for layer in range(tensors.num_layers) if places.group(layer) == group) for group in groups
        ),
    )


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """A computed prompt. The offer's last token is the first token of the answer."""

    request_id: int
    offer: Offer


class PrefillConnector:
    """Producer of keys and values: computes prompts and their first tokens, and offers both.

    The engine should do nothing else. An offer holds the row and blocks of its sequence, and a hybrid model's state in
    the row's slot.

    Args:
        engine: the engine.
        name: name of this side, as for `PeerInfo`.
        incarnation: number of this start, as for `PeerInfo`.
        ttl: time to live of offers, as for `HandoffSender`.
    """

    def __init__(self, engine: Engine, name: str, incarnation: int, ttl: float) -> None:
        self.engine = engine
        self.sender = HandoffSender(engine.cache, peer_info(engine, name, incarnation), ttl)
        self.port = KVPort(engine.kv_cache, slots=engine.state_slots)
        self._keys: dict[int, Sequence[ExtraKey]] = {}

    def add_request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        extra_keys: Sequence[ExtraKey] = (),
        tenant: str | None = None,
    ) -> int:
        """Queue a prompt and return its request id.

        Raises as `Engine.add_request`, and `InvalidArgument` for n above 1 or logprobs.

        Args:
            prompt: the prompt.
            sampling: sampling parameters of the whole request; give the other side the same.
            extra_keys: extra keys, as for `Engine.add_request`.
            tenant: tenant, as for `Engine.add_request`. The offer carries its salt, which tells the other side the
                tenant.
        """
        wanted = _required(SamplingParams() if sampling is None else sampling)
        least = min(wanted.max_tokens, max(2, wanted.min_tokens))
        request_id = self.engine.add_request(
            prompt, dataclasses.replace(wanted, max_tokens=least), extra_keys=extra_keys, tenant=tenant
        )
        self._keys[request_id] = self.engine.limits.roster.keys_of(tenant, tuple(extra_keys))
        return request_id

    def step(self, now: float) -> tuple[list[PrefillResult], list[GenerationResult]]:
        """Run one step; return the computed prompts, and results of requests that ended with their first token.

        Raises as `Engine.step`. `now` is the time for the offers' time to live.
        """
        self.sender.expire(now)
        report = _step(self.engine)
        done = [self._offer(token, now) for token in report.new_tokens if token.finish_reason is None]
        for result in report.finished:
            self._keys.pop(result.request_id, None)
        return done, report.finished

    def _offer(self, token: NewToken, now: float) -> PrefillResult:
        request_id = token.request_id
        keys = self._keys.pop(request_id)
        offer = self.engine.detach(request_id, lambda seq: self.sender.take_over(seq, now, keys))
        return PrefillResult(request_id, offer)


class DecodeConnector:
    """Consumer of keys and values: continues prompts computed elsewhere, and serves its own requests.

    Step the engine with `step` of the connector.

    Args:
        engine: the engine.
        name: name of this side, as for `PeerInfo`.
        incarnation: number of this start, as for `PeerInfo`.
        ttl: time that a transfer may take, as for `HandoffReceiver`.
    """

    def __init__(self, engine: Engine, name: str, incarnation: int, ttl: float) -> None:
        self.engine = engine
        peer = peer_info(engine, name, incarnation)
        self.receiver = HandoffReceiver(engine.cache, peer, ttl, engine.move_blocks)
        self.port = KVPort(engine.kv_cache, slots=engine.state_slots)
        self._requests: dict[int, Request] = {}

    def accept(self, offer: Offer, sampling: SamplingParams | None, now: float) -> Transfer | Admission:
        """Allocate blocks for an offer. Fetch its keys and values next (`ReceiverLink.fetch`), then call `finish`.

        Raises as `HandoffReceiver.accept`, and as `Engine.add_request` for requests that cannot be served here.

        Args:
            offer: the offer.
            sampling: the request's sampling parameters, as on the other side.
            now: the time.
        """
        wanted = _required(SamplingParams() if sampling is None else sampling)
        num_prompt = len(offer.token_ids) - 1
        if offer.num_computed != num_prompt:
            raise InvalidArgument(
                f"offer has {offer.num_computed} computed tokens of {num_prompt + 1}; all but the last must be computed"
            )
        vocab_size = self.engine.shape.vocab_size
        if int(offer.token_ids.max()) >= vocab_size:
            raise InvalidArgument(f"offer has token {offer.token_ids.max()}; the vocabulary has {vocab_size}")
        prompt = EncodedPrompt(offer.token_ids[:-1].tolist(), vocab_size)
        request = self.engine.prepare("offer", prompt, wanted, offer.extra_keys)
        transfer = self.receiver.accept(offer, now, f"request {request.request_id}, on its way in")
        if isinstance(transfer, Transfer):
            self._forget_ended()
            self._requests[transfer.number] = request
        return transfer

    def finish(self, transfer: Transfer, now: float) -> NewToken:
        """Run the request of a completed transfer from the next step on, and return its first token.

        The token has the request's id, and a finish reason if it was the last. Raises as `HandoffReceiver.finish`.
        """
        seq = self.receiver.finish(transfer, now)
        request = self._requests.pop(transfer.number)
        request.num_cached_tokens = transfer.start
        if self.engine.cache.config.observe.track_misses:
            request.misses = self.engine.cache.miss_causes(seq)
        runs = False
        try:
            token = request.branches[0].take(Choice(int(transfer.offer.token_ids[-1])))
            if token.finish_reason is None:
                self.engine.adopt(request, seq)
                runs = True
        finally:
            if not runs:
                self.engine.cache.free(seq)
            self.engine.cache.pool.publish_events()
        return token

    def step(self, now: float) -> StepReport:
        """Abort expired transfers, then run one step of the engine. Raises as `Engine.step`."""
        self.receiver.expire(now)
        self._forget_ended()
        return _step(self.engine)

    def _forget_ended(self) -> None:
        live = {transfer.number for transfer in self.receiver.transfers()}
        self._requests = {number: request for number, request in self._requests.items() if number in live}


def _step(engine: Engine) -> StepReport:
    """Run a step that may compute nothing, because the blocks are held by offers or transfers."""
    return engine.step(only=engine.request_ids)


def _required(sampling: Any) -> SamplingParams:
    if not isinstance(sampling, SamplingParams):
        raise InvalidArgument(f"sampling is a {type(sampling).__name__}; it must be SamplingParams")
    if sampling.n > 1:
        raise InvalidArgument(f"n is {sampling.n}; it must be 1 for a hand-over")
    if sampling.logprobs is not None:
        raise InvalidArgument(
            f"logprobs is {sampling.logprobs}; it must be None: the first token's are not handed over"
        )
    return sampling
