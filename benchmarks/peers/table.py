"""One Markdown table of ours, the C program and the peers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..workload import size_name
from .rows import DECODE, LIFE, ROWS, Measured, Row

NOTHING = "-"


@dataclass
class Column:
    """What one manager took: by row name, size and layout."""

    name: str
    version: str
    cells: dict[tuple[str, int, str], Measured]

    def value(self, row: Row) -> float | None:
        """Nanoseconds, or None where there is no such row."""
        measured = self.cells.get((row.name, row.size, row.layout))
        return measured.value if measured else None


def shown(value: float | None, row: Row) -> str:
    """A value in the row's unit, three digits."""
    return NOTHING if value is None else f"{_three_digits(value / row.scale)} {row.unit}"


def ratio(over: float | None, under: float | None, digits: int = 3) -> str:
    """How many times `under` fits into `over`."""
    return NOTHING if over is None or not under else _three_digits(over / under, digits)


def _three_digits(value: float, digits: int = 3) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.{digits}g}"


def least_of(turns: list[Column]) -> Column:
    """The least that each row took in any turn."""
    cells: dict[tuple[str, int, str], Measured] = {}
    for cell in (cell for turn in turns for cell in turn.cells.values()):
        if cell.key not in cells or cell.value < cells[cell.key].value:
            cells[cell.key] = cell
    return Column(turns[0].name, turns[0].version, cells)


def table_lines(turns: list[Column], limit: Column, peers: list[Column]) -> Iterator[str]:
    """The table: ours (the least of its turns), most over least of these, C, and each peer, with its ratio to ours."""
    ours = least_of(turns)
    heads = ["row", "layout", "size", "ours", "most / least", "C", "ours / C"]
    for peer in peers:
        heads += [peer.name, f"{peer.name} / ours"]
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for row in ROWS:
        if ours.value(row) is not None:
            yield f"| {' | '.join(_cells(row, ours, turns, limit, peers))} |"


def _cells(row: Row, ours: Column, turns: list[Column], limit: Column, peers: list[Column]) -> Iterator[str]:
    own = ours.value(row)
    yield row.text
    yield row.layout
    yield f"{row.size:,} seqs" if row.name == DECODE else size_name(row.size)
    yield shown(own, row)
    yield ratio(max(turn.value(row) or 0 for turn in turns), own, 2)
    yield shown(limit.value(row), row)
    yield ratio(own, limit.value(row), 2)
    for peer in peers:
        yield shown(peer.value(row), row)
        yield ratio(peer.value(row), own, 2)


def hit_lines(columns: list[Column]) -> Iterator[str]:
    """The tokens that each manager hit in the trace: who hits less has done less work, or evicts otherwise."""
    yield "| hit tokens | " + " | ".join(column.name for column in columns) + " |"
    yield "|" + "---|" * (1 + len(columns))
    for row in ROWS:
        if row.name == LIFE:
            hits = [column.cells.get((row.name, row.size, row.layout)) for column in columns]
            shown_hits = (f"{hit.hit_tokens:,}" if hit else NOTHING for hit in hits)
            yield f"| {size_name(row.size)} | " + " | ".join(shown_hits) + " |"
