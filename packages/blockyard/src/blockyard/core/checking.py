"""The invariants that `check()` verifies across sequences, leases, steps in flight and pools."""

from mypy_extensions import i64

from ..errors import InvariantError
from ..ids import NO_CONTENT, NO_ROW
from .blocks.fence import StepFence
from .blocks.lease import BlockLease
from .blocks.ledger import BlockLedger
from .sequences.block_table import BlockTable
from .sequences.open_steps import OpenSteps
from .sequences.table import NO_TOKEN, SequenceTable
from .store.content_ledger import ContentLedger
from .store.group_table import GroupTable
from .store.grouped import GroupedStore
from .store.state_group import StateGroup


def check_sequences(pool: BlockLedger, leases: list[BlockLease], sequences: SequenceTable, is_stored: bool) -> None:
    """Compare every row with the pool. O(num_blocks + block tables). Raises `InvariantError`.

    Args:
        pool: ledger of the token blocks.
        leases: leases of the pool that has keys and values.
        sequences: the sequence table.
        is_stored: True if `pool` is that pool.
    """
    rows = sequences.live_rows()
    _check_counts(pool, leases, sequences, rows, is_stored)
    _check_rows(sequences, rows)
    for row in rows:
        _check_lengths(sequences, i64(row), pool.block_size)
        if sequences.ready[i64(row)] > 0:
            _check_ready(sequences, i64(row), pool.block_size)
        _check_published(pool, sequences, i64(row), is_stored)
        _check_writer(pool, sequences, i64(row))
    _check_waiting(sequences, rows)
    _check_owners(pool, sequences)


def _fail(invariant: str, what: str) -> None:
    raise InvariantError(f"{invariant}: {what}")


def _check_counts(
    pool: BlockLedger, leases: list[BlockLease], sequences: SequenceTable, rows: list[int], is_stored: bool
) -> None:
    """Verify that the holds of rows and leases add up to ref_cnt."""
    held = [0] * int(pool.capacity)
    for row in rows:
        blocks = [int(block) for block in sequences.row_blocks(i64(row))]
        if 0 in blocks or len(set(blocks)) != len(blocks):
            _fail("I2", f"{sequences.name(i64(row))} holds the null block, or a block twice: {blocks}")
        for block in blocks:
            held[block] += 1
    if is_stored:
        for row in rows:
            for block in sequences.copy_from[row]:
                held[block] += 1
    for lease in leases:
        for block in lease.held_ids() if is_stored else [int(number) for number in lease._token_blocks]:
            held[block] += 1
    _count_fenced(pool, held)
    for block in range(int(pool.capacity)):
        if pool.ref_cnt[i64(block)] != held[block]:
            _fail("I8", f"block {block} has ref_cnt {pool.ref_cnt[i64(block)]}, but {held[block]} holders")


def _count_fenced(pool: BlockLedger, held: list[int]) -> None:
    """Count the hold of each block that waits for a step in flight."""
    for block in pool.fence.block_ids():
        held[block] += 1


def _check_rows(sequences: SequenceTable, rows: list[int]) -> None:
    if len(rows) + sequences.num_free_rows != sequences.max_num_seqs:
        _fail("I6", f"{len(rows)} rows are used and {sequences.num_free_rows} free of {sequences.max_num_seqs}")
    for row in range(int(sequences.max_num_seqs)):
        first = i64(row) * sequences.width
        for position in range(first + sequences.num_blocks[i64(row)], first + sequences.width):
            if sequences.blocks[position] != 0:
                _fail("I2", f"row {row} has a block id behind its {sequences.num_blocks[i64(row)]} blocks")


def _check_lengths(sequences: SequenceTable, row: i64, block_size: i64) -> None:
    """Verify that every known token has a slot, except one that may wait for its block."""
    name = sequences.name(row)
    stored = sequences.num_tokens[row]
    if sequences.pending_token[row] != NO_TOKEN:
        stored -= 1
    room = sequences.num_blocks[row] * block_size
    if stored > room:
        _fail("I6", f"{name} has {stored} tokens in {room} slots")
    if sequences.num_computed[row] > sequences.num_tokens[row]:
        _fail("I3", f"{name} has computed {sequences.num_computed[row]} of {sequences.num_tokens[row]} tokens")
    if sequences.num_computed[row] + _num_open(sequences, row) > room:
        _fail("I6", f"{name} has reserved {sequences.num_reserved[row]} tokens beyond its {room} slots")


def _check_ready(sequences: SequenceTable, row: i64, block_size: i64) -> None:
    """Verify that a ready row may write up to the end of its blocks, and that its tail is the last of them."""
    if sequences.ready[row] != sequences.num_blocks[row] * block_size:
        _fail("I6", f"{sequences.name(row)} is ready up to {sequences.ready[row]} tokens, which is not where it ends")
    _check_tail(sequences, sequences.name(row), row)


