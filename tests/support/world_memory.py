"""What the random program of `tests.world` remembers: what stands in each slot, and each sequence."""

from __future__ import annotations

from typing import Any

import numpy as np

NOTHING = -1


class Memory:
    """What stands in each slot of each group: (group, block) → names of its tokens."""

    def __init__(self, num_blocks: int, sizes: list[int]) -> None:
        self.blocks = [np.full((num_blocks, size), NOTHING, dtype=np.int64) for size in sizes]


class Seq:
    """What the program knows of one sequence."""

    def __init__(
        self, handle: int, tokens: list[int], keys: tuple[Any, ...], spans: tuple[Any, ...], generation: int
    ) -> None:
        self.handle = handle
        self.tokens = tokens
        self.keys = keys
        self.spans = spans
        #: Keys and values belong to the weights that were loaded when the sequence began.
        self.generation = generation
        #: Behind the shortest cut everything is text, whatever span reached over it.
        self.text_from = len(tokens)
        self.drafts: list[int] = []
        self.is_swapped = False
        #: Forks that the allocation set rows aside for.
        self.num_promised = 0
