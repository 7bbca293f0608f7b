"""The formulas of sliding windows, compiled: the allocator and the capacity calculator both count with it."""

from mypy_extensions import i64


def first_needed_block(num_computed: i64, window: i64, block_size: i64) -> i64:
    """The first block that tokens from `num_computed` on attend to; window: tokens, 0 for all. O(1)."""
    if window == 0:
        return 0
    return max(num_computed - window + 1, 0) // block_size


def num_least_blocks(num_tokens: i64, window: i64, block_size: i64) -> i64:
    """Blocks without which a sequence of `num_tokens` tokens cannot run, even alone; window: 0 for all. O(1)."""
    if window > 0:
        num_tokens = min(num_tokens, window - 1 + block_size)
    return (num_tokens + block_size - 1) // block_size
