"""Prefill here, decode there: the two doors of an engine through which computed prompts leave and come in.

    from blockyard_engine.handoff import DecodeDoor, PrefillDoor

What goes between them, and over which transport, is `blockyard_engine.parallel`'s; docs/parallel.md shows both
together.
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
from .prompts import EncodedPrompt, Prompt
from .request import Request
from .results import GenerationResult, NewToken, StepReport
from .sampling import SamplingParams

__all__ = ["DecodeDoor", "PrefillDoor", "Prefilled"]


def peer_of(engine: Engine, name: str, incarnation: int) -> PeerInfo:
    """Return what an engine's cache is, for the handshake. Of an engine of one rank."""
    if engine.num_ranks != 1:
        raise InvalidArgument(f"the engine has {engine.num_ranks} ranks; a door serves an engine of one")
    if engine.shape.index is not None:
        raise InvalidArgument(
            "the engine's model keeps index keys, which are not handed over; serve it with one engine"
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
class Prefilled:
    """A prompt that was computed, with its first token chosen: the offer's last one."""

    request_id: int
    offer: Offer


class PrefillDoor:
    """An engine that computes prompts, chooses their first tokens, and offers both.

    engine: it should do nothing else. name, incarnation: as for `PeerInfo`. ttl: as for `HandoffSender`. While an
    offer lives it has the row and the blocks of its sequence, and a hybrid model's state in the row's slot.
    """

    def __init__(self, engine: Engine, name: str, incarnation: int, ttl: float) -> None:
        self.engine = engine
        self.sender = HandoffSender(engine.cache, peer_of(engine, name, incarnation), ttl)
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
        """Queue a prompt; returns its request id. Raises as `Engine.add_request`, and for n or logprobs.

        sampling: what the whole request asks for; the other side is given the same. tenant: as for the engine; the
        offer has its salt, by which the other side knows whose blocks it takes.
        """
        wanted = _required(SamplingParams() if sampling is None else sampling)
        least = min(wanted.max_tokens, max(2, wanted.min_tokens))
        request_id = self.engine.add_request(
            prompt, dataclasses.replace(wanted, max_tokens=least), extra_keys=extra_keys, tenant=tenant
        )
        self._keys[request_id] = self.engine.limits.roster.keys_of(tenant, tuple(extra_keys))
        return request_id

    def step(self, now: float) -> tuple[list[Prefilled], list[GenerationResult]]:
        """Run one step; the prompts that it has finished, and results of requests that ended with their first token.

        now: for the time limits of offers. Raises as `Engine.step`.
        """
        self.sender.expire(now)
        report = _step(self.engine)
        done = [self._offer(token, now) for token in report.new_tokens if token.finish_reason is None]
        for result in report.finished:
            self._keys.pop(result.request_id, None)
        return done, report.finished

    def _offer(self, token: NewToken, now: float) -> Prefilled:
        """Give the sender the sequence of a request whose first token was just chosen, and forget the request."""
        request_id = token.request_id
        keys = self._keys.pop(request_id)
        offer = self.engine.take_out(request_id, lambda seq: self.sender.take_over(seq, now, keys))
        return Prefilled(request_id, offer)


class DecodeDoor:
    """An engine that goes on with prompts computed elsewhere, beside requests of its own.

    name, incarnation: as for `PeerInfo`. ttl: as for `HandoffReceiver`. Step the engine by `step` of this door.
    """

    def __init__(self, engine: Engine, name: str, incarnation: int, ttl: float) -> None:
        self.engine = engine
        peer = peer_of(engine, name, incarnation)
        self.receiver = HandoffReceiver(engine.cache, peer, ttl, engine.move_blocks)
        self.port = KVPort(engine.kv_cache, slots=engine.state_slots)
        self._requests: dict[int, Request] = {}

    def accept(self, offer: Offer, sampling: SamplingParams | None, now: float) -> Transfer | Admission:
        """Take blocks for an offer; fetch its keys and values next (`ReceiverLink.fetch`), then `finish`.

        sampling: what the request asks for, as on the other side. Raises as `HandoffReceiver.accept`, and as
        `Engine.add_request` for what cannot be served here.
        """
        wanted = _required(SamplingParams() if sampling is None else sampling)
        num_prompt = len(offer.token_ids) - 1
        if offer.num_computed != num_prompt:
            raise InvalidArgument(
                f"the offer has {offer.num_computed} computed tokens of {num_prompt + 1}; no first token"
            )
        vocab_size = self.engine.shape.vocab_size
        if int(offer.token_ids.max()) >= vocab_size:
            raise InvalidArgument(f"the offer holds token {offer.token_ids.max()}; the vocabulary has {vocab_size}")
        prompt = EncodedPrompt(offer.token_ids[:-1].tolist(), vocab_size)
        request = self.engine.prepare("offer", prompt, wanted, offer.extra_keys)
        transfer = self.receiver.accept(offer, now, f"request {request.request_id}, on its way in")
        if isinstance(transfer, Transfer):
            self._forget_ended()
            self._requests[transfer.number] = request
        return transfer

    def finish(self, transfer: Transfer, now: float) -> NewToken:
        """Its keys and values are there: the request runs from the next step on. Returns its first token.

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
        """Run one step of the engine, after giving up the transfers whose time is over. Raises as `Engine.step`."""
        self.receiver.expire(now)
        self._forget_ended()
        return _step(self.engine)

    def _forget_ended(self) -> None:
        live = {transfer.number for transfer in self.receiver.transfers()}
        self._requests = {number: request for number, request in self._requests.items() if number in live}


def _step(engine: Engine) -> StepReport:
    """Return a step in which nothing may be possible, because what is needed is held by offers or on its way in."""
    return engine.step(only=engine.request_ids)


def _required(sampling: Any) -> SamplingParams:
    if not isinstance(sampling, SamplingParams):
        raise InvalidArgument(f"sampling is a {type(sampling).__name__}; it must be SamplingParams")
    if sampling.n > 1:
        raise InvalidArgument(f"n is {sampling.n}; a prompt is handed over for one completion")
    if sampling.logprobs is not None:
        raise InvalidArgument(f"logprobs is {sampling.logprobs}; those of the first token stay with the prefill")
    return sampling
