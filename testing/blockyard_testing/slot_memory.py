"""The memory of the small engines around the adapters: nano-vllm's, mini-sglang's, SGLang's and transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MODULUS = 2**61 - 1


def chained(number: int, token: int) -> int:
    """What stands for a token after what `number` stands for."""
    return (number * 1_000_003 + token + 7) % _MODULUS


class SlotMemory:
    """Each slot holds a number for a token and all tokens before it, as keys and values depend on both.

    slots: where the numbers are kept; a dict where None is given.
    """

    def __init__(self, slots: Any = None) -> None:
        self.slots = {} if slots is None else slots

    def compute(self, who: str, tokens: Sequence[int], places: Sequence[int], first: int, root: int = 1) -> int:
        """Write the tokens from the `first` on to their places, then read all of them; the last one's number.

        root: what stands before the first token. Raises `AssertionError` where a slot holds something else.
        """
        numbers, number = [], root
        for token in tokens:
            number = chained(number, token)
            numbers.append(number)
        for position in range(first, len(numbers)):
            self.slots[int(places[position])] = numbers[position]
        for position, expected in enumerate(numbers):
            found = self.slots[int(places[position])]
            assert found == expected, f"position {position} of {who} holds something else"
        return number
