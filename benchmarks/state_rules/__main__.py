"""What rules for states hit on a trace, by budget: `python -m benchmarks.state_rules TRACE --state-tokens 400`.

A line for each ORDER:RULE+RULE (docs/states.md) and budget: the share of prompt tokens that hit, a schedule that
knows the future and keeps the budget, and a bound that no cache passes. A rule that ends with +over has sessions say
so after their last turn. By `StateRun`, or with --manager by a `KVCacheManager`, whose running requests are in the
budget too.
"""

from __future__ import annotations

import argparse
from typing import Any

import blockyard
from blockyard.cache_options import MAX_MODEL_LEN
from blockyard.cli import build_name
from blockyard_lab.policy_names import OPTIMUM, parse_sizes
from blockyard_lab.sweep import run_all
from blockyard_lab.traces import open_trace

from .bound import StateLoad, read_state_load
from .replay import StateReplay
from .rules import SCHEDULE, STATE_RULES, parse_state_rule, rule_hits, run_load


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="a file, or a generator's name")
    parser.add_argument("--state-tokens", type=int, default=400, help="of keys and values that a state is worth (400)")
    parser.add_argument("--rules", default=STATE_RULES, help="ORDER:RULE+RULE, with commas between")
    parser.add_argument("--blocks", default="5%,10%,25%,50%", help="budgets, as shares of all blocks or numbers")
    parser.add_argument("--manager", action="store_true", help="by the real manager")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    rules = list(dict.fromkeys(rule.strip() for rule in options.rules.split(",")))
    load = read_state_load(open_trace(options.trace))
    sizes = parse_sizes(options.blocks, load.working_set)
    print(f"blockyard {blockyard.__version__}, {build_name()}")
    about = f"{len(load.prompts):,} requests, {load.num_tokens:,} prompt tokens"
    print(f"{about}, states of {options.state_tokens:,} tokens\n")
    hits = rule_hits(load, rules, sizes, options.state_tokens, jobs=options.jobs)
    runs = {}
    if options.manager:
        asked = [(load, rule, options.state_tokens, size) for rule in rules for size in sizes]
        found = run_all(managed, asked, jobs=options.jobs)
        runs = {(cell[1], cell[3]): run for cell, run in zip(asked, found, strict=True)}
    print("| rule | blocks | hit rate, % | best found | optimum |", "|---" * 5 + "|", sep="\n")
    for rule in rules:
        for place, size in enumerate(sizes):
            own = runs[rule, size]["hits"] if runs else int(hits[rule][place])
            shares = [own, *(int(hits[name][place]) for name in (SCHEDULE, OPTIMUM))]
            cells = " | ".join(f"{100 * share / load.num_tokens:.2f}" for share in shares)
            print(f"| {rule} | {size:,} | {cells} |")


def managed(load: StateLoad, rule: str, state_tokens: int, blocks: int) -> dict[str, Any]:
    """Send a load through a manager; a prompt that is too long runs without the cache."""
    budget = blocks * load.tokens_a_block
    longest = min(int(load.prompts.max()), MAX_MODEL_LEN)
    run = StateReplay(*parse_state_rule(rule), state_tokens, budget, load.tokens_a_block, max_model_len=longest)
    hits = run_load(load, rule, run)
    run.cache.check()
    return {"hits": hits, "states": run.num_written, "left_out": run.num_refused}


if __name__ == "__main__":
    main()
