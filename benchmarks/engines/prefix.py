"""`python -m benchmarks.engines.prefix`: what a shared prefix is worth in the engine itself, cache on against off.

Requests that begin with the same system prompt and end with a question of their own come together, each waits for its
answer and asks a second question behind it. Ratios of the time to the first token and of tokens a second; the tokens
must be the same. `benchmarks.serving.prefix` shows the same through a server under steady load.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from blockyard_engine import Engine, SamplingParams, StepReport
from blockyard_engine.model import demo_model_path, load_model

from .work import BLOCK_SIZE

STEP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Talk:
    """How many requests at once, and how many tokens: of the system prompt, of each question, of each answer."""

    num_requests: int = 16
    num_system: int = 1000
    num_question: int = 24
    num_answer: int = 16

    @property
    def max_len(self) -> int:
        """Tokens of a request at the end of its second turn."""
        return self.num_system + 2 * (self.num_question + self.num_answer)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn took: the median request's seconds to its first token, seconds of all, and what came of it."""

    first_token: float
    seconds: float
    num_cached: int
    token_ids: list[list[int]]


def make_engine(model: Any, talk: Talk, *, is_cached: bool) -> Engine:
    """An engine that has room for all of it."""
    return Engine(
        model,
        num_blocks=talk.num_requests * (talk.max_len // BLOCK_SIZE + 2) + 1,
        block_size=BLOCK_SIZE,
        max_num_seqs=talk.num_requests,
        max_num_batched_tokens=STEP_TOKENS,
        enable_prefix_caching=is_cached,
    )


def turns(engine: Engine, talk: Talk, number: int) -> Iterator[Turn]:
    """Both turns of round `number`, whose system prompt no other round has."""
    rng = np.random.default_rng(5000 + number)
    vocab_size = engine.shape.vocab_size
    system = rng.integers(0, vocab_size, talk.num_system).tolist()
    prompts = [system] * talk.num_requests
    for _ in range(2):
        questions = rng.integers(0, vocab_size, (talk.num_requests, talk.num_question)).tolist()
        prompts = [prompt + question for prompt, question in zip(prompts, questions, strict=True)]
        turn = one_turn(engine, prompts, talk.num_answer)
        yield turn
        prompts = [prompt + answer for prompt, answer in zip(prompts, turn.token_ids, strict=True)]


def one_turn(engine: Engine, prompts: list[list[int]], num_answer: int) -> Turn:
    """All requests come at once."""
    seen: dict[int, float] = {}
    start = time.perf_counter()

    def note(report: StepReport) -> None:
        now = time.perf_counter() - start
        for token in report.new_tokens:
            seen.setdefault(token.request_id, now)

    results = engine.generate(prompts, SamplingParams(max_tokens=num_answer, ignore_eos=True), on_step=note)
    seconds = time.perf_counter() - start
    num_cached = sum(result.num_cached_tokens for result in results)
    return Turn(statistics.median(seen.values()), seconds, num_cached, [result.token_ids for result in results])


@dataclass(frozen=True, slots=True)
class Gain:
    """Cache on against off in one turn of one round: how many times sooner, how many times as many tokens a second."""

    first_token: float
    tokens_per_second: float
    num_cached: int

    @classmethod
    def of(cls, on: Turn, off: Turn) -> Gain:
        """Raises `RuntimeError` if the cache changed a token."""
        if on.token_ids != off.token_ids:
            raise RuntimeError("the tokens with and without the prefix cache differ")
        return cls(off.first_token / on.first_token, off.seconds / on.seconds, on.num_cached)


def gains(model: Any, talk: Talk, rounds: int) -> list[list[Gain]]:
    """For each round, the gain of the first turn and of the second. The two engines take turns, on and off first."""
    engines = {is_cached: make_engine(model, talk, is_cached=is_cached) for is_cached in (True, False)}
    found = []
    for number in range(rounds):
        order = (True, False) if number % 2 == 0 else (False, True)
        seen = {is_cached: list(turns(engines[is_cached], talk, number)) for is_cached in order}
        found.append([Gain.of(on, off) for on, off in zip(seen[True], seen[False], strict=True)])
    return found


def main() -> int:
    """Measure and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16, help="at once; default: 16")
    parser.add_argument("--system", type=int, default=1000, help="tokens; default: 1000")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    talk = Talk(arguments.requests, arguments.system)
    model, _ = load_model(demo_model_path())
    found = gains(model, talk, arguments.rounds)
    num_prompt = talk.num_system + talk.num_question
    print(f"{talk.num_requests} requests, {talk.num_system} tokens shared, {talk.num_question} of their own a turn.\n")
    print("| turn | prompt tokens cached | first token sooner by | tokens a second more by |")
    print("|---|---|---|---|")
    for turn, of_turn in enumerate(zip(*found, strict=True)):
        prompt_tokens = talk.num_requests * (num_prompt + turn * (talk.num_answer + talk.num_question))
        cached = statistics.median(gain.num_cached for gain in of_turn) / prompt_tokens
        first = statistics.median(gain.first_token for gain in of_turn)
        rate = statistics.median(gain.tokens_per_second for gain in of_turn)
        print(f"| {turn + 1} | {cached:.1%} | {first:.1f}x | {rate:.1f}x |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
