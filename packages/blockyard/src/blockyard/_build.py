"""Detection of the build: compiled or interpreted, and whether the extension matches its sources."""

from __future__ import annotations

import warnings
from pathlib import Path

from . import ids
from ._sources import source_digest

PACKAGE = Path(__file__).resolve().parent


class StaleBuildWarning(UserWarning):
    """The compiled extension does not match the sources beside it, or is incomplete."""


def compiled() -> bool:
    """Return whether the core runs as compiled code."""
    return not str(getattr(ids, "__file__", "")).endswith(".py")


def build_name() -> str:
    """Return a description of the build for people."""
    return "compiled by mypyc" if compiled() else "interpreted (slow: for debugging and coverage)"


def warn_if_stale() -> None:
    """Warn if the sources of a checkout have changed since the build, or if a part of the extension is missing.

    An installed wheel holds sources and extension of one build, so its sources are not read. Without a module's
    extension file Python silently imports the source, and the other extension files are unused.
    """
    if not compiled() and any(PACKAGE.parent.glob("blockyard__mypyc.*")) and not any(PACKAGE.glob("ids.*.so")):
        warnings.warn(
            "blockyard runs interpreted, though a part of its compiled core is here: the extensions in "
            f"{PACKAGE} are missing; copy them too, or rebuild",
            StaleBuildWarning,
            stacklevel=3,
        )
    if not compiled() or not (PACKAGE.parent.parent / "pyproject.toml").exists():
        return
    if source_digest(PACKAGE) != _built_digest():
        warnings.warn(
            "blockyard's compiled core is older than its sources; run `make test` or "
            "`python setup.py build_ext --inplace` in packages/blockyard to rebuild it",
            StaleBuildWarning,
            stacklevel=3,
        )


def _built_digest() -> str:
    try:
        from ._build_record import SOURCE_DIGEST  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return ""
    return str(SOURCE_DIGEST)
