"""Labels at the ends of lines that must not lie on one another."""

from __future__ import annotations

from collections.abc import Sequence


def spread_labels(wanted: Sequence[float], spacing: float, low: float, high: float) -> list[float] | None:
    """Places at least `spacing` apart within low to high, in the order of `wanted`, near to what was wanted.

    wanted: ascending. None where they cannot all stand there. Labels that would touch become a group around the mean
    of what they wanted, as pooled adjacent violators of isotonic regression. O(labels).
    """
    if (len(wanted) - 1) * spacing > high - low:
        return None
    groups: list[tuple[float, int]] = []  # the sum of the wanted places of the first label, and how many labels
    for number, place in enumerate(wanted):
        total, count = place - number * spacing, 1
        while groups and groups[-1][0] / groups[-1][1] >= total / count:
            total, count = total + groups[-1][0], count + groups[-1][1]
            groups.pop()
        groups.append((total, count))
    top = high - (len(wanted) - 1) * spacing
    firsts = [min(max(total / count, low), top) for total, count in groups for _ in range(count)]
    return [first + number * spacing for number, first in enumerate(firsts)]
