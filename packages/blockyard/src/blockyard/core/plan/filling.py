"""Writes a step's inputs to the caller's arrays."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ...arguments import require_int, shown
from ...errors import InvalidArgument
from ..sequences.block_table import BlockTable
from .batch import Batch
from .buffers import StepBuffers

#: Slot of a padded token, which kernels do not write.
NO_SLOT: Final[i64] = -1
#: Larger than any array.
MOST_PADDING: Final = 2**40


def fill_buffers(
    given: object, batch: Batch, table: BlockTable, slots: vec[i64], pad_to: object, pad_tokens_to: object
) -> None:
    """Write a step to `given`, as described at `StepPlan.fill`. `slots` has the slots of all tokens, or is empty."""
    if not isinstance(given, StepBuffers):
        raise InvalidArgument(f"buffers is {shown(given)}; it must be a StepBuffers")
    given._gate.enter("fill")
    try:
        _fill(given, batch, table, slots, pad_to, pad_tokens_to)
    finally:
        given._gate.leave()


def _fill(
    buffers: StepBuffers, batch: Batch, table: BlockTable, slots: vec[i64], pad_to: object, pad_tokens_to: object
) -> None:
    num_seqs = i64(len(batch.rows))
    num_tokens = batch.num_tokens()
    padded_seqs = _padded("pad_to", pad_to, num_seqs, "sequences")
    least = padded_seqs if pad_to is not None and pad_tokens_to is None else i64(0)
    padded_tokens = max(_padded("pad_tokens_to", pad_tokens_to, num_tokens, "tokens"), least)
    batch.require_fresh()
    _require_room(buffers, batch, table, padded_seqs, padded_tokens)
    _lay_out_tokens(buffers, batch, table, slots, num_tokens)
    _lay_out_seqs(buffers, batch)
    # Making room can run a finaliser that frees a sequence of this batch.
    batch.require_fresh()
    _write(buffers, batch, table, num_tokens, padded_seqs, padded_tokens)
    batch.require_fresh()


def _padded(name: str, value: object, least: i64, what: str) -> i64:
    if value is None:
        return least
    number = i64(require_int(name, value, 0, MOST_PADDING))
    if number < least:
        raise InvalidArgument(f"{name} is {number}; the step has {least} {what}")
    return number


def _require_room(buffers: StepBuffers, batch: Batch, table: BlockTable, num_seqs: i64, num_tokens: i64) -> None:
    for column in (buffers._slot_mapping, buffers._input_ids, buffers._positions):
        if column is not None:
            column.require(num_tokens, "this step")
    if buffers._seq_lens is not None:
        buffers._seq_lens.require(num_seqs, "this step")
    if buffers._query_start_loc is not None:
        buffers._query_start_loc.require(num_seqs + 1, "this step")
    if buffers._block_tables is not None:
        buffers._block_tables.require(table, batch.rows, num_seqs)


def _lay_out_tokens(buffers: StepBuffers, batch: Batch, table: BlockTable, slots: vec[i64], num_tokens: i64) -> None:
    column = buffers._slot_mapping
    if column is not None:
        items = column.room(column.length)
        if num_tokens > 0 and len(slots) == 0:
            table.map_slots(batch.rows, batch.starts, batch.scheduled, items)
        else:
            for index in range(num_tokens):
                items[index] = slots[index]
        if column.is_narrow:
            column.require_narrow(num_tokens)
    if buffers._positions is not None:
        batch.write_positions(buffers._positions.room(buffers._positions.length))
    if buffers._input_ids is not None:
        ids = buffers._input_ids.room(buffers._input_ids.length)
        batch.tokens.write(batch.rows, batch.starts, batch.scheduled, slots, ids)


def _lay_out_seqs(buffers: StepBuffers, batch: Batch) -> None:
    starts = batch.starts
    scheduled = batch.scheduled
    if buffers._seq_lens is not None:
        items = buffers._seq_lens.room(buffers._seq_lens.length)
        for index in range(i64(len(starts))):
            items[index] = starts[index] + scheduled[index]
    if buffers._query_start_loc is not None:
        items = buffers._query_start_loc.room(buffers._query_start_loc.length)
        total: i64 = 0
        for index in range(i64(len(starts))):
            items[index] = total
            total += scheduled[index]
        items[i64(len(starts))] = total


def _write(
    buffers: StepBuffers, batch: Batch, table: BlockTable, num_tokens: i64, padded_seqs: i64, padded_tokens: i64
) -> None:
    num_seqs = i64(len(batch.rows))
    if buffers._slot_mapping is not None:
        buffers._slot_mapping.write(num_tokens, padded_tokens, NO_SLOT)
    if buffers._input_ids is not None:
        buffers._input_ids.write(num_tokens, padded_tokens, 0)
    if buffers._positions is not None:
        buffers._positions.write(num_tokens, padded_tokens, 0)
    if buffers._seq_lens is not None:
        buffers._seq_lens.write(num_seqs, padded_seqs, 0)
    if buffers._query_start_loc is not None:
        buffers._query_start_loc.write(num_seqs + 1, padded_seqs + 1, num_tokens)
    if buffers._block_tables is not None:
        buffers._block_tables.write(table, batch.rows, padded_seqs)
