"""Modules in the place of packages that cannot be installed here; the folder goes on the path of another process."""

from pathlib import Path

#: The folder, for PYTHONPATH.
STAND_INS = str(Path(__file__).parent)
