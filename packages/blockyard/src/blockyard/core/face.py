"""What the core's public faces share: plain arguments read fast, and what is said to `copy`, `pickle` and `class`."""

from mypy_extensions import i64

from ..arguments import require_bool, require_int, require_str


def read_int(name: str, value: object, low: i64, high: i64) -> i64:
    """Return what `require_int` does; a plain integer, the common case, takes no call into interpreted code."""
    if type(value) is int:
        number: int = value
        if int(low) <= number <= int(high):
            return number
    return require_int(name, value, int(low), int(high))


def read_str(name: str, value: object) -> str:
    """Return what `require_str` does; a plain string is read the same way."""
    if type(value) is str:
        return value
    return require_str(name, value)


def read_bool(name: str, value: object) -> bool:
    """Return what `require_bool` does; the same."""
    if isinstance(value, bool):
        return value
    return require_bool(name, value)


def refuse_copy(what: str, instead: str) -> TypeError:
    """The error for `copy.copy` and `copy.deepcopy`."""
    return TypeError(f"{what} cannot be copied, because two of it would own the same blocks; {instead}")


def refuse_subclass(what: str) -> TypeError:
    """The error for a class statement."""
    return TypeError(f"{what} is compiled and cannot be subclassed; hold one and pass its calls on")


def refuse_pickle(what: str, instead: str) -> TypeError:
    """The error for `pickle`."""
    return TypeError(f"{what} cannot be pickled, because its blocks are those of this process; {instead}")
