"""Shared by the public classes of the core: fast reads of arguments, and errors for copies and subclasses."""

from mypy_extensions import i64

from ..arguments import require_bool, require_int, require_str


def read_int(name: str, value: object, low: i64, high: i64) -> i64:
    """Return `value` as `require_int` does. A plain integer is read without a call of interpreted code."""
    if type(value) is int:
        number: int = value
        if int(low) <= number <= int(high):
            return number
    return require_int(name, value, int(low), int(high))


def read_str(name: str, value: object) -> str:
    """Return `value` as `require_str` does. A plain string is read without a call of interpreted code."""
    if type(value) is str:
        return value
    return require_str(name, value)


def read_bool(name: str, value: object) -> bool:
    """Return `value` as `require_bool` does. A bool is read without a call of interpreted code."""
    if isinstance(value, bool):
        return value
    return require_bool(name, value)


def refuse_copy(what: str, instead: str) -> TypeError:
    """Return the error for `copy.copy` and `copy.deepcopy`."""
    return TypeError(f"{what} cannot be copied, because two of it would own the same blocks; {instead}")


def refuse_subclass(what: str) -> TypeError:
    """Return the error for a class statement."""
    return TypeError(f"{what} is compiled and cannot be subclassed; hold one and pass its calls on")


def refuse_pickle(what: str, instead: str) -> TypeError:
    """Return the error for `pickle`."""
    return TypeError(f"{what} cannot be pickled, because its blocks are those of this process; {instead}")
