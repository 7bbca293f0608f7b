"""What `fork`, `truncate` and the swaps ask of a sequence first: that nothing of it is in flight."""

from mypy_extensions import i64

from ...errors import SequenceNotReady
from ..parts import Parts
from ..sequences.table import SequenceTable


def require_nothing_reserved(sequences: SequenceTable, row: i64, action: str) -> None:
    """Raise `SequenceNotReady` while tokens are reserved."""
    if sequences.num_reserved[row] > 0:
        raise SequenceNotReady(
            f"{action}: {sequences.name(row)} has {sequences.num_reserved[row]} reserved tokens; commit them first"
        )


def require_nothing_to_copy(sequences: SequenceTable, row: i64, action: str) -> None:
    """Raise `SequenceNotReady` while the beginning of a block is to be copied."""
    if sequences.copy_from[row]:
        raise SequenceNotReady(
            f"{action}: {sequences.name(row)} has the beginning of a block to copy; its next step does"
        )


def is_idle(sequences: SequenceTable, row: i64) -> bool:
    """Return whether neither of these two would raise."""
    return sequences.num_reserved[row] == 0 and not sequences.copy_from[row]


def require_settled(parts: Parts, row: i64, action: str) -> None:
    """Both, and the same for blocks to load, published blocks that are not computed, and a prefix to wait for."""
    sequences = parts.sequences
    require_nothing_reserved(sequences, row, action)
    num_loads = parts.store.num_loads(row) if sequences.is_swapped[row] == 0 else i64(0)
    if num_loads > 0:
        raise SequenceNotReady(
            f"{action}: {sequences.name(row)} has {num_loads} blocks to bring back from the CPU; its next step does"
        )
    require_nothing_to_copy(sequences, row, action)
    promised = sequences.num_published[row] * parts.block_size
    if promised > sequences.num_computed[row] or sequences.is_waiting(row):
        raise SequenceNotReady(
            f"{action}: {sequences.name(row)} has computed {sequences.num_computed[row]} of its prompt; "
            f"{max(promised, sequences.num_computed[row] + 1)} tokens are needed"
        )
