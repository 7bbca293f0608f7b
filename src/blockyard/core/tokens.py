"""Whatever a caller calls tokens or numbers, checked and brought into the core's own form.

Tokens travel as packed words: two 32-bit tokens in one 64-bit word, the first in the low half. A block of
`block_size` tokens is `ceil(block_size / 2)` words, so that a block of 16 is hashed and compared in eight steps.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i32, i64

from ..errors import InvalidArgument
from .arrays import view_i32

MAX_TOKEN: Final = 2**31 - 1
LOW_HALF: Final[i64] = 4294967295
HIGH_HALF: Final[i64] = 4294967296


class PackedTokens:
    """The tokens of one request, in blocks; the last block is padded with zeros."""

    def __init__(self, words: vec[i64], num_tokens: i64) -> None:
        self.words = words
        self.num_tokens = num_tokens


def words_per_block(block_size: int) -> int:
    """Packed words of one block."""
    return (block_size + 1) // 2


def pack_tokens(token_ids: object, block_size: int) -> PackedTokens:
    """Check `token_ids` and pack them. O(n); an int32 array costs one or two memory copies.

    Raises `InvalidArgument` for anything but a non-empty, one-dimensional run of integers from 0 to 2**31 - 1.
    """
    tokens = token_array(token_ids)
    num_tokens = len(tokens)
    num_blocks = -(-num_tokens // block_size)
    if num_tokens < num_blocks * block_size:
        padded = np.zeros(num_blocks * block_size, dtype=np.int32)
        padded[:num_tokens] = tokens
        tokens = padded
    if block_size % 2:
        even = np.zeros((num_blocks, block_size + 1), dtype=np.int32)
        even[:, :block_size] = tokens.reshape(num_blocks, block_size)
        tokens = even.reshape(-1)
    return PackedTokens(vec[i64](tokens.view(np.int64)), num_tokens)


def token_array(token_ids: object) -> npt.NDArray[np.int32]:
    """`token_ids` as a contiguous int32 array (n,), checked; see `pack_tokens` for what is refused."""
    if isinstance(token_ids, list):
        tokens = _array_of_list(token_ids)
    else:
        tokens = _array_of_buffer(token_ids)
    if len(tokens) == 0:
        raise InvalidArgument("token_ids is empty; at least 1 token is needed")
    if tokens.min() < 0:
        _refuse_token(tokens)
    return tokens


def _array_of_list(token_ids: list[Any]) -> npt.NDArray[np.int32]:
    try:
        tokens = view_i32(vec[i32](token_ids))
        if not _holds_bool(token_ids, tokens):
            return tokens
    except (TypeError, ValueError, OverflowError):
        pass
    for index, token in enumerate(token_ids):
        if not isinstance(token, (int, np.integer)) or isinstance(token, bool):
            raise InvalidArgument(f"token_ids[{index}] is {token!r}; a token is an integer from 0 to {MAX_TOKEN}")
        if not 0 <= token <= MAX_TOKEN:
            raise InvalidArgument(f"token_ids[{index}] is {token}; a token is from 0 to {MAX_TOKEN}")
    return np.array(token_ids, dtype=np.int32)


def _holds_bool(token_ids: list[Any], tokens: npt.NDArray[np.int32]) -> bool:
    """Whether an item is True or False, which a vec takes for 1 and 0. Only items that became 0 or 1 are looked at."""
    return any(isinstance(token_ids[index], bool) for index in np.flatnonzero(tokens <= 1).tolist())


def _array_of_buffer(token_ids: object) -> npt.NDArray[np.int32]:
    array = integer_array("token_ids", token_ids)
    if array.dtype == np.int32:
        return np.ascontiguousarray(array)
    if len(array) and (array.min() < 0 or array.max() > MAX_TOKEN):
        _refuse_token(array)
    return np.ascontiguousarray(array, dtype=np.int32)


def _refuse_token(tokens: npt.NDArray[Any]) -> None:
    index = int(np.flatnonzero((tokens < 0) | (tokens > MAX_TOKEN))[0])
    raise InvalidArgument(f"token_ids[{index}] is {tokens[index]}; a token is from 0 to {MAX_TOKEN}")


class TokenTable:
    """Tokens for each sequence of a batch: `columns` items a sequence, one sequence after another."""

    def __init__(self, items: vec[i64], columns: i64) -> None:
        self.items = items
        self.columns = columns


def token_table(name: str, value: object, num_seqs: i64) -> TokenTable:
    """Integers (num_seqs,) or (num_seqs, k) as a table; None is a table without columns."""
    if value is None:
        return TokenTable(vec[i64]([]), 0)
    shape = _array(name, value).shape
    if len(shape) != 2:
        return TokenTable(int64_vector(name, value, num_seqs), 1)
    if shape[0] != num_seqs:
        raise InvalidArgument(f"{name} has shape {shape} for {num_seqs} sequences")
    return TokenTable(int64_items(name, _array(name, value).reshape(-1)), shape[1])


def _array(name: str, value: object) -> npt.NDArray[Any]:
    if isinstance(value, (str, bytes, bytearray)) or value is None:
        raise InvalidArgument(f"{name} is {type(value).__name__}; a run of integers is needed")
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        refusal = InvalidArgument(f"{name} is {type(value).__name__}, which gives no array of integers: {error}")
        refusal.__cause__ = error
        raise refusal


def integer_array(name: str, value: object) -> npt.NDArray[Any]:
    """`value` as a one-dimensional numpy array of some integer type, in native byte order."""
    array = _array(name, value)
    if array.ndim != 1:
        raise InvalidArgument(f"{name} has shape {array.shape}; one dimension is needed")
    if array.size == 0:
        return np.zeros(0, dtype=np.int32)
    if array.dtype.kind not in "iu":
        raise InvalidArgument(f"{name} has items of type {array.dtype}; integers are needed")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def int64_vector(name: str, value: object, length: i64) -> vec[i64]:
    """One integer for all, or one for each of `length` sequences, as a vec of `length` items."""
    if isinstance(value, np.integer):
        value = value.item()
    if not isinstance(value, bool) and isinstance(value, int):
        return vec[i64](np.full(length, _int64(name, value), dtype=np.int64))
    items = int64_items(name, value)
    if len(items) != length:
        raise InvalidArgument(f"{name} has {len(items)} items for {length} sequences")
    return items


def int64_items(name: str, value: object) -> vec[i64]:
    """A run of integers as a vec; an int64 array is one memory copy."""
    array = integer_array(name, value)
    if array.dtype == np.uint64 and array.max() > 2**63 - 1:
        raise InvalidArgument(f"{name} holds {array.max()}; the limit is {2**63 - 1}")
    return vec[i64](np.ascontiguousarray(array, dtype=np.int64))


def _int64(name: str, value: int) -> int:
    if not -(2**62) < value < 2**62:
        raise InvalidArgument(f"{name} is {value}; its size must stay below 2**62")
    return value


def store_token(words: vec[i64], row: i64, offset: i64, token: i64) -> None:
    """Put a token at `offset` of the packed row that starts at word `row`. An even offset clears the odd one behind."""
    position = row + (offset >> 1)
    if offset & 1 == 0:
        words[position] = token
    else:
        words[position] = (words[position] & LOW_HALF) + token * HIGH_HALF


def unpack_tokens(words: npt.NDArray[np.int64], block_size: int, num_tokens: int) -> npt.NDArray[np.int32]:
    """The first `num_tokens` tokens of packed rows of words (num_blocks, words_per_block), as int32."""
    halves = np.ascontiguousarray(words).view(np.int32).reshape(len(words), -1)
    return np.ascontiguousarray(halves[:, :block_size]).reshape(-1)[:num_tokens]
