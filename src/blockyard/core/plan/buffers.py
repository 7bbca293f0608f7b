"""The caller's own arrays for a step's inputs, which `plan.fill` writes."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import InvalidArgument
from ..gate import Gate
from .caller_arrays import Column
from .table_target import TableTarget


class StepBuffers:
    """Arrays that live as long as the engine: pinned memory, or the static inputs of CUDA graphs. All are optional.

    slot_mapping, input_ids, positions: (most tokens of a step,). seq_lens: (most sequences,). query_start_loc: (most
    sequences + 1,). block_tables: (most sequences, most blocks of one). Each is int32 or int64, contiguous and
    writable: a numpy array, a CPU tensor, or anything with a buffer; it is held and written, never copied.

    `block_tables` is written where it has changed since the last `fill`, so write it nowhere else; if you did, say
    `forget()`. Two sets of buffers that take turns are fine: each knows what stands in its own.

    Raises `InvalidArgument`, which names the array, for any other array, and for two that overlap.
    """

    def __init__(
        self,
        slot_mapping: object = None,
        block_tables: object = None,
        seq_lens: object = None,
        query_start_loc: object = None,
        input_ids: object = None,
        positions: object = None,
    ) -> None:
        self._slot_mapping = _column("slot_mapping", slot_mapping)
        self._block_tables = None if block_tables is None else TableTarget(block_tables)
        self._seq_lens = _column("seq_lens", seq_lens)
        self._query_start_loc = _column("query_start_loc", query_start_loc)
        self._input_ids = _column("input_ids", input_ids)
        self._positions = _column("positions", positions)
        self._require_apart()
        self._gate = Gate()

    def forget(self) -> None:
        """Let the next `fill` write all of `block_tables`: something else wrote into it."""
        if self._block_tables is not None:
            self._block_tables.forget()

    def _columns(self) -> list[Column]:
        columns = [self._slot_mapping, self._seq_lens, self._query_start_loc, self._input_ids, self._positions]
        return [column for column in columns if column is not None]

    def _require_apart(self) -> None:
        names = [column.name for column in self._columns()]
        arrays: list[npt.NDArray[Any]] = [column.array for column in self._columns()]
        if self._block_tables is not None:
            names.append("block_tables")
            arrays.append(self._block_tables.array)
        for index in range(len(names)):
            for other in range(index):
                if np.may_share_memory(arrays[index], arrays[other]):
                    raise InvalidArgument(f"{names[index]} overlaps {names[other]}; each needs memory of its own")


def _column(name: str, value: object) -> Column | None:
    return None if value is None else Column(name, value)
