"""Turns users' prompts and options into checked requests; a prompt that cannot be served is refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from blockyard.arguments import require_session
from blockyard.errors import InvalidArgument
from blockyard.keys import ExtraKey, canonical_keys, plain_keys, require_spans_within, spans_of

from .decoding.sampler import Choice
from .decoding.speculation import Drafter, PromptLookup
from .prompt_encoding import Prompt, encode_prompt
from .request import Request, make_request
from .sampling import SamplingParams
from .scheduling.limits import CacheLimits
from .shape import KVShape


class InputProcessor:
    """Checks, encodes and numbers requests."""

    def __init__(self, shape: KVShape, tokenizer: Any, limits: CacheLimits, speculation: PromptLookup | None) -> None:
        self._shape = shape
        self._tokenizer = tokenizer
        self._limits = limits
        self._speculation = speculation
        self._num_requests = 0

    def requests(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        extra_keys: Sequence[ExtraKey] = (),
        tenant: str | None = None,
    ) -> list[Request]:
        """Return requests for all prompts. Raises an error that names the first prompt that cannot be served."""
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
            raise InvalidArgument(f"prompts is a {type(prompts).__name__}; it must be a list of prompts")
        if isinstance(sampling, Sequence):
            params = list(sampling)
        else:
            params = [sampling or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidArgument(f"sampling has {len(params)} entries; there are {len(prompts)} prompts")
        return [
            self.request(f"prompt {number}", prompt, wanted, extra_keys=extra_keys, tenant=tenant)
            for number, (prompt, wanted) in enumerate(zip(prompts, params, strict=True))
        ]

    def request(
        self,
        name: str,
        prompt: Prompt,
        sampling: SamplingParams,
        priority: int = 0,
        extra_keys: Sequence[ExtraKey] = (),
        session: str | None = None,
        tenant: str | None = None,
    ) -> Request:
        """Return a checked request for one prompt. Raises `InvalidArgument` or `NeverFits`. O(tokens).

        `name` is the prompt's name in errors.
        """
        if not isinstance(sampling, SamplingParams):
            raise InvalidArgument(f"sampling of {name} is a {type(sampling).__name__}; it must be SamplingParams")
        if sampling.stop and self._tokenizer is None:
            raise InvalidArgument(
                f"stop of {name} is {sampling.stop!r}, but the engine has no tokenizer; use stop_token_ids"
            )
        sampling.require_tokens_below(self._shape.vocab_size)
        if session is not None:
            require_session("session", session)
        token_ids = encode_prompt(name, prompt, self._tokenizer, self._shape.vocab_size)
        keys = canonical_keys(self._limits.roster.keys_of(tenant, canonical_keys(extra_keys)))
        require_spans_within(spans_of(keys), len(token_ids))
        owner = self._limits.roster.number_of(plain_keys(keys))
        self._limits.require_fits(name, len(token_ids), sampling.max_tokens, sampling.n, owner)
        stops = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= self._shape.eos_token_ids
        self._num_requests += 1
        return make_request(
            self._num_requests,
            token_ids,
            sampling,
            stops,
            priority=priority,
            extra_keys=keys,
            session=session,
            tokenizer=self._tokenizer,
            make_drafter=None if self._speculation is None else partial(Drafter, self._speculation),
        )

    def resume(self, request: Request, answer_prefix: Any) -> None:
        """Start a new request's answer with tokens that were chosen elsewhere. O(tokens).

        Raises `InvalidArgument`; the request cannot be used then.
        """
        if isinstance(answer_prefix, str) or not (
            isinstance(answer_prefix, Sequence) or hasattr(answer_prefix, "dtype")
        ):
            raise InvalidArgument(f"answer_prefix is a {type(answer_prefix).__name__}; it must be a list of token ids")
        if len(answer_prefix) == 0:
            return
        sampling, tokens = request.sampling, encode_prompt("answer_prefix", answer_prefix, None, self._shape.vocab_size)
        if sampling.n > 1 or sampling.logprobs is not None:
            wrong = f"n is {sampling.n}" if sampling.n > 1 else f"logprobs is {sampling.logprobs}"
            raise InvalidArgument(f"{wrong}; answer_prefix needs n=1 and no logprobs")
        if len(tokens) >= sampling.max_tokens:
            raise InvalidArgument(
                f"answer_prefix has {len(tokens)} tokens; it must have fewer than max_tokens, {sampling.max_tokens}"
            )
        for position, token in enumerate(tokens):
            if request.branches[0].take(Choice(token)).finish_reason is not None:
                raise InvalidArgument(f"answer_prefix has token {token} at position {position}, which ends the answer")
