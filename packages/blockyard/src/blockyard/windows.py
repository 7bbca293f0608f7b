"""Block counts of sliding windows, shared by all code that needs them. Compiled."""

from mypy_extensions import i64


def first_needed_block(num_computed: i64, window: i64, block_size: i64) -> i64:
    """Return the first block that tokens from `num_computed` on attend to. O(1).

    Args:
        num_computed: tokens computed so far.
        window: tokens that attention reaches; 0 for all.
        block_size: tokens per block.
    """
    if window == 0:
        return 0
    return max(num_computed - window + 1, 0) // block_size


def num_computed_past(first: i64, window: i64, block_size: i64) -> i64:
    """Return the smallest number of computed tokens that need no block before `first`. O(1).

    The inverse of `first_needed_block`.

    Args:
        first: block number.
        window: tokens that attention reaches, above 0.
        block_size: tokens per block.
    """
    return first * block_size + window - 1 if first > 0 else 0


def num_peak_blocks(num_tokens: i64, chunk: i64, window: i64, block_size: i64) -> i64:
    """Return the most blocks a sequence holds while it grows to `num_tokens`. O(1).

    With a window, these are the blocks of a step's tokens and of the window before them, at the worst alignment.

    Args:
        num_tokens: final length.
        chunk: tokens computed per step.
        window: tokens that attention reaches; 0 for all.
        block_size: tokens per block.
    """
    whole = (num_tokens + block_size - 1) // block_size
    reach = window + chunk - 1
    if window == 0:
        return whole
    return min(whole, (reach - 2) // block_size + 2 if reach > 1 else 1)


def num_least_blocks(num_tokens: i64, window: i64, block_size: i64) -> i64:
    """Return the fewest blocks with which a sequence of `num_tokens` tokens can run, even by itself. O(1).

    Args:
        num_tokens: length of the sequence.
        window: tokens that attention reaches; 0 for all.
        block_size: tokens per block.
    """
    if window > 0:
        num_tokens = min(num_tokens, window - 1 + block_size)
    return (num_tokens + block_size - 1) // block_size
