"""Types of arguments, for type checkers. At run time, arguments of other types raise `InvalidArgument`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from .keys import ExtraKey


class Tensor(Protocol):
    """A torch tensor, or an object like one."""

    def data_ptr(self) -> int:
        """Return the address of its data."""
        raise NotImplementedError

    def tolist(self) -> Any:
        """Return its items as Python numbers."""
        raise NotImplementedError


#: An integer of Python or numpy.
Integer: TypeAlias = SupportsIndex
#: A number of Python or numpy.
Number: TypeAlias = float | np.integer[Any] | np.floating[Any]
#: Integers (n,): a list, an array of integers, a tensor, an `array.array`.
Integers: TypeAlias = Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]] | Tensor
#: Integers (n,), or a single one.
OneOrMore: TypeAlias = SupportsIndex | Integers
#: Tokens to append: (B,), (B, k) padded with -1, rows of different lengths, or one token for all.
NextTokens: TypeAlias = OneOrMore | Sequence[Sequence[SupportsIndex]]
#: See `blockyard.keys`.
ExtraKeys: TypeAlias = tuple[ExtraKey, ...] | list[ExtraKey]
#: The name of a policy, or a class or function that makes one from num_blocks.
Policy: TypeAlias = str | Callable[[int], Any]
