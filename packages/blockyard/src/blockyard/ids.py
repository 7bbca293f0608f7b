"""Sentinel values of block ids, rows and content ids, and the layout of sequence handles.

All are 64-bit integers in compiled code.
"""

from typing import Final

from mypy_extensions import i64

#: A block id is a fixed address in the KV tensors, 1 to num_blocks - 1; 0 is the null block.
NULL_BLOCK: Final[i64] = 0

#: Rows of the block table are 0 to max_num_seqs - 1.
NO_ROW: Final[i64] = -1

#: A sequence's handle is serial * ROW_SPAN + row. Serials are never reused, so the handle of an ended sequence is
#: recognised.
ROW_SPAN: Final[i64] = 1048576

#: A content id identifies the tokens of a block together with its prefix. Ids are never reused; equal blocks share one.
NO_CONTENT: Final[i64] = 0
