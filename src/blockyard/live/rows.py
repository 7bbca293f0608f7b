"""The sequences as the page lists them: who, how far, and the cells of their blocks in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .snapshot import Row, Snapshot

#: Sequences in the list, the oldest first; the page says how many more there are.
MAX_ROWS = 64
#: Cells of a sequence's path.
MAX_PATH = 512


@dataclass(frozen=True, slots=True)
class RowView:
    """A line of the list. path: the cells of its blocks, in order of its tokens, at most `MAX_PATH`."""

    handle: int
    holder: str
    name: str
    num_tokens: int
    num_computed: int
    num_blocks: int
    is_swapped: bool
    path: tuple[int, ...]

    def whole(self) -> dict[str, Any]:
        """As the wire has it where the reader knows nothing of it."""
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
        """What a reader that knows `before` has to be told; None for nothing. O(path)."""
        if before == self:
            return None
        if before is None or self.path[: len(before.path)] != before.path or before.name != self.name:
            return self.whole()
        told: dict[str, Any] = {"id": self.handle, "tokens": self.num_tokens, "computed": self.num_computed}
        told |= {"blocks": self.num_blocks, "swapped": self.is_swapped}
        more = self.path[len(before.path) :]
        return told | ({"more": more} if more else {})


def row_views(snapshot: Snapshot, scale: int) -> dict[int, RowView]:
    """The first `MAX_ROWS` sequences by handle. scale: blocks a cell. O(their blocks)."""
    return {row.handle: _view(row, snapshot, scale) for row in snapshot.rows[:MAX_ROWS]}


def _view(row: Row, snapshot: Snapshot, scale: int) -> RowView:
    blocks = np.concatenate(row.block_ids) if row.block_ids else np.empty(0, np.int32)
    blocks = blocks[blocks > 0]  # null blocks stand where a window has left
    name = snapshot.around.names.get(row.holder, "")
    path = tuple(((blocks[:MAX_PATH] - 1) // scale).tolist())
    return RowView(row.handle, row.holder, name, row.num_tokens, row.num_computed, len(blocks), row.is_swapped, path)
