"""Checks callers' tokens and numbers, and converts them to packed tokens and vecs.

Packed tokens are two 32-bit tokens per 64-bit word, the first in the low half. A block of `block_size` tokens is
`ceil(block_size / 2)` words, so a block of 16 is hashed and compared in eight steps.

Reading an argument may run foreign code (`__index__`, `__array__`), which may call the cache or let other threads run.
So every call copies all of its arguments before it reads any state.
"""

from collections.abc import Sequence
from operator import index as index_of
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i32, i64

from ..arguments import shown
from ..errors import BlockyardError, InvalidArgument
from .arrays import filled_i64, grown_i64, view_i64, zeros_i64

MAX_TOKEN: Final = 2**31 - 1
INT32: Final = np.dtype(np.int32)
INT64: Final = np.dtype(np.int64)
#: Looked up once; numpy has one object per item type.
ARRAY: Final[Any] = np.ndarray
LOW_HALF: Final[i64] = 4294967295
HIGH_HALF: Final[i64] = 4294967296
TOKEN_BITS: Final = 31
LAST_TOKEN: Final[i64] = MAX_TOKEN
#: Replaces every token below 0 in packed tokens; equal to no real token.
PLACEHOLDER: Final[i64] = -1

#: Arrays of up to this many tokens are packed token by token; longer ones are copied in memory.
FEW_TOKENS: Final = 256


_NO_WORDS: Final = zeros_i64(0)


class PackedTokens:
    """The tokens of one request, in blocks; the last block is padded with zeros.

    Attributes:
        words: the packed tokens.
        num_tokens: number of tokens.
        placeholders: tokens below 0 by position, which are stored as PLACEHOLDER; None if there are none.
        is_checked: False if tokens below 0 were not searched for; any are then stored unchanged.
    """

    def __init__(
        self,
        words: vec[i64],
        num_tokens: i64,
        placeholders: dict[int, int] | None = None,
        is_checked: bool = True,
    ) -> None:
        self.words = words
        self.num_tokens = num_tokens
        self.placeholders = placeholders
        self.is_checked = is_checked


def words_per_block(block_size: int) -> int:
    """Return the packed words of one block."""
    return (block_size + 1) // 2


def pack_tokens(
    token_ids: object, block_size: int, with_placeholders: bool = False, checks_later: bool = False
) -> PackedTokens:
    """Check `token_ids` and pack them. O(n); a long int32 array takes two or three memory copies.

    Args:
        token_ids: the tokens.
        block_size: tokens per block.
        with_placeholders: True to accept integers below 0.
        checks_later: True to pack a long int32 array unchecked, for a later `first_below_zero`.

    Raises:
        InvalidArgument: not a non-empty, one-dimensional sequence of integers from 0 to 2**31 - 1.
    """
    if isinstance(token_ids, (list, tuple)):
        if isinstance(token_ids, list):
            words = _pack_plain(token_ids, block_size)
            if len(words) > 0:
                return PackedTokens(words, len(token_ids))
        # A copy, because an object with __index__ may run code that changes the list.
        return _pack_list(list(token_ids), block_size, with_placeholders)
    array = integer_array("token_ids", token_ids)
    if len(array) == 0:
        _refuse_empty()
    if array.dtype != INT32:
        tokens = vec[i64](np.ascontiguousarray(array, dtype=np.int64))
    elif len(array) > FEW_TOKENS:
        return _pack_as_it_lies(array, block_size, with_placeholders, checks_later)
    else:
        given = vec[i32](array)
        if block_size % 2 == 0:
            words = _pack_few(given, block_size)
            if len(words) > 0:
                return PackedTokens(words, len(array))
        tokens = widened(given)
    placeholders: dict[int, int] | None = None
    if not are_tokens(tokens):
        placeholders = _placeholders(array, with_placeholders)
        tokens = vec[i64](np.maximum(np.asarray(array, dtype=np.int64), int(PLACEHOLDER)))
    return PackedTokens(pack_items(tokens, block_size), len(array), placeholders)


