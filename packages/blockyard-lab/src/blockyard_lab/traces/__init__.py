"""Where requests come from: files of production, and generators.

Read it in this order:

    lines                      bytes of a file, decompressed; numbered lines of bounded length; what is wrong with one
    fields                     values out of a line, checked
    reading                    a walk over a file: what is left out, what is corrected, what is counted
    block_ids                  formats with ids of blocks: Mooncake, Bailian
    lengths                    formats with lengths and arrivals alone: Azure, BurstGPT
    prompts                    formats with whole prompts: token ids, text
    formats                    which of them a file is
    generators                 traces that are made
    opening, writing           the ways in and out
"""

from __future__ import annotations

from .formats import FORMATS
from .generators import GENERATORS
from .opening import SHIPPED, SHIPPED_FROM, make_trace, open_trace
from .writing import write_trace

__all__ = ["FORMATS", "GENERATORS", "SHIPPED", "SHIPPED_FROM", "make_trace", "open_trace", "write_trace"]
