"""Arguments that run Python code when they are read, in every possible way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np

from blockyard import StateHints

Act = Callable[[], object]


class Reads:
    """Looks like nothing: whatever is asked of it, it acts, and has no answer."""

    def __init__(self, act: Act) -> None:
        self._act = act

    def _read(self, *_: object, **__: object) -> Any:
        self._act()
        raise TypeError("no such value")

    __index__ = __int__ = __float__ = __bool__ = __len__ = __iter__ = __getitem__ = __array__ = _read
    __str__ = __format__ = __call__ = __contains__ = _read

    def __repr__(self) -> str:
        self._act()
        return "<hostile>"

    def __eq__(self, other: object) -> bool:
        self._act()
        return False

    def __hash__(self) -> int:
        self._act()
        return 1


class Number:
    """An integer by `__index__`, and a real number by `__float__`."""

    def __init__(self, act: Act, value: Any) -> None:
        self._act, self._value = act, value

    def __index__(self) -> int:
        self._act()
        return int(self._value)

    def __float__(self) -> float:
        self._act()
        return float(self._value)


class Integer(int):
    """An int of a subclass."""

    act: Act = staticmethod(lambda: None)

    def _read(self) -> Any:
        self.act()
        return int.__index__(self)

    __index__ = __int__ = _read

    def __hash__(self) -> int:
        self.act()
        return int.__hash__(self)

    def __eq__(self, other: object) -> bool:
        self.act()
        return int.__eq__(self, other)

    def __lt__(self, other: int) -> bool:
        self.act()
        return int.__lt__(self, other)

    def __le__(self, other: int) -> bool:
        self.act()
        return int.__le__(self, other)

    def __and__(self, other: int) -> int:
        self.act()
        return int.__and__(self, other)


class Float(float):
    """A float of a subclass."""

    act: Act = staticmethod(lambda: None)

    def __float__(self) -> float:
        self.act()
        return float.__add__(self, 0.0)

    def __lt__(self, other: float) -> bool:
        self.act()
        return float.__lt__(self, other)


class Text(str):
    """A string of a subclass."""

    __slots__ = ("act",)

    def __hash__(self) -> int:
        self.act()
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        self.act()
        return str.__eq__(self, other)

    def __format__(self, spec: str) -> str:
        self.act()
        return str.__format__(self, spec)


class Array:
    """An array by `__array__`."""

    def __init__(self, act: Act, values: Any) -> None:
        self._act, self._values = act, values

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        del dtype, copy
        self._act()
        return np.array(self._values)


class Sequence:
    """A sequence by `__len__` and `__getitem__` alone."""

    def __init__(self, act: Act, values: Any) -> None:
        self._act, self._values = act, values

    def __len__(self) -> int:
        self._act()
        return len(self._values)

    def __getitem__(self, index: int) -> Any:
        self._act()
        return self._values[index]


class _Acting:
    act: Act = staticmethod(lambda: None)

    def __iter__(self) -> Iterator[Any]:
        self.act()
        return super().__iter__()  # type: ignore[misc]

    def __len__(self) -> int:
        self.act()
        return super().__len__()  # type: ignore[misc]

    def __getitem__(self, index: Any) -> Any:
        self.act()
        return super().__getitem__(index)  # type: ignore[misc]


class List(_Acting, list):
    """A list of a subclass."""


class Tuple(_Acting, tuple):
    """A tuple of a subclass."""


def _made(kind: Any, act: Act, value: Any) -> Any:
    made = kind(value)
    made.act = act
    return made


def disguises(value: Any, act: Act) -> dict[str, Any]:
    """`value` in every disguise that acts when it is read, by name; the first one is no value at all."""
    found: dict[str, Any] = {"nothing": Reads(act)}
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        found |= {"a number": Number(act, value), "an array of no dimension": Array(act, value)}
        found["of a class of its own"] = _made(Integer if isinstance(value, int) else Float, act, value)
    if isinstance(value, int) and not isinstance(value, bool):
        found["an array of one"] = Array(act, [value])
    if isinstance(value, str):
        found["of a class of its own"] = _made(Text, act, value)
    if isinstance(value, (list, tuple)):
        found |= {"a list": _made(List, act, value), "a tuple": _made(Tuple, act, value)}
        found |= {"a sequence": Sequence(act, value), "a generator": _generated(act, value)}
        found["followed by nothing"] = [*value, Reads(act)]
    if isinstance(value, StateHints):
        for field in fields(value):
            given = disguises(getattr(value, field.name), act)
            found |= {f"{field.name}: {name}": replace(value, **{field.name: item}) for name, item in given.items()}
    if isinstance(value, list) and value:
        found["an array"] = Array(act, value)
        found |= {f"beginning with {name}": [item, *value[1:]] for name, item in disguises(value[0], act).items()}
    return found


def _generated(act: Act, values: Any) -> Iterator[Any]:
    for value in values:
        act()
        yield value
