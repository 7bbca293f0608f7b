"""The two orders in which kernels read a block: tokens outside heads (NHD), or heads outside tokens (HND)."""

from __future__ import annotations

from enum import StrEnum

from ..errors import InvalidArgument


class KVLayout(StrEnum):
    """How a block of keys (or of values) lies in memory.

    NHD: (block_size, num_kv_heads, head_size). FlashAttention, vLLM, and FlashInfer's default. A token's row is
        contiguous, so writing is one copy a token and gathering one copy a block.
    HND: (num_kv_heads, block_size, head_size). FlashInfer's and TensorRT-LLM's other order: a head's tokens
        are contiguous. Gathering into token order costs a transposition.
    """

    NHD = "NHD"
    HND = "HND"

    @classmethod
    def parse(cls, value: object) -> KVLayout:
        """Return the layout called `value`, a `KVLayout` or its name."""
        try:
            return cls(str(value))
        except ValueError as error:
            raise InvalidArgument(f"layout is {value!r}; it must be 'NHD' or 'HND'") from error

    def block_shape(self, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, int, int]:
        """Shape of one block of keys in this layout."""
        if self is KVLayout.NHD:
            return (block_size, num_kv_heads, head_size)
        return (num_kv_heads, block_size, head_size)
