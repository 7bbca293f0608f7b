"""Checks of single arguments. Each error has the argument's name, its value and the limit.

Public methods of compiled classes declare such arguments as `object`: a declared type would raise a bare TypeError in
the compiled build, and accept anything in the interpreted one.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
from pathlib import Path
from typing import Final

from .errors import BlockyardError, InvalidArgument

MAX_SESSION_NAME: Final = 200


def shown(value: object) -> str:
    """Return `repr(value)` for an error message, cut to 200 characters.

    Return the type instead if repr fails, as for an int of 5,000 digits.
    """
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."


def require_int(name: str, value: object, low: int, high: int) -> int:
    """Return `value` as an int if it is an integer from `low` to `high`.

    numpy's integers are accepted, bools are not.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    except (BlockyardError, MemoryError):
        raise
    except Exception as error:
        raise InvalidArgument(f"{name} is a {type(value).__name__}, whose __index__ fails: {error!r}") from error
    if number is None or isinstance(value, bool):
        raise InvalidArgument(f"{name} is {shown(value)}; it must be an integer from {low} to {high}")
    if not low <= number <= high:
        raise InvalidArgument(f"{name} is {shown(number)}; it must be from {low} to {high}")
    return number


def require_str(name: str, value: object) -> str:
    """Return `value` if it is a plain string; a subclass could run its own code when it is hashed or compared."""
    if type(value) is not str:
        needed = f", a {type(value).__name__}; it must be a plain string"
        needed = needed if isinstance(value, str) else "; it must be a string"
        raise InvalidArgument(f"{name} is {shown(value)}{needed}")
    return value


def require_session(name: str, value: object) -> str:
    """Return `value` if it is a session name: a string of 1 to 200 characters."""
    text = require_str(name, value)
    if not 1 <= len(text) <= MAX_SESSION_NAME:
        raise InvalidArgument(f"{name} has {len(text)} characters; it must have 1 to {MAX_SESSION_NAME}")
    return text


def require_unicode(name: str, text: str) -> str:
    """Return `text` if it can be encoded.

    Python represents bytes that are not UTF-8, from a shell for example, as lone surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = ascii(text[error.start])
        raise InvalidArgument(f"{name} holds {found} at position {error.start}; it must be valid Unicode") from None
    return text


def printable(text: str) -> str:
    """Return `text` with escapes for characters that cannot be encoded (`require_unicode`)."""
    return text.encode("utf-8", "backslashreplace").decode()


def require_path(name: str, value: object) -> Path:
    """Return `value` as a path: a string or an object with `__fspath__`, without a NUL."""
    try:
        found = os.fspath(value)  # type: ignore[call-overload]
        if isinstance(found, str) and b"\0" not in os.fsencode(found):
            return Path(found)
    except Exception:  # no path, or the caller's own __fspath__ fails
        pass
    raise InvalidArgument(f"{name} is {shown(value)}; it must be the path of a file")


def require_bool(name: str, value: object) -> bool:
    """Return `value` if it is True or False."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} is {shown(value)}; it must be True or False")
    return value


def require_number(name: str, value: object) -> float:
    """Return `value` as a float if it is a finite number. numpy's numbers are accepted, bools are not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidArgument(f"{name} is {shown(value)}; it must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidArgument(f"{name} is {shown(value)}; it must be finite")
    return number


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
