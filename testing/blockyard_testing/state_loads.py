"""Loads for caches of states: prompts and outputs as tokens, and as the keys of their blocks."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BLOCK = 16


@dataclass(frozen=True)
class Request:
    """prompt, output: tokens. requested: where the application says that something ends."""

    prompt: list[int]
    output: list[int]
    requested: list[int]


def pattern(num_shared: int, num_unique: int, num_requests: int = 64) -> list[Request]:
    """vllm#45238: prompts that begin alike and go on alone."""
    shared = list(range(num_shared))
    return [
        Request(shared + [10_000 * (number + 1) + token for token in range(num_unique)], [9] * 16, [num_shared])
        for number in range(num_requests)
    ]


def chats(seed: int, num_requests: int) -> list[Request]:
    """Sessions with system prompts of four applications, in turns, now and then with an earlier turn edited."""
    draw = random.Random(seed)
    fresh = iter(range(1, 10**9))

    def text(least: int, most: int) -> list[int]:
        return [next(fresh) for _ in range(draw.randint(least, most))]

    systems = [text(40, 700) for _ in range(4)]
    sessions = [list(systems[draw.randrange(4)]) for _ in range(6)]
    starts = [len(session) for session in sessions]
    requests = []
    for _ in range(num_requests):
        number = draw.randrange(len(sessions))
        if draw.random() < 0.12:
            sessions[number] = list(systems[min(draw.randrange(4), draw.randrange(4))])
            starts[number] = len(sessions[number])
        elif draw.random() < 0.1:
            sessions[number] = sessions[number][: draw.randint(starts[number], len(sessions[number]))]
        prompt = sessions[number] + text(3, 150)
        output = text(1, 120)
        requests.append(Request(prompt, output, [starts[number]]))
        sessions[number] = prompt + output
    return requests


class Keys:
    """Numbers blocks by their tokens and all before them."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}

    def of(self, tokens: list[int]) -> npt.NDArray[np.int64]:
        """A number for each whole block, above 0."""
        keys = []
        parent = 0
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            step = (parent, tuple(tokens[start : start + BLOCK]))
            parent = self._numbers.setdefault(step, len(self._numbers) + 1)
            keys.append(parent)
        return np.array(keys, dtype=np.int64)
