"""The signatures of an installed engine's methods, compared with those that an adapter was written for.

A contract has the names of each method's arguments, in order, `=` where there is a default. A method's name is
`module:Class.method`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any


def arguments_of(function: Callable[..., Any]) -> str:
    """Return the names of its arguments, as they stand in a contract."""
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(p.name + ("" if p.default is inspect.Parameter.empty else "=") for p in parameters)


def found_installed(name: str) -> str:
    """Return the arguments of one installed method; "" where it is gone."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return "" if found is None else arguments_of(found)


def moved_methods(contract: Mapping[str, str], found: Callable[[str], str] = found_installed) -> list[str]:
    """Return what differs: a line for each method that is gone or takes other arguments."""
    lines = []
    for name, expected in contract.items():
        is_there = found(name)
        if is_there != expected:
            method = name.rpartition(":")[2]
            lines.append(f"{method}({is_there}); the adapter knows ({expected})" if is_there else f"{method} is gone")
    return lines
