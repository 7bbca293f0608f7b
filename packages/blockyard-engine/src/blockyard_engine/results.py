"""Results of the engine: new tokens, finished requests, and reports of steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from blockyard.answers import MissCauses


class FinishReason(StrEnum):
    """Why a completion ended.

    STOP: an end-of-sequence token, stop token or stop string. LENGTH: `max_tokens`. ABORT: the request was dropped.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a chosen token, and of the most likely tokens at its position, best first.

    They are those of the model's own distribution, before penalties, temperature and truncation.

    Attributes:
        text_offset: characters of the completion before the token; for a part of a character, those before the
            character.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text_offset: int = 0


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token that a step chose.

    Attributes:
        index: number of the completion in its request.
        text: text that became final; "" while a stop string or a character may be incomplete, or without a tokenizer.
        logprob: set if the request asked for it.
        finish_reason: set if this is the completion's last token; its text is complete then.
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

    Attributes:
        text: text without special tokens, up to the stop string that ended it; "" without a tokenizer.
        token_ids: all new tokens, including a final stop token or stop string.
        logprobs: one for each token, if requested.
        score: length-penalized sum of log probabilities of a beam; else None.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The completions of one request, and its use of the cache.

    Attributes:
        num_cached_tokens: prompt tokens found in the cache, which were not computed again.
        num_preemptions: how often one of its sequences was preempted; this changes no token.
        num_cpu_cached_tokens: cached tokens that were in the CPU pool.
        misses: prompt tokens by cause of the miss; None without `track_misses`, and before the request has run.
        num_tier_cached_tokens: cached tokens that a tier supplied.
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
        """Text of the first completion."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the first completion."""
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Finish reason of the first completion."""
        return self.completions[0].finish_reason


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of one step.

    Attributes:
        num_tokens: tokens computed.
        num_seqs: sequences in the step.
        num_preempted: sequences preempted to make room.
        num_running: running requests after the step.
        num_waiting: waiting requests after the step.
        new_tokens: all tokens chosen.
        finished: results of the requests that ended.
        num_drafted: tokens proposed by speculation.
        num_accepted: proposed tokens that the model confirmed.
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
