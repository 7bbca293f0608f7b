"""A call that fails leaves the plans of later steps as they were, in a cache with states."""

from __future__ import annotations

import random
from typing import Any

import pytest

from blockyard import Admission, InvalidArgument

from .test_states import hybrid


def plan_after(seed: int, moment: int, *, fails: bool) -> tuple[Any, ...] | None:
    """Return a plan of a random load, perhaps after a `reserve` that raised; None if nothing else runs then."""
    choose = random.Random(seed)
    cache = hybrid(num_blocks=40, max_num_seqs=4, max_model_len=512, watermark=0.0)
    heads = [list(range(1000 * number, 1000 * number + 96)) for number in range(3)]
    live: list[int] = []
    count = 0
    for _ in range(40):
        if cache.num_seqs < 4:
            tail = [choose.randrange(10**6) for _ in range(choose.randrange(40, 200))]
            seq = cache.try_allocate(heads[choose.randrange(3)] + tail)
            live += [] if isinstance(seq, Admission) else [seq]
        for seq in list(live):
            count += 1
            others = [other for other in live if other != seq]
            if count == moment and others:
                if fails:
                    with pytest.raises(InvalidArgument):
                        cache.reserve([seq, others[0]], [200, 10**7])
                cache.free(others)
                plan = cache.reserve([seq])
                states = plan.states
                return plan.num_scheduled.tolist(), states.save_positions.tolist(), states.refused.tolist()
            plan = cache.reserve([seq])
            if plan.num_scheduled[0] > 0:
                cache.commit([seq], plan.num_scheduled)
            if plan.status[0] != 0 or cache.num_computed_tokens(seq) >= cache.num_tokens(seq):
                cache.free(seq)
                live.remove(seq)
    return None


def test_a_reserve_that_raises_changes_no_later_plan() -> None:
    """It noted refused checkpoints, so that a later step saved fewer."""
    plans = [(seed, moment) for seed in range(4) for moment in range(1, 60)]
    undisturbed = [plan_after(*place, fails=False) for place in plans]
    assert sum(plan is not None for plan in undisturbed) > 50
    assert [plan_after(*place, fails=True) for place in plans] == undisturbed
