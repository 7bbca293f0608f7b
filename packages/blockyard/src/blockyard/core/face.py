"""Fast checks of arguments of the public classes, and their errors for copies and subclasses."""

from mypy_extensions import i64

from ..arguments import require_bool, require_int, require_str


def read_int(name: str, value: object, low: i64, high: i64) -> i64:
    """Return `value` if it is an integer from `low` to `high`. Only other types than int need `require_int`."""
    if type(value) is int:
        number: int = value
        if int(low) <= number <= int(high):
            return number
    return require_int(name, value, int(low), int(high))


def read_str(name: str, value: object) -> str:
    """Return `value` if it is a string. Only other types than str need `require_str`."""
    if type(value) is str:
        return value
    return require_str(name, value)


def read_bool(name: str, value: object) -> bool:
    """Return `value` if it is a bool, with the error of `require_bool`."""
    if isinstance(value, bool):
        return value
    return require_bool(name, value)


def refuse_copy(what: str, instead: str) -> TypeError:
    """Return the error for `copy.copy` and `copy.deepcopy`."""
    return TypeError(f"{what} cannot be copied, because both copies would own the same blocks; {instead}")


def refuse_subclass(what: str) -> TypeError:
    """Return the error for defining a subclass."""
    return TypeError(f"{what} is compiled and cannot be subclassed; wrap an instance and forward the calls")


def refuse_pickle(what: str, instead: str) -> TypeError:
    """Return the error for `pickle`."""
    return TypeError(f"{what} cannot be pickled, because its blocks are those of this process; {instead}")
