"""Formats with block ids, in JSONL: Mooncake's (512 tokens) and Qwen-Bailian's (16 tokens, with a tree of chats).

Each of Mooncake's ids names a block together with its prefix (Qin et al., "Mooncake: Trading More Storage for Less
Computation", FAST 2025). Blockyard's own traces add two optional fields: `hash_block_size`, if it is not 512, and
`session`.

Bailian's format is from Wang et al., "KVCache Cache in the Wild", USENIX ATC 2025. Its description says that each
block's tokens are hashed, but not whether the hash includes the prefix. The reader therefore renames ids so that they
include it. This changes nothing if they already did; otherwise it stops a repeated block (of blanks, say) from looking
like a shared prefix.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..references import mix_bits
from . import line_fields as fields
from .lines import Line, LineProblem, parse_json_object, preview
from .trace_file import TraceLine

BLOCK_SIZE = 16
#: Chats whose root is remembered; the oldest is forgotten first.
REMEMBERED_CHATS = 2**18
ROOT = -1


class Bailian:
    """Bailian's format: chat_id, parent_chat_id (-1: a root), timestamp (s), input_length, output_length, hash_ids."""

    name = "bailian"
    units_a_second = 1
    hash_block_size = BLOCK_SIZE

    def parser(self) -> BailianParser:
        """Return a parser that knows no chats yet."""
        return BailianParser()


class BailianParser:
    """Parser of one walk. Remembers the root of each of the latest `REMEMBERED_CHATS` chats."""

    def __init__(self) -> None:
        self._roots: dict[int, int] = {}

    def row(self, line: Line) -> TraceLine:
        """Parse a line into a request. Its session is the chat's earliest ancestor seen in this walk.

        Raises:
            LineProblem: if the line holds no valid request.
        """
        found = fields.rename_fields(parse_json_object(line))
        chat = fields.integer("chat_id", fields.required(found, "chat_id"), 0, 2**63)
        parent = fields.integer("parent_chat_id", fields.required(found, "parent_chat_id"), ROOT, 2**63)
        timestamp = fields.timestamp("timestamp", fields.required(found, "timestamp"))
        prompt = fields.prompt_length("input_length", fields.required(found, "input_length"))
        output = fields.output_length("output_length", fields.required(found, "output_length"))
        ids = fields.hash_ids(fields.required(found, "hash_ids"), prompt, BLOCK_SIZE)
        root = self._roots[chat] = chat if parent == ROOT else self._roots.get(parent, parent)
        if len(self._roots) > REMEMBERED_CHATS:
            del self._roots[next(iter(self._roots))]
        return TraceLine(timestamp, prompt, output, chain_ids(ids), None, str(root))


def chain_ids(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 60-bit ids, equal only if all original ids up to that position are equal.

    Each id is mixed with its position, and the running sum is mixed again: O(n), with no memory between calls. Among n
    different prefixes, two share an id with probability of about n**2 / 2**61: one in 20,000 for ten million blocks.
    """
    mixed = mix_bits(mix_bits(ids) + mix_bits(np.arange(1, len(ids) + 1)))
    return fields.read_only((mix_bits(np.cumsum(mixed, dtype=np.uint64)) >> np.uint64(4)).astype(np.int64))


DEFAULT_BLOCK_SIZE = 512


class Mooncake:
    """Mooncake's format: timestamp (ms), input_length, output_length (tokens), hash_ids."""

    name = "mooncake"
    units_a_second = 1000

    def __init__(self, hash_block_size: int = DEFAULT_BLOCK_SIZE) -> None:
        self.hash_block_size = hash_block_size

    def parser(self) -> Mooncake:
        """Return this object, since lines do not depend on one another."""
        return self

    def row(self, line: Line) -> TraceLine:
        """Parse a line into a request.

        Raises:
            LineProblem: if the line holds no valid request.
        """
        found = fields.rename_fields(parse_json_object(line))
        timestamp = fields.timestamp("timestamp", fields.required(found, "timestamp"))
        prompt = fields.prompt_length("input_length", fields.required(found, "input_length"))
        output = fields.output_length("output_length", fields.required(found, "output_length"))
        block_size = found.get("hash_block_size", DEFAULT_BLOCK_SIZE)
        if type(block_size) is not int or block_size != self.hash_block_size:
            text = f"hash_block_size is {preview(block_size)}; it must be {self.hash_block_size}, as on the first line"
            raise LineProblem("hash_block_size changes", text)
        ids = fields.hash_ids(fields.required(found, "hash_ids"), prompt, block_size)
        session = fields.session("session", found.get("session", ""))
        return TraceLine(timestamp, prompt, output, fields.require_distinct(ids), None, session)
