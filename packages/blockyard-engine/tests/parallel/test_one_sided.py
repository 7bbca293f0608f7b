"""One-sided reads: the right bytes, the check afterwards, and NIXL itself if it is installed."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import threading
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
import torch

from blockyard import InvalidArgument
from blockyard.storage import KVCache
from blockyard.wire.message import pack
from blockyard_engine import Engine, SamplingParams
from blockyard_engine.handoff import DecodeConnector, PrefillConnector
from blockyard_engine.parallel import (
    HandoffError,
    PeerMismatch,
    StaleOffer,
    Transfer,
    TransferPlan,
    token_runs,
)
from blockyard_engine.parallel.link import ReceiverLink, SenderLink
from blockyard_engine.parallel.one_sided import MemoryShape, OneSided, byte_runs
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.tiny_models import reference_tokens, tiny_model

HAS_NIXL = importlib.util.find_spec("nixl") is not None


class SameProcess(OneSided):
    """Memory of the same process, copied byte by byte."""

    def __init__(self, cache: KVCache, name: str) -> None:
        self.shape = MemoryShape.of(cache)
        self.num_layers = [cache.num_layers]
        self.source: MemoryShape | None = None
        self.is_broken = False

    def describe(self) -> bytes:
        return self.shape.to_bytes()

    def connect(self, message: bytes) -> None:
        self.source, _ = MemoryShape.from_bytes(message)

    def read(self, plan: TransferPlan) -> None:
        assert self.source is not None
        if self.is_broken:
            raise HandoffError("the read failed")
        for old, new, size in byte_runs(plan, self.source, self.shape, self.num_layers).tolist():
            ctypes.memmove(new, old, size)


def nixl_memory(cache: KVCache, name: str) -> Any:
    from blockyard_engine.parallel.nixl import NixlMemory

    return NixlMemory(cache, name)


MEMORIES = [
    pytest.param(SameProcess, id="same process"),
    pytest.param(nixl_memory, id="nixl", marks=pytest.mark.skipif(not HAS_NIXL, reason="nixl is not installed")),
]


def moved(layout: str, value_size: int, start: int, stop: int) -> tuple[KVCache, KVCache, torch.Tensor, list[Any]]:
    caches = [
        KVCache(count, 4, 3, 2, 6, layout=layout, value_size=value_size, dtype=torch.bfloat16) for count in (20, 31)
    ]
    for cache in caches:
        cache.data.copy_(torch.randn(cache.data.shape))
    before = caches[1].data.clone()
    tables = [np.array([5, 6, 7, 9, 3, 4, 12]), np.array([2, 3, 4, 5, 8, 9, 30])]
    plan = TransferPlan((token_runs(tables[0], 4, tables[1], 4, start, stop),), ())
    shapes = [MemoryShape.of(cache) for cache in caches]
    for old, new, size in byte_runs(plan, shapes[0], shapes[1], [3]).tolist():
        ctypes.memmove(new, old, size)
    return caches[0], caches[1], before, tables


@pytest.mark.parametrize("span", [(0, 28), (0, 27), (4, 9), (5, 7), (6, 23), (3, 3)])
@pytest.mark.parametrize("value_size", [6, 2, 10])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_byte_runs_are_the_keys_and_values_of_the_tokens_and_no_others(
    layout: str, value_size: int, span: tuple[int, int]
) -> None:
    source, target, before, tables = moved(layout, value_size, *span)
    for layer in range(3):
        for read, part in ((KVCache.key_cache, 0), (KVCache.value_cache, 1)):
            for position in range(28):
                old, new = (int(table[position // 4]) for table in tables)
                place = (slice(None), position % 4) if layout == "HND" else (position % 4, slice(None))
                if span[0] <= position < span[1]:
                    assert torch.equal(read(target, layer)[new][place], read(source, layer)[old][place]), part
                    read(target, layer)[new][place] = 0.0
    kept = target.data == before
    assert int((~kept).sum()) <= 3 * (span[1] - span[0]) * 2 * (6 + value_size)
    assert bool((target.data[~kept] == 0).all()), "what was not asked for is as it was"


def test_slots_that_are_not_there_are_refused() -> None:
    small, large = (MemoryShape.of(KVCache(count, 4, 3, 2, 6)) for count in (5, 50))
    runs = token_runs([10], 4, [2], 4, 0, 4)
    with pytest.raises(InvalidArgument, match=r"slots 40 to 4\d; those of the source are"):
        byte_runs(TransferPlan((runs,), ()), small, large, [3])
    with pytest.raises(InvalidArgument, match="base"):
        MemoryShape(-1, 1, 2, 3, 4, 5, 6, True)
    with pytest.raises(InvalidArgument, match="does not describe a memory"):
        MemoryShape.from_bytes(pack("memory", {"shape": {"bass": 1}, "access": ""}))
    with pytest.raises(InvalidArgument, match="it was damaged"):
        MemoryShape.from_bytes(small.to_bytes().replace(b"base", b"bass"))


class Ends:
    """Two engines with links, one of which reads from the other."""

    def __init__(self, make: Any, block_size: int = 4) -> None:
        engines = [
            Engine(tiny_model("llama-gqa"), num_blocks=60, block_size=size, max_num_seqs=8) for size in (4, block_size)
        ]
        self.prefill, self.decode = (
            PrefillConnector(engines[0], "prefill", 1, 10),
            DecodeConnector(engines[1], "decode", 1, 10),
        )
        self.memories = [make(engine.kv_cache, f"agent {number}") for number, engine in enumerate(engines)]
        pipes, made = Pipe(), []

        def make_sender() -> None:
            with contextlib.suppress(PeerMismatch):
                made.append(
                    SenderLink(
                        self.prefill.sender,
                        self.prefill.port,
                        self.memories[0],
                        pipes[0],
                        [1],
                        timeout=PATIENCE_SECONDS,
                    )
                )

        thread = threading.Thread(target=make_sender)
        thread.start()
        try:
            connector = self.decode
            self.receiver = ReceiverLink(
                connector.receiver, connector.port, self.memories[1], pipes[1], [0], timeout=PATIENCE_SECONDS
            )
        finally:
            thread.join(PATIENCE_SECONDS)
        [self.sender] = made

    def offer(self, prompt: list[int], sampling: SamplingParams) -> Any:
        self.prefill.add_request(prompt, sampling)
        while self.prefill.engine.has_unfinished:
            for computed in self.prefill.step(0)[0]:
                self.sender.offer(computed.offer)
        [offer] = self.receiver.offers(PATIENCE_SECONDS)
        transfer = self.decode.accept(offer, sampling, 0)
        assert isinstance(transfer, Transfer)
        return transfer

    def fetch(self, transfer: Transfer, now: float = 0) -> None:
        thread = threading.Thread(target=lambda: self.sender.serve(now, PATIENCE_SECONDS))
        thread.start()
        try:
            self.receiver.fetch(transfer)
        finally:
            thread.join(PATIENCE_SECONDS)

    def end(self) -> None:
        self.sender.close()
        self.receiver.close()
        for connector in (self.prefill, self.decode):
            connector.engine.cache.check()
            assert connector.engine.cache.leak_report() == []
        for memory in self.memories:
            getattr(memory, "close", lambda: None)()


@pytest.mark.parametrize("make", MEMORIES)
def test_two_engines_answer_as_one(make: Any) -> None:
    ends, sampling = Ends(make), SamplingParams(max_tokens=8)
    prompts = [list(range(1, 30)), list(range(40, 90))]
    for prompt in prompts:
        transfer = ends.offer(prompt, sampling)
        ends.fetch(transfer)
        ends.decode.finish(transfer, 0)
    results = []
    while ends.decode.engine.has_unfinished:
        results += [result.token_ids for result in ends.decode.step(0).finished]
    assert results == reference_tokens(tiny_model("llama-gqa"), prompts, 8)
    ends.end()


@pytest.mark.parametrize("make", MEMORIES)
def test_late_reads_are_refused(make: Any) -> None:
    ends = Ends(make)
    transfer = ends.offer(list(range(1, 30)), SamplingParams(max_tokens=8))
    with pytest.raises(StaleOffer, match="offer 1 of 'prefill' has ended"):
        ends.fetch(transfer, now=10)
    assert ends.decode.engine.cache.num_used_blocks == 0
    ends.end()


def test_a_read_that_fails_aborts_the_transfer() -> None:
    ends = Ends(SameProcess)
    transfer = ends.offer(list(range(1, 30)), SamplingParams(max_tokens=8))
    ends.memories[1].is_broken = True
    with pytest.raises(HandoffError, match="the read failed"):
        ends.receiver.fetch(transfer)
    assert ends.decode.engine.cache.num_used_blocks == 0
    ends.end()


def test_memories_of_another_kind_are_refused() -> None:
    with pytest.raises(PeerMismatch, match="block_size of group 0 is 8 here, 4 at the peer"):
        Ends(SameProcess, block_size=8)