def _check_tail(table: BlockTable, name: str, row: i64) -> None:
    """Verify that the tail of a ready row is its last block, unless the window has passed that block."""
    place = table.num_blocks[row] - 1
    if 0 <= place < table.num_null[row]:
        return
    if place < 0 or table.tail[row] != table.block_at(row, place) or table.tail_at[row] != place * table.block_size:
        _fail("I2", f"{name} has block {table.tail[row]} for its last one, from token {table.tail_at[row]} on")


def _num_open(sequences: SequenceTable, row: i64) -> i64:
    """Return the tokens of all open reservations."""
    return max(sequences.num_reserved[row], sequences.num_ahead[row])


def _check_published(pool: BlockLedger, sequences: SequenceTable, row: i64, is_stored: bool) -> None:
    """Verify that published blocks are indexed in one chain, and that those without a producer are computed (I3).

    Token blocks without keys and values have no producer, because their stored blocks may be evicted while the sequence
    is swapped out.
    """
    index = pool.index
    if not pool.enable_prefix_caching or sequences.generation[row] != index.num_generations:
        return
    parent = sequences.root[row]
    for position in range(sequences.num_published[row]):
        block = sequences.block_at(row, position)
        follows = index.parent_of(block) == parent or position in sequences.spans[row]
        if not index.is_cached(block) or not follows:
            _fail("I5", f"block {block} of {sequences.name(row)} is not indexed after its predecessor")
        parent = index.content_of(block)
        owned = i64(index.owner[block]) == row + 1
        is_pending = is_stored and position >= sequences.num_computed[row] // i64(pool.block_size)
        if owned != is_pending and not _joined(sequences, row):
            _fail("I3", f"block {block} of {sequences.name(row)}: computed and owner disagree")


def _joined(sequences: SequenceTable, row: i64) -> bool:
    """Return whether some of the row's blocks may have another producer."""
    return sequences.waits_on[row] != NO_ROW


