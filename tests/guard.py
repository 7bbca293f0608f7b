"""Random loads through the guard, with the worst policies inside it.

    python -m tests.guard --references 10000000 --seed N
    python -m tests.guard --loads 10000
    python -m tests.guard --loads 10000 --guard learned --inside auto
    python -m tests.guard --loads 1000 --length 3000 --guard none --inside "lying hints"

Every load is a random tree of prompts with a random capacity, run through `Guarded` around an adversary that evicts
what is asked for next, hints that say the opposite of what is true, dice, the youngest block, or a shipped policy, and
beside it through least recently used. After each request the guard's structures and its inequality are checked, its
shadow must not have fewer hits than LRU, and a strict guard must not be below LRU by more than 0.2 % of the references
so far, a learned one not by more than 0.3 %. With `--guard none` the same policies run alone, and nothing is asserted:
what is printed is what they lose without a guard by the end of a load.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import numpy as np

import blockyard
from blockyard._build import build_name
from blockyard.core.policies import POLICIES
from blockyard.core.policies.base import EvictionPolicy
from blockyard.lab.simulation.policy_run import PolicyRun

from .support.guard_loads import Adversary, GuardedLoad, Load, SlowLRU
from .support.lies import Lies
from .support.own_policies import MRU, Dice
from .support.seeds import run_seed

INSIDE: dict[str, Callable[[int], EvictionPolicy]] = {
    "adversary": Adversary,
    "lying hints": Lies,
    "dice": Dice,
    "youngest": MRU,
    **{name: make for name, make in POLICIES.items() if name != "lru"},
}
GUARDS = ("strict", "learned", "none")


def run_load(seed: int, num_references: int, inside: str, strict: bool) -> GuardedLoad:
    """One load to its end."""
    load = Load(seed, num_references)
    guarded = GuardedLoad(load, INSIDE[inside](GuardedLoad.num_ids(load)), strict)
    for number in range(len(load.requests)):
        guarded.step(number)
    return guarded


def run_alone(seed: int, num_references: int, inside: str) -> tuple[float, int]:
    """One load without a guard: the difference to LRU at its end, in hits a reference, and how many these were."""
    load = Load(seed, num_references)
    policy = INSIDE[inside](GuardedLoad.num_ids(load))
    run, lru = PolicyRun(policy, load.capacity, load.num_contents, load.longest), SlowLRU(load.capacity)
    for contents, uses in zip(load.requests, load.next_uses(), strict=True):
        if isinstance(policy, Adversary):
            policy.next_use |= dict(zip(contents, uses, strict=True))
        run.run(np.array(contents, np.int64), np.array([0, len(contents)], np.int64))
        lru.request(contents)
    references = sum(map(len, load.requests))
    return (run.num_hits - lru.num_hits) / references, references


def worst_of(seed: int, num_references: int, inside: str, guard: str) -> tuple[float, int]:
    """The lowest difference to LRU on one load, in hits a reference, and how many these were."""
    if guard == "none":
        return run_alone(seed, num_references, inside)
    done = run_load(seed, num_references, inside, guard == "strict")
    return done.worst, done.num_references


def main() -> None:
    """Run loads until there were enough; print the worst difference of each policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--references", type=int, default=0)
    parser.add_argument("--loads", type=int, default=0)
    parser.add_argument("--length", type=int, default=1000, help="references of a load")
    parser.add_argument("--inside", choices=INSIDE, help="of every guard; drawn for each load unless given")
    parser.add_argument("--adversary", dest="inside", action="store_const", const="adversary", help="the same")
    parser.add_argument("--guard", choices=GUARDS, help="of every load; three in four strict by default")
    parser.add_argument("--seed", type=int, default=run_seed())
    options = parser.parse_args()
    print(f"blockyard {blockyard.__version__}, {build_name()}, seed {options.seed}", flush=True)
    draw = random.Random(options.seed)
    worst: dict[tuple[str, str], float] = {}
    start, loads, references = time.monotonic(), 0, 0
    try:
        while references < options.references or loads < options.loads:
            inside = options.inside or draw.choice(list(INSIDE))
            guard = options.guard or ("strict" if draw.random() < 0.75 else "learned")
            seed = draw.randrange(2**32)
            try:
                lowest, num_references = worst_of(seed, options.length, inside, guard)
            except Exception:
                print(f"load {seed}, {inside} inside, guard {guard}")
                raise
            worst[guard, inside] = min(worst.get((guard, inside), 0.0), lowest)
            loads += 1
            references += num_references
    except KeyboardInterrupt:
        print("stopped")
    print(f"{loads:,} loads, {references:,} references, {time.monotonic() - start:.0f} s; worst, in points of LRU:")
    for (guard, inside), value in sorted(worst.items()):
        print(f"{guard:<7} {inside:<12} {100 * value:+.3f}")


if __name__ == "__main__":
    main()
