"""The sentinels of the indices, and how a sequence's handle is made.

Block ids, rows and content ids are plain 64-bit integers in compiled code; each has a value that names nothing.
"""

from typing import Final

from mypy_extensions import i64

#: A block id is a fixed address in the KV tensors, 1 to num_blocks - 1; 0 is the null block.
NULL_BLOCK: Final[i64] = 0

#: A row of the block table is 0 to max_num_seqs - 1.
NO_ROW: Final[i64] = -1

#: A handle, what a caller holds for a sequence, is serial * ROW_SPAN + row. A serial is never used twice, so a handle
#: that outlives its sequence is recognised.
ROW_SPAN: Final[i64] = 1048576

#: A content id names a distinct content under a distinct prefix. None is used twice; duplicates share one.
NO_CONTENT: Final[i64] = 0
