"""Where things stand, for tests that read files of the repository or start other processes."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_DIR = ROOT / "src" / "blockyard"


def child_environment(**more: str) -> dict[str, str]:
    """This process's environment, with the package that is tested on the path, and `more`.

    That is the checkout's, or an installed one where the tests of an sdist run on a wheel. What else was on the path
    still is, behind it.
    """
    spec = importlib.util.find_spec("blockyard")
    assert spec is not None
    assert spec.origin is not None
    path = [str(Path(spec.origin).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **more}
