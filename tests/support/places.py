"""Where things stand, for tests that read files of the repository or start other processes."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_DIR = ROOT / "src" / "blockyard"


def child_environment(**more: str) -> dict[str, str]:
    """This process's environment, with the package that is tested on the path, and `more`."""
    return {**os.environ, "PYTHONPATH": str(PACKAGE_DIR.parent), **more}
