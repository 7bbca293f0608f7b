"""Requests in the engine: one prompt, and one branch for each completion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from blockyard.answers import MissCauses
from blockyard.keys import ExtraKey

from .decoding.sampler import Choice
from .decoding.speculation import Drafter
from .decoding.text import GeneratedText, TextMark
from .results import Completion, FinishReason, GenerationResult, NewToken, TokenLogprob
from .sampling import SamplingParams

BranchMark = tuple[int, int, FinishReason | None, TextMark]


@dataclass(slots=True, eq=False)
class Branch:
    """One completion in progress, the unit that the scheduler schedules.

    Only the scheduler writes `seq`, `is_swapped` and `ticket`.

    Attributes:
        token_ids: the prompt and the tokens chosen so far.
        seq: handle in the cache while it runs or is swapped out, else -1.
        num_cpu_tokens: prompt tokens loaded from the CPU pool since its last admission, until `CpuHits` counts them.
        ticket: its ticket in the cache's queue of waiting requests (`scheduling.admission_control`); 0 for none.
    """

    request: Request
    index: int
    token_ids: list[int]
    text: GeneratedText
    logprobs: list[TokenLogprob] | None
    drafter: Drafter | None = None
    seq: int = -1
    is_swapped: bool = False
    num_cpu_tokens: int = 0
    ticket: int = 0
    finish_reason: FinishReason | None = None

    @property
    def order_key(self) -> tuple[int, int, int]:
        """Position in the schedule: lower is served first; no two are equal."""
        return (self.request.due, self.request.request_id, self.index)

    @property
    def num_generated(self) -> int:
        """Number of tokens chosen so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    def draft(self) -> list[int]:
        """Return guesses for the next tokens. The last token allowed is never drafted: nothing would follow it."""
        if self.drafter is None:
            return []
        return self.drafter.propose(self.token_ids, self.request.sampling.max_tokens - self.num_generated - 1)

    def take(self, choice: Choice) -> NewToken:
        """Append a token and return it with its text; set `finish_reason` if it is the last."""
        self.token_ids.append(choice.token_id)
        may_stop = self.num_generated > self.request.sampling.min_tokens
        piece = self.text.push(choice.token_id, may_stop)
        logprob = choice.logprob
        if logprob is not None:
            logprob = replace(logprob, text_offset=self.text.offset)
            if self.logprobs is not None:
                self.logprobs.append(logprob)
        if self.text.is_stopped or (may_stop and choice.token_id in self.request.stop_token_ids):
            self.finish_reason = FinishReason.STOP
        elif self.num_generated == self.request.sampling.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None:
            piece += self.text.finish(may_stop)
            if self.text.is_stopped:
                self.finish_reason = FinishReason.STOP
        request_id = self.request.request_id
        return NewToken(request_id, self.index, choice.token_id, piece, logprob, self.finish_reason)

    def mark(self) -> BranchMark:
        """Return a mark of the present end, for `reset`. O(1)."""
        return len(self.token_ids), len(self.logprobs or ()), self.finish_reason, self.text.mark()

    def reset(self, mark: BranchMark) -> None:
        """Drop the tokens taken since `mark`."""
        num_tokens, num_logprobs, self.finish_reason, text = mark
        del self.token_ids[num_tokens:]
        if self.logprobs is not None:
            del self.logprobs[num_logprobs:]
        self.text.reset(text)

    def completion(self) -> Completion:
        """Return the completion so far; its finish reason is ABORT if it is not finished."""
        new = self.token_ids[len(self.request.prompt_token_ids) :]
        return Completion(self.index, self.text.text, new, self.finish_reason or FinishReason.ABORT, self.logprobs)


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and its branches.

    Only the scheduler writes `due`, `arrived`, `tenant` and the counters.

    Attributes:
        stop_token_ids: tokens that end a branch.
        extra_keys: canonical extra keys; blocks are shared only between requests with equal keys.
        due: queue position in steps: the step of arrival, adjusted by the priority.
        arrived: time of arrival by the engine's clock; 0 if requests are admitted by arrival.
        is_forked: whether the branches after the first exist in the cache.
        num_cached_tokens: prompt tokens found in the cache when the request was first computed; None before.
        misses: causes of the missed prompt tokens; None without `track_misses`.
        session: name of the conversation; None for none.
        tenant: number of the tenant in the `Roster`, derived from extra_keys.
    """

    request_id: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    priority: int = 0
    extra_keys: tuple[ExtraKey, ...] = ()
    branches: list[Branch] = field(default_factory=list)
    due: int = 0
    arrived: float = 0.0
    is_forked: bool = False
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    num_cpu_cached_tokens: int = 0
    num_tier_cached_tokens: int = 0
    misses: MissCauses | None = None
    session: str | None = None
    tenant: int = 0

    @property
    def is_finished(self) -> bool:
        """True if all completions have ended."""
        return all(branch.finish_reason is not None for branch in self.branches)

    def result(self) -> GenerationResult:
        """Return the result so far."""
        return GenerationResult(
            request_id=self.request_id,
            completions=[branch.completion() for branch in self.branches],
            num_prompt_tokens=len(self.prompt_token_ids),
            num_cached_tokens=self.num_cached_tokens or 0,
            num_preemptions=self.num_preemptions,
            num_cpu_cached_tokens=self.num_cpu_cached_tokens,
            misses=self.misses,
            num_tier_cached_tokens=self.num_tier_cached_tokens,
        )


def make_request(
    request_id: int,
    prompt_token_ids: list[int],
    sampling: SamplingParams,
    stop_token_ids: frozenset[int] = frozenset(),
    *,
    priority: int = 0,
    extra_keys: tuple[ExtraKey, ...] = (),
    session: str | None = None,
    tokenizer: Any = None,
    make_drafter: Callable[[], Drafter | None] | None = None,
) -> Request:
    """Return a request with its branches. `make_drafter` is called for each branch; None for no speculation."""
    request = Request(request_id, prompt_token_ids, sampling, stop_token_ids, priority, extra_keys, session=session)
    for index in range(sampling.n):
        drafter = None if make_drafter is None else make_drafter()
        text = GeneratedText(tokenizer, sampling.stop)
        logprobs: list[TokenLogprob] | None = None if sampling.logprobs is None else []
        request.branches.append(Branch(request, index, list(prompt_token_ids), text, logprobs, drafter))
    return request
