"""Traces with ids of blocks, in JSONL: Mooncake's, of 512 tokens, and Qwen-Bailian's, of 16 and with the tree of chats.

Mooncake's ids each stand for a block under its prefix (Qin et al., "Mooncake: Trading More Storage for Less
Computation", FAST 2025). Our own traces are the same with two more fields: `hash_block_size`, where it is not 512, and
`session`.

Bailian's: Wang et al., "KVCache Cache in the Wild", USENIX ATC 2025. The data's own description says that each block's
tokens are hashed, and not whether the prefix goes into the hash. So ids are renamed under their prefix here, which
changes nothing where they already are, and keeps a repeated block of blanks from looking like a prefix where they are
not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import fields
from .lines import Line, LineProblem, json_object, shown
from .reading import TraceLine

BLOCK_SIZE = 16
#: Chats whose first ancestor is remembered; older ones are forgotten.
REMEMBERED_CHATS = 2**18
ROOT = -1


class Bailian:
    """chat_id, parent_chat_id (-1 for a root), timestamp (seconds), input_length, output_length (tokens), hash_ids."""

    name = "bailian"
    units_a_second = 1
    hash_block_size = BLOCK_SIZE

    def parser(self) -> BailianParser:
        """Return a parser that knows no chats yet."""
        return BailianParser()


class BailianParser:
    """One walk: remembers the first known ancestor of the latest `REMEMBERED_CHATS` chats."""

    def __init__(self) -> None:
        self._roots: dict[int, int] = {}

    def row(self, line: Line) -> TraceLine:
        """The request on a line; its session is the first ancestor that the walk has seen. Raises `LineProblem`."""
        found = fields.renamed(json_object(line))
        chat = fields.integer("chat_id", fields.required(found, "chat_id"), 0, 2**63)
        parent = fields.integer("parent_chat_id", fields.required(found, "parent_chat_id"), ROOT, 2**63)
        timestamp = fields.timestamp("timestamp", fields.required(found, "timestamp"))
        prompt = fields.prompt_length("input_length", fields.required(found, "input_length"))
        output = fields.output_length("output_length", fields.required(found, "output_length"))
        ids = fields.hash_ids(fields.required(found, "hash_ids"), prompt, BLOCK_SIZE)
        return TraceLine(timestamp, prompt, output, under_prefixes(ids), None, str(self._root(chat, parent)))

    def _root(self, chat: int, parent: int) -> int:
        root = chat if parent == ROOT else self._roots.get(parent, parent)
        self._roots[chat] = root
        if len(self._roots) > REMEMBERED_CHATS:
            del self._roots[next(iter(self._roots))]
        return root


def under_prefixes(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Make ids of 60 bits, equal where the ids are equal from the start up to there.

    A running sum of each id mixed with its place, mixed again: O(n), no memory between calls. Two of n different
    prefixes get the same id with a chance of about n**2 / 2**61: one in 20,000 for ten million blocks.
    """
    mixed = _mix(_mix(ids.astype(np.uint64)) + _mix(np.arange(1, len(ids) + 1, dtype=np.uint64)))
    return fields.read_only((_mix(np.cumsum(mixed, dtype=np.uint64)) >> np.uint64(4)).astype(np.int64))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix as the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a bijection, does; products wrap."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


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

    def row(self, line: Line) -> TraceLine:
        """Return the request on a line. Raises `LineProblem`."""
        found = fields.renamed(json_object(line))
        timestamp = fields.timestamp("timestamp", fields.required(found, "timestamp"))
        prompt = fields.prompt_length("input_length", fields.required(found, "input_length"))
        output = fields.output_length("output_length", fields.required(found, "output_length"))
        block_size = found.get("hash_block_size", DEFAULT_BLOCK_SIZE)
        if type(block_size) is not int or block_size != self.hash_block_size:
            text = f"hash_block_size is {shown(block_size)}; the trace began with {self.hash_block_size}"
            raise LineProblem("hash_block_size changes", text)
        ids = fields.hash_ids(fields.required(found, "hash_ids"), prompt, block_size)
        session = fields.session("session", found.get("session", ""))
        return TraceLine(timestamp, prompt, output, fields.different(ids), None, session)
