"""Load Blockyard's `.py` files where compiled extensions lie beside them, under any package name.

Under a second name (`blockyard_interpreted`) both builds live in one process and can be compared. Under the
package's own name the whole suite runs on the sources, so that coverage can see them:

    BLOCKYARD_INTERPRETED=1 coverage run -m pytest
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

from .places import PACKAGE_DIR


class SourceOnlyFinder(MetaPathFinder):
    """Finds `name` and its submodules as source files under `folder`, never as extensions."""

    def __init__(self, name: str, folder: Path = PACKAGE_DIR) -> None:
        self.name = name
        self.folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        head, *rest = fullname.split(".")
        if head != self.name:
            return None
        base = self.folder.joinpath(*rest)
        if (base / "__init__.py").is_file():
            return _spec(fullname, base / "__init__.py", [str(base)])
        source = base.with_name(base.name + ".py")
        return _spec(fullname, source, None) if source.is_file() else None


def _spec(fullname: str, source: Path, locations: list[str] | None) -> ModuleSpec | None:
    loader = SourceFileLoader(fullname, str(source))
    return importlib.util.spec_from_file_location(fullname, source, loader=loader, submodule_search_locations=locations)


def install(name: str) -> None:
    """Put the finder first; modules already imported under `name` stay as they are."""
    if not any(isinstance(finder, SourceOnlyFinder) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, SourceOnlyFinder(name))


def load_interpreted(name: str = "blockyard_interpreted") -> ModuleType:
    """The package from its sources, beside whatever `blockyard` is."""
    install(name)
    return importlib.import_module(name)
