"""Replays with tiers below the pool, for the --tier of `blockyard replay`, `curve` and `plan`."""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from blockyard.amounts import parse_memory
from blockyard.errors import InvalidArgument
from blockyard.progress import WorkBar
from blockyard_tiers import require_write_policy

from .. import References, Trace, UnknownContents, read_references
from ..curve import hit_curves, lru_hits
from ..policy_names import OPTIMUM
from ..replay.tier_result import TierReplayResult, TierRow
from ..replay.tiers import RunnableTrace, TierModel, TierReplay
from ..sweep import run_all
from .lab_options import chosen_jobs

_OPTION = re.compile(r",(\w+)=([^,]*)")
_SECONDS_PER_TOKEN = 5e-5
_KNOWN = ("write", "policy", "speed", "start")
#: Stands for the sizes that find these shares of the hits that the pool misses.
_AUTO, SHARES = "auto", (0.25, 0.5, 0.75, 0.9, 1.0)


def asks_auto(options: argparse.Namespace) -> bool:
    """Return whether a --tier has "auto" instead of sizes."""
    return any(text.split(",")[0] == _AUTO for text in options.tier)


def tier_models(text: str, auto: Sequence[int] = ()) -> list[TierModel]:
    """Return the models of one --tier, one per size.

    Args:
        text: value of the option.
        auto: sizes in bytes for "auto".

    Raises:
        InvalidArgument: if the text is not valid.
    """
    sizes, given = _OPTION.sub("", text), _OPTION.findall(text)
    options = dict(given)
    unknown = next((name for name in options if name not in _KNOWN), None)
    if unknown is not None:
        raise InvalidArgument(f"--tier is {text!r}; option {unknown} must be one of {', '.join(_KNOWN)}")
    if len(options) < len(given):
        raise InvalidArgument(f"--tier is {text!r}; each option may be given only once")
    speed = parse_memory("--tier's speed", options["speed"]) if "speed" in options else math.inf
    start = _seconds(options.get("start", "0"))
    write = require_write_policy("--tier's write", options.get("write", "through"))
    asked = auto if sizes == _AUTO else [parse_memory("--tier", size) for size in sizes.split("/")]
    if 0 in asked:
        raise InvalidArgument(f"--tier is {text!r}; a size must be at least 1 byte")
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
    """Return tier sizes in bytes that find these shares of the hits that the pool misses.

    They are estimated with one LRU cache that also holds the pool's contents. O(references * log references).

    Args:
        references: the trace.
        num_tokens: tokens of the pool.
        bytes_per_token: bytes of keys and values per token.
        shares: shares of the missed hits.
    """
    hits = lru_hits(references)
    least = int(hits[min(round(num_tokens / references.tokens_a_block * references.rate), len(hits) - 1)])
    places = [int(np.searchsorted(hits, least + (int(hits[-1]) - least) * share)) for share in shares]
    block = references.tokens_a_block * bytes_per_token / references.rate
    return sorted({round(max(place, 1) * block) for place in places})


def replay_tiers(
    options: argparse.Namespace, trace: Trace, cells: list[dict[str, Any]], bytes_per_token: int
) -> list[TierRow]:
    """Replay every pool with every combination of tiers, and return a row for each.

    Args:
        options: the command's options.
        trace: the trace.
        cells: num_blocks, block_size, policy and max_model_len of each pool.
        bytes_per_token: bytes of keys and values per token.

    Raises:
        InvalidArgument: for an invalid --tier.
    """
    try:
        references = read_references(trace, block_size=cells[0]["block_size"])
    except UnknownContents:
        references = None
    auto: list[int] = []
    if asks_auto(options):
        if references is None:
            raise InvalidArgument("--tier is auto, but the trace has no contents; give sizes, like 50GiB/1TiB")
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
) -> list[TierRow]:
    """Replay each pool with its tiers, and return a row for each."""
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
        if bound is not None and result.num_refused and result.num_requests:  # requests that cannot run cannot hit
            if blocks not in fitting:
                size = fields["block_size"]
                runnable = RunnableTrace(trace, blocks, size, fields["max_model_len"])
                fitting[blocks] = read_references(runnable, block_size=size)
            bound = fitting[blocks]
        rows.append(_tier_row(stack, fields, result, bound))
    return rows


def _run(trace: Trace, stack: tuple[TierModel, ...], fields: dict[str, Any]) -> TierReplayResult:
    return TierReplay(tiers=stack, **fields).run(trace)


def _tier_row(
    stack: tuple[TierModel, ...], fields: dict[str, Any], result: TierReplayResult, references: References | None
) -> TierRow:
    tokens = (
        fields["num_blocks"] * fields["block_size"]
        + sum(model.num_bytes for model in stack) // fields["bytes_per_token"]
    )
    optimum = None
    if references is not None:
        size = max(min(tokens // references.tokens_a_block, references.working_set), 1)
        share = float(hit_curves(references, [OPTIMUM], [size]).hit_rates[OPTIMUM][0])
        whole = (
            share * references.num_references * references.tokens_a_block
        )  # as if each prompt's last block were full
        optimum = min(whole / result.num_prompt_tokens, 1.0) if result.num_prompt_tokens else 0.0
    sizes = tuple(model.num_bytes for model in stack)
    return TierRow(fields["policy"], fields["num_blocks"], sizes, result, optimum)
