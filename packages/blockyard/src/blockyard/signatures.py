"""Checks that an installed engine has the version and the method signatures that an adapter was written for.

A contract maps each method, as `module:Class.method`, to the names of its arguments in order, with `=` after those that
have a default.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from .errors import MissingExtra

#: Most methods listed in an error.
MOST_NAMED = 3


class Engine(NamedTuple):
    """An engine that an adapter was written for.

    Attributes:
        name: name for messages.
        module: top-level module.
        versions: prefixes of the supported version numbers.
        requirement: requirement for pip.
        beside: other packages that the adapter needs.
    """

    name: str
    module: str
    versions: tuple[str, ...]
    requirement: str
    beside: str = ""

    def __str__(self) -> str:
        return f"{self.beside and self.beside + ' and '}{self.name} {' or '.join(self.versions)}"


@contextmanager
def engine_imports(engine: Engine, adapter: str, any_version: bool = False) -> Iterator[None]:
    """Import an engine's modules in the body; raise `MissingExtra` if they are missing or of an unsupported version.

    Args:
        engine: the engine.
        adapter: name of the adapter, for the message.
        any_version: whether to compare the version only if an import fails.
    """
    if not any_version:
        require_version(engine, adapter)
    try:
        yield
    except ImportError as error:
        require_version(engine, adapter)
        raise _missing(engine, adapter, str(error)) from error


def require_version(engine: Engine, adapter: str) -> None:
    """Raise `MissingExtra` if the engine is not installed, or its version is not supported.

    Development builds are accepted: their version numbers do not identify their contents, so their methods are
    compared.
    """
    try:
        module = importlib.import_module(engine.module)
    except ImportError as error:
        raise _missing(engine, adapter, str(error)) from error
    version = version_of(module)
    if version and ".dev" not in version and release_of(engine, version) is None:
        raise _missing(engine, adapter, f"{engine.name} {version} is installed")


def version_of(module: Any) -> str:
    """Return the version of an imported package; "" if unknown."""
    version = getattr(module, "__version__", None)
    if not isinstance(version, str):
        try:
            version = importlib.metadata.version(module.__name__)
        except importlib.metadata.PackageNotFoundError:
            return ""
    return version if re.match(r"\d+\.\d+", version) else ""


def release_of(engine: Engine, version: str) -> str | None:
    """Return the known release that a version belongs to: "0.32" for "0.32.1+cpu"; None if there is none."""
    return next((known for known in engine.versions if re.match(rf"{re.escape(known)}(?![0-9])", version)), None)


def _missing(engine: Engine, adapter: str, reason: str) -> MissingExtra:
    return MissingExtra(
        f"{adapter} needs {engine} in the same environment: pip install {engine.requirement} ({reason})"
    )


def arguments_of(function: Callable[..., Any]) -> str:
    """Return the names of a function's arguments, in the form of a contract."""
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(p.name + ("" if p.default is inspect.Parameter.empty else "=") for p in parameters)


def found_installed(name: str) -> str:
    """Return the arguments of an installed method; "" if it does not exist."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return "" if found is None else arguments_of(found)


def moved_methods(contract: Mapping[str, str], found: Callable[[str], str] = found_installed) -> list[str]:
    """Return a line for each method of a contract that is missing or has other arguments than it says."""
    lines = []
    for name, expected in contract.items():
        is_there = found(name)
        if is_there != expected:
            method = name.rpartition(":")[2]
            lines.append(f"{method}({is_there}); the adapter knows ({expected})" if is_there else f"{method} is gone")
    return lines


def require_methods(given: Any, contract: Mapping[str, str], adapter: str, engine: str) -> None:
    """Raise `MissingExtra` if methods of an engine's object have other arguments than the contract says.

    Args:
        given: the object that the adapter replaces, of an engine without a version number.
        contract: argument names by method.
        adapter: name of the adapter, for the message.
        engine: name of the engine, for the message.
    """
    moved = [
        f"{name}({found})"
        for name, expected in contract.items()
        if (method := getattr(type(given), name, None)) is not None and (found := arguments_of(method)) != expected
    ]
    if moved:
        raise MissingExtra(
            f"{adapter} needs {engine}; methods of the {type(given).__name__} here differ: {listed(moved)}"
        )


def listed(moved: Sequence[str]) -> str:
    """Return the first methods, and the number of further ones."""
    more = len(moved) - MOST_NAMED
    return "; ".join(moved[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