def _pack_few(tokens: vec[i32], block_size: i64) -> vec[i64]:
    """Return the packed tokens in blocks of even size, two tokens per step; empty if a token is below 0. O(tokens)."""
    num_tokens = i64(len(tokens))
    words = zeros_i64(int((num_tokens + block_size - 1) // block_size * (block_size >> 1)))
    lowest: i64 = 0
    for place in range(num_tokens >> 1):
        low = i64(tokens[2 * place])
        high = i64(tokens[2 * place + 1])
        lowest |= low | high
        words[place] = low + high * HIGH_HALF
    if num_tokens & 1 == 1:
        low = i64(tokens[num_tokens - 1])
        lowest |= low
        words[num_tokens >> 1] = low
    return words if lowest >= 0 else _NO_WORDS


def _placeholders(tokens: npt.NDArray[Any], with_placeholders: bool) -> dict[int, int]:
    """Return the tokens below 0 by position. Raises `InvalidArgument` for an invalid token."""
    if not with_placeholders or bool((tokens > MAX_TOKEN).any()):
        _refuse_token(tokens, with_placeholders)
    return {int(index): int(tokens[index]) for index in np.flatnonzero(tokens < 0)}


def _pack_list(token_ids: list[Any], block_size: int, with_placeholders: bool) -> PackedTokens:
    num_tokens = len(token_ids)
    if num_tokens == 0:
        _refuse_empty()
    placeholders: dict[int, int] | None = None
    tokens = zeros_i64(num_tokens)
    for index in range(i64(num_tokens)):
        item = token_ids[index]
        if isinstance(item, bool) or not isinstance(item, int):
            item = _integer(item, index)
        number: int = item
        if number < 0 or number > MAX_TOKEN:
            if number > 0 or not with_placeholders:
                raise InvalidArgument(f"token_ids[{index}] is {shown(number)}; a token is from 0 to {MAX_TOKEN}")
            if placeholders is None:
                placeholders = {}
            placeholders[int(index)] = number
            number = int(PLACEHOLDER)
        tokens[index] = number
    return PackedTokens(pack_items(tokens, block_size), num_tokens, placeholders)


def _pack_plain(token_ids: list[Any], block_size: i64) -> vec[i64]:
    """Return a list's packed tokens in one pass, empty if it has anything but plain valid tokens. O(tokens).

    No foreign code runs.
    """
    num_tokens = i64(len(token_ids))
    words = zeros_i64(int((num_tokens + block_size - 1) // block_size * ((block_size + 1) >> 1)))
    position: i64 = 0
    offset: i64 = 0
    for index in range(num_tokens):
        item = token_ids[index]
        if type(item) is not int:
            return _NO_WORDS
        number: int = item
        if number < 0 or number > MAX_TOKEN:
            return _NO_WORDS
        token = i64(number)
        if offset & 1 == 0:
            words[position] = token
        else:
            words[position] += token * HIGH_HALF
            position += 1
        offset += 1
        if offset == block_size:
            position += offset & 1
            offset = 0
    return words


def _integer(item: object, index: i64) -> int:
    """Return an item that is no plain integer as one if it is an integer of numpy. Bools are rejected."""
    if not isinstance(item, np.integer):
        raise InvalidArgument(f"token_ids[{index}] is {shown(item)}; a token is an integer from 0 to {MAX_TOKEN}")
    return plain_int(f"token_ids[{index}]", item)


def widened(items: vec[i32]) -> vec[i64]:
    """Return the numbers in 64 bits. O(items)."""
    wide = zeros_i64(len(items))
    for index in range(i64(len(items))):
        wide[index] = i64(items[index])
    return wide


def are_tokens(items: vec[i64]) -> bool:
    """Return whether all items are from 0 to 2**31 - 1. O(items)."""
    wrong: i64 = 0
    for index in range(i64(len(items))):
        wrong |= items[index] >> TOKEN_BITS
    return wrong == 0


def pack_items(tokens: vec[i64], block_size: i64) -> vec[i64]:
    """Return the packed words of tokens that are given one per item. O(tokens)."""
    num_blocks = (i64(len(tokens)) + block_size - 1) // block_size
    words = zeros_i64(int(num_blocks * ((block_size + 1) >> 1)))
    position: i64 = 0
    offset: i64 = 0
    for index in range(i64(len(tokens))):
        token = tokens[index]
        if offset & 1 == 0:
            words[position] = token & LOW_HALF
        else:
            words[position] = words[position] + token * HIGH_HALF
            position += 1
        offset += 1
        if offset == block_size:
            position += offset & 1
            offset = 0
    return words


def _pack_as_it_lies(
    tokens: npt.NDArray[np.int32], block_size: int, with_placeholders: bool, checks_later: bool
) -> PackedTokens:
    """Pack a long int32 array, whose memory equals the packed words if blocks are even."""
    given = tokens
    num_tokens = len(tokens)
    num_blocks = -(-num_tokens // block_size)
    if num_tokens < num_blocks * block_size or not tokens.flags.c_contiguous:
        padded = np.empty(num_blocks * block_size, dtype=np.int32)
        padded[:num_tokens] = tokens
        padded[num_tokens:] = 0
        tokens = padded
    placeholders: dict[int, int] | None = None
    is_later = checks_later and block_size % 2 == 0
    if not is_later and np.minimum.reduce(tokens) < 0:
        placeholders = _placeholders(given, with_placeholders)
        tokens = np.maximum(tokens, np.int32(PLACEHOLDER))
    if block_size % 2:
        return PackedTokens(pack_rows(tokens.reshape(num_blocks, block_size)), num_tokens, placeholders)
    return PackedTokens(vec[i64](tokens.view(np.int64)), num_tokens, placeholders, not is_later)


def first_below_zero(words: vec[i64], first: i64) -> tuple[int, int]:
    """Return the position and value of the first token below 0 from word `first` on, or (-1, 0). O(tokens).

    The blocks must have an even size.
    """
    tokens = view_i64(words)[int(first) :].view(np.int32)
    if len(tokens) == 0 or np.minimum.reduce(tokens) >= 0:
        return -1, 0
    place = int(np.argmax(tokens < 0))
    return 2 * int(first) + place, int(tokens[place])


def pack_rows(tokens: npt.NDArray[np.int32]) -> vec[i64]:
    """Return the packed words of whole blocks, int32 (num_blocks, block_size). O(tokens), memory copies."""
    num_blocks, block_size = tokens.shape
    if block_size % 2:
        even = np.zeros((num_blocks, block_size + 1), dtype=np.int32)
        even[:, :block_size] = tokens
        tokens = even
    return vec[i64](np.ascontiguousarray(tokens).reshape(-1).view(np.int64))


def _refuse_empty() -> None:
    raise InvalidArgument("token_ids is empty; at least 1 token is needed")


def _refuse_token(tokens: npt.NDArray[Any], with_placeholders: bool) -> None:
    wrong = tokens > MAX_TOKEN if with_placeholders else (tokens < 0) | (tokens > MAX_TOKEN)
    index = int(np.flatnonzero(wrong)[0])
    raise InvalidArgument(f"token_ids[{index}] is {tokens[index]}; a token is from 0 to {MAX_TOKEN}")


class TokenTable:
    """Tokens of a batch: `columns` items per sequence, sequence by sequence."""

    def __init__(self, items: vec[i64], columns: i64) -> None:
        self.items = items
        self.columns = columns


def token_table(name: str, value: object, num_seqs: i64) -> TokenTable:
    """Return integers (num_seqs,) or (num_seqs, k), or lists of any lengths, as a table. None gives no columns."""
    if value is None:
        return TokenTable(zeros_i64(0), 0)
    if is_plain_array(value) or _is_flat(value):
        return TokenTable(int64_vector(name, value, num_seqs), 1)
    if isinstance(value, (list, tuple)) and len(value) > 0 and _is_row(value[0]):
        return _table_of_rows(name, list(value), num_seqs)
    array = _array(name, value)
    if array.ndim != 2:
        return TokenTable(int64_vector(name, array, num_seqs), 1)
    if array.shape[0] != num_seqs:
        raise InvalidArgument(
            f"{name} has shape {array.shape}; it must have one row for each of the {num_seqs} sequences"
        )
    return TokenTable(int64_items(name, array.reshape(-1)), array.shape[1])


def _table_of_rows(name: str, rows: list[Any], num_seqs: i64) -> TokenTable:
    """Return a table from a list of tokens per sequence, such as accepted drafts. Shorter lists are padded with -1."""
    if i64(len(rows)) != num_seqs:
        raise InvalidArgument(f"{name} has {len(rows)} rows; it must have one for each of the {num_seqs} sequences")
    columns: i64 = 0
    tokens = zeros_i64(2 * len(rows))
    ends = zeros_i64(len(rows))
    end: i64 = 0
    for index in range(len(rows)):
        if not _is_row(rows[index]):
            raise InvalidArgument(
                f"{name}[{index}] is {shown(rows[index])}; it must be a list of tokens like the other rows"
            )
        items = int64_items(f"{name}[{index}]", rows[index])
        columns = max(columns, i64(len(items)))
        if end + i64(len(items)) > i64(len(tokens)):
            tokens = grown_i64(tokens, int(2 * (end + i64(len(items)))))
        for place in range(i64(len(items))):
            tokens[end + place] = items[place]
        end += i64(len(items))
        ends[index] = end
    table = filled_i64(-1, num_seqs * columns)
    begin: i64 = 0
    for number in range(num_seqs):
        for place in range(begin, ends[number]):
            table[number * columns + place - begin] = tokens[place]
        begin = ends[number]
    return TokenTable(table, columns)


def _is_row(item: Any) -> bool:
    """Return whether an item is a sequence of tokens rather than a token."""
    if isinstance(item, (list, tuple)):
        return True
    if isinstance(item, (int, np.integer, str, bytes, bytearray)):
        return False
    return isinstance(item, Sequence) or getattr(item, "ndim", 0) == 1


def _is_flat(value: object) -> bool:
    """Return whether a value is a number or a list of numbers."""
    if isinstance(value, (int, np.integer)):
        return True
    return isinstance(value, list) and len(value) > 0 and isinstance(value[0], int)


def _array(name: str, value: object) -> npt.NDArray[Any]:
    if type(value) is np.ndarray:
        return value
    if isinstance(value, (str, bytes, bytearray)) or value is None:
        raise InvalidArgument(f"{name} is {type(value).__name__}; it must be a sequence of integers")
    try:
        if isinstance(value, Sequence) and not isinstance(value, memoryview):
            value = _plain_list(name, value)
        return np.asarray(value)
    except Exception as error:
        if isinstance(error, (BlockyardError, MemoryError)) and not isinstance(error, ValueError):
            raise
        reason = f"{type(value).__name__}, which gives no array of integers: {error}"
        if isinstance(value, list) and len([item for item in value if _is_row(item)]) > 0:
            reason = f"{shown(value)}; integers are needed, and no lists of different lengths or beside integers"
        refusal = InvalidArgument(f"{name} is {reason}")
        refusal.__cause__ = error
        raise refusal


def _plain_list(name: str, value: Sequence[Any]) -> list[Any]:
    """Return any sequence as nested lists. Bools are rejected here because numpy takes True for 1 among integers."""
    items = list(value)
    for index in range(len(items)):
        item = items[index]
        if isinstance(item, (bool, np.bool_)) or (isinstance(item, np.ndarray) and item.dtype == np.bool_):
            raise InvalidArgument(f"{name}[{index}] is {shown(item)}; integers are needed")
        if isinstance(item, Sequence) and not isinstance(item, (str, bytes, bytearray, memoryview)):
            items[index] = _plain_list(f"{name}[{index}]", item)
    return items


def is_plain_array(value: Any) -> bool:
    """Return whether a value is a one-dimensional int32 or int64 array, as engines usually pass."""
    if type(value) is not ARRAY:
        return False
    kind = value.dtype
    return (kind is INT64 or kind is INT32) and int(value.ndim) == 1


def integer_array(name: str, value: Any) -> npt.NDArray[Any]:
    """Return `value` as a one-dimensional numpy array of an integer type, in native byte order."""
    if is_plain_array(value):
        given: npt.NDArray[Any] = value
        return given
    array = _array(name, value)
    if array.ndim == 0:
        raise InvalidArgument(f"{name} is {shown(value)}; integers are needed")
    if array.ndim != 1:
        raise InvalidArgument(f"{name} has shape {array.shape}; one dimension is needed")
    if array.size == 0:
        return np.zeros(0, dtype=np.int32)
    if array.dtype.kind not in "iu":
        raise InvalidArgument(f"{name} has items of type {array.dtype}; integers are needed")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def int64_vector(name: str, value: object, length: i64) -> vec[i64]:
    """Return one integer for all, or one for each of `length` sequences, as a vec of `length` items."""
    if type(value) is not ARRAY and not isinstance(value, bool) and isinstance(value, (int, np.integer)):
        return filled_i64(_int64(name, plain_int(name, value)), length)
    items = int64_items(name, value)
    if len(items) != length:
        raise InvalidArgument(f"{name} has {len(items)} items; it must have one for each of the {length} sequences")
    return items


def int64_items(name: str, value: object) -> vec[i64]:
    """Return integers as a new vec; an int64 array takes one memory copy."""
    if isinstance(value, list):
        numbers = list(value)
        items = zeros_i64(len(numbers))
        if _copy_plain(numbers, items):
            return items
    array = integer_array(name, value)
    if array.dtype is INT64 and array.flags.c_contiguous:
        return vec[i64](array)
    if array.dtype == np.uint64 and int(array.max()) > 2**63 - 1:
        raise InvalidArgument(f"{name} holds {array.max()}; the limit is {2**63 - 1}")
    return vec[i64](np.ascontiguousarray(array, dtype=np.int64))


def _copy_plain(values: list[Any], items: vec[i64]) -> bool:
    """Copy a list of plain integers of at most 61 bits into `items`; return False if it holds anything else."""
    for index in range(i64(len(values))):
        value = values[index]
        if isinstance(value, bool) or not isinstance(value, int):
            return False
        number: int = value
        if number < -(2**61) or number > 2**61:
            return False
        items[index] = number
    return True


def plain_int(name: str, value: object) -> int:
    """Return an integer of Python or numpy as a plain int.

    Objects that only pretend to be one (`__class__`) are rejected.
    """
    try:
        return index_of(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgument(f"{name} is {shown(value)}; an integer is needed")


def _int64(name: str, value: int) -> int:
    if not -(2**62) < value < 2**62:
        raise InvalidArgument(f"{name} is {shown(value)}; it must be above -2**62 and below 2**62")
    return value


def store_token(words: vec[i64], row: i64, offset: i64, token: i64) -> None:
    """Write a token at `offset` of the packed row that starts at word `row`.

    An even offset clears the odd one after it.
    """
    position = row + (offset >> 1)
    if offset & 1 == 0:
        words[position] = token
    else:
        words[position] = (words[position] & LOW_HALF) + token * HIGH_HALF


def unpack_tokens(words: npt.NDArray[np.int64], block_size: int, num_tokens: int) -> npt.NDArray[np.int32]:
    """Return the first `num_tokens` tokens of packed rows (num_blocks, words_per_block), as int32."""
    halves = np.ascontiguousarray(words).view(np.int32).reshape(len(words), -1)
    return np.ascontiguousarray(halves[:, :block_size]).reshape(-1)[:num_tokens]
