"""Plans from a config alone beside what engines reported: 31 runs, seven of which had a part in the constants."""

from __future__ import annotations

import statistics

import pytest

from blockyard.lab.planning import CapacityPlan, LargestStep, plan_capacity
from blockyard.sizing import KVCacheSpec, ModelShape, count_parameters, known_model, model_names

from ..support.published_figures import FIGURES, PublishedFigure, config_of

GIB = 2**30


def weight_bytes(figure: PublishedFigure) -> int:
    if figure.model not in model_names():
        return 2 * count_parameters(config_of(figure))
    model = known_model(figure.model)
    return model.served_bytes or 2 * model.num_parameters


def plan_of(figure: PublishedFigure) -> CapacityPlan:
    config = config_of(figure)
    return plan_capacity(
        KVCacheSpec.from_config(config, dtype="bfloat16", tensor_parallel_size=figure.ranks),
        gpu_memory_gib=figure.total_gib,
        gpu_memory_utilization=figure.utilization,
        weights_gib=weight_bytes(figure) / GIB,
        step=LargestStep(ModelShape.from_config(config), figure.tokens, figure.sampler),
        max_num_seqs=figure.seqs,
    )


def error(figure: PublishedFigure) -> float:
    """Percent by which the plan is above what was reported."""
    found = plan_of(figure)
    reported = figure.num_blocks or figure.kv_gib * GIB / found.spec.bytes_per_block
    return 100 * (found.num_blocks / reported - 1)


def is_near(figure: PublishedFigure) -> bool:
    return abs(error(figure)) < 10


def test_the_median_error_is_below_three_percent() -> None:
    assert statistics.median(abs(error(figure)) for figure in FIGURES) < 3
    assert statistics.median(abs(error(figure)) for figure in FIGURES if not figure.is_fitted) < 3


@pytest.mark.parametrize("figure", FIGURES, ids=lambda f: f"{f.model} on {f.ranks} {f.gpu}, {f.tokens} tokens")
def test_an_error_above_ten_percent_has_its_reason(figure: PublishedFigure) -> None:
    assert is_near(figure) or figure.why
    assert figure.source.startswith("https://")


def test_a_flat_amount_would_be_further_off() -> None:
    """What the model of activations is for: with 2 GiB for everything the same plans are worse."""

    def flat_error(figure: PublishedFigure) -> float:
        found = plan_of(figure)
        cache = found.gpu.cache_bytes + found.gpu.activation_bytes - 2 * GIB
        reported = figure.num_blocks * found.spec.bytes_per_block or figure.kv_gib * GIB
        return 100 * (cache / reported - 1)

    flat = [abs(flat_error(figure)) for figure in FIGURES]
    assert statistics.mean(flat) > 3 * statistics.mean(abs(error(figure)) for figure in FIGURES)
    assert max(flat) > 100


def show() -> None:
    """Print the table of docs/planning.md: python -m tests.sizing.test_published_figures."""
    for figure in FIGURES:
        found = plan_of(figure)
        block = found.spec.bytes_per_block
        reported = figure.num_blocks * block / GIB if figure.num_blocks else figure.kv_gib
        gpus = f"{figure.ranks} x {figure.gpu}" if figure.ranks > 1 else figure.gpu
        fitted = " *" if figure.is_fitted else ""
        step = f"{figure.tokens:,} / {figure.seqs:,}"
        print(
            f"| {figure.model}{fitted} | {gpus} | {step} | {reported:.2f} | {found.num_blocks * block / GIB:.2f} | "
            f"{error(figure):+.1f} % |"
        )


if __name__ == "__main__":
    show()
