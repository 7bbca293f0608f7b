"""From a client's request to the engine's jobs: encodes prompts, checks limits, translates sampling parameters.

Session names are keyed by the cache salt, so that no tenant can name a session of another.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

from blockyard.errors import InvalidArgument
from blockyard.keys import CacheSalt, plain_keys
from blockyard.tenants import OTHERS
from blockyard_engine import SamplingParams

from ..errors import ApiError, invalid, too_long
from ..limits import ServerLimits
from ..openai.protocol import ChatRequest, GenerationFields
from .job import Job, Mailbox
from .prompt_encoder import PromptEncoder
from .served_model import ServedModel


def session_name(session_id: str, cache_salt: str | None) -> str:
    """Return the engine's name of a session: 64 characters from its id and its requests' salt. O(characters).

    A BLAKE2b digest keyed by a digest of the salt. Without the salt nobody can compute the name, and the name, which
    reports of the cache may show, reveals neither id nor salt.
    """
    key = b"" if cache_salt is None else hashlib.blake2b(_bytes(cache_salt), digest_size=32).digest()
    return hashlib.blake2b(_bytes(session_id), digest_size=32, key=key, person=b"session").hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


_SEED_MASK = 2**63 - 1


class Planner:
    """Makes jobs of requests, and refuses requests that the server could not complete.

    Args:
        capacity: completions that may wait and run together.

    Attributes:
        max_model_len: tokens of the longest sequence that the context and the pool allow.
    """

    def __init__(self, model: ServedModel, encoder: PromptEncoder, limits: ServerLimits, capacity: int) -> None:
        self._encoder = encoder
        self._limits = limits
        self.max_model_len = model.max_model_len
        self._context = f"the context is {model.context} tokens"
        if model.max_model_len != model.context:
            self._context += f", of which the pool of {model.num_blocks} blocks holds {model.max_model_len}"
        self._vocab_size = model.vocab_size
        self._max_num_seqs = model.max_num_seqs
        self._max_completions = min(limits.max_completions, capacity)
        self._model_limits, self._roster = model.limits, model.limits.roster

    def salt_of(self, tenant: str | None, cache_salt: str | None) -> str | None:
        """Return the cache salt of a request: the tenant's, combined with the client's own; None for no salt.

        A request without a tenant belongs to the default tenant, whatever its `cache_salt`. Without tenants the salt is
        the client's. Raises `ApiError` (400) for an unknown tenant.
        """
        if len(self._roster.names) == 1:
            return cache_salt
        try:
            found = self._roster.keys_of(tenant or OTHERS, [] if cache_salt is None else [CacheSalt(cache_salt)])
        except InvalidArgument as error:
            raise invalid(f"the header X-Tenant is refused: {error}", code="unknown_tenant") from None
        return next((key.value for key in found if isinstance(key, CacheSalt)), None)

    async def jobs(
        self, request: GenerationFields, arrived_at: float, name: str, tenant: str | None = None
    ) -> list[Job]:
        """Return a job for each prompt of a request.

        Raises `ApiError` (400), with the field, for a value beyond a limit.

        Args:
            request: the request.
            arrived_at: time of its arrival, in seconds of `time.perf_counter`.
            name: id of the request, for the log.
            tenant: name of the tenant that sent it, if known.
        """
        field = "messages" if isinstance(request, ChatRequest) else "prompt"
        prompts = request.prompts()
        self._require_completions(request.n, len(prompts))
        salt = self.salt_of(tenant, request.cache_salt)
        session = self._session(request, len(prompts), salt)
        mailbox, jobs = Mailbox(), []
        keys = () if salt is None else (CacheSalt(salt),)
        owner = self._roster.number_of(plain_keys(keys))
        for position, prompt in enumerate(prompts):
            path = field if len(prompts) == 1 else f"{field}[{position}]"
            encoded = await self._encoder.encode(path, prompt)
            num_tokens = self._num_new_tokens(request, len(encoded.token_ids), path, owner)
            sampling = self._sampling(request, num_tokens, position)
            rest: dict[str, Any] = {"session": session, "resumes": request.resume, "tenant": owner}
            jobs.append(Job(encoded, sampling, request.priority, position, mailbox, arrived_at, keys, name, **rest))
        return jobs

    def _session(self, request: GenerationFields, num_prompts: int, salt: str | None) -> str | None:
        """Return the engine's name of the session. It has one newest prompt, so a request with it has one prompt."""
        if request.session_id is None:
            return None
        if num_prompts > 1:
            raise invalid(f"'session_id' requires a single prompt; the request has {num_prompts}", "session_id")
        return session_name(request.session_id, salt)

    def _require_completions(self, n: int, num_prompts: int) -> None:
        if n > self._max_num_seqs:
            raise invalid(f"'n' is {n}; this server runs at most {self._max_num_seqs} sequences at once", "n")
        if n * num_prompts > self._max_completions:
            asked = f"{num_prompts} prompts with 'n' of {n} are {n * num_prompts} completions"
            raise invalid(f"{asked}; the limit of a request is {self._max_completions}", "n")

    def _num_new_tokens(self, request: GenerationFields, num_prompt_tokens: int, field: str, tenant: int) -> int:
        """Return the maximum of new tokens of each completion: the request's, or all that fit."""
        if num_prompt_tokens >= self.max_model_len:
            raise too_long(f"'{field}' has {num_prompt_tokens} tokens; {self._context}, answer included", field)
        room = self._model_limits.max_new_tokens(num_prompt_tokens, request.n, tenant)
        allowed = room if self._limits.max_tokens is None else min(room, self._limits.max_tokens)
        wanted = request.token_limit
        if wanted is None:
            wanted = min(allowed, self._limits.default_max_tokens or allowed)
        if wanted < 1 or wanted > room:
            asked = "" if request.token_limit is None else f" and 'max_tokens' is {str(wanted)[:40]}"
            times = "" if request.n == 1 else f" for each of {request.n} completions"
            names, most = self._roster.names, self._model_limits.num_usable(tenant)
            quota = f"; tenant {names[tenant]!r} can hold {most} blocks" if len(names) > 1 else ""
            raise too_long(
                f"'{field}' has {num_prompt_tokens} tokens{asked}; there is room for {room} new tokens{times} "
                f"({self._context}{quota})",
                field if wanted < 1 else "max_tokens",
            )
        if wanted > allowed:
            raise invalid(f"'max_tokens' is {wanted}; the limit of this server is {allowed}", "max_tokens")
        return wanted

    def _sampling(self, request: GenerationFields, num_tokens: int, position: int) -> SamplingParams:
        # Each prompt of a request gets its own seed, so that equal prompts get different answers.
        seed = secrets.randbits(63) if request.seed is None else (request.seed + position) & _SEED_MASK
        try:
            sampling = SamplingParams(
                max_tokens=num_tokens,
                min_tokens=request.min_tokens,
                temperature=request.temperature,
                top_k=max(request.top_k, 0),
                top_p=request.top_p,
                min_p=request.min_p,
                repetition_penalty=request.repetition_penalty,
                presence_penalty=request.presence_penalty,
                frequency_penalty=request.frequency_penalty,
                logit_bias=request.logit_bias,
                seed=seed,
                n=request.n,
                stop=request.stop_strings,
                stop_token_ids=tuple(request.stop_token_ids),
                ignore_eos=request.ignore_eos,
                logprobs=request.num_logprobs,
            )
            sampling.require_tokens_below(self._vocab_size)
        except InvalidArgument as error:
            raise _named(error) from None
        return sampling


def _named(error: InvalidArgument) -> ApiError:
    """Return a 400 error. The engine's errors begin with the argument, which has the name of the field."""
    name = str(error).split()[0]
    return invalid(str(error), name if name in GenerationFields.model_fields else None)
