"""`python -m benchmarks.events [--blocks N] [--vllm-python FILE]`: what KV events cost, on each thread."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import zmq

from blockyard import CacheConfig, KVCacheManager, ObserveConfig
from blockyard.events import KVEventPublisher
from blockyard.events.following.mirror import Mirror
from blockyard.events.publishing.feed import Feed, WorkTurns
from blockyard.events.tables.block_trie import BlockTrie
from blockyard.events.tables.content_table import ContentTable
from blockyard.events.wire import END_SEQUENCE

ROOT = Path(__file__).parent.parent
BLOCK_SIZE = 16
#: Blocks that one step publishes: a long prompt.
A_STEP = 2000
ROUNDS = 15
#: Messages that are kept for replays here; as many are made before times count.
KEPT = 8
#: Steps whose times are taken without a snapshot beside them, and at most.
ALONE_STEPS, MOST_STEPS = 1000, 20_000
SNAPSHOTS = 5
#: Of a mirror's workers: blocks that each has, blocks of an event, and events that are timed together.
HELD, AN_EVENT, EVENTS = 4000, 100, 32
#: The longest that a process answers.
ANSWER_SECONDS = 120
DEVICE_SECONDS = 0.0005


def make_cache(num_blocks: int, on: bool) -> KVCacheManager:
    return KVCacheManager(
        CacheConfig(
            num_blocks,
            BLOCK_SIZE,
            max_num_seqs=4,
            max_model_len=40_000,
            watermark=0.0,
            observe=ObserveConfig(enable_kv_cache_events=on),
        )
    )


def run_prompt(cache: KVCacheManager, draw: np.random.Generator, vocabulary: int = 100_000) -> float:
    """Seconds of a prompt's life but for its end, where it evicts as many blocks as it publishes."""
    tokens = draw.integers(0, vocabulary, BLOCK_SIZE * A_STEP, dtype=np.int32)
    begin = time.perf_counter()
    seq = cache.allocate(tokens)
    cache.reserve([seq], len(tokens))
    cache.commit([seq], len(tokens), [1])
    seconds = time.perf_counter() - begin
    cache.free(seq)
    return seconds


def nanoseconds(seconds: list[float], num_blocks: int) -> str:
    """Median and least, a block."""
    each = [1e9 * one / num_blocks for one in seconds]
    return f"{statistics.median(each):8.1f} {min(each):8.1f} ns a block"


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def engine_thread() -> None:
    """Publishing and evicting with the log off and on, in turns, and the hand-over."""
    off, on, take = [], [], []
    caches = {state: make_cache(10_000, state) for state in (False, True)}
    draw = np.random.default_rng(1)
    for number in range(8 + 4 * ROUNDS):
        plain = run_prompt(caches[False], draw)
        logged = run_prompt(caches[True], draw)
        handed = timed(caches[True].take_events)
        if number >= 8:
            off.append(plain)
            on.append(logged)
            take.append(handed)
    print("engine's thread, publish and evict, events off", nanoseconds(off, A_STEP))
    print("engine's thread, publish and evict, events on ", nanoseconds(on, A_STEP))
    print("engine's thread, take_events                  ", nanoseconds(take, A_STEP))


def other_threads(vocabulary: int) -> None:
    """The publisher's work and the mirror's, where messages take the memory of earlier ones."""
    cache = make_cache(10_000, True)
    feed = Feed(ContentTable(cache.config), True, KEPT, None, time.time)
    draw = np.random.default_rng(2)
    publish, own, ingest, own_ingest = [], [], [], []
    mirror = Mirror(hash_seed=1)
    mirror.receive_replayed("worker", *feed.heartbeat())
    for message in feed.replay(0):
        mirror.receive_replayed("worker", *message)
    mirror.end_replay("worker")
    for number in range(2 * KEPT + 2 * ROUNDS):
        run_prompt(cache, draw, vocabulary)
        changes = cache.take_events()
        begin, busy = time.perf_counter(), time.thread_time()
        message = feed.make_message(changes)
        middle, half = time.perf_counter(), time.thread_time()
        assert message is not None
        mirror.receive_live("worker", *message)
        end, done = time.perf_counter(), time.thread_time()
        if number >= 2 * KEPT:
            publish.append(middle - begin)
            own.append(half - busy)
            ingest.append(end - middle)
            own_ingest.append(done - half)
    print(f"random tokens below {vocabulary:,}, median and least, a block stored and one gone:")
    print("publisher's thread                            ", nanoseconds(publish, A_STEP))
    print("the same, of its own time on a core           ", nanoseconds(own, A_STEP))
    print("mirror                                        ", nanoseconds(ingest, A_STEP))
    print("the same, of its own time on a core           ", nanoseconds(own_ingest, A_STEP))


