"""The list of compiled sources, and the digest that detects a stale extension.

`setup.py` imports this file by path before the package exists, so it imports nothing of the package.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

#: Folders that are compiled as a whole.
COMPILED_ROOMS = ("core", "events/tables")
#: Other modules whose constants and formulas hot code uses.
COMPILED_GROUND = ("ids.py", "windows.py")
BUILD_RECORD = "_build_record.py"
#: Options for mypyc's mypy run. The extras are not installed where wheels are built, so errors in interpreted modules
#: that import them are ignored.
MYPY_OPTIONS = ("--follow-imports=silent",)


def compiled_sources(package: Path) -> list[Path]:
    """Return the source files that mypyc compiles, sorted. `__init__.py` files stay interpreted."""
    rooms = [path for room in COMPILED_ROOMS for path in (package / room).rglob("*.py") if path.name != "__init__.py"]
    return sorted([package / name for name in COMPILED_GROUND] + rooms)


def source_digest(package: Path) -> str:
    """Return the SHA-256 of the names and contents of the compiled sources."""
    digest = hashlib.sha256()
    for path in compiled_sources(package):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def write_build_record(package: Path, digest: str) -> None:
    """Write the digest of the compiled sources ("" for the interpreted build) into the package."""
    text = f'"""Written by setup.py: the digest of the compiled sources."""\n\nSOURCE_DIGEST = "{digest}"\n'
    (package / BUILD_RECORD).write_text(text)
