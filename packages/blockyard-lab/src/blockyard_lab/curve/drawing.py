"""Draws hit-rate curves as PNG or SVG."""

from __future__ import annotations

import os

from blockyard.arguments import require_int, require_str
from blockyard.errors import MissingExtra

from ..output_file import require_output, write_whole
from .curves import HitCurves

MAX_BYTES_PER_BLOCK = 2**50


def draw_curves(curves: HitCurves, path: str | os.PathLike[str], *, bytes_per_block: int = 0, model: str = "") -> None:
    """Draw hit rate against capacity, one line per policy, to a .png or .svg file.

    The file appears whole or not at all. Equal curves give equal bytes with the same matplotlib. O(policies * sizes).

    Args:
        curves: the curves to draw.
        path: the file.
        bytes_per_block: bytes of a block in `model`'s cache, for an axis in GiB; 0 for an axis in tokens.
        model: name of the model.

    Raises:
        InvalidArgument: for another suffix, or a path that cannot be written.
        MissingExtra: if matplotlib is not installed.
    """
    found = require_output(path, (".png", ".svg"))
    require_int("bytes_per_block", bytes_per_block, 0, MAX_BYTES_PER_BLOCK)
    require_str("model", model)
    try:
        from .picture import render
    except ImportError as error:
        raise MissingExtra(f"drawing curves needs {error.name}: pip install 'blockyard[lab]'") from error
    write_whole(found, render(curves, found.suffix.lower()[1:], bytes_per_block, model))
