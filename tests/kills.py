"""kill -9 of one of two real processes at a random moment of a hand-over; the other must free all and say why.

    python -m tests.kills --kills 50 --seed 7

Each trial starts a sender and a receiver, joined by a pipe and by gloo. They hand prompts over as fast as they can, and
check every key and value that arrives. One is killed; the other ends with one error, every invariant and no block held.
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

from blockyard import CacheConfig, KVCacheManager
from blockyard.parallel import HandoffError, HandoffReceiver, HandoffSender, HeadShards, PeerInfo, Transfer
from blockyard.parallel.link import ReceiverLink, SenderLink
from blockyard.parallel.tensors import KVPort
from blockyard.parallel.transport import DistributedTransport
from blockyard.storage import KVCache

from .handoff import names_of
from .support.seeds import run_seed

LEASE = 60.0
#: Seconds that a side may be silent: nobody is, but a busy machine may not let it speak for a while.
SILENCE = 30.0
NUM_LAYERS, NUM_HEADS, HEAD_SIZE, NUM_BLOCKS = 3, 2, 64, 400


class Side:
    """A process of its own: a cache, its tensors, and the prompts that both sides draw from."""

    def __init__(self, name: str, block_size: int, seed: int) -> None:
        self.random = random.Random(seed)
        config = CacheConfig(num_blocks=NUM_BLOCKS, block_size=block_size, max_num_seqs=16, max_model_len=1024)
        self.cache = KVCacheManager(config)
        self.tensors = KVCache(NUM_BLOCKS, block_size, NUM_LAYERS, NUM_HEADS, HEAD_SIZE)
        shape: dict[str, Any] = {"dtype": "float32", "num_layers": NUM_LAYERS, "head_size": HEAD_SIZE}
        self.peer = PeerInfo.of(config, name, 1, shards=HeadShards.even(NUM_HEADS), **shape)
        self.seqs: list[int] = []

    def slots(self, seq: int, stop: int) -> np.ndarray:
        size = self.cache.block_size
        return self.cache.block_ids(seq)[np.arange(stop) // size] * size + np.arange(stop) % size

    def values(self, seq: int, layer: int) -> torch.Tensor:
        """The keys of a sequence in a layer; its values are twice as large. Exact in float32."""
        names = torch.from_numpy((names_of(self.cache.token_ids(seq), 0, 1) % 2**16).astype(np.float32))
        place = torch.arange(NUM_HEADS * HEAD_SIZE).view(NUM_HEADS, HEAD_SIZE) + 1000 * layer
        return names[:, None, None] + place

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
    link = SenderLink(
        sender, KVPort(side.tensors, 2**14), join(0, rendezvous), connection, [1], checked=True, timeout=SILENCE
    )
    told.send("ready")
    stems = [side.random.choices(range(64), k=side.random.randrange(100, 600)) for _ in range(5)]
    while True:
        side.drop_some()
        stem = side.random.choice(stems)
        tokens = [*stem[: side.random.randrange(1, len(stem))], *side.random.choices(range(64), k=20)]
        seq = side.cache.try_allocate(tokens)
        if isinstance(seq, int):
            start = side.cache.num_computed_tokens(seq)
            side.cache.reserve([seq])
            slots = side.slots(seq, len(tokens))[start:]
            for layer in range(NUM_LAYERS):
                keys = side.values(seq, layer)[start:]
                side.tensors.write(layer, keys, 2 * keys, slots)
            side.cache.commit([seq], len(tokens) - start)
            side.seqs.append(seq)
            if sender.num_offers < 4 and side.cache.num_seqs < 16:
                link.offer(sender.offer(seq, time.monotonic()))
        link.serve(time.monotonic(), 0.0 if sender.num_offers < 4 else 0.01)
        sender.check()


def receive(side: Side, rendezvous: str, connection: Connection, told: Connection) -> None:
    receiver = HandoffReceiver(side.cache, side.peer, LEASE)
    link = ReceiverLink(
        receiver, KVPort(side.tensors, 2**14), join(1, rendezvous), connection, [0], checked=True, timeout=SILENCE
    )
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
    """Every key and value, those of a hit too."""
    size = side.cache.block_size
    slots = side.slots(seq, side.cache.num_computed_tokens(seq))
    for layer in range(NUM_LAYERS):
        keys = side.values(seq, layer)
        assert torch.equal(side.tensors.key_cache(layer)[slots // size, slots % size], keys)
        assert torch.equal(side.tensors.value_cache(layer)[slots // size, slots % size], 2 * keys)


def child(run: Any, side: Side, rendezvous: str, ends: list[Connection], own: int, told: Connection) -> None:
    """One process: it goes on until the other has gone, and must then hold nothing."""
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
    """Start two, kill one, and hear the other out."""
    draw = random.Random(seed)
    context = multiprocessing.get_context("fork")
    ends = list(context.Pipe())
    sides = [Side("sender", draw.choice([4, 8, 16]), seed), Side("receiver", draw.choice([4, 8, 16]), seed + 1)]
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
    """`num_kills` trials; what they did together."""
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
