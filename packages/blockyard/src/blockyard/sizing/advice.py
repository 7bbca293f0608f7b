"""Advice on the block size and on the blocks left for cached prefixes, with reasons."""

from __future__ import annotations

from dataclasses import dataclass

from ..arguments import require_int
from ..cache_options import MAX_BLOCKS, MAX_MODEL_LEN
from ..config import MAX_SEQS
from ..errors import InvalidArgument

_BLOCK_SIZES = (8, 16, 32, 64, 128)
#: Blocks reserved for running requests, in tenths of their mean need: a fifth more, so that they can grow.
_RESERVE_TENTHS = 12


@dataclass(frozen=True, slots=True)
class BlockSizeAdvice:
    """A block size in tokens, and why.

    Attributes:
        block_size: the block size.
        expected_waste_tokens: mean number of empty slots in a sequence's last block, over all lengths.
        table_entries: blocks of a sequence of the mean length, which are entries of its table and hashes of its prompt.
        reasons: sentences with the numbers.
    """

    block_size: int
    expected_waste_tokens: float
    table_entries: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CacheBudgetAdvice:
    """Blocks left for cached prefixes that no sequence uses, and why.

    Attributes:
        num_blocks: blocks left for cached prefixes.
        reserved_blocks: blocks reserved for running requests.
        missing_blocks: how many of these the pool lacks.
        reasons: sentences with the numbers.
    """

    num_blocks: int
    reserved_blocks: int
    missing_blocks: int
    reasons: tuple[str, ...]


def advise_block_size(mean_sequence_tokens: float) -> BlockSizeAdvice:
    """Return the power of two from 8 to 128 that is nearest, by ratio, to the square root of the mean length. O(1).

    Large blocks waste half a block per sequence; small blocks make long tables and many hashes. At the square root both
    costs are balanced.

    Args:
        mean_sequence_tokens: mean tokens of prompt and output together; above 0.

    Raises:
        InvalidArgument: the value is outside its limits.
    """
    mean = mean_sequence_tokens
    if isinstance(mean, bool) or not isinstance(mean, (int, float)) or not 0 < mean <= MAX_MODEL_LEN:
        raise InvalidArgument(
            f"mean_sequence_tokens is {mean!r}; it must be a number above 0 and at most {MAX_MODEL_LEN}"
        )
    # A power is nearest to the root by ratio when the mean lies between half its square and twice its square.
    block_size = next((size for size in _BLOCK_SIZES if mean < 2 * size * size), _BLOCK_SIZES[-1])
    return BlockSizeAdvice(
        block_size, _waste(block_size), _entries(mean, block_size), _block_size_reasons(mean, block_size)
    )


def advise_cache_budget(total_blocks: int, concurrent_requests: int, blocks_per_request: int) -> CacheBudgetAdvice:
    """Return the blocks left for cached prefixes: total_blocks - 1.2 * concurrent_requests * blocks_per_request. O(1).

    Never negative.

    Args:
        total_blocks: blocks of the pool.
        concurrent_requests: requests that run at once.
        blocks_per_request: mean blocks of each.

    Raises:
        InvalidArgument: a value is outside its limits.
    """
    total = require_int("total_blocks", total_blocks, 0, MAX_BLOCKS)
    concurrent = require_int("concurrent_requests", concurrent_requests, 0, MAX_SEQS)
    each = require_int("blocks_per_request", blocks_per_request, 0, MAX_BLOCKS)
    needed = concurrent * each
    reserved = -(-needed * _RESERVE_TENTHS // 10)
    budget, missing = max(total - reserved, 0), max(reserved - total, 0)
    reasons = (
        f"{concurrent} requests of {each} blocks hold {needed} blocks at once.",
        f"A fifth more, {reserved} in all, lets them grow before blocks are evicted.",
        _rest_reason(total, reserved, budget, missing),
    )
    return CacheBudgetAdvice(budget, reserved, missing, reasons)


def _rest_reason(total: int, reserved: int, budget: int, missing: int) -> str:
    if missing:
        return f"The pool has {total}, {missing} too few: nothing is left for cached prefixes; run fewer requests."
    share = 100 * budget / total if total else 0.0
    return f"Of {total} blocks {total} - {reserved} = {budget} ({share:.1f} %) are left for cached prefixes."


def _block_size_reasons(mean: float, block_size: int) -> tuple[str, ...]:
    root = mean**0.5
    clamped = min(max(root, _BLOCK_SIZES[0]), _BLOCK_SIZES[-1])
    limit = (
        "" if clamped == root else f", which the limits of {_BLOCK_SIZES[0]} and {_BLOCK_SIZES[-1]} make {clamped:g}"
    )
    first = (
        f"The square root of {mean:g} tokens is {root:.1f}{limit}; the nearest power of two by ratio is {block_size}."
    )
    others = [size for size in (block_size // 2, block_size * 2) if size in _BLOCK_SIZES]
    return (
        first,
        _cost_sentence(mean, block_size, "leave"),
        *(_cost_sentence(mean, n, "would leave") for n in others),
    )


def _cost_sentence(mean: float, block_size: int, verb: str) -> str:
    waste, entries = _waste(block_size), _entries(mean, block_size)
    return (
        f"Blocks of {block_size} {verb} {waste:g} slots of a sequence empty ({100 * waste / mean:.1f} % of its tokens) "
        f"and make {entries} table entries."
    )


def _waste(block_size: int) -> float:
    """Return the mean number of empty slots in the last block."""
    return (block_size - 1) / 2


def _entries(mean: float, block_size: int) -> int:
    return int(-(-mean // block_size))
