"""`python -m benchmarks.live`: what watching costs: a snapshot in the engine's thread, a frame besides, bytes a second.

Pools of 1,000, 100,000 and a million blocks, 32 sequences that decode, one of them ending and one beginning every
eighth step. `--seconds` of steps, as fast as they go, once alone and once with a reader, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
import time

from blockyard import CacheConfig, KVCacheManager
from blockyard_serve.live import CallQueue, EngineStatus
from blockyard_serve.live.feed import MAX_SHARE, PageFeed
from blockyard_serve.live.frames import Frame
from blockyard_serve.live.prompt_log import PromptLog
from blockyard_serve.live.snapshot import take_snapshot

_NUM_SEQS = 32
_ROUNDS = 15


class Load:
    """A cache at work. num_blocks: of its pool, of which half is cached by prompts that have ended."""

    def __init__(self, num_blocks: int) -> None:
        config = CacheConfig(num_blocks=num_blocks, block_size=16, max_num_seqs=_NUM_SEQS, max_model_len=2**15)
        self.cache = KVCacheManager(config)
        self._length = max(min(num_blocks // 3 // _NUM_SEQS, 500), 4) * 16
        self._next = 0
        while self.cache.num_cached_blocks < num_blocks // 2:
            self.cache.free(self._begin())
        self.seqs = [self._begin() for _ in range(_NUM_SEQS)]
        self.num_steps = 0

    def _begin(self) -> int:
        self._next += self._length
        seq = self.cache.allocate(list(range(self._next, self._next + self._length)))
        self.cache.commit([seq], self.cache.reserve([seq]).num_scheduled, [1])
        return seq

    def step(self) -> None:
        """All sequences get a token; now and then one ends and another begins."""
        self.cache.commit(self.seqs, self.cache.reserve(self.seqs).num_scheduled, [7] * _NUM_SEQS)
        self.num_steps += 1
        if self.num_steps % 8 == 0:
            place = self.num_steps // 8 % _NUM_SEQS
            self.cache.free(self.seqs[place])
            self.seqs[place] = self._begin()


class Watching:
    """A reader in a thread of its own; counts what is sent to it."""

    def __init__(self, calls: CallQueue) -> None:
        self.num_bytes = self.num_frames = 0
        self._calls = calls
        self._is_over = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._read()))
        self._thread.start()

    async def _read(self) -> None:
        feed = PageFeed(self._calls, PromptLog(), is_ending=lambda: self._is_over)
        async for sent in feed.events():
            self.num_bytes += len(sent)
            self.num_frames += sent.startswith((b"event: frame", b"event: change"))

    def stop(self, load: Load) -> None:
        """End it; what it asked last is answered."""
        self._is_over = True
        while self._thread.is_alive():
            self._calls.run()
            load.step()


def steps_a_second(load: Load, calls: CallQueue, seconds: float, step_seconds: float) -> tuple[float, float]:
    """Steps a second, and the share of the time in which questions were answered.

    step_seconds: what a step takes beside the cache, in which the thread sleeps, as it waits for a device.
    """
    start, num_before, answering = time.perf_counter(), load.num_steps, 0.0
    while (now := time.perf_counter()) < start + seconds:
        calls.run(EngineStatus(step=load.num_steps))
        answering += time.perf_counter() - now
        load.step()
        time.sleep(step_seconds)
    elapsed = time.perf_counter() - start
    return (load.num_steps - num_before) / elapsed, answering / elapsed


def microseconds(samples: list[float]) -> str:
    """The median and the range."""
    values = sorted(1e6 * sample for sample in samples)
    return f"{statistics.median(values):,.0f} us ({values[0]:,.0f} to {values[-1]:,.0f})"


def measure(num_blocks: int, seconds: float, step_seconds: float) -> None:
    """Print the rows of one pool."""
    load = Load(num_blocks)
    copies, frames = [], []
    for number in range(1, _ROUNDS + 1):
        load.step()
        snapshot = take_snapshot(load.cache, EngineStatus())
        start = time.perf_counter()
        frame = Frame.of(snapshot, number)
        frames.append(time.perf_counter() - start)
        copies.append(snapshot.seconds)
    size = len(frame.whole())
    print(
        f"| {num_blocks:,} | {microseconds(copies[1:])} | {microseconds(frames[1:])} | {size:,} B |",
        end=" ",
        flush=True,
    )
    calls = CallQueue(load.cache)
    alone, watched, shares = [], [], []
    num_bytes = num_frames = 0
    for _ in range(3):
        alone.append(steps_a_second(load, calls, seconds, step_seconds)[0])
        reader = Watching(calls)
        rate, share = steps_a_second(load, calls, seconds, step_seconds)
        num_bytes, num_frames = num_bytes + reader.num_bytes, num_frames + reader.num_frames
        reader.stop(load)
        watched.append(rate)
        shares.append(share)
    rates = f"{num_frames / 3 / seconds:.1f} | {num_bytes / 3 / seconds / 1000:,.1f} kB"
    slower = 100 * (1 - statistics.median(watched) / statistics.median(alone))
    print(f"{rates} | {100 * statistics.median(shares):.2f} % | {slower:.1f} % |")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.live", description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="of steps in each of six runs; default: 4")
    parser.add_argument("--step-ms", type=float, default=10.0, help="of a step beside the cache; default: 10")
    options = parser.parse_args()
    print(
        f"at most {100 * MAX_SHARE:g} % of the cache's thread; {_NUM_SEQS} sequences; steps of {options.step_ms:g} ms"
    )
    head = ("blocks", "a snapshot, on the engine's thread", "its frame, elsewhere", "whole", "frames/s", "wire/s")
    print(f"| {' | '.join(head)} | share | slower |")
    print("|---|---|---|---|---|---|---|---|")
    for num_blocks in (1000, 100_000, 1_000_000):
        measure(num_blocks, options.seconds, options.step_ms / 1000)


if __name__ == "__main__":
    main()
