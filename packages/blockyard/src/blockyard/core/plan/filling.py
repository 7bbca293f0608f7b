"""Writes a step's inputs to the caller's arrays."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ...arguments import require_int, shown
from ...errors import InvalidArgument
from ..sequences.block_table import BlockTable
from .batch import Batch
from .buffers import StepBuffers
from .caller_arrays import FilledStep

#: More than any array has room for.
MOST_PADDING: Final = 2**40


def fill_buffers(
    given: object, batch: Batch, table: BlockTable, slots: vec[i64], pad_to: object, pad_tokens_to: object
) -> None:
    """Write a step to the buffers `given`, as `StepPlan.fill` describes.

    `slots` has the slots of all tokens; it is empty if they have to be computed.
    """
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
    num_tokens = i64(len(slots)) if len(slots) > 0 else batch.num_tokens()
    padded_seqs = _padded("pad_to", pad_to, num_seqs, "sequences")
    least = padded_seqs if pad_to is not None and pad_tokens_to is None else i64(0)
    padded_tokens = max(_padded("pad_tokens_to", pad_tokens_to, num_tokens, "tokens"), least)
    batch.require_fresh()
    step = FilledStep(batch, table, slots, num_tokens, padded_seqs, padded_tokens)
    for target in buffers.targets:
        target.require(step)
    for target in buffers.targets:
        target.lay_out(step)
    # Making room can run a finaliser that frees a sequence of this batch.
    batch.require_fresh()
    for target in buffers.targets:
        target.write(step)
    batch.require_fresh()


def _padded(name: str, value: object, least: i64, what: str) -> i64:
    if value is None:
        return least
    number = i64(require_int(name, value, 0, MOST_PADDING))
    if number < least:
        raise InvalidArgument(f"{name} is {number}; the step has {least} {what}")
    return number
