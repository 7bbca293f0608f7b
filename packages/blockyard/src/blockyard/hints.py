"""What the calls take, for type checkers. At run time every argument is checked, and refused as `InvalidArgument`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from .keys import ExtraKey


class Tensor(Protocol):
    """It is a torch tensor, or like one."""

    def data_ptr(self) -> int:
        """Return where its items are."""
        raise NotImplementedError

    def tolist(self) -> Any:
        """Return its items as Python numbers."""
        raise NotImplementedError


#: One integer: Python's or numpy's.
Integer: TypeAlias = SupportsIndex
#: One number; numpy's float64 is a float.
Number: TypeAlias = float | np.integer[Any] | np.floating[Any]
#: Integers (n,): a list, an array of integers, a tensor, an `array.array`.
Integers: TypeAlias = Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]] | Tensor
#: Integers (n,), or one.
OneOrMore: TypeAlias = SupportsIndex | Integers
#: Tokens to append: (B,), (B, k) with -1 for none, rows of different lengths, or one for all.
NextTokens: TypeAlias = OneOrMore | Sequence[Sequence[SupportsIndex]]
#: See `blockyard.keys`.
ExtraKeys: TypeAlias = tuple[ExtraKey, ...] | list[ExtraKey]
#: A policy's name, or what makes one from num_blocks: a class, a function.
Policy: TypeAlias = str | Callable[[int], Any]
