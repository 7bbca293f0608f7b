"""`blockyard replay`, `curve` and `plan` with `--tier` say how many GiB of tiers give which hit rate, from a trace."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from blockyard.amounts import parse_memory
from blockyard.cli import as_text
from blockyard.errors import InvalidArgument
from blockyard.progress import WorkBar
from blockyard_tiers import require_write_policy

from .. import References, Trace, UnknownContents, read_references
from ..curve import hit_curves, lru_hits
from ..policy_names import OPTIMUM
from ..printing import fine_percent
from ..replay.tiers import RunnableTrace, TierModel, TierReplay, TierReplayResult
from ..sweep import run_all
from .lab_options import chosen_jobs

_OPTION = re.compile(r",(\w+)=([^,]*)")
_SECONDS_PER_TOKEN = 5e-5
_KNOWN = ("write", "policy", "speed", "start")
#: In place of sizes: those in which these shares of the hits that the pool lacks are found.
_AUTO, SHARES = "auto", (0.25, 0.5, 0.75, 0.9, 1.0)


def asks_auto(options: argparse.Namespace) -> bool:
    """Returns whether a --tier has "auto" in place of its sizes."""
    return any(text.split(",")[0] == _AUTO for text in options.tier)


def tier_models(text: str, auto: Sequence[int] = ()) -> list[TierModel]:
    """Returns the tiers that one --tier names, one for each of its sizes; auto: bytes that stand for "auto".

    Raises `InvalidArgument`.
    """
    sizes, given = _OPTION.sub("", text), _OPTION.findall(text)
    options = dict(given)
    unknown = next((name for name in options if name not in _KNOWN), None)
    if unknown is not None:
        raise InvalidArgument(f"--tier is {text!r}; {unknown} is none of {', '.join(_KNOWN)}")
    if len(options) < len(given):
        raise InvalidArgument(f"--tier is {text!r}; each of its options is given once")
    speed = parse_memory("--tier's speed", options["speed"]) if "speed" in options else math.inf
    start = _seconds(options.get("start", "0"))
    write = require_write_policy("--tier's write", options.get("write", "through"))
    asked = auto if sizes == _AUTO else [parse_memory("--tier", size) for size in sizes.split("/")]
    if 0 in asked:
        raise InvalidArgument(f"--tier is {text!r}; a tier has at least 1 byte")
    return [TierModel(size, write, options.get("policy", "lru"), speed, start) for size in asked]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InvalidArgument(f"--tier's start is {text!r}; it must be seconds, 0 or more")
    return seconds


def sizes_that_pay(
    references: References, num_tokens: int, bytes_per_token: int, shares: Sequence[float] = SHARES
) -> list[int]:
    """Returns the bytes in which these shares of the hits that a pool of `num_tokens` lacks are found, by one LRU that
    has all that the pool has too. O(references * log references)."""
    hits = lru_hits(references)
    least = int(hits[min(round(num_tokens / references.tokens_a_block * references.rate), len(hits) - 1)])
    places = [int(np.searchsorted(hits, least + (int(hits[-1]) - least) * share)) for share in shares]
    block = references.tokens_a_block * bytes_per_token / references.rate
    return sorted({round(max(place, 1) * block) for place in places})


def replay_tiers(
    options: argparse.Namespace, trace: Trace, cells: list[dict[str, Any]], bytes_per_token: int
) -> list[dict[str, Any]]:
    """Replay every pool with every combination of tiers; returns a plain row of figures for each.

    cells: num_blocks, block_size, policy, max_model_len of each pool. Raises `InvalidArgument`.
    """
    try:
        references = read_references(trace, block_size=cells[0]["block_size"])
    except UnknownContents:
        references = None
    auto: list[int] = []
    if asks_auto(options):
        if references is None:
            raise InvalidArgument("--tier is auto, and the trace says nothing of contents; give sizes, like 50GiB/1TiB")
        num_tokens = max(cell["num_blocks"] * cell["block_size"] for cell in cells)
        auto = sizes_that_pay(references, num_tokens, bytes_per_token)
    stacks = itertools.product(*(tier_models(text, auto) for text in options.tier))
    return run_stacks(options, trace, list(itertools.product(cells, stacks)), bytes_per_token, references)


def run_stacks(
    options: argparse.Namespace,
    trace: Trace,
    pairs: Sequence[tuple[dict[str, Any], tuple[TierModel, ...]]],
    bytes_per_token: int,
    references: References | None,
) -> list[dict[str, Any]]:
    """Replay each of these pools with the tiers below it; returns as `replay_tiers`."""
    asked = options.seconds_per_prompt_token
    fields = {"bytes_per_token": bytes_per_token, "seconds_per_token": _SECONDS_PER_TOKEN if asked is None else asked}
    runs = [(trace, stack, {**cell, **fields}) for cell, stack in pairs]
    jobs = chosen_jobs(options, len(runs))
    with WorkBar("tiers", len(runs), not options.quiet) as bar:
        found = run_all(_run, runs, jobs=jobs, backend=options.backend, on_done=bar.update)
    fitting: dict[int, References] = {}
    rows = []
    for (_, stack, fields), result in zip(runs, found, strict=True):
        bound, blocks = references, fields["num_blocks"]
        if bound is not None and result.num_refused and result.num_requests:  # what could not run hits nowhere
            if blocks not in fitting:
                size = fields["block_size"]
                runnable = RunnableTrace(trace, blocks, size, fields["max_model_len"])
                fitting[blocks] = read_references(runnable, block_size=size)
            bound = fitting[blocks]
        rows.append(_figures(stack, fields, result, bound))
    return rows


def _run(trace: Trace, stack: tuple[TierModel, ...], fields: dict[str, Any]) -> TierReplayResult:
    return TierReplay(tiers=stack, **fields).run(trace)


def _figures(
    stack: tuple[TierModel, ...], fields: dict[str, Any], result: TierReplayResult, references: References | None
) -> dict[str, Any]:
    tokens = (
        fields["num_blocks"] * fields["block_size"]
        + sum(model.num_bytes for model in stack) // fields["bytes_per_token"]
    )
    optimum = None
    if references is not None:
        size = max(min(tokens // references.tokens_a_block, references.working_set), 1)
        share = float(hit_curves(references, [OPTIMUM], [size]).hit_rates[OPTIMUM][0])
        whole = share * references.num_references * references.tokens_a_block  # if the last of each prompt were full
        optimum = min(whole / result.num_prompt_tokens, 1.0) if result.num_prompt_tokens else 0.0
    pool = {name: fields[name] for name in ("policy", "num_blocks")}
    return {
        **pool,
        "tier_bytes": [model.num_bytes for model in stack],
        **dataclasses.asdict(result),
        "optimum": optimum,
    }


def tier_text(rows: list[dict[str, Any]]) -> str:
    """Returns a table for people; shares are of prompt tokens; the optimum's is a bound."""
    table = as_text([_text(row) for row in rows])
    return f"With tiers below the pool: requests one after another\n\n{table}"


def _text(row: dict[str, Any]) -> dict[str, str]:
    tokens = max(row["num_prompt_tokens"], 1)
    hits = [tier["num_hit_tokens"] for tier in row["tiers"]]
    cells = {"policy": row["policy"], "blocks": f"{row['num_blocks']:,}"}
    cells |= {f"tier {at}": f"{size / 2**30:,.4g} GiB" for at, size in enumerate(row["tier_bytes"], 1)}
    cells |= {"pool": fine_percent(row["num_pool_tokens"] / tokens)}
    cells |= {f"hit {at}": fine_percent(hit / tokens) for at, hit in enumerate(hits, 1)}
    cells |= {
        "not worth": fine_percent(row["missed"]["not_worth"] / tokens),
        "all": fine_percent((row["num_pool_tokens"] + sum(hits)) / tokens),
        "optimum": "-" if row["optimum"] is None else fine_percent(row["optimum"]),
    }
    for at, tier in enumerate(row["tiers"], 1):
        a_day = tier["written_bytes_a_day"]
        cells[f"GiB a day {at}"] = "-" if a_day is None else f"{a_day / 2**30:,.4g}"
    return {**cells, "first token": f"{row['mean_seconds']:.3f} s"}
