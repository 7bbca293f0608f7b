"""The names of the indices, each with its sentinel beside it.

All are 64-bit integers at run time; mypy keeps them apart in signatures that cross a file.
"""

from typing import Final, NewType

from mypy_extensions import i64

#: A block's fixed address in the KV tensors, 1 to num_blocks - 1. Id 0 is the null block.
BlockId = NewType("BlockId", i64)
NULL_BLOCK: Final[i64] = 0

#: A running sequence's row in the block table, 0 to max_num_seqs - 1.
Row = NewType("Row", i64)
NO_ROW: Final[i64] = -1

#: What a caller holds for a sequence: serial * ROW_SPAN + row. A serial is never used twice, so a handle
#: that outlives its sequence is recognised.
SequenceId = NewType("SequenceId", i64)
ROW_SPAN: Final[i64] = 1048576

#: The identity of a distinct content under a distinct prefix. Never used twice; duplicates share one.
ContentId = NewType("ContentId", i64)
NO_CONTENT: Final[i64] = 0
