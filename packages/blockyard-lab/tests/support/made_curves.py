"""Hit-rate curves made by hand, with awkward names and sizes that their pictures must handle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blockyard.core.policies import POLICIES
from blockyard_lab.curve import HitCurves, Knee

#: What a name may hold that HTML, SVG, JSON, templates and mathematical text each take for something else.
HOSTILE = "</script><script>alert(1)</script>&amp;\"' $x_1$ {{rows}} ü 对话 \x00\x1b\udcff\n<!--.py:Mine"


def made_curves(rates: dict[str, Sequence[float]], sizes: Sequence[int], **changed: Any) -> HitCurves:
    """Curves of a trace of 100 references, exact, the knee of lru at the first size unless changed."""
    fields: dict[str, Any] = {
        "trace": "made",
        "tokens_a_block": 16,
        "num_requests": 7,
        "num_references": 100,
        "working_set": 50,
        "sample_rate": 1.0,
        "sizes": np.array(sizes, np.int64),
        "hit_rates": {policy: np.array(values, np.float64) for policy, values in rates.items()},
        "num_hits": {policy: np.array(values) for policy, values in rates.items()},
        "infinite": max(max(values) for values in rates.values()),
        "error": {},
        "knee": Knee("lru", sizes[0], float(rates.get("lru", [0.25])[0])),
    }
    return HitCurves(**{**fields, **changed})


def plain_curves() -> HitCurves:
    """Three policies below an optimum, 4 sizes, the knee of lru at 300 blocks."""
    rates = {
        "lru": [0.01, 0.125, 0.35, 0.4],
        "arc": [0.02, 0.2, 0.33, 0.4],
        "examples/own_policy.py:Mine": [0.0, 0.1, 0.34, 0.4],
        "optimum": [0.1, 0.3, 0.4, 0.4],
    }
    return made_curves(rates, [1, 20, 300, 4_000], knee=Knee("lru", 300, 0.35), infinite=0.4375)


def two_traces() -> list[HitCurves]:
    """Of two days, the second with twice the hits."""
    rates = {"lru": [0.01, 0.125, 0.35, 0.4], "optimum": [0.1, 0.3, 0.4, 0.45]}
    twice = {policy: [2 * rate for rate in found] for policy, found in rates.items()}
    return [
        made_curves(found, [1, 20, 300, 4_000], knee=Knee("lru", 20, found["lru"][1]), trace=f"{day}.jsonl")
        for day, found in (("monday", rates), ("tuesday", twice))
    ]


def sampled_curves() -> HitCurves:
    """Of one block in 16, with an error of lru."""
    error = {"lru": np.array([0.005, 0.01])}
    return made_curves({"lru": [0.01, 0.2], "arc": [0.1, 0.2]}, [100, 1600], sample_rate=1 / 16, error=error)


def awkward_curves() -> dict[str, HitCurves]:
    """Return curves by what is awkward about them."""
    steps = np.linspace(0, 1, 9)
    huge = [10**power for power in range(9)]
    many = {f"folder/policies_{number}.py:Policy": steps * (0.5 + number / 100) for number in range(40)}
    return {
        "one policy": made_curves({"fifo": [0.1, 0.2]}, [5, 6]),
        "only the optimum": made_curves({"optimum": [0.5, 1.0]}, [1, 1000]),
        "one size": made_curves({"lru": [0.3], "optimum": [0.4]}, [38_667]),
        "one size of one block": made_curves({"lru": [0.0]}, [1]),
        "two sizes close together": made_curves({"lru": [0.3, 0.5]}, [100_000, 100_001]),
        "nothing hits": made_curves({"lru": [0.0] * 9, "optimum": [0.0] * 9}, huge),
        "everything hits": made_curves({"lru": [1.0] * 9, "optimum": [1.0] * 9}, huge),
        "huge sizes": made_curves({"lru": steps.tolist()}, huge, knee=Knee("lru", 10**8, 1.0)),
        "twelve policies": made_curves(dict(list(many.items())[:11]) | {"optimum": steps}, huge),
        "forty policies": made_curves(many, huge),
        "hostile names": made_curves({HOSTILE: [0.1, 0.2], "optimum": [0.3, 0.4]}, [1, 9], trace=HOSTILE * 5),
        "no name": made_curves({"lru": [0.1]}, [1], trace=""),
        "sampled": sampled_curves(),
        "a knee between two sizes": made_curves(
            {"lru": [0.1, 0.4], "arc": [0.1, 0.4]}, [10, 50], knee=Knee("lru", 17, 0.3)
        ),
        "a knee beyond the sizes": made_curves(
            {"lru": [0.1, 0.2], "arc": [0.1, 0.2]}, [1, 9], knee=Knee("lru", 17, 0.3)
        ),
        "every policy": made_curves(
            {p: steps * (1 - n / 50) for n, p in enumerate((*POLICIES, "optimum"))}, huge, knee=Knee("lru", 10**4, 0.5)
        ),
    }
