"""Block moves that overlap with computation: which side waits, and transfers of runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from blockyard.storage.moves import MoveStream, copy_runs
from blockyard_engine import Engine, SamplingParams
from blockyard_testing.seeds import run_seed
from blockyard_testing.tiny_models import mixed_prompts, tiny_model


class Device:
    """Streams that record their calls in order, with the interface of torch.cuda."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = Device.Named(self, "compute")

    class Named:
        """A stream."""

        def __init__(self, device: Device, name: str) -> None:
            self.device, self.name = device, name

        def wait_stream(self, other: Any) -> None:
            self.device.log.append(f"{self.name} waits for all of {other.name}")

        def wait_event(self, event: Any) -> None:
            self.device.log.append(f"{self.name} waits for {event.name}")

    def Stream(self, device: Any) -> Any:  # noqa: N802  # torch.cuda's name
        assert device == torch.device("cuda")
        return Device.Named(self, "moves")

    def Event(self) -> Any:  # noqa: N802  # torch.cuda's name
        owner = self

        class Event:
            name = ""

            def record(self, stream: Any) -> None:
                self.name = f"event {len(owner.log)}"
                owner.log.append(f"{stream.name} records {self.name}")

        return Event()

    def current_stream(self, device: Any) -> Any:
        assert device == torch.device("cuda")
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Any:
        previous, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = previous

    def moved(self, place: int) -> None:
        self.log.append(f"{self.current.name} moves place {place}")


def test_moves_follow_what_was_computed_and_layers_wait_for_their_own() -> None:
    device = Device()
    moves = MoveStream(torch.device("cuda"), 2, device)
    moves.wait(0)
    assert device.log == []  # nothing was started
    moves.start(device.moved)
    started = [
        "moves waits for all of compute",
        "moves moves place 0",
        "moves records event 2",
        "moves moves place 1",
        "moves records event 4",
    ]
    assert device.log == started
    moves.wait(1)
    moves.wait(1)  # once is enough
    moves.wait(0)
    assert device.log[5:] == ["compute waits for event 4", "compute waits for event 2"]
    assert device.current.name == "compute"


def test_failed_moves_are_waited_for_too() -> None:
    device = Device()
    moves = MoveStream(torch.device("cuda"), 2, device)

    def broken(place: int) -> None:
        device.moved(place)
        raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="the device is lost"):
        moves.start(broken)
    moves.wait(0)
    moves.wait(1)  # was never begun
    assert device.log[1:] == ["moves moves place 0", "moves records event 2", "compute waits for event 2"]


def test_memory_of_pending_moves_is_not_reused() -> None:
    device = Device()

    class Blocks:
        def record_stream(self, stream: Any) -> None:
            device.log.append(f"its memory waits for {stream.name} when it is freed")

    MoveStream(torch.device("cuda"), 2, device).hold(Blocks())
    assert device.log == ["its memory waits for moves when it is freed"]


class LateMoves:
    """Replacement for `MoveStream` that moves each layer's blocks as late as possible: when a layer waits for them."""

    def __init__(self, num_places: int) -> None:
        self._asked: list[list[Callable[[int], None]]] = [[] for _ in range(num_places)]
        self.num_late = 0

    def start(self, move: Callable[[int], None]) -> None:
        for asked in self._asked:
            asked.append(move)

    def wait(self, place: int) -> None:
        asked, self._asked[place] = self._asked[place], []
        self.num_late += len(asked)
        for move in asked:
            move(place)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("shape", ["llama-gqa", "gemma3"])
def test_an_engine_waits_for_all_that_it_reads_and_overwrites(shape: str, preemption: str) -> None:
    """Tokens do not depend on how late blocks move: preemption, copies of shared blocks and a CPU pool."""
    model = tiny_model(shape)
    prompts = mixed_prompts((33, 5, 40, 1, 64, 50), shared=24)
    params = SamplingParams(max_tokens=20, n=2, temperature=0.8, ignore_eos=True)
    roomy = Engine(model, num_blocks=3000, block_size=4, enable_prefix_caching=False)
    engine = Engine(
        model,
        num_blocks=40 if shape == "llama-gqa" else 100,
        block_size=4,
        max_num_seqs=6,
        num_cpu_blocks=60,
        preemption=preemption,
    )
    late = LateMoves(engine.kv_cache.places.num_places)
    engine.kv_cache._move_stream = late  # type: ignore[assignment]
    for _ in range(2):  # the second time blocks come back from the CPU pool
        found, expected = (each.generate(prompts, params) for each in (engine, roomy))
        for result, other in zip(found, expected, strict=True):
            assert [one.token_ids for one in result.completions] == [one.token_ids for one in other.completions]
    assert engine.num_preemptions > 0
    assert late.num_late > 0
    engine.cache.check()


@pytest.mark.parametrize("fragments", ["neighbours", "scattered", "mixed"])
def test_runs_of_blocks_move_like_blocks(fragments: str) -> None:
    rng = np.random.default_rng(run_seed())
    source = torch.arange(2 * 50 * 6).view(2, 50, 6)
    old, new = np.arange(10, 30), np.arange(3, 23)
    if fragments == "scattered":
        old, new = rng.permutation(old), rng.permutation(new)
    if fragments == "mixed":
        new[7:] += 5
    target = torch.full((2, 40, 6), -1)
    expected = target.clone()
    expected[:, new] = source[:, old]
    copy_runs(source, target, np.stack([old, new], 1).astype(np.int64))
    assert torch.equal(target, expected)
