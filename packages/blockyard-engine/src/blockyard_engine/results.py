"""What the engine hands back: tokens as they come, and what became of each request."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from blockyard.answers import MissCauses


class FinishReason(StrEnum):
    """Why a completion ended: STOP at an end-of-sequence token, a stop token or a stop string, LENGTH at
    `max_tokens`, ABORT because it was dropped."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural logarithm of a token's probability, and of the likeliest ones' in its place, best first.

    The model's own distribution counts, before penalties, temperature and cuts. text_offset: characters of the
    completion before the token; of one that is part of a character, those before the character.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text_offset: int = 0


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token that a step chose.

    index: which of the request's n completions. text: the piece of text that is certain now; "" while a stop string
    or a character may be incomplete, or without a tokenizer. logprob: if the request asked for it. finish_reason: of
    the completion, if this is its last token; then its text is whole.
    """

    request_id: int
    index: int
    token_id: int
    text: str
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer to a prompt.

    text: without special tokens, and up to the stop string that ended it ("" if the engine has no tokenizer).
    token_ids: all new tokens; a stop token that ended it, or those of a stop string, are the last of them.
    logprobs: one for each token, if asked for. score: of a beam, its penalized sum of log probabilities, else None.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What came of one request: its completions, and what the cache did for it.

    num_cached_tokens: prompt tokens whose keys and values the cache had, so that they were not computed again.
    num_preemptions: how often a sequence of it was preempted to make room for others. No token depends on it.
    num_cpu_cached_tokens: those of the cached tokens that lay in the CPU pool. num_tier_cached_tokens: those that a
    tier brought. misses: its prompt's tokens by cause; None without `track_misses`, and before it has run.
    """

    request_id: int
    completions: list[Completion]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_cpu_cached_tokens: int = 0
    misses: MissCauses | None = None
    num_tier_cached_tokens: int = 0

    @property
    def text(self) -> str:
        """Return the first completion's text."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """Return the first completion's tokens."""
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Return why the first completion ended."""
        return self.completions[0].finish_reason


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did.

    num_tokens: tokens computed; num_seqs: sequences they belong to. num_preempted: sequences preempted to make room.
    num_running, num_waiting: requests after the step. new_tokens: each token chosen. finished: the requests that
    ended. num_drafted, num_accepted: tokens that speculation proposed, and those of them that the model confirmed.
    """

    num_tokens: int
    num_seqs: int
    num_preempted: int
    num_running: int
    num_waiting: int
    new_tokens: list[NewToken] = field(default_factory=list)
    finished: list[GenerationResult] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
