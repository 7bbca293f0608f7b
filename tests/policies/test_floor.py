"""The strict floor in a manager: cuts, forks, and equal contents, which LRU holds twice and a shadow once."""

from __future__ import annotations

import pytest

from ..support.floor_loads import KINDS, MAPPED_KINDS, below_the_floor, furthest_below
from ..support.seeds import run_seed

#: Loads that were below the floor, by 0.5 to 6.9 hits, before a guard knew the parent of a tail that is cut off, and
#: that another block has the content of the one that is hit.
FOUND = [
    *((seed, ("plain",)) for seed in (86,)),
    *((seed, ("generated",)) for seed in (86,)),
    *((seed, ("cut",)) for seed in (1, 12, 28, 43, 58, 67, 84, 98, 99, 128, 141)),
    *((seed, ("cut", "generated")) for seed in (12, 28, 41, 42, 56, 59, 66, 77, 79, 85, 86, 87)),
    *((seed, ("forked",)) for seed in (32, 127)),
    # With a CPU pool, by up to 40.4, before a guard was told there what a prompt misses.
    *((seed, ("mapped",)) for seed in (5011, 5046, 5051, 5061, 5064, 5073, 5096)),
    *((seed, ("mapped", "generated")) for seed in (5115, 5134, 5141, 5150, 5159, 5172, 5199)),
]


#: Loads that are still below it, because their shadow has a hit or two fewer than least recently used: that has some
#: contents twice. In the first three a cut takes a content's last copy.
BELOW = [
    (2203990178, ("cut",)),
    (2203992186, ("cut",)),
    (2203992573, ("cut", "generated")),
    (3100007382, ("cut",)),
    (52016950, ("plain",)),
]


@pytest.mark.parametrize(("seed", "kinds"), FOUND)
def test_a_load_that_was_below_the_floor_is_not(seed: int, kinds: tuple[str, ...]) -> None:
    assert below_the_floor(seed, kinds) <= 1e-9


@pytest.mark.xfail(strict=True, reason="by up to 1.5 hits, 5 of 40,210 loads, 4 of them with cuts (docs/guard.md)")
@pytest.mark.parametrize(("seed", "kinds"), BELOW)
def test_a_load_that_is_below_the_floor(seed: int, kinds: tuple[str, ...]) -> None:
    assert below_the_floor(seed, kinds) <= 1e-9


@pytest.mark.parametrize("kinds", KINDS + MAPPED_KINDS)
def test_drawn_loads_are_not_below_the_floor(kinds: tuple[str, ...]) -> None:
    """At most one of four is, and then by few hits: as long as loads as those of `BELOW` are below it."""
    worst = sorted(below_the_floor(seed, kinds) for seed in range(run_seed(), run_seed() + 4))
    assert worst[-2] <= 1e-9, run_seed()
    assert worst[-1] <= 5, run_seed()


@pytest.mark.parametrize(("seed", "kinds"), [*BELOW, (52004248, ("resized",)), (52011128, ("resized",))])
def test_what_is_below_the_floor_is_not_below_that_under_its_shadow(seed: int, kinds: tuple[str, ...]) -> None:
    of_lru, of_shadow = furthest_below(seed, kinds)
    assert of_lru > 0.2
    assert of_shadow <= 1e-9


@pytest.mark.parametrize("kinds", [*KINDS, ("resized",)])
def test_no_drawn_load_is_below_the_floor_under_its_shadow(kinds: tuple[str, ...]) -> None:
    for seed in range(run_seed(), run_seed() + 4):
        assert furthest_below(seed, kinds)[1] <= 1e-9, seed
