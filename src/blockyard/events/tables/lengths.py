"""How much of a prompt holders have, and workers: two numbers each, anywhere and on the GPU."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ...core.arrays import view_i64, zeros_i64


class Lengths:
    """Two numbers of tokens a row, 0 at first: what is there anywhere, and on the GPU."""

    def __init__(self, num_rows: int) -> None:
        self.items = zeros_i64(2 * num_rows)

    def of(self, row: int) -> tuple[int, int]:
        """The numbers of a row. O(1)."""
        return int(self.items[2 * row]), int(self.items[2 * row + 1])

    def raise_to(self, row: i64, num_tokens: i64, num_gpu_tokens: i64) -> None:
        """The numbers of a row, if they are more than what stands there. O(1)."""
        items, at = self.items, 2 * row
        if num_tokens > items[at] or (num_tokens == items[at] and num_gpu_tokens > items[at + 1]):
            items[at], items[at + 1] = num_tokens, num_gpu_tokens

    def table(self) -> npt.NDArray[np.int64]:
        """All of them, int64 (rows, 2), a read-only view. O(1)."""
        return view_i64(self.items).reshape(-1, 2)


class HolderRows:
    """For each holder the row of an answer, -1 for none: int64 (holders,)."""

    def __init__(self, rows: npt.NDArray[np.int64]) -> None:
        self.items = vec[i64](rows)
