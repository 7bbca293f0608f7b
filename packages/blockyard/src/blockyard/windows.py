"""The formulas of sliding windows, compiled: all that counts the blocks a window reaches counts with these."""

from mypy_extensions import i64


def first_needed_block(num_computed: i64, window: i64, block_size: i64) -> i64:
    """The first block that tokens from `num_computed` on attend to; window: tokens, 0 for all. O(1)."""
    if window == 0:
        return 0
    return max(num_computed - window + 1, 0) // block_size


def num_computed_past(first: i64, window: i64, block_size: i64) -> i64:
    """Return the least number of computed tokens that need no block before `first`: the inverse. O(1)."""
    return first * block_size + window - 1 if first > 0 else 0


def num_peak_blocks(num_tokens: i64, chunk: i64, window: i64, block_size: i64) -> i64:
    """Count the blocks a sequence holds at its fullest while it grows to `num_tokens`, `chunk` tokens a step. O(1).

    With a window: those of a step's tokens and the window before them, wherever they lie across blocks.
    """
    whole = (num_tokens + block_size - 1) // block_size
    reach = window + chunk - 1
    if window == 0:
        return whole
    return min(whole, (reach - 2) // block_size + 2 if reach > 1 else 1)


def num_least_blocks(num_tokens: i64, window: i64, block_size: i64) -> i64:
    """Blocks without which a sequence of `num_tokens` tokens cannot run, even alone; window: 0 for all. O(1)."""
    if window > 0:
        num_tokens = min(num_tokens, window - 1 + block_size)
    return (num_tokens + block_size - 1) // block_size
