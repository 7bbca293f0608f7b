"""Trace files from production, and generators of synthetic traces.

Read it in this order:

    lines                      a file's bytes, decompressed and split into lines of bounded length
    line_fields                the values of a line, checked
    trace_file                 a walk over a file, with counts of skipped lines
    block_ids                  formats with block ids: Mooncake, Bailian
    weka                       agent sessions, an archive of one JSON file each
    formats                    formats with lengths only (Azure, BurstGPT) or whole prompts; format detection
    generators                 synthetic traces
    opening, writing           `open_trace`, `make_trace`, `write_trace`
"""

from __future__ import annotations

from .formats import FORMATS
from .generators import GENERATORS
from .opening import SHIPPED, SHIPPED_FROM, make_trace, open_trace
from .writing import write_trace

__all__ = ["FORMATS", "GENERATORS", "SHIPPED", "SHIPPED_FROM", "make_trace", "open_trace", "write_trace"]
