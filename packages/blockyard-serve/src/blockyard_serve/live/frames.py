"""One moment on the wire: whole for a new reader, or as a change since the previous moment."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blockyard.answers import TenantUse

from .cells import NAMES, Cells, States, block_states, cells_of, counts_of, pool_states
from .snapshot import SequenceRow, Snapshot

#: Maximum of listed sequences, the oldest first; the page shows how many more there are.
MAX_ROWS = 64
#: Maximum of cells in a sequence's path.
MAX_PATH = 512
#: Maximum of tenants shown by name.
MAX_TENANTS = 16


@dataclass(frozen=True, slots=True)
class RowView:
    """A sequence in the list. `path` has the cells of its blocks in order of its tokens, at most `MAX_PATH`."""

    handle: int
    holder: str
    name: str
    num_tokens: int
    num_computed: int
    num_blocks: int
    is_swapped: bool
    path: tuple[int, ...]

    def whole(self) -> dict[str, Any]:
        """Return all fields."""
        return {
            "id": self.handle,
            "holder": self.holder,
            "name": self.name,
            "tokens": self.num_tokens,
            "computed": self.num_computed,
            "blocks": self.num_blocks,
            "swapped": self.is_swapped,
            "path": self.path,
        }

    def since(self, before: RowView | None) -> dict[str, Any] | None:
        """Return the change for a reader that knows `before`; None if there is none. O(path)."""
        if before == self:
            return None
        if before is None or self.path[: len(before.path)] != before.path or before.name != self.name:
            return self.whole()
        content: dict[str, Any] = {"id": self.handle, "tokens": self.num_tokens, "computed": self.num_computed}
        content |= {"blocks": self.num_blocks, "swapped": self.is_swapped}
        more = self.path[len(before.path) :]
        return content | ({"more": more} if more else {})


def row_views(snapshot: Snapshot, scale: int) -> dict[int, RowView]:
    """Return the first `MAX_ROWS` sequences by handle; `scale` is blocks per cell. O(their blocks)."""
    return {row.handle: _view(row, snapshot, scale) for row in snapshot.rows[:MAX_ROWS]}


def _view(row: SequenceRow, snapshot: Snapshot, scale: int) -> RowView:
    blocks = np.concatenate(row.block_ids) if row.block_ids else np.empty(0, np.int32)
    blocks = blocks[blocks > 0]  # null blocks replace those that left a window
    name = snapshot.status.names.get(row.holder, "")
    path = tuple(((blocks[:MAX_PATH] - 1) // scale).tolist())
    return RowView(row.handle, row.holder, name, row.num_tokens, row.num_computed, len(blocks), row.is_swapped, path)


#: Unchanged cells between two changed ones that are sent with them: a separate run costs more.
_GAP = 6


@dataclass(frozen=True, slots=True)
class Frame:
    """A snapshot as the page shows it.

    Attributes:
        number: number of the frame in its feed, from 1.
        at: time of the snapshot, in seconds of the server's clock.
        step: number of steps so far.
        states: states of the blocks from block 1 on.
        rows: listed sequences by handle.
        num_rows: number of sequences, listed or not.
        totals: counts (`totals_of`).
        is_after_gap: whether no page was open before it, so that nothing is known about the time in between.
    """

    number: int
    at: float
    step: int
    states: States
    cells: Cells
    cpu_cells: Cells | None
    rows: Mapping[int, RowView]
    num_rows: int
    totals: dict[str, Any]
    is_after_gap: bool = False

    @classmethod
    def of(cls, snapshot: Snapshot, number: int, is_after_gap: bool = False) -> Frame:
        """Make a frame of a snapshot, in any thread. O(num_blocks + held blocks)."""
        states = block_states(snapshot)
        cells = cells_of(states, snapshot.pool.ref_counts[1:])
        cpu_states = None if snapshot.cpu_pool is None else pool_states(snapshot.cpu_pool)
        cpu_cells = None
        if cpu_states is not None and snapshot.cpu_pool is not None:
            cpu_cells = cells_of(cpu_states, snapshot.cpu_pool.ref_counts[1:])
        rows = row_views(snapshot, cells.scale)
        totals = totals_of(snapshot, states, cpu_states)
        step = snapshot.status.step
        num_rows = len(snapshot.rows)
        return cls(number, snapshot.taken_at, step, states, cells, cpu_cells, rows, num_rows, totals, is_after_gap)

    def is_like(self, other: Frame | None) -> bool:
        """Return whether the other frame shows the same. O(cells + rows)."""
        if other is None or (self.cells, self.cpu_cells) != (other.cells, other.cpu_cells):
            return False
        return (self.rows, self.totals, self.step) == (other.rows, other.totals, other.step)

    def whole(self) -> bytes:
        """Return the event for a new reader. O(cells + paths)."""
        content = self._head() | {
            "map": _map(self.cells),
            "cpu": None if self.cpu_cells is None else _map(self.cpu_cells),
            "rows": [row.whole() for row in self.rows.values()],
        }
        return event("frame", content)

    def since(self, before: Frame) -> bytes:
        """Return the event for a reader that has `before`; whole if the map's size changed. O(cells + paths)."""
        if not (_is_comparable(self.cells, before.cells) and _is_comparable(self.cpu_cells, before.cpu_cells)):
            return self.whole()
        content = self._head() | {
            "after": before.number,
            "changed": _changes(self.cells, before.cells),
            "cpu_changed": _changes(self.cpu_cells, before.cpu_cells),
            "rows": [
                content for key, row in self.rows.items() if (content := row.since(before.rows.get(key))) is not None
            ],
            "gone": [handle for handle in before.rows if handle not in self.rows],
        }
        return event("change", content)

    def _head(self) -> dict[str, Any]:
        return {"n": self.number, **self.point(), "num_rows": self.num_rows}

    def point(self) -> dict[str, Any]:
        """Return the frame's point of the chart."""
        return {"at": round(self.at, 3), "step": self.step, "totals": self.totals, "gap": self.is_after_gap}


