"""Values out of a line's fields, each checked: type and limits, never a guess."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .lines import MAX_HASH_ID, MAX_OUTPUT_TOKENS, MAX_PROMPT_TOKENS, MAX_TIMESTAMP, MAX_TOKEN_ID, LineProblem, shown

Fields = Mapping[str, Any]
Ids = TypeVar("Ids", NDArray[np.int64], NDArray[np.int32])


def required(fields: Fields, name: str) -> Any:
    """Return the value of a field that must be there."""
    try:
        return fields[name]
    except KeyError:
        # A name may hold anything, a terminal's commands too.
        found = ", ".join(key if key.isprintable() else shown(key) for key in sorted(map(str, fields))[:12])
        raise LineProblem(f"{name} missing", f"{name} is missing; the line has {found[:200] or 'no fields'}") from None


#: Names that other tools give to the same fields: vLLM's benchmarks, aiperf and Dynamo, SGLang.
_OTHER_NAMES = {
    "output_length": ("output_tokens", "output_len", "num_output_tokens", "completion_tokens"),
    "input_length": ("input_tokens", "input_len", "num_input_tokens", "prompt_tokens", "prompt_len"),
    "session": ("session_id", "conversation_id"),
}
#: Fields that say when a request arrives in a way that a trace of timestamps cannot keep.
_RELATIVE_TIMES = ("delay", "delays", "delay_ms", "think_time", "arrival_time", "arrived_at", "start_time")


def renamed(fields: Fields) -> Fields:
    """Return the fields of a JSON line under the names that are read here.

    Raises `LineProblem` for a field that is there under two names with two values, and for a time that is none of
    `timestamp`: leaving such a field out would make another trace of it.
    """
    for name in _RELATIVE_TIMES:
        if fields.get(name):
            text = f"{name} is {shown(fields[name])}; only timestamp is read: give each request the time of its arrival"
            raise LineProblem(f"{name} is not read", text)
    found = dict(fields)
    for name, others in _OTHER_NAMES.items():
        for other in others:
            value = found.pop(other, None)
            if value is None:
                continue
            if found.get(name, value) != value:
                text = f"{other} is {shown(value)}, and {name} is {shown(found[name])}; they are one field"
                raise LineProblem(f"{other} and {name} differ", text)
            found[name] = value
    return found


def integer(name: str, value: object, low: int, high: int) -> int:
    """Return an integer within limits. A bool, a float and a text of digits are none."""
    if type(value) is not int:
        raise LineProblem(f"{name} not an integer", f"{name} is {shown(value)}; it must be an integer")
    if not low <= value <= high:
        raise LineProblem(f"{name} out of range", f"{name} is {shown(value)}; it must be from {low} to {high}")
    return value


def prompt_length(name: str, value: object) -> int:
    """Return the tokens of a prompt: at least 1."""
    return integer(name, value, 1, MAX_PROMPT_TOKENS)


def output_length(name: str, value: object) -> int:
    """Return the tokens of an output, 0 for a request that failed or of which nothing is known."""
    return integer(name, value, 0, MAX_OUTPUT_TOKENS)


def timestamp(name: str, value: object) -> float:
    """Return a finite number, in the format's unit."""
    if type(value) not in (int, float):
        raise LineProblem(f"{name} not a number", f"{name} is {shown(value)}; it must be a number")
    if not abs(value) <= MAX_TIMESTAMP:  # type: ignore[arg-type]  # NaN compares false, so it is refused too
        raise LineProblem(f"{name} out of range", f"{name} is {shown(value)}; it must be from -2**53 to 2**53")
    return value  # type: ignore[return-value]


def _integers(name: str, value: object, high: int) -> list[int]:
    if type(value) is not list:
        raise LineProblem(f"{name} not a list", f"{name} is {shown(value)}; it must be a list of integers")
    if not set(map(type, value)) <= {int}:
        wrong = next(item for item in value if type(item) is not int)
        raise LineProblem(f"{name} not integers", f"{name} holds {shown(wrong)}; it must hold integers only")
    if value and not (min(value) >= 0 and max(value) <= high):
        wrong = next(item for item in value if not 0 <= item <= high)
        raise LineProblem(f"{name} out of range", f"{name} holds {shown(wrong)}; ids must be from 0 to {high}")
    return value


def hash_ids(value: object, num_prompt_tokens: int, block_size: int) -> NDArray[np.int64]:
    """Return one id for each block that the prompt begins: ceil(num_prompt_tokens / block_size)."""
    ids = _integers("hash_ids", value, MAX_HASH_ID)
    expected = -(-num_prompt_tokens // block_size)
    if len(ids) != expected:
        raise LineProblem(
            "hash_ids do not match input_length",
            f"hash_ids has {len(ids)} ids; input_length {num_prompt_tokens} takes {expected} of {block_size} tokens",
        )
    return read_only(np.array(ids, dtype=np.int64))


def different(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ids, if none stands twice: an id names a block under its prefix, which no prompt can hold twice."""
    if len(set(ids.tolist())) != len(ids):
        values, counts = np.unique(ids, return_counts=True)
        twice = int(values[np.argmax(counts > 1)])
        raise LineProblem("hash_ids repeat", f"hash_ids holds {twice} twice; an id names a block under its prefix")
    return ids


def token_ids(name: str, value: object) -> NDArray[np.int32]:
    """Return the prompt itself, (n,) int32 with 1 <= n <= `MAX_PROMPT_TOKENS`."""
    ids = _integers(name, value, MAX_TOKEN_ID)
    prompt_length(f"the length of {name}", len(ids))
    return read_only(np.array(ids, dtype=np.int32))


def session(name: str, value: object) -> str:
    """Return a conversation's name: a text or an integer."""
    if isinstance(value, bool) or not isinstance(value, (str, int)) or len(str(value)) > 200:
        raise LineProblem(f"{name} not a name", f"{name} is {shown(value)}; it must be an integer or a short text")
    return str(value)


def digits(name: str, text: str) -> int:
    """Return the integer that a cell of CSV spells. Only digits and a sign: int() would also take 1_000."""
    if len(text) > 20 or not (text.isascii() and text.lstrip("+-").isdigit()):
        raise LineProblem(f"{name} not an integer", f"{name} is {shown(text)}; it must be an integer")
    try:
        return int(text)
    except ValueError:
        raise LineProblem(f"{name} not an integer", f"{name} is {shown(text)}; it must be an integer") from None


def decimal(name: str, text: str) -> float:
    """Return the finite number that a cell of CSV spells."""
    try:
        value = math.nan if "_" in text else float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise LineProblem(f"{name} not a number", f"{name} is {shown(text)}; it must be a number")
    return timestamp(name, value)


def read_only(array: Ids) -> Ids:
    """Return the array, read-only from now on."""
    array.flags.writeable = False
    return array
