"""kill -9 of one of two real processes during a hand-over; the other must free all blocks and report the reason.

    python -m tests.kills --kills 50 --seed 7

Each trial starts a sender and a receiver, joined by a pipe and by gloo. They hand prompts over as fast as they can and
check every key and value that arrives, in half of the trials every state too. One is killed; the other ends with one
error, all invariants intact and no block held.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import tempfile
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blockyard import CacheConfig, KVCacheManager, LayerGroup, StateSpec, StepPlan
from blockyard.storage import KVCache, StateSlots, StateTensor
from blockyard.storage.states import state_bytes
from blockyard_engine.parallel import (
    HandoffError,
    HandoffReceiver,
    HandoffSender,
    HeadShards,
    PeerInfo,
    Transfer,
)
from blockyard_engine.parallel.link import ReceiverLink, SenderLink
from blockyard_engine.parallel.tensors import KVPort
from blockyard_engine.parallel.transport import DistributedTransport
from blockyard_testing.seeds import run_seed

from .handoff import names_of

LEASE = 60.0
#: Seconds that a side may be silent: nobody is, but a busy machine may not let it speak for a while.
SILENCE = 30.0
NUM_LAYERS, NUM_HEADS, HEAD_SIZE, NUM_BLOCKS = 3, 2, 64, 400
#: A state takes two blocks of 16 tokens, and of smaller ones more.
STATE_TENSORS = (StateTensor((90, 200), torch.float32), StateTensor((400,), torch.int64))


class Side:
    """One process: a cache, its tensors, and the prompts that both sides draw from."""

    def __init__(self, name: str, block_size: int, seed: int, has_states: bool) -> None:
        self.random = random.Random(seed)
        self.tensors = KVCache(NUM_BLOCKS, block_size, NUM_LAYERS, NUM_HEADS, HEAD_SIZE)
        groups = [LayerGroup(block_size, token_bytes=self.tensors.bytes_per_block // block_size)]
        if has_states:
            groups.append(StateSpec(state_bytes=state_bytes(STATE_TENSORS), checkpoint_every=block_size))
        config = CacheConfig(num_blocks=NUM_BLOCKS, groups=tuple(groups), max_num_seqs=16, max_model_len=1024)
        self.cache = KVCacheManager(config)
        self.states = StateSlots(16, STATE_TENSORS, self.tensors) if has_states else None
        shape: dict[str, Any] = {"dtype": "float32", "num_layers": NUM_LAYERS, "head_size": HEAD_SIZE}
        if self.states is not None:
            shape["state_tensors"] = self.states.describe()
        self.peer = PeerInfo.of(config, name, 1, shards=HeadShards.even(NUM_HEADS), **shape)
        self.seqs: list[int] = []

    def slots(self, seq: int, stop: int) -> np.ndarray:
        size = self.cache.block_size
        return self.cache.block_ids(seq)[np.arange(stop) // size] * size + np.arange(stop) % size

    def values(self, seq: int, layer: int) -> torch.Tensor:
        """Return the keys of a sequence in a layer; values are twice as large. Exact in float32."""
        names = torch.from_numpy((names_of(self.cache.token_ids(seq), 0, 1) % 2**16).astype(np.float32))
        place = torch.arange(NUM_HEADS * HEAD_SIZE).view(NUM_HEADS, HEAD_SIZE) + 1000 * layer
        return names[:, None, None] + place

    def port(self) -> KVPort:
        return KVPort(self.tensors, 2**14, self.states)

    def move(self, plan: StepPlan) -> None:
        """Carry out a plan's moves."""
        if self.states is not None:
            self.states.move(plan.states)

    def compute(self, seq: int, count: int) -> None:
        """Compute keys, values and states of a prompt of `count` tokens."""
        while (start := self.cache.num_computed_tokens(seq)) < count:
            plan = self.cache.reserve([seq])
            self.move(plan)
            stop = start + int(plan.num_scheduled[0])
            slots = self.slots(seq, stop)[start:]
            for layer in range(NUM_LAYERS):
                keys = self.values(seq, layer)[start:stop]
                self.tensors.write(layer, keys, 2 * keys, slots)
            if self.states is not None:
                self.states.state(int(plan.rows[0])).copy_(self.state(self.cache.token_ids(seq), stop))
                self.states.save(plan.states.saves, plan.states.save_blocks)
            self.cache.commit([seq], stop - start)

    def state(self, tokens: np.ndarray, count: int) -> torch.Tensor:
        """Return the bytes of the state after the first `count` tokens."""
        assert self.states is not None
        name = int(names_of(tokens[:count], 0, 1)[-1] % 2**16)
        return torch.arange(self.states.num_bytes, dtype=torch.int64).mul_(name).remainder_(251).to(torch.uint8)

    def drop_some(self) -> None:
        while len(self.seqs) > self.random.randrange(12):
            self.cache.free(self.seqs.pop(self.random.randrange(len(self.seqs))))

    def require_empty(self) -> None:
        self.cache.free(self.seqs)
        self.cache.check()
        assert self.cache.leak_report() == []
        assert self.cache.num_used_blocks == 0


def join(rank: int, rendezvous: str) -> DistributedTransport:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    return DistributedTransport(timeout=SILENCE)


