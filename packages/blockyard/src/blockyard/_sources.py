"""Which sources are compiled, and the digest that tells a fresh extension from a stale one.

`setup.py` imports this file by path, before the package exists, so it imports nothing of the package.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

#: Folders that are compiled as a whole.
COMPILED_ROOMS = ("core", "events/tables")
#: Modules outside of them whose constants and formulas hot code uses, so they are compiled with it.
COMPILED_GROUND = ("ids.py", "windows.py")
BUILD_RECORD = "_build_record.py"
#: How mypy is asked for them. Where a wheel is built the extras are not installed, and what stays interpreted and
#: imports them is not to be reported.
MYPY_OPTIONS = ("--follow-imports=silent",)


def compiled_sources(package: Path) -> list[Path]:
    """Return every source file that goes through mypyc, sorted; `__init__.py` files stay interpreted."""
    rooms = [path for room in COMPILED_ROOMS for path in (package / room).rglob("*.py") if path.name != "__init__.py"]
    return sorted([package / name for name in COMPILED_GROUND] + rooms)


def source_digest(package: Path) -> str:
    """SHA-256 over names and contents of the compiled sources."""
    digest = hashlib.sha256()
    for path in compiled_sources(package):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def write_build_record(package: Path, digest: str) -> None:
    """Leave the digest of what was compiled ("" for the interpreted build) beside the package."""
    text = f'"""Written by setup.py: the digest of the compiled sources."""\n\nSOURCE_DIGEST = "{digest}"\n'
    (package / BUILD_RECORD).write_text(text)
