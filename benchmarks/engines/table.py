"""The comparison as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .agreement import Agreement
from .rounds import Standing


def table_lines(standings: Sequence[Standing], agreements: dict[str, Agreement]) -> Iterator[str]:
    """A row a contestant, the first of which is ours; `agreements` by name, for the others."""
    ours = standings[0]
    yield "| engine | tokens a second | rounds | ours / it | its tokens and ours |"
    yield "|---|---|---|---|---|"
    for standing in standings:
        name = standing.contestant.name
        rates = " ".join(f"{rate:.0f}" for rate in standing.rates)
        agreed = agreements.get(name, "")
        yield f"| {name} | {standing.rate:.0f} | {rates} | {ours.ratio_to(standing):.2f} | {agreed} |"
