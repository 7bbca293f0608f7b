"""A request on its way through the engine, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from .sampling import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended: STOP at an end-of-sequence or stop token, LENGTH at `max_tokens`."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(slots=True)
class Request:
    """A request while it waits or runs. Only the scheduler writes `seq`, `num_cached_tokens` and `num_preemptions`.

    seq: the cache's handle while the request runs, None while it waits.
    num_cached_tokens: prompt tokens that the cache had when the request first computed something; None before.
    """

    request_id: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    seq: int | None = None
    num_cached_tokens: int | None = None
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens chosen so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    def append(self, token_id: int) -> FinishReason | None:
        """Take the next chosen token; returns why the request is over, or None while it is not."""
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        if self.num_generated == self.sampling.max_tokens:
            return FinishReason.LENGTH
        return None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What came of one request.

    text: the new tokens as text, without special tokens ("" if the engine has no tokenizer).
    token_ids: the new tokens; a stop token that ended the request is the last of them.
    num_cached_tokens: prompt tokens whose keys and values the cache had, so that they were not computed again.
    num_preemptions: how often the request was set back to make room for others. Its tokens do not depend on it.
    """

    request_id: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int
