"""Hit-rate curves as a picture: PNG or SVG."""

from __future__ import annotations

import os

from blockyard.arguments import require_int, require_str
from blockyard.errors import MissingExtra

from ..output_file import require_output, write_whole
from .hit_rates import HitCurves

MAX_BYTES_PER_BLOCK = 2**50


def draw_curves(curves: HitCurves, path: str | os.PathLike[str], *, bytes_per_block: int = 0, model: str = "") -> None:
    """Draw hit rate against capacity, every policy a line, into a .png or .svg file.

    bytes_per_block: of a block of `curves.tokens_a_block` tokens of `model`; then the axis on top counts GiB, otherwise
    tokens. The file appears whole or not at all, and the same curves give the same bytes with the same matplotlib.
    O(policies * sizes). Raises `InvalidArgument` for another suffix or a path that cannot be written, `MissingExtra`
    where matplotlib is not installed.
    """
    found = require_output(path, (".png", ".svg"))
    require_int("bytes_per_block", bytes_per_block, 0, MAX_BYTES_PER_BLOCK)
    require_str("model", model)
    try:
        from .picture import drawn
    except ImportError as error:
        raise MissingExtra(f"drawing curves needs {error.name}: pip install 'blockyard[lab]'") from error
    write_whole(found, drawn(curves, found.suffix.lower()[1:], bytes_per_block, model))
