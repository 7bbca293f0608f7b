"""The invariants of several steps in flight: what is reserved in which step, and which blocks wait for which."""

from mypy_extensions import i64

from ...errors import InvariantError
from ..pool.fence import Fence
from ..pool.ledger import BlockLedger
from .open_steps import OpenSteps
from .table import SequenceTable


def check_steps(pool: BlockLedger, sequences: SequenceTable) -> None:
    """Hold the open reservations and the fence against each other. O(rows * steps + num_blocks)."""
    if pool.fence is None or sequences.open_steps is None:
        return
    fence = pool.fence
    if not 0 <= fence.num_in_flight() <= fence.max_steps:
        raise InvariantError(f"I10: {fence.num_in_flight()} steps are in flight, the limit is {fence.max_steps}")
    of_step = [0] * int(fence.max_steps)
    for row in range(int(sequences.max_num_seqs)):
        _check_row(fence, sequences, sequences.open_steps, i64(row), of_step)
    for step in range(fence.num_ended + 1, fence.num_begun + 1):
        counted = sequences.open_steps.num_of_step(step)
        if counted != of_step[int(step % fence.max_steps)]:
            raise InvariantError(f"I10: step {step} counts {counted} open reservations, there are others")
    _check_fence(pool, fence)


def _check_row(fence: Fence, sequences: SequenceTable, open_steps: OpenSteps, row: i64, of_step: list[int]) -> None:
    """Reservations go up in steps in flight, and their tokens add up."""
    tokens: i64 = 0
    before = fence.num_ended
    for number in range(open_steps.num_open[row]):
        step = open_steps.step_at(row, number)
        count = open_steps.count_at(row, number)
        if not before < step <= fence.last_step[row] or count <= 0:
            raise InvariantError(f"I10: row {row} has {count} tokens reserved in step {step}, behind step {before}")
        before = step
        tokens += count
        of_step[int(step % fence.max_steps)] += 1
    if tokens != sequences.num_ahead[row] or open_steps.oldest_count(row) != sequences.num_reserved[row]:
        raise InvariantError(
            f"I10: row {row} has {tokens} tokens in flight, but counts {sequences.num_ahead[row]}, of which "
            f"{sequences.num_reserved[row]} come first"
        )
    if sequences.handle[row] == 0 and (tokens > 0 or fence.last_step[row] > 0):
        raise InvariantError(f"I10: row {row} is empty, but in step {fence.last_step[row]}")


def _check_fence(pool: BlockLedger, fence: Fence) -> None:
    """Every block that waits for a step in flight stands in one list, once, and is held."""
    blocks = fence.block_ids()
    if len(set(blocks)) != len(blocks) or len(blocks) != fence.num_blocks:
        raise InvariantError(f"I10: {fence.num_blocks} blocks wait for steps in flight, listed are {blocks}")
    waiting = set(blocks)
    for block in range(int(pool.capacity)):
        until = fence.until[i64(block)]
        if (until > 0) != (block in waiting):
            raise InvariantError(f"I10: block {block} waits for step {until}, but is listed: {block in waiting}")
        if until > 0 and not fence.num_ended < until <= fence.num_begun:
            raise InvariantError(f"I10: block {block} waits for step {until}, which is not in flight")
