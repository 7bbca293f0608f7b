"""Ctrl-C for real: a timer's signal raises KeyboardInterrupt wherever a random program is, many times.

A signal that arrives right after a call has returned takes the result along. What nobody has a handle for then is
found again by `cache.running()` and `pool.leases()`; everything else must be as if each call had been done whole or not
begun.

    python -m tests.signals --count 100000
"""

from __future__ import annotations

import argparse
import random
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import blockyard
from blockyard import BlockPool, ConcurrentCall, InvariantError, KVCacheManager, PolicyError
from blockyard._build import build_name
from blockyard.config import cache_config
from blockyard_testing.own_policies import MRU

from .support.own_calls import KEYS, KINDS

#: Interruptions of one manager.
NUM_A_MANAGER = 250
#: Seconds after which it rings again: Python drops what is raised in a callback of its garbage collector.
AGAIN = 2.0


class Alarm:
    """Raises KeyboardInterrupt soon, and again until it is disarmed."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.is_armed = False

    def ring(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.is_armed:
            raise KeyboardInterrupt("by a timer")

    def arm(self) -> None:
        self.is_armed = True
        signal.setitimer(signal.ITIMER_REAL, self.draw.uniform(20e-6, 500e-6), AGAIN)

    def disarm(self) -> None:
        self.is_armed = False


@contextmanager
def alarm(draw: random.Random) -> Iterator[Alarm]:
    """The process's timer and its signal, as they were afterwards."""
    made = Alarm(draw)
    before = signal.signal(signal.SIGALRM, made.ring)
    try:
        yield made
    finally:
        made.disarm()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Program:
    """Random calls on one manager, interrupted anywhere."""

    def __init__(self, kind: str, seed: int, counts: Counter[str]) -> None:
        self.draw = random.Random(seed)
        self.counts = counts
        settings = {"num_blocks": 40, "max_num_seqs": 8, "max_model_len": 48, **KINDS[kind]}
        self.has_own_policy = kind == "own policy"
        self.keys: tuple[Any, ...] = KEYS if kind == "keys" else ()
        self.cache = KVCacheManager(cache_config(block_size=4, watermark=0.0, **settings))
        self.pool: BlockPool = self.cache.pool
        self.seqs: list[int] = []
        self.leases: list[Any] = []

    def run(self) -> None:
        """Runs forever; ends by an interruption."""
        acts = [self.allocate] * 4 + [self.batch] + [self.step] * 6 + [self.fork, self.regroup, self.free, self.free]
        acts += [self.lease, self.lease, self.free_lease, self.retain, self.resize, self.truncate, self.look, self.swap]
        while True:
            try:
                self.draw.choice(acts)()
            except (ConcurrentCall, InvariantError):
                raise
            except PolicyError:
                self.cache.set_eviction_policy(MRU)
            except blockyard.BlockyardError as error:
                self.counts[f"refused: {type(error).__name__}"] += 1

    def prompt(self) -> list[int]:
        number = self.draw.choice((1, 1, 2, 3))
        return [100 * number + position for position in range(self.draw.randint(4, 20))]

    def some(self) -> list[int]:
        return self.draw.sample(self.seqs, self.draw.randint(0, len(self.seqs)))

    def allocate(self) -> None:
        self.seqs.append(self.cache.allocate(self.prompt(), holder="somebody", extra_keys=self.keys))

    def batch(self) -> None:
        self.seqs += self.cache.allocate_batch([self.prompt(), self.prompt()], holders=(), extra_keys=self.keys)

    def step(self) -> None:
        seqs = self.some()
        counts = [max(self.cache.num_tokens(seq) - self.cache.num_computed_tokens(seq), 1) for seq in seqs]
        if self.cache.config.max_steps_in_flight > 1:
            self.land()
        plan = self.cache.reserve(seqs, counts)
        done = [seq for seq, fits in zip(seqs, plan.fits.tolist(), strict=True) if fits]
        computed = [count for seq, count in zip(seqs, counts, strict=True) if seq in done]
        self.cache.commit(done, computed, [1] * len(done), step=plan.step or None)

    def land(self) -> None:
        """End the steps in flight; what an interruption left open has failed."""
        for step in self.cache.steps_in_flight:
            self.cache.commit(self.seqs, 0, None, step=step)
            self.cache.end_step(step)

    def fork(self) -> None:
        if self.seqs:
            self.seqs += self.cache.fork(self.draw.choice(self.seqs), self.draw.randint(1, 2))

    def regroup(self) -> None:
        seqs = self.some()[:3]
        if seqs:
            handles = self.cache.regroup(seqs, [self.draw.randrange(len(seqs)) for _ in range(3)])
            self.seqs = [seq for seq in self.seqs if seq not in seqs] + handles

    def free(self) -> None:
        seqs = self.some()[:4]
        self.cache.free(seqs)
        self.seqs = [seq for seq in self.seqs if seq not in seqs]

    def lease(self) -> None:
        if self.draw.random() < 0.5 or self.cache.config.is_mapped:
            self.leases.append(self.pool.get_new_blocks(self.draw.randint(0, 3), holder="somebody"))
        elif self.leases and self.draw.random() < 0.5:
            self.pool.extend(self.draw.choice(self.leases), 1)
        else:
            self.leases.append(self.cache.hold_cached(self.prompt(), extra_keys=self.keys, holder="somebody"))

    def free_lease(self) -> None:
        if self.leases:
            lease = self.draw.choice(self.leases)
            self.pool.free_blocks(lease)
            self.leases.remove(lease)

    def retain(self) -> None:
        self.cache.retain(self.prompt(), priority=self.draw.randint(0, 2), expires_at=None, extra_keys=self.keys)

    def resize(self) -> None:
        self.cache.resize(self.draw.randint(20, 50))

    def truncate(self) -> None:
        if self.seqs:
            self.cache.truncate(self.draw.choice(self.seqs), self.draw.randint(1, 8))

    def swap(self) -> None:
        self.draw.choice((self.cache.swap_out, self.cache.swap_in))(self.some()[:2])

    def look(self) -> None:
        self.cache.leak_report()
        self.cache.history()
        for seq in self.some():
            self.cache.token_ids(seq)

    # After an interruption.

    def reconcile(self) -> None:
        """The laws hold; what a lost result named is found and released."""
        self.find_interruption()
        self.cache.check()
        self.seqs = self.found("sequence", self.seqs, list(self.cache.running()), self.cache.free)
        self.leases = self.found("lease", self.leases, self.pool.leases(), self.pool.free_blocks)
        self.cache.check()

    def find_interruption(self) -> None:
        """One that came in a policy's callback during a call with a result is raised by the next call."""
        try:
            self.cache.running()
        except KeyboardInterrupt:
            self.counts["raised by a later call"] += 1

    def found(self, what: str, known: list[Any], live: list[Any], free: Callable[[Any], object]) -> list[Any]:
        for one in live:
            if one not in known:
                self.counts[f"lost {what}s found again"] += 1
                free(one)
        return [one for one in known if one in live]

    def finish(self) -> None:
        self.cache.free(self.seqs)
        for lease in self.leases:
            self.pool.free_blocks(lease)
        for step in self.cache.steps_in_flight:
            self.cache.end_step(step)
        self.cache.check()
        assert self.cache.num_used_blocks == 0


