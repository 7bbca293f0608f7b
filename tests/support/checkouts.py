"""Sources of other engines, imported from a checkout without what their packages import on the way (kernels, GPUs)."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest


def checkout(variable: str, inside: str) -> Path:
    """The folder of a package within the checkout that an environment variable names; skips the test without one."""
    named = os.environ.get(variable)
    if not named:
        pytest.skip(f"{variable} names no checkout")
    folder = Path(named) / inside
    assert folder.is_dir(), f"{variable} is {named}; it has no {inside}"
    return folder


def import_from(package: Path, *names: str) -> list[ModuleType]:
    """Modules of a package, whose own `__init__` files are not run."""
    for name in {package.name, *(f"{package.name}.{name.rpartition('.')[0]}" for name in names)}:
        bare = ModuleType(name)
        bare.__path__ = [str(package.joinpath(*name.split(".")[1:]))]
        sys.modules.setdefault(name, bare)
    return [importlib.import_module(f"{package.name}.{name}") for name in names]
