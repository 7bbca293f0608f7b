"""Checks the values of a line's fields. A value of the wrong type or range is refused, never guessed at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .lines import MAX_HASH_ID, MAX_OUTPUT_TOKENS, MAX_PROMPT_TOKENS, MAX_TIMESTAMP, MAX_TOKEN_ID, LineProblem, preview

Fields = Mapping[str, Any]
Ids = TypeVar("Ids", NDArray[np.int64], NDArray[np.int32])


def required(fields: Fields, name: str) -> Any:
    """Return the value of field `name`.

    Raises:
        LineProblem: if the field is missing.
    """
    try:
        return fields[name]
    except KeyError:
        # A name may hold anything, even terminal control codes.
        found = ", ".join(key if key.isprintable() else preview(key) for key in sorted(map(str, fields))[:12])
        raise LineProblem(f"{name} missing", f"{name} is missing; the line has {found[:200] or 'no fields'}") from None


#: Other names of these fields, in vLLM's benchmarks, aiperf, Dynamo and SGLang.
_OTHER_NAMES = {
    "output_length": ("output_tokens", "output_len", "num_output_tokens", "completion_tokens"),
    "input_length": ("input_tokens", "input_len", "num_input_tokens", "prompt_tokens", "prompt_len"),
    "session": ("session_id", "conversation_id"),
}
#: Fields with arrival times in a form that a trace of timestamps cannot represent.
_RELATIVE_TIMES = ("delay", "delays", "delay_ms", "think_time", "arrival_time", "arrived_at", "start_time")


def rename_fields(fields: Fields) -> Fields:
    """Return the fields of a JSON line under this package's names.

    Raises:
        LineProblem: if one field appears under two names with different values, or if arrival times are given in a form
            other than `timestamp`; ignoring those would change the trace.
    """
    for name in _RELATIVE_TIMES:
        if fields.get(name):
            text = f"{name} is {preview(fields[name])}; only timestamp is read: write each arrival as a timestamp"
            raise LineProblem(f"{name} is not read", text)
    found = dict(fields)
    for name, others in _OTHER_NAMES.items():
        for other in others:
            value = found.pop(other, None)
            if value is None:
                continue
            if found.get(name, value) != value:
                text = f"{other} is {preview(value)} and {name} is {preview(found[name])}; they name the same field"
                raise LineProblem(f"{other} and {name} differ", text)
            found[name] = value
    return found


def integer(name: str, value: object, low: int, high: int) -> int:
    """Return `value` if it is an integer from `low` to `high`. Bools, floats and strings of digits are refused."""
    if type(value) is not int:
        raise LineProblem(f"{name} not an integer", f"{name} is {preview(value)}; it must be an integer")
    if not low <= value <= high:
        raise LineProblem(f"{name} out of range", f"{name} is {preview(value)}; it must be from {low} to {high}")
    return value


def prompt_length(name: str, value: object) -> int:
    """Return `value` if it is a valid number of prompt tokens, 1 or more."""
    return integer(name, value, 1, MAX_PROMPT_TOKENS)


def output_length(name: str, value: object) -> int:
    """Return `value` if it is a valid number of output tokens; 0 means a failed request or an unknown output."""
    return integer(name, value, 0, MAX_OUTPUT_TOKENS)


def timestamp(name: str, value: object) -> float:
    """Return `value` if it is a finite number within `MAX_TIMESTAMP`, in the format's unit."""
    if type(value) not in (int, float):
        raise LineProblem(f"{name} not a number", f"{name} is {preview(value)}; it must be a number")
    if not abs(value) <= MAX_TIMESTAMP:  # type: ignore[arg-type]  # NaN compares false, so it is refused too
        raise LineProblem(f"{name} out of range", f"{name} is {preview(value)}; it must be from -2**53 to 2**53")
    return value  # type: ignore[return-value]


def _integers(name: str, value: object, high: int) -> list[int]:
    if type(value) is not list:
        raise LineProblem(f"{name} not a list", f"{name} is {preview(value)}; it must be a list of integers")
    if not set(map(type, value)) <= {int}:
        wrong = next(item for item in value if type(item) is not int)
        raise LineProblem(f"{name} not integers", f"{name} holds {preview(wrong)}; it must hold integers only")
    if value and not (min(value) >= 0 and max(value) <= high):
        wrong = next(item for item in value if not 0 <= item <= high)
        raise LineProblem(f"{name} out of range", f"{name} holds {preview(wrong)}; ids must be from 0 to {high}")
    return value


def hash_ids(value: object, num_prompt_tokens: int, block_size: int) -> NDArray[np.int64]:
    """Return the prompt's block ids: ceil(num_prompt_tokens / block_size) of them."""
    ids = _integers("hash_ids", value, MAX_HASH_ID)
    expected = -(-num_prompt_tokens // block_size)
    if len(ids) != expected:
        raise LineProblem(
            "hash_ids do not match input_length",
            f"hash_ids has {len(ids)} ids; input_length {num_prompt_tokens} needs {expected} of {block_size} tokens",
        )
    return read_only(np.array(ids, dtype=np.int64))


def require_distinct(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `ids` if all differ. An id names a block together with its prefix, so no prompt holds one twice."""
    if len(set(ids.tolist())) != len(ids):
        values, counts = np.unique(ids, return_counts=True)
        twice = int(values[np.argmax(counts > 1)])
        raise LineProblem("hash_ids repeat", f"hash_ids holds {twice} twice; ids in one prompt must differ")
    return ids


def token_ids(name: str, value: object) -> NDArray[np.int32]:
    """Return the prompt's tokens, (n,) int32 with 1 <= n <= `MAX_PROMPT_TOKENS`."""
    ids = _integers(name, value, MAX_TOKEN_ID)
    prompt_length(f"the length of {name}", len(ids))
    return read_only(np.array(ids, dtype=np.int32))


def session(name: str, value: object) -> str:
    """Return the name of a session, given as a string or an integer."""
    if isinstance(value, bool) or not isinstance(value, (str, int)) or len(str(value)) > 200:
        raise LineProblem(f"{name} not a name", f"{name} is {preview(value)}; it must be an integer or a short text")
    return str(value)


def digits(name: str, text: str) -> int:
    """Return the integer in a CSV cell. Only digits and a sign are accepted; `int()` would also accept 1_000."""
    if len(text) > 20 or not (text.isascii() and text.lstrip("+-").isdigit()):
        raise LineProblem(f"{name} not an integer", f"{name} is {preview(text)}; it must be an integer")
    try:
        return int(text)
    except ValueError:
        raise LineProblem(f"{name} not an integer", f"{name} is {preview(text)}; it must be an integer") from None


def decimal(name: str, text: str) -> float:
    """Return the finite number in a CSV cell."""
    try:
        value = math.nan if "_" in text else float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise LineProblem(f"{name} not a number", f"{name} is {preview(text)}; it must be a number")
    return timestamp(name, value)


def read_only(array: Ids) -> Ids:
    """Make `array` read-only and return it."""
    array.flags.writeable = False
    return array
