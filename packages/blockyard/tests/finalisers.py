"""Random worlds in which the garbage collector frees, and calls the cache, in the middle of every call.

`tests.world` with litter: sequences and leases that only a garbage cycle knows, whose finaliser frees them, in chains
of which each leaves the next one to the next allocation; and finalisers that call `allocate`, `reserve` and the like.
The collector comes by at nearly every allocation. The shadow memory and the laws say whether a call went wrong.

    python -m tests.finalisers --worlds 2000 --seed 7
"""

from __future__ import annotations

import argparse
import gc
import random
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

from blockyard_testing.world import World

from .support.cycles import collector_at, collector_off, leave_to_die

#: Calls of one world.
NUM_CALLS = 100


class Collected:
    """A cache whose calls the collector comes by: everything is passed on to `cache`."""

    def __init__(self, world: LitteredWorld, cache: Any) -> None:
        self.world = world
        self.cache = cache

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.cache, name)
        return self._collected(value) if callable(value) else value

    def _collected(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            self.world.num_lost_at_question = self.world.num_lost_before
            self.world.num_lost_before = self.world.num_lost
            self.world.drop_litter()
            with collector_at(self.world.draw_threshold()):
                return call(*arguments, **named)

        return run


class LitteredWorld(World):
    """A world some of whose sequences and leases are known to nothing but garbage."""

    frees_by_itself = True

    def __init__(self, package: ModuleType, seed: int) -> None:
        super().__init__(package, seed)
        self.real = self.cache
        self.cache = Collected(self, self.real)
        #: What is to be dropped before the next call.
        self.litter: list[Callable[[], object]] = []
        #: How many sequences and leases wait for the collector.
        self.num_lost = 0
        #: The same before the latest call and before the one before it, in which finalisers may have run.
        self.num_lost_before = 0
        self.num_lost_at_question = 0
        #: What finalisers met that they must not meet.
        self.wrong: list[str] = []

    def draw_threshold(self) -> int:
        return self.random.choice((1, 1, 1, 2, 3, 5, 8, 13, 30))

    def actors(self) -> list[tuple[Any, float]]:
        return [*super().actors(), (self.lose_sequence, 12), (self.lose_lease, 8), (self.leave_caller, 12)]

    def require_hope(self, answer: str) -> None:
        held = self.seqs or self.num_lost_before or self.cache.pool.leases()
        assert answer != "LATER" or held, "LATER, and nothing holds a block"

    def require_said(self, answer: str) -> None:
        """Unless what held room was freed between the question and the call."""
        assert answer == "OK" or self.num_lost < self.num_lost_at_question, answer

    # What finalisers do.

    def lose_sequence(self) -> None:
        seq = self.one()
        if seq is None:
            return
        self.seqs.remove(seq)
        self.num_lost += 1
        self.litter.append(lambda: self.freed("free", lambda: self.real.free(seq.handle)))

    def lose_lease(self) -> None:
        pool = self.real.pool
        if self.random.random() < 0.5 or self.config.is_mapped:
            lease = pool.get_new_blocks(self.random.randint(0, 2))
        else:
            lease = self.real.hold_cached(self.prompt(self.earlier()))
        self.num_lost += 1
        self.litter.append(lambda: self.freed("free_blocks", lambda: pool.free_blocks(lease)))

    def freed(self, what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            self.wrong.append(f"{what} raised {type(error).__name__}: {error}")
        self.num_lost -= 1
        self.counts[f"{what} by finalisers"] += 1

    def leave_caller(self) -> None:
        calls = (self.call_allocate, self.call_reserve, self.call_resize, self.call_running)
        self.litter.append(self.random.choice(calls))

    def call_allocate(self) -> None:
        self.refused(lambda: self.real.free(self.real.allocate([7, 7, 7])))

    def call_reserve(self) -> None:
        self.refused(lambda: self.real.can_append([seq.handle for seq in self.seqs]))

    def call_resize(self) -> None:
        self.refused(lambda: self.real.resize(int(self.real.pool.num_blocks)))

    def call_running(self) -> None:
        self.refused(self.real.running)

    def refused(self, call: Callable[[], object]) -> None:
        """From inside a call it is refused; a finaliser that ran between two calls may call whatever it likes."""
        try:
            call()
            self.counts["calls by finalisers between calls"] += 1
        except self.package.ConcurrentCall:
            self.counts["calls by finalisers refused"] += 1
        except self.package.BlockyardError:
            self.counts["calls by finalisers between calls"] += 1
        except BaseException as error:
            self.wrong.append(f"{type(error).__name__}: {error}")

    # When.

    def drop_litter(self) -> None:
        """Leave all that waits to the collector, often as a chain: each finaliser leaves the next one behind."""
        if not self.litter or self.random.random() < 0.5:
            return
        litter, self.litter = self.litter, []
        self.random.shuffle(litter)
        if self.random.random() < 0.7:
            self.drop_chain(litter)
        else:
            for last_act in litter:
                leave_to_die(last_act)

    def drop_chain(self, litter: list[Callable[[], object]]) -> None:
        if litter:
            first, *others = litter
            leave_to_die(lambda: (self.drop_chain(others), first()))

    def finish(self) -> None:
        while self.litter or self.num_lost:
            self.drop_litter()
            gc.collect()
        super().finish()
        assert self.wrong == []

    def act(self, actor: Any) -> None:
        super().act(actor)
        assert self.wrong == []


def run_littered(package: ModuleType, seed: int, num_worlds: int) -> tuple[Counter[str], list[str]]:
    """Worlds of seeds `seed`, `seed + 1`, ...: what they did, added up, and what broke, one line a world."""
    counts: Counter[str] = Counter()
    broken: list[str] = []
    with collector_off():
        for number in range(seed, seed + num_worlds):
            world = LitteredWorld(package, number)
            try:
                world.run(NUM_CALLS)
            except Exception as error:
                broken.append(f"world {number}, after {len(world.story)} calls: {type(error).__name__}: {error}")
            counts += world.counts
            counts["worlds"] += 1
            if number % 20 == 0:
                gc.collect()
    return counts, broken


def main() -> None:
    """Many worlds; prints the seed first and what broke as it comes."""
    import blockyard
    from blockyard._build import build_name

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--worlds", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    print(f"seed {options.seed}, {build_name()}", flush=True)
    counts, broken = run_littered(blockyard, options.seed, options.worlds)
    for name, count in sorted(counts.items()):
        print(f"{count:10} {name}")
    for line in broken[:20]:
        print(line)
    print(f"{len(broken)} of {options.worlds} worlds broken")
    raise SystemExit(bool(broken))


if __name__ == "__main__":
    main()