def _check_writer(pool: BlockLedger, sequences: SequenceTable, row: i64) -> None:
    """Verify that only the sequence itself, and waiters for its prefix, hold the blocks of its reserved tokens (I7)."""
    block_size = i64(pool.block_size)
    start = sequences.num_computed[row]
    num_open = _num_open(sequences, row)
    if num_open == 0:
        return
    for position in range(start // block_size, (start + num_open - 1) // block_size + 1):
        block = sequences.block_at(row, position)
        if pool.ref_cnt[block] > 1 and position >= sequences.num_published[row]:
            _fail(
                "I7",
                f"{sequences.name(row)} is about to write block {block}, held {pool.ref_cnt[block]} times",
            )


def _check_waiting(sequences: SequenceTable, rows: list[int]) -> None:
    waiters = [0] * int(sequences.max_num_seqs)
    for row in rows:
        owner = sequences.waits_on[i64(row)]
        if owner == NO_ROW:
            continue
        waiters[int(owner)] += 1
        if sequences.handle[owner] == 0 or sequences.waits_for[i64(row)] > sequences.num_computed[i64(row)]:
            _fail("I3", f"{sequences.name(i64(row))} waits on row {owner}, which is gone or not on its way")
    for row in range(int(sequences.max_num_seqs)):
        if sequences.num_waiters[i64(row)] != waiters[row]:
            _fail("I3", f"row {row} counts {sequences.num_waiters[i64(row)]} waiters, there are {waiters[row]}")


def _check_owners(pool: BlockLedger, sequences: SequenceTable) -> None:
    """Verify that the producer of a block holds it and has not computed it yet."""
    for block in range(1, int(pool.capacity)):
        row = i64(pool.index.owner[i64(block)]) - 1
        if row == NO_ROW:
            continue
        blocks = [int(held) for held in sequences.row_blocks(row)]
        position = blocks.index(block) if block in blocks else -1
        first = int(sequences.num_computed[row]) // pool.block_size
        if not first <= position < sequences.num_published[row]:
            _fail(
                "I3",
                f"block {block} is to be computed by row {row}, which is at block {first} and has it at {position}",
            )


def check_groups(
    store: GroupedStore, states: StateGroup | None, leases: list[BlockLease], cpu_leases: list[BlockLease]
) -> None:
    """Compare the rows of every group with the pools. O(blocks + tables * groups). Raises `InvariantError`."""
    rows = store.sequences.live_rows()
    store.pool.check()
    held = [0] * int(store.pool.capacity)
    for group in store.groups:
        for row in rows:
            _check_group_row(store, group, i64(row), held)
    for row in rows:
        if store.sequences.ready[i64(row)] > 0 and store.sequences.is_swapped[i64(row)] == 0:
            _check_tail(store.groups[0], f"{store.sequences.name(i64(row))}, group 0", i64(row))
        store.check_slides(i64(row))
        pending = [] if states is None else states.pending_blocks(i64(row))
        for block in store.sequences.copy_from[row] + pending:
            held[block] += 1
    _check_holders(store.pool, leases, held, "I8")
    if states is not None:
        states.check()
    if store.cpu is not None:
        _check_cpu(store, store.cpu, cpu_leases, rows)


def _check_group_row(store: GroupedStore, group: GroupTable, row: i64, held: list[int]) -> None:
    """Verify that only passed blocks are null, and that published blocks have the content of their token blocks."""
    sequences = store.sequences
    name = f"{sequences.name(row)}, group {group.number}"
    blocks = [int(block) for block in group.row_blocks(row)]
    for place, block in enumerate(blocks):
        held[block] += 1 if block else 0
        outside = place < group.num_null[row] or sequences.is_swapped[row] != 0
        if (block == 0) != outside:
            _fail("I2", f"{name} has block {block} at place {place}, of which {group.num_null[row]} are null")
    if group.num_null[row] > group.first_needed(sequences.num_computed[row]):
        _fail("I2", f"{name} lacks places of its window: {group.num_null[row]} are null")
    needed = sequences.num_computed[row] + _num_open(sequences, row)
    if sequences.copy_from[row] and not store.has_states:
        # The block whose beginning is to be copied may not be there yet.
        needed -= needed % group.block_size
    if sequences.is_swapped[row] == 0 and needed > group.num_blocks[row] * group.block_size:
        _fail("I6", f"{name} has {needed} computed or reserved tokens in {len(blocks)} blocks")
    _check_contents(store, group, row)


def _check_contents(store: GroupedStore, group: GroupTable, row: i64) -> None:
    sequences = store.sequences
    index = store.token_blocks.index
    last = min(sequences.num_published[row] // group.span, group.num_blocks[row])
    for place in range(group.num_null[row], last):
        block = group.block_at(row, place)
        token_block = sequences.block_at(row, (place + 1) * group.span - 1)
        content = index.content_of(token_block)
        if block == 0 or content == NO_CONTENT or not store.pool.is_cached(block):
            continue
        if store.pool.content_of(block) != content or store.pool.group_of(block) != group.number:
            _fail(
                "I5",
                f"block {block} of {sequences.name(row)} is cached as another content than token block {token_block}",
            )


def _check_holders(pool: ContentLedger, leases: list[BlockLease], held: list[int], invariant: str) -> None:
    _count_fenced(pool, held)
    for lease in leases:
        for block in lease.held_ids():
            held[block] += 1
    for block in range(int(pool.capacity)):
        if pool.ref_cnt[i64(block)] != held[block]:
            _fail(invariant, f"block {block} has ref_cnt {pool.ref_cnt[i64(block)]}, but {held[block]} holders")


def _check_cpu(store: GroupedStore, cpu: ContentLedger, leases: list[BlockLease], rows: list[int]) -> None:
    """Verify that swapped sequences, loads and pending saves hold exactly the CPU blocks that are referenced."""
    cpu.check()
    held = [0] * int(cpu.capacity)
    for block in store.tier.waiting_blocks() if store.tier is not None else []:
        held[block] += 1
    for group in store.groups:
        for row in rows:
            loads = 0
            for place in range(group.width):
                block = group.cpu_block_at(i64(row), place)
                held[int(block)] += 1 if block != 0 else 0
                loads += 1 if block != 0 else 0
            if store.sequences.is_swapped[i64(row)] == 0 and loads != group.num_loads[i64(row)]:
                _fail("I8", f"row {row} counts {group.num_loads[i64(row)]} loads, there are {loads}")
    _check_holders(cpu, leases, held, "I8")


def check_steps(pool: BlockLedger, sequences: SequenceTable) -> None:
    """Compare the open reservations with the fence. O(rows * steps + num_blocks). Raises `InvariantError`."""
    fence = pool.fence
    if not isinstance(fence, StepFence) or sequences.open_steps is None:
        return
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


def _check_row(fence: StepFence, sequences: SequenceTable, open_steps: OpenSteps, row: i64, of_step: list[int]) -> None:
    """Verify that a row's reservations are in consecutive order in steps in flight, and that their tokens add up."""
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


def _check_fence(pool: BlockLedger, fence: StepFence) -> None:
    """Verify that each block that waits for a step in flight is held, and is in exactly one list, once."""
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