def filled(num_blocks: int, seed: int) -> tuple[KVCacheManager, np.random.Generator]:
    """A cache whose pool is full of contents that are not held; what it told has not been taken."""
    cache = make_cache(num_blocks, True)
    draw = np.random.default_rng(seed)
    for _ in range(num_blocks // A_STEP):
        run_prompt(cache, draw)
    return cache, draw


class Held(WorkTurns):
    """Turns whose own time on a core is noted: as long as that a compiled call may keep the interpreter."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._since = time.thread_time()

    def begin(self) -> None:
        super().begin()
        self._since = time.thread_time()

    def rest(self) -> None:
        """Note the turn where it ends here."""
        busy = time.thread_time()
        if self.is_over():
            self.seconds.append(busy - self._since)
            super().rest()
            self._since = time.thread_time()


def snapshot(num_blocks: int) -> None:
    """All of a pool in one message."""
    cache, _ = filled(num_blocks, 3)
    feed = Feed(ContentTable(cache.config), True, 100, None, time.time)
    feed.make_message(cache.take_events())
    feed.turns = held = Held()
    for _ in range(SNAPSHOTS):
        begin, own = time.perf_counter(), time.thread_time()
        ((_, payload),) = feed.replay(0)
        seconds, own = time.perf_counter() - begin, time.thread_time() - own
        size = f"{len(payload) / 1e6:.1f} MB"
        print(f"snapshot of {num_blocks:,} blocks: {1000 * seconds:.0f} ms, {1000 * own:.0f} of its own, {size}")
    print("its turns, of its own time: " + quantiles(held.seconds))


def quantiles(seconds: list[float]) -> str:
    """Median, 99 %, 99.9 % and longest."""
    each = ", ".join(f"{1e3 * one:.3f}" for one in np.quantile(seconds, [0.5, 0.99, 0.999, 1.0]))
    return f"median, 99 %, 99.9 %, longest of {len(seconds):,}: {each} ms"


def stalls(num_blocks: int) -> None:
    """Steps of an engine's thread alone, and while its publisher answers replays of another process with snapshots.

    An engine waits for its device between steps and leaves the interpreter to others: a lap is a step and how much
    longer than asked for the wait took, until the thread had the interpreter again. For comparison the laps of a thread
    beside whose process another one does the same work: what the machine does to it without an interpreter in common.
    """
    asking = [sys.executable, "-m", "benchmarks.events", "--ask"]
    making = [sys.executable, "-m", "benchmarks.events", "--answer", str(num_blocks)]
    print("engine's lap alone: " + quantiles(laps(None)))
    with subprocess.Popen(making, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        assert other.stdout is not None
        endpoint = other.stdout.readline().strip()
        print("engine's lap beside another process's snapshots: " + quantiles(laps([*asking, endpoint])))
        other.terminate()
    told, _ = filled(num_blocks, 5)
    with KVEventPublisher(told, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*") as publisher:
        publisher.publish()
        print("engine's lap beside snapshots: " + quantiles(laps([*asking, publisher.replay_endpoint])))
        stats = publisher.stats()
        print(f"{stats.num_snapshots} snapshots, {stats.snapshot_bytes / 1e6:.0f} MB, {stats.num_replays} replays")


def laps(beside: list[str] | None) -> list[float]:
    """Seconds of laps while another process runs, from its first line on; without one, of `ALONE_STEPS`."""
    cache = make_cache(4000, True)
    draw = np.random.default_rng(6)
    seqs = [cache.allocate(draw.integers(0, 100_000, 200, dtype=np.int32)) for _ in range(4)]
    cache.commit(seqs, cache.reserve(seqs).num_scheduled, [7] * len(seqs))
    program = None if beside is None else subprocess.Popen(beside, stdout=subprocess.PIPE, cwd=ROOT)
    if program is not None:
        assert program.stdout is not None
        program.stdout.readline()
    seconds: list[float] = []
    while len(seconds) < MOST_STEPS and (len(seconds) < ALONE_STEPS if program is None else program.poll() is None):
        begin = time.perf_counter()
        cache.commit(seqs, cache.reserve(seqs).num_scheduled, [7] * len(seqs))
        time.sleep(DEVICE_SECONDS)
        seconds.append(time.perf_counter() - begin - DEVICE_SECONDS)
        cache.take_events()
    if program is not None:
        assert program.wait(60) == 0
    return seconds


def ask(endpoint: str) -> None:
    """A consumer: asks for all, some times, and reads the answers."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        print("asking", flush=True)
        for _ in range(SNAPSHOTS):
            socket.send_multipart((b"", bytes(8)))
            while socket.recv_multipart()[-2] != END_SEQUENCE:
                pass


def answer(num_blocks: int) -> None:
    """A process that answers replays with snapshots until it is ended."""
    told, _ = filled(num_blocks, 5)
    with KVEventPublisher(told, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*") as publisher:
        publisher.publish()
        print(publisher.replay_endpoint, flush=True)
        time.sleep(ANSWER_SECONDS)


def stores(num_workers: int) -> None:
    """What a block costs a mirror that a worker stores, and one that it removes, while each has `HELD`."""
    trie, draw = BlockTrie(BLOCK_SIZE, 1), np.random.default_rng(7)
    held: list[deque[bytes]] = [deque() for _ in range(num_workers)]
    for _ in held:
        trie.add_holder()
    stored, removed = [], []
    num_before = num_workers * HELD // AN_EVENT
    for first in range(0, num_before + 40 * EVENTS, EVENTS):
        events = [
            (
                number % num_workers,
                msgspec.msgpack.encode(draw.integers(2**32, 2**62, AN_EVENT).tolist()),
                msgspec.msgpack.encode(draw.integers(2**16, 100_000, AN_EVENT * BLOCK_SIZE).tolist()),
            )
            for number in range(first, first + EVENTS)
        ]
        begin = time.perf_counter()
        for worker, names, tokens in events:
            trie.store(worker, 0, names, None, tokens, (), [], [])
        middle = time.perf_counter()
        for worker, names, _ in events:
            held[worker].append(names)
            if len(held[worker]) > HELD // AN_EVENT:
                trie.remove(worker, 0, held[worker].popleft())
        if first >= num_before + EVENTS:
            stored.append(middle - begin)
            removed.append(time.perf_counter() - middle)
    for what, seconds in (("stored", stored), ("removed", removed)):
        print(f"mirror of {num_workers:>2} workers, {what:<24}", nanoseconds(seconds, EVENTS * AN_EVENT))


def match() -> None:
    """A prompt of 750 blocks that 64 workers have, each a little more of it."""
    cache = make_cache(10_000, True)
    mirror = Mirror(hash_seed=1)
    tokens = np.random.default_rng(4).integers(0, 100_000, BLOCK_SIZE * 750, dtype=np.int32)
    for number in range(64):
        cache.reset_prefix_cache()
        feed = Feed(ContentTable(cache.config), True, 100, None, time.time)
        length = BLOCK_SIZE * (750 - number)
        seq = cache.allocate(tokens[:length])
        cache.reserve([seq], length)
        cache.commit([seq], length)
        feed.make_message(cache.take_events())
        cache.free(seq)
        for message in feed.replay(0):
            mirror.receive_replayed(f"worker-{number}", *message)
        mirror.end_replay(f"worker-{number}")
    seconds = [timed(lambda: mirror.match(tokens)) for _ in range(200)]
    found = mirror.match(tokens)
    assert sorted(one.num_tokens for one in found.values()) == [BLOCK_SIZE * (750 - n) for n in range(63, -1, -1)]
    least = 1e6 * min(seconds)
    print(f"match of 750 blocks over 64 workers: {1e6 * statistics.median(seconds):.0f} us, least {least:.0f}")
    holdings = mirror.num_holdings()
    print(f"memory: {mirror.num_bytes() / holdings:.0f} bytes a holding ({holdings:,} holdings)")


def beside_vllm(python: str) -> None:
    """The same step in vLLM: its manager with events off and on, and what its publisher's thread encodes."""
    command = [python, "-m", "benchmarks.peers.vllm_events", str(A_STEP), str(ROUNDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600, cwd=ROOT)
    seen = json.loads(done.stdout.splitlines()[-1])
    names = {
        "off": "engine's thread, publish and evict, events off",
        "on": "engine's thread, publish and evict, events on",
        "take": "engine's thread, take_events",
        "encode": "publisher's thread, encoding alone",
    }
    for kind, name in names.items():
        print(f"vLLM {seen['version']}, {name:<46}", nanoseconds(seen["rounds"][kind], A_STEP))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.events", description=main.__doc__)
    parser.add_argument("--blocks", type=int, default=200_000, help="of snapshots; default: 200,000")
    parser.add_argument("--vllm-python", help="the interpreter of an environment with vLLM (`make peers` makes one)")
    parser.add_argument("--ask", metavar="ENDPOINT", help=argparse.SUPPRESS)
    parser.add_argument("--answer", metavar="BLOCKS", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        return ask(options.ask)
    if options.answer:
        return answer(options.answer)
    if options.vllm_python:
        beside_vllm(options.vllm_python)
    engine_thread()
    for vocabulary in (65_536, 100_000):
        other_threads(vocabulary)
    snapshot(options.blocks)
    stalls(options.blocks)
    for num_workers in (4, 64):
        stores(num_workers)
    match()


if __name__ == "__main__":
    main()