def interrupt_many(count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """`count` interruptions, on managers of every kind in turn: what happened, and what broke."""
    counts: Counter[str] = Counter()
    broken: list[str] = []
    draw = random.Random(seed)
    with alarm(draw) as timer:
        for number in range(-(-count // NUM_A_MANAGER)):
            kind = list(KINDS)[number % len(KINDS)]
            times = min(NUM_A_MANAGER, count - number * NUM_A_MANAGER)
            try:
                interrupt_one(Program(kind, draw.randrange(2**32), counts), timer, times, counts)
            except Exception:
                timer.disarm()
                broken.append(f"{kind}: {traceback.format_exc()}")
    return counts, broken


def interrupt_one(program: Program, timer: Alarm, times: int, counts: Counter[str]) -> None:
    for _ in range(times):
        try:
            timer.arm()
            program.run()
        except KeyboardInterrupt as error:
            timer.disarm()
            counts["interruptions"] += 1
            counts["in the middle of a call"] += is_inside(error)
        program.reconcile()
    program.finish()


def is_inside(error: BaseException) -> bool:
    """Whether it came up inside the package; compiled functions stand in tracebacks too."""
    return any("blockyard/" in frame.filename for frame in traceback.extract_tb(error.__traceback__, limit=-4))


def main() -> None:
    """Many interruptions; what broke."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    print(f"seed {options.seed}, {build_name()}", flush=True)
    counts, broken = interrupt_many(options.count, options.seed)
    for name, number in sorted(counts.items()):
        print(f"{number:8} {name}")
    for line in broken[:10]:
        print(line)
    print(f"{len(broken)} managers broken in {counts['interruptions']} interruptions")
    raise SystemExit(bool(broken))


if __name__ == "__main__":
    main()
