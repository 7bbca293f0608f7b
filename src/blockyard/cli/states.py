"""`blockyard curve` and `blockyard replay` ask about hybrid models: this reads their options, and runs the replay."""

from __future__ import annotations

import argparse
from typing import Any

from ..amounts import parse_memory
from ..arguments import require_int
from ..config import MAX_MODEL_LEN
from ..errors import InvalidArgument
from ..lab import StateReplay, Trace
from ..lab.curve.state_curves import MAX_STATE_TOKENS, STATE_RULES, count_state_hits, parse_state_rule, run_load
from ..lab.policy_names import OPTIMUM, parse_sizes
from ..lab.printing import fine_percent, short_number
from ..lab.state_bound import StateLoad, read_state_load
from ..lab.sweep import run_all
from ..progress import WorkBar
from .lab_options import chosen_jobs, report_skips, short_name, skips_as_dict
from .tables import as_csv, as_json, as_text


def has_states(options: argparse.Namespace) -> bool:
    """Return whether a hybrid model is asked about."""
    return any(given is not None for given in (options.state_tokens, options.state_bytes, options.state_rules))


def refuse_beside_states(options: argparse.Namespace, *names: str) -> None:
    """Raises `InvalidArgument` for the first of these options that was given."""
    for name in names:
        if getattr(options, name):
            raise InvalidArgument(f"--{name.replace('_', '-')} was given with states, which it says nothing of")


def state_rules(options: argparse.Namespace) -> list[str]:
    """Return the rules that are compared, each once."""
    text = STATE_RULES if options.state_rules is None else options.state_rules
    rules = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for rule in rules:
        parse_state_rule(rule)
    return rules


def chosen_state_tokens(options: argparse.Namespace, bytes_per_token: int, model_state_bytes: int = 0) -> int:
    """Return tokens of keys and values that a state is worth: as given, or by bytes, or the model's own."""
    if options.state_tokens is not None:
        return require_int("--state-tokens", options.state_tokens, 1, MAX_STATE_TOKENS)
    size = model_state_bytes if options.state_bytes is None else parse_memory("--state-bytes", options.state_bytes)
    if not size or not bytes_per_token:
        raise InvalidArgument(
            f"a state has {size} bytes and the keys and values of a token {bytes_per_token}; give --state-tokens, or "
            f"--state-bytes and --kv-bytes"
        )
    return -(-size // bytes_per_token)


def run_state_replay(options: argparse.Namespace, trace: Trace) -> int:
    """Send the trace through a manager for every rule and budget, beside the bound, and print what hit."""
    refuse_beside_states(options, "timed", "output", "tier", "num_cpu_blocks")
    rules = state_rules(options)
    load = read_state_load(trace, options.block_size)
    report_skips(trace)
    sizes = parse_sizes(options.blocks, load.working_set)
    bytes_per_token = parse_memory("--kv-bytes", options.kv_bytes) if options.kv_bytes else 0
    tokens = chosen_state_tokens(options, bytes_per_token)
    cells = [(load, rule, tokens, size) for rule in (OPTIMUM, *rules) for size in sizes]
    with WorkBar("runs", len(cells), not options.quiet) as bar:
        jobs = chosen_jobs(options, len(cells))
        found = run_all(_cell, cells, jobs=jobs, backend=options.backend, on_done=bar.update)
    bounds, rows = found[: len(sizes)], found[len(sizes) :]
    for row in rows:
        at = bounds[sizes.index(row["blocks"])]
        row |= {"best_found": at["states"] / load.num_tokens, "optimum": at["hits"] / load.num_tokens}
    _print(options, trace, load, tokens, bytes_per_token, rows)
    return 0


def _cell(load: StateLoad, rule: str, state_tokens: int, blocks: int) -> dict[str, Any]:
    """Does one run; of the bound, `states` has what the schedule hits."""
    budget = blocks * load.tokens_a_block
    about = {"rule": rule, "blocks": blocks, "tokens": budget}
    if rule == OPTIMUM:
        hits, states = count_state_hits(load, rule, state_tokens, budget)
        return {**about, "hits": hits, "states": states}
    longest = min(int(load.prompts.max()), MAX_MODEL_LEN)
    run = StateReplay(*parse_state_rule(rule), state_tokens, budget, load.tokens_a_block, max_model_len=longest)
    hits = run_load(load, rule, run)
    run.cache.check()
    rate = hits / load.num_tokens
    return {**about, "hits": hits, "hit_rate": rate, "states": run.num_written, "left_out": run.num_refused}


def _print(
    options: argparse.Namespace,
    trace: Trace,
    load: StateLoad,
    state_tokens: int,
    bytes_per_token: int,
    rows: list[dict[str, Any]],
) -> None:
    if options.json:
        about = {"name": trace.name, "num_requests": len(load.prompts), "num_prompt_tokens": load.num_tokens}
        about |= {"state_tokens": state_tokens, "skips": skips_as_dict(trace)}
        print(as_json({"trace": about, "runs": rows}))
    elif options.csv:
        print(as_csv(rows))
    else:
        print(
            f"{short_name(trace)}: {len(load.prompts):,} requests one after another, {load.num_tokens:,} prompt "
            f"tokens, states of {state_tokens:,} tokens at boundaries of {load.tokens_a_block}\n"
        )
        print(as_text([_text(row, len(load.prompts), bytes_per_token) for row in rows]))


def _text(row: dict[str, Any], num_requests: int, bytes_per_token: int) -> dict[str, str]:
    cells = {"rule": row["rule"], "blocks": f"{row['blocks']:,}", "tokens": short_number(row["tokens"])}
    if bytes_per_token:
        cells["GiB"] = f"{row['tokens'] * bytes_per_token / 2**30:,.2f}"
    cells |= {name.replace("_", " "): fine_percent(row[name]) for name in ("hit_rate", "best_found", "optimum")}
    return {**cells, "states a request": f"{row['states'] / num_requests:.2f}", "left out": f"{row['left_out']:,}"}
