"""Mooncake's traces: JSONL with the ids of blocks of 512 tokens, each id standing for a block under its prefix.

Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025. Our own traces are the same with two more
fields: `hash_block_size`, where it is not 512, and `session`.
"""

from __future__ import annotations

from . import fields
from .lines import Line, json_object
from .problems import LineProblem, shown
from .reading import Row

DEFAULT_BLOCK_SIZE = 512


class Mooncake:
    """timestamp (ms), input_length, output_length (tokens), hash_ids."""

    name = "mooncake"
    units_a_second = 1000

    def __init__(self, hash_block_size: int = DEFAULT_BLOCK_SIZE) -> None:
        self.hash_block_size = hash_block_size

    def parser(self) -> Mooncake:
        """Lines do not depend on one another, so this is its own parser."""
        return self

    def row(self, line: Line) -> Row:
        """The request on a line. Raises `LineProblem`."""
        found = json_object(line)
        timestamp = fields.timestamp("timestamp", fields.required(found, "timestamp"))
        prompt = fields.prompt_length("input_length", fields.required(found, "input_length"))
        output = fields.output_length("output_length", fields.required(found, "output_length"))
        block_size = found.get("hash_block_size", DEFAULT_BLOCK_SIZE)
        if type(block_size) is not int or block_size != self.hash_block_size:
            text = f"hash_block_size is {shown(block_size)}; the trace began with {self.hash_block_size}"
            raise LineProblem("hash_block_size changes", text)
        ids = fields.hash_ids(fields.required(found, "hash_ids"), prompt, block_size)
        session = fields.session("session", found.get("session", ""))
        return Row(timestamp, prompt, output, fields.different(ids), None, session)
