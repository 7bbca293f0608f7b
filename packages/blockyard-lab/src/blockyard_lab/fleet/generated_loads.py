"""Loads generated from a seed: chats, agents, bursts and one-off prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .loads import Job, Load
from .replica import Speed

BLOCK_SIZE = 16


@dataclass(slots=True)
class _Text:
    num_tokens: int
    ids: list[int]


class _Writer:
    """Adds jobs to a load. Texts are chains of block ids."""

    def __init__(self, name: str, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        self.load = Load(name, BLOCK_SIZE, [])
        self._next = 0

    def text(self, num_tokens: int) -> _Text:
        """Return a new text, to start prompts with."""
        return self.longer(_Text(0, []), num_tokens)

    def longer(self, text: _Text, num_tokens: int) -> _Text:
        """Return the text extended by `num_tokens` new, unique tokens."""
        total = text.num_tokens + num_tokens
        num_new = total // BLOCK_SIZE - len(text.ids)
        self._next += num_new
        return _Text(total, [*text.ids, *range(self._next - num_new, self._next)])

    def ask(self, at: float, after: int, session: str, prompt: _Text, num_output: int) -> tuple[int, _Text]:
        """Add a job. Return its number, and the text of prompt and answer together."""
        computed = self.longer(prompt, num_output - 1)
        self.load.jobs.append(Job(at, after, session, prompt.num_tokens, num_output, computed.ids))
        return len(self.load.jobs) - 1, self.longer(computed, 1)

    def chat(self, session: str, begin: float, system: _Text, turns: int, output: int, think: float) -> None:
        """Add a conversation. Each turn adds 100 to 200 tokens, up to `think` seconds after the previous answer."""
        text, last = system, -1
        for turn in range(turns):
            pause = self.draw.random() * think
            text = self.longer(text, int(self.draw.integers(100, 201)))
            last, text = self.ask(pause if turn else begin + pause, last, session, text, output)


def _chats(name: str, seed: int, num_chats: int, num_systems: int, zipf: float) -> Load:
    writer = _Writer(name, seed)
    systems = [writer.text(512) for _ in range(num_systems)]
    weights = 1 / np.arange(1, num_systems + 1) ** zipf
    drawn = writer.draw.choice(num_systems, num_chats, p=weights / weights.sum())
    for chat in range(num_chats):
        system = systems[int(drawn[chat]) if zipf else chat % num_systems]
        writer.chat(f"chat-{chat}", 2 * writer.draw.random(), system, 6, 24, 0.3)
    return writer.load


def many_systems(seed: int) -> Load:
    """Return load A: 32 chats of 6 turns under 7 system prompts of 512 tokens, with Zipf popularity (1.2)."""
    return _chats("A", seed, 32, 7, 1.2)


def one_system_each(seed: int) -> Load:
    """Return load B: 24 chats under as many system prompts as there are replicas, three."""
    return _chats("B", seed, 24, 3, 0.0)


def overfull(seed: int) -> Load:
    """Return load C: 48 chats under three system prompts, whose texts are 1.5 times the pools' size."""
    return _chats("C", seed, 48, 3, 0.0)


def agents(seed: int) -> Load:
    """Return load D: 24 agents of two kinds with 16 calls each; some run two subagents that start with their text."""
    writer = _Writer("D", seed)
    kinds = [writer.text(1500), writer.text(2500)]
    for agent in range(24):
        text, last = kinds[agent % 2], -1
        for turn in range(16):
            draw = writer.draw
            text = writer.longer(text, int(draw.integers(30, 500)))
            at = 4 * draw.random() if turn == 0 else 0.5 * draw.random()
            last, text = writer.ask(at, last, f"agent-{agent}", text, int(draw.integers(20, 100)))
            if draw.random() < 0.1:
                for number in range(2):
                    branch = writer.longer(text, int(draw.integers(50, 300)))
                    own, branch = writer.ask(0.1, last, f"sub-{agent}-{turn}-{number}", branch, 40)
                    writer.ask(0.1, own, f"sub-{agent}-{turn}-{number}", writer.longer(branch, 200), 40)
    return writer.load


def bursts(seed: int) -> Load:
    """Return load E: 30 new documents of 2,000 to 4,000 tokens, each with 24 questions within 0.2 seconds."""
    writer = _Writer("E", seed)
    at = 0.0
    for burst in range(30):
        at += float(writer.draw.exponential(1.0))
        document = writer.text(int(writer.draw.integers(2000, 4001)))
        for question in range(24):
            prompt = writer.longer(document, int(writer.draw.integers(20, 80)))
            writer.ask(at + 0.2 * writer.draw.random(), -1, f"user-{burst}-{question}", prompt, 30)
    return writer.load


def strangers(seed: int) -> Load:
    """Return load F: 40 chats with long answers among 400 unique prompts of 200 to 6,000 tokens."""
    writer = _Writer("F", seed)
    systems = [writer.text(800) for _ in range(5)]
    for chat in range(40):
        writer.chat(f"chat-{chat}", 10 * writer.draw.random(), systems[chat % 5], 8, 150, 2.0)
    for stranger in range(400):
        prompt = writer.text(int(np.exp(writer.draw.uniform(np.log(200), np.log(6000)))))
        writer.ask(30 * writer.draw.random(), -1, f"stranger-{stranger}", prompt, int(writer.draw.integers(20, 300)))
    return writer.load


@dataclass(frozen=True, slots=True)
class GeneratedLoad:
    """A generator of loads, and the fleet it is meant for."""

    make: Callable[[int], Load]
    num_replicas: int
    num_blocks: int
    speed: Speed


#: Roughly a tiny model on one core of a shared machine, with steps of 512 tokens. A, B and C were first run there.
SMALL = Speed(step=0.03, prompt_token=4e-4, decode=2e-3, context_token=0.0, max_num_batched_tokens=512)

#: The `robust` cost was developed on A to C; D to F were held out until it was finished.
LOADS = {
    "A": GeneratedLoad(many_systems, 3, 900, SMALL),
    "B": GeneratedLoad(one_system_each, 3, 700, SMALL),
    "C": GeneratedLoad(overfull, 3, 700, SMALL),
    "D": GeneratedLoad(agents, 4, 2500, Speed()),
    "E": GeneratedLoad(bursts, 4, 2500, Speed()),
    "F": GeneratedLoad(strangers, 4, 2500, Speed()),
}
