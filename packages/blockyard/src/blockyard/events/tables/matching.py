"""A match asks with a prompt, whose tokens are compared as they lie, and answers how much of it holders have."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ...core.arrays import view_i64, zeros_i64
from ...core.tokens import FEW_TOKENS, PackedTokens, pack_tokens


class Lengths:
    """Two numbers of tokens a row, 0 at first: what is there anywhere, and on the GPU."""

    def __init__(self, num_rows: int) -> None:
        self.items = zeros_i64(2 * num_rows)

    def of(self, row: int) -> tuple[int, int]:
        """Return the numbers of a row. O(1)."""
        return int(self.items[2 * row]), int(self.items[2 * row + 1])

    def raise_to(self, row: i64, num_tokens: i64, num_gpu_tokens: i64) -> None:
        """The numbers of a row, if they are more than what stands there. O(1)."""
        items, at = self.items, 2 * row
        if num_tokens > items[at] or (num_tokens == items[at] and num_gpu_tokens > items[at + 1]):
            items[at], items[at + 1] = num_tokens, num_gpu_tokens

    def table(self) -> npt.NDArray[np.int64]:
        """Return all of them, int64 (rows, 2), a read-only view. O(1)."""
        return view_i64(self.items).reshape(-1, 2)


class HolderRows:
    """For each holder the row of an answer, -1 for none: int64 (holders,)."""

    def __init__(self, rows: npt.NDArray[np.int64]) -> None:
        self.items = vec[i64](rows)


class ComparedPrompt:
    """What stands in a long int32 array is a copy in `memory`, which is what the packed words of even blocks are.

    Tokens that equal stored ones are tokens, and need no look at their range. So what is compared in memory is neither
    packed nor checked: a third of the time of a match.
    """

    def __init__(self, token_ids: object, block_size: int) -> None:
        """O(n), a memory copy or a packing. Raises `InvalidArgument` for what cannot be packed; for a number in such an
        array that is no token, `words` and `require_tokens` do.
        """
        self._block_size = block_size
        self._packed: PackedTokens | None = None
        #: The tokens, four bytes each; empty where they do not lie as packed words do.
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
        """Return the packed words of all blocks. O(n) once. Raises `InvalidArgument` for a number that is no token."""
        packed = self._packed
        if packed is None:
            packed = self._pack(np.frombuffer(self.memory, dtype=np.int32))
        return packed.words

    def require_tokens(self, first: i64) -> None:
        """Raises `InvalidArgument` for a number from `first` on that is no token. O(n - first)."""
        if self._packed is not None or first >= self.num_tokens:
            return
        if np.frombuffer(self.memory, dtype=np.int32, offset=4 * int(first)).min() < 0:
            self.words()


def _lies_packed(tokens: npt.NDArray[np.int32], block_size: int) -> bool:
    return block_size % 2 == 0 and tokens.dtype == np.int32 and tokens.ndim == 1 and len(tokens) > FEW_TOKENS