def send(side: Side, rendezvous: str, connection: Connection, told: Connection) -> None:
    sender = HandoffSender(side.cache, side.peer, LEASE)
    link = SenderLink(sender, side.port(), join(0, rendezvous), connection, [1], checked=True, timeout=SILENCE)
    told.send("ready")
    stems = [side.random.choices(range(64), k=side.random.randrange(100, 600)) for _ in range(5)]
    while True:
        side.drop_some()
        stem = side.random.choice(stems)
        tokens = [*stem[: side.random.randrange(1, len(stem))], *side.random.choices(range(64), k=20)]
        seq = side.cache.try_allocate(tokens)
        if isinstance(seq, int):
            side.compute(seq, len(tokens))
            side.seqs.append(seq)
            if sender.num_offers < 4 and side.cache.num_seqs < 16:
                link.offer(sender.offer(seq, time.monotonic()))
        link.serve(time.monotonic(), 0.0 if sender.num_offers < 4 else 0.01)
        sender.check()


def receive(side: Side, rendezvous: str, connection: Connection, told: Connection) -> None:
    receiver = HandoffReceiver(side.cache, side.peer, LEASE, side.move)
    link = ReceiverLink(receiver, side.port(), join(1, rendezvous), connection, [0], checked=True, timeout=SILENCE)
    told.send("ready")
    while True:
        for offer in link.offers(0.05):
            side.drop_some()
            transfer = receiver.accept(offer, time.monotonic())
            if isinstance(transfer, Transfer):
                link.fetch(transfer)
                seq = receiver.finish(transfer, time.monotonic())
                side.seqs.append(seq)
                require_right(side, seq)
                told.send("fetched")
            link.release(offer.id)
            receiver.check()


def require_right(side: Side, seq: int) -> None:
    """Check every key and value, cached ones too, the state, and the checkpoints of its tokens."""
    size = side.cache.block_size
    slots = side.slots(seq, side.cache.num_computed_tokens(seq))
    for layer in range(NUM_LAYERS):
        keys = side.values(seq, layer)
        assert torch.equal(side.tensors.key_cache(layer)[slots // size, slots % size], keys)
        assert torch.equal(side.tensors.value_cache(layer)[slots // size, slots % size], 2 * keys)
    if side.states is not None:
        tokens, count = side.cache.token_ids(seq), int(side.cache.num_computed_tokens(seq))
        assert torch.equal(side.states.state(side.cache.states.slot(seq)), side.state(tokens, count))
        for end in range(size, count + 1, size):
            blocks = side.cache.states.blocks(tokens[:end])
            assert not len(blocks) or torch.equal(side.states.saved_state(blocks), side.state(tokens, end))


def child(run: Any, side: Side, rendezvous: str, ends: list[Connection], own: int, told: Connection) -> None:
    """Run one process until the other is gone; it must then hold nothing."""
    ends[1 - own].close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run(side, rendezvous, ends[own], told)
    except HandoffError as error:
        try:
            side.require_empty()
            told.send(f"ended: {type(error).__name__}")
        except AssertionError:
            told.send(f"leaks: {traceback.format_exc()}")
    except BaseException:
        told.send(f"broke: {traceback.format_exc()}")
    told.close()
    os._exit(0)


def trial(seed: int) -> Counter[str]:
    """Start two processes, kill one, and read the other's output."""
    draw = random.Random(seed)
    context = multiprocessing.get_context("fork")
    ends = list(context.Pipe())
    sizes, has_states = draw.choices([4, 8, 16], k=2), draw.random() < 0.5
    sides = [Side("sender", sizes[0], seed, has_states), Side("receiver", sizes[1], seed + 1, has_states)]
    tells = [context.Pipe(duplex=False) for _ in sides]
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        for own, (run, side) in enumerate(zip((send, receive), sides, strict=True)):
            processes.append(context.Process(target=child, args=(run, side, rendezvous, ends, own, tells[own][1])))
            processes[-1].start()
        for end in (*ends, *(told for _, told in tells)):
            end.close()
        try:
            return _kill_one(draw, processes, [heard for heard, _ in tells])
        finally:
            for process in processes:
                process.kill()
                process.join(10)


def _kill_one(draw: random.Random, processes: list[Any], heard: list[Connection]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for each in heard:
        if not each.poll(60) or each.recv() != "ready":
            raise AssertionError("a process did not start")
    victim = draw.randrange(2)
    deadline = time.monotonic() + draw.uniform(0.0, 1.5)
    while time.monotonic() < deadline:
        if heard[1].poll(0.001):
            counts[_told(heard[1])] += 1
    processes[victim].kill()
    counts[f"killed the {('sender', 'receiver')[victim]}"] += 1
    other = heard[1 - victim]
    while other.poll(3 * SILENCE):
        said = _told(other)
        counts[said] += 1
        if said.startswith("ended"):
            return counts
    raise AssertionError(f"the survivor did not end within {3 * SILENCE:g} s, {counts}")


def _told(heard: Connection) -> str:
    said = str(heard.recv())
    if said.startswith(("leaks", "broke")):
        raise AssertionError(said)
    return said


def run(num_kills: int, seed: int) -> Counter[str]:
    """Run `num_kills` trials; return the sums of their counts."""
    draw = random.Random(seed)
    counts: Counter[str] = Counter()
    for _ in range(num_kills):
        number = draw.randrange(2**32)
        try:
            counts += trial(number)
        except BaseException as error:
            error.add_note(f"seed of the trial: {number}")
            raise
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = run_seed() if options.seed is None else options.seed
    began = time.perf_counter()
    counts = run(options.kills, seed)
    print(
        f"{time.perf_counter() - began:.0f} s, seed {seed}: " + ", ".join(f"{n} {k}" for k, n in sorted(counts.items()))
    )


if __name__ == "__main__":
    main()
