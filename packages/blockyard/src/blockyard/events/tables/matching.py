"""Prompts prepared for comparison with stored blocks, and the lengths of matches."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ...core.arrays import view_i64, zeros_i64
from ...core.tokens import FEW_TOKENS, PackedTokens, pack_tokens


class Lengths:
    """Two token counts per row, initially 0: on any medium, and on the GPU."""

    def __init__(self, num_rows: int) -> None:
        self.items = zeros_i64(2 * num_rows)

    def of(self, row: int) -> tuple[int, int]:
        """Return the counts of a row. O(1)."""
        return int(self.items[2 * row]), int(self.items[2 * row + 1])

    def raise_to(self, row: i64, num_tokens: i64, num_gpu_tokens: i64) -> None:
        """Replace the counts of a row if the new ones are greater; tokens on any medium are compared first. O(1)."""
        items, at = self.items, 2 * row
        if num_tokens > items[at] or (num_tokens == items[at] and num_gpu_tokens > items[at + 1]):
            items[at], items[at + 1] = num_tokens, num_gpu_tokens

    def table(self) -> npt.NDArray[np.int64]:
        """Return all counts, int64 (rows, 2), as a read-only view. O(1)."""
        return view_i64(self.items).reshape(-1, 2)


class HolderRows:
    """The row of each holder in a match, -1 for none: int64 (holders,)."""

    def __init__(self, rows: npt.NDArray[np.int64]) -> None:
        self.items = vec[i64](rows)


class ComparedPrompt:
    """A prompt whose tokens are compared as raw memory, if possible.

    A long int32 array is copied to `memory`, whose bytes are the packed words of blocks of even size. Tokens that equal
    stored ones are valid, so compared tokens need neither packing nor a check, which saves a third of the time of a
    match.
    """

    def __init__(self, token_ids: object, block_size: int) -> None:
        """Copy or pack the tokens. O(n).

        Raises `InvalidArgument` for tokens that cannot be packed. Invalid numbers in a long array are only detected by
        `words` and `require_tokens`.
        """
        self._block_size = block_size
        self._packed: PackedTokens | None = None
        #: The tokens, four bytes each; empty if their bytes differ from those of packed words.
        self.memory = b""
        self.num_tokens: i64 = 0
        if type(token_ids) is np.ndarray and _lies_packed(token_ids, block_size):
            self.memory = token_ids.tobytes()
            self.num_tokens = len(token_ids)
        else:
            self._pack(token_ids)

    def _pack(self, token_ids: object) -> PackedTokens:
        packed = pack_tokens(token_ids, self._block_size)
        self._packed = packed
        self.num_tokens = packed.num_tokens
        return packed

    def words(self) -> vec[i64]:
        """Return the packed words of all blocks. O(n) once. Raises `InvalidArgument` for an invalid token."""
        packed = self._packed
        if packed is None:
            packed = self._pack(np.frombuffer(self.memory, dtype=np.int32))
        return packed.words

    def require_tokens(self, first: i64) -> None:
        """Raise `InvalidArgument` for an invalid token from position `first` on. O(n - first)."""
        if self._packed is not None or first >= self.num_tokens:
            return
        if np.frombuffer(self.memory, dtype=np.int32, offset=4 * int(first)).min() < 0:
            self.words()


def _lies_packed(tokens: npt.NDArray[np.int32], block_size: int) -> bool:
    return block_size % 2 == 0 and tokens.dtype == np.int32 and tokens.ndim == 1 and len(tokens) > FEW_TOKENS
