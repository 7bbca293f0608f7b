"""Where things stand, for tests that read files of the repository or start other processes."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / "packages"
TESTING = ROOT / "testing"
#: Import names of the packages, each above those that it imports.
NAMES = (
    "blockyard_vllm",
    "blockyard_sglang",
    "blockyard_lab",
    "blockyard_serve",
    "blockyard_engine",
    "blockyard_tiers",
    "blockyard",
)


def source_of(name: str) -> Path:
    """Return the folder of a package's sources in this checkout."""
    return PACKAGES / name.replace("_", "-") / "src" / name


PACKAGE_DIR = source_of("blockyard")
#: `PYTHONPATH` of a process that runs this checkout's packages and what their tests share.
SOURCE_PATH = os.pathsep.join(map(str, [*(source_of(name).parent for name in NAMES), TESTING]))


def child_environment(**more: str) -> dict[str, str]:
    """This process's environment, with the packages that are tested on the path, and `more`.

    They are the checkout's, or installed ones if the tests of an sdist run on a wheel. What else was on the path still
    is, after them.
    """
    found = [spec for name in NAMES if (spec := importlib.util.find_spec(name)) is not None]
    folders = [str(Path(spec.origin).parents[1]) for spec in found if spec.origin is not None]
    path = [*dict.fromkeys(folders), str(TESTING), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **more}
