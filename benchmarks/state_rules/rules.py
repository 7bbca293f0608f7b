"""Counts the tokens that hit in hybrid models by budget, rule by rule, below what no cache can pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockyard import InvalidArgument
from blockyard.arguments import require_int
from blockyard.cache_options import STATE_ORDERS, require_checkpoint_rules
from blockyard_lab import StateRun
from blockyard_lab.policy_names import OPTIMUM
from blockyard_lab.sweep import run_all

from .bound import StateBound, StateLoad
from .replay import StateReplay

#: The best that was found with the future known, where the optimum is a bound.
SCHEDULE = "best found"
#: Tokens of a state: from one to more than any memory holds.
MAX_STATE_TOKENS = 2**40
#: Compared unless rules are named: the last checkpoint position under one LRU, a good simple rule, and the default.
STATE_RULES = "lru:last,lru:branch+ends,index:branch+ends+pow2"
#: Behind the places of a rule: each session says after its last turn that it is over (docs/hints.md).
OVER = "+over"


def parse_state_rule(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the order and the places of a rule like "index:branch+ends+pow2", which may end with `OVER`.

    Raises `InvalidArgument`.
    """
    order, _, places = text.removesuffix(OVER).partition(":")
    if order not in STATE_ORDERS:
        raise InvalidArgument(
            f"state rules have {text!r}; before the first colon stands one of {', '.join(STATE_ORDERS)}"
        )
    found = tuple(places.split("+"))
    require_checkpoint_rules(f"state rule {text!r}", found)
    return order, found


def rule_hits(
    load: StateLoad,
    rules: Sequence[str],
    sizes: Sequence[int],
    state_tokens: int,
    *,
    jobs: int = 1,
    backend: str = "processes",
    on_done: Callable[[int], None] | None = None,
) -> dict[str, NDArray[np.int64]]:
    """Run every rule by `StateRun`, and the offline bound and schedule, at every size; return the tokens that hit.

    rules: as `parse_state_rule` has them. sizes: budgets for states, keys and values together, in blocks of the load.
    state_tokens: of a state. O(tokens + states * evictions) a rule and size; the bound as `StateBound`. Raises
    `InvalidArgument`.
    """
    require_int("state_tokens", state_tokens, 1, MAX_STATE_TOKENS)
    if not rules or not sizes:
        raise InvalidArgument(f"rules has {len(rules)} names and sizes {len(sizes)}; each needs one at least")
    cells: list[tuple[Any, ...]] = [
        (load, rule, state_tokens, size * load.tokens_a_block) for rule in (OPTIMUM, *rules) for size in sizes
    ]
    for rule in rules:
        parse_state_rule(rule)
    found = np.array(run_all(count_state_hits, cells, jobs=jobs, backend=backend, on_done=on_done), np.int64)
    by_rule = found.reshape(1 + len(rules), len(sizes), 2)
    hits = {rule: by_rule[place, :, 0] for place, rule in enumerate(rules, 1)}
    return hits | {SCHEDULE: by_rule[0, :, 1], OPTIMUM: by_rule[0, :, 0]}


def count_state_hits(load: StateLoad, rule: str, state_tokens: int, budget: int) -> tuple[int, int]:
    """Tokens that hit under a rule, and states written; of `OPTIMUM` the bound, and what a schedule reaches."""
    if rule == OPTIMUM:
        bound = StateBound(load)
        most, prices = bound.at(state_tokens, budget)
        return most, bound.schedule(state_tokens, budget, prices)
    run = StateRun(*parse_state_rule(rule), state_tokens, budget, load.tokens_a_block)
    return run_load(load, rule, run), int(run.num_written)


def run_load(load: StateLoad, rule: str, run: StateRun | StateReplay) -> int:
    """Send all requests through; returns the tokens that hit. Sessions say that they are over where the rule asks."""
    hits, says_over = 0, rule.endswith(OVER)
    last_turns = load.last_turns() if says_over else set()
    for number, (tokens, session) in enumerate(zip(load.prompts.tolist(), load.sessions.tolist(), strict=True)):
        hits += run.request(load.keys_of(number), tokens, tokens, [], [], session if says_over else 0)
        if number in last_turns:
            run.over(session)
    return hits
