"""`blockyard curve --tier`: hits in the pool and each tier, against the size of one of them."""

from __future__ import annotations

import argparse

import numpy as np

from blockyard.arguments import require_int
from blockyard.cache_options import MAX_MODEL_LEN
from blockyard.errors import InvalidArgument

from .. import References, Trace, UnknownContents, read_references
from ..curve import HitCurves, Knee, lru_hits
from ..curve.hit_rates import find_knee
from ..policy_names import MAX_SIZES, OPTIMUM, parse_policies, parse_sizes, spread_sizes
from ..replay.tier_result import TierRow
from ..replay.tiers import TierModel
from .lab_options import report_skips, short_name
from .tier_table import asks_auto, run_stacks, sizes_that_pay, tier_models

#: Fewer sizes than without tiers, since a run takes long, and none so small that hardly a prompt fits.
_SHARE, _SIZES = 100, 8
_GIB = 2**30


def refuse_beside_tiers(options: argparse.Namespace) -> None:
    """Raise `InvalidArgument` for options that do not work with tiers."""
    for name in ("beside", "hints", "max_references"):
        if getattr(options, name):
            raise InvalidArgument(f"--{name.replace('_', '-')} was given with --tier; omit one of them")


def tier_curves(options: argparse.Namespace, trace: Trace, bytes_per_token: int) -> tuple[HitCurves, list[TierRow]]:
    """Return the curves of the pool, each tier and all together, and the rows they are made of.

    Exactly one of the pool and the tiers may have several sizes, which are the axis.

    Args:
        options: the command's options.
        trace: the trace.
        bytes_per_token: bytes of keys and values per token.

    Raises:
        InvalidArgument: for options that do not go together.
    """
    if not bytes_per_token:
        raise InvalidArgument("--tier was given without the bytes of a token; give --kv-bytes or --model")
    policies = parse_policies(options.policies or "lru", "--policies")
    if len(policies) > 1 or policies == [OPTIMUM]:
        raise InvalidArgument(f"--policies is {options.policies!r}; with --tier it must be one policy, not optimum")
    block = options.block_size
    try:
        references = read_references(trace, block_size=block)
    except UnknownContents as error:
        raise InvalidArgument(f"--tier was given, but nothing can hit: {error}") from None
    report_skips(trace)
    pools, models = _sizes(options, references, bytes_per_token)
    fields = {"block_size": block, "policy": policies[0]}
    longest = min(references.survey.longest_sequence, MAX_MODEL_LEN)
    cells = [{**fields, "num_blocks": size, "max_model_len": min(longest, size * block)} for size in pools]
    axis = next((place for place, some in enumerate(models) if len(some) > 1), None)
    num_points = len(pools) if axis is None else len(models[axis])
    stacks = [tuple(some[place if len(some) > 1 else 0] for some in models) for place in range(num_points)]
    pairs = [(cells[place if len(cells) > 1 else 0], stack) for place, stack in enumerate(stacks)]
    rows = run_stacks(options, trace, pairs, bytes_per_token, references)
    sizes = pools if axis is None else [model.num_bytes // (block * bytes_per_token) for model in models[axis]]
    return _curves(references, rows, sizes, axis, block, short_name(trace)), rows


def _sizes(
    options: argparse.Namespace, references: References, bytes_per_token: int
) -> tuple[list[int], list[list[TierModel]]]:
    """Return the pool's sizes in blocks, and each tier's models, ascending."""
    block, sizes = options.block_size, options.sizes
    count = _SIZES if sizes is None else require_int("sizes", sizes, 2, MAX_SIZES)
    working_set = -(-references.working_set * references.tokens_a_block // block)
    longest = -(-references.survey.longest_sequence // block) + 1  # a smaller pool leaves requests out
    found = spread_sizes(count, working_set, max(working_set // _SHARE, longest))
    found = found if options.blocks is None else parse_sizes(options.blocks, working_set)
    pools = sorted({max(size, 2) for size in found})
    shares = [place / count for place in range(1, count + 1)]
    auto = sizes_that_pay(references, pools[-1] * block, bytes_per_token, shares) if asks_auto(options) else []
    models = []
    for text in options.tier:
        by_blocks = {model.num_bytes // (block * bytes_per_token): model for model in tier_models(text, auto)}
        if 0 in by_blocks:
            raise InvalidArgument(
                f"--tier is {text!r}; {by_blocks[0].num_bytes} bytes cannot hold a block of {block} tokens"
            )
        models.append([by_blocks[size] for size in sorted(by_blocks)])
    if [len(pools) > 1, *(len(some) > 1 for some in models)].count(True) > 1:
        raise InvalidArgument(
            f"--blocks has {len(pools)} sizes and --tier {', '.join(str(len(some)) for some in models)}; only one of "
            f"them, the axis, may have several"
        )
    return pools, models


def _curves(
    references: References, rows: list[TierRow], sizes: list[int], axis: int | None, block: int, name: str
) -> HitCurves:
    tokens = max(references.survey.num_prompt_tokens, 1)
    num_hits = {"pool": np.array([row.result.num_pool_tokens for row in rows], np.int64)}
    for at in range(len(rows[0].result.tiers)):
        num_hits[f"tier {at + 1}"] = np.array([row.result.tiers[at].num_hit_tokens for row in rows], np.int64)
    num_hits["all"] = np.sum(list(num_hits.values()), axis=0)
    prompts = np.array([max(row.result.num_prompt_tokens, 1) for row in rows])
    rates = {place: hits / prompts for place, hits in num_hits.items()}
    rates[OPTIMUM] = np.array([row.optimum for row in rows], np.float64)
    factor = references.tokens_a_block / block
    found = int(lru_hits(references)[-1]) / references.rate * references.tokens_a_block
    infinite = min(found / tokens, 1.0)
    working_set = round(references.working_set * factor)
    knee = find_knee(np.array(sizes, np.float64), rates["all"], max(working_set, *sizes), infinite)
    beside = {"first token (s)": np.array([row.result.mean_seconds for row in rows])}
    for at in range(len(rows[0].result.tiers)):
        a_day = [row.result.tiers[at].written_bytes_a_day for row in rows]
        if None not in a_day:
            beside[f"GiB a day to tier {at + 1}"] = np.array(a_day, np.float64) / _GIB
    return HitCurves(
        trace=name,
        tokens_a_block=block,
        num_requests=references.num_requests,
        num_references=round(references.num_references * factor),
        working_set=working_set,
        sample_rate=references.rate,
        sizes=np.array(sizes, np.int64),
        hit_rates=rates,
        num_hits=num_hits,
        infinite=infinite,
        error={},
        knee=Knee("all", sizes[knee], float(rates["all"][knee])),
        tiers=_describe(rows, axis),
        beside=beside,
    )


def _describe(rows: list[TierRow], axis: int | None) -> str:
    """Return which capacity the axis shows, and the other sizes."""
    others = [] if axis is None else [f"a pool of {rows[0].num_blocks:,} blocks"]
    others += [f"tier {at + 1} of {size / _GIB:,.4g} GiB" for at, size in enumerate(rows[0].tier_bytes) if at != axis]
    what = "the pool" if axis is None else f"tier {axis + 1}"
    return f"The capacity is that of {what}, beside {' and '.join(others)}"