def totals_of(snapshot: Snapshot, states: States, cpu_states: States | None) -> dict[str, Any]:
    """Return counts by state, and totals since the cache was made. O(num_blocks)."""
    stats, status = snapshot.stats, snapshot.status
    content: dict[str, Any] = dict(zip(NAMES, counts_of(states), strict=True))
    del content["gone"]
    content |= {
        "running": status.num_running or stats.num_running_seqs,
        "waiting": status.num_waiting,
        "preempted": status.num_preemptions,
        "prompt": stats.num_prompt_tokens,
        "hit": stats.num_hit_tokens,
        "evicted": stats.num_evicted_blocks,
        "copied": stats.num_copied_blocks,
        "peak": stats.peak_used_blocks,
        "wasted": stats.num_wasted_slots,
        "bytes": stats.block_bytes,
        "padding": stats.num_padding_bytes,
    }
    if snapshot.misses is not None:
        content["causes"] = snapshot.misses.missed
    if stats.tenants:
        content["tenants"] = tenant_lines(stats.tenants)
    if status.tiers:
        content["tiers"] = status.tiers
    if cpu_states is not None:
        content["cpu"] = counts_of(cpu_states)[:4]
    return content


def tenant_lines(uses: Sequence[TenantUse]) -> list[tuple[str, int, int, int, int, int]]:
    """Return (name, held, idle, retained, guarantee, quota) in blocks of the largest tenants, and a sum of the rest.

    O(n log n).
    """
    lines = [
        (use.name, use.num_held, use.num_idle, use.num_retained, use.min_blocks, use.share)
        for use in sorted(uses, key=lambda use: -use.num_held - use.num_idle)
    ]
    if rest := lines[MAX_TENANTS:]:
        held, idle, retained, guarantee, quota = (
            sum(column) for column in zip(*(line[1:] for line in rest), strict=True)
        )
        lines[MAX_TENANTS:] = [(f"{len(rest)} others", held, idle, retained, guarantee, quota)]
    return lines


def event(name: str, content: object) -> bytes:
    """Return a server-sent event. It is ASCII, so that no line break in a text can end it."""
    return f"event: {name}\ndata: {json.dumps(content, separators=(',', ':'))}\n\n".encode("ascii")


def _map(cells: Cells) -> dict[str, Any]:
    return {"blocks": cells.num_blocks, "scale": cells.scale, "width": cells.width, "cells": _text(cells.content)}


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _is_comparable(cells: Cells | None, before: Cells | None) -> bool:
    if cells is None or before is None:
        return cells is before
    return (cells.num_blocks, cells.scale) == (before.num_blocks, before.scale)


def _changes(cells: Cells | None, before: Cells | None) -> list[tuple[int, str]]:
    """Return the runs of changed cells, each with the number of its first cell. O(cells)."""
    if cells is None or before is None or cells.content == before.content:
        return []
    width = cells.width
    new, old = (np.frombuffer(each.content, np.uint8).reshape(-1, width) for each in (cells, before))
    changed = np.flatnonzero((new != old).any(axis=1))
    cuts = np.flatnonzero(np.diff(changed) > _GAP)
    starts, ends = changed[np.append(0, cuts + 1)], changed[np.append(cuts, -1)]
    runs = zip(starts.tolist(), ends.tolist(), strict=True)
    return [(start, _text(cells.content[start * width : (end + 1) * width])) for start, end in runs]
