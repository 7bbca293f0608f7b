"""Requests of OpenAI's API that generate text."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, StrictBool, StrictFloat, StrictInt, StrictStr
from pydantic_core import PydanticCustomError

from blockyard_engine.sampling import MAX_BIAS, MAX_BIASES, MAX_LOGPROBS, MAX_PENALTY

from ..errors import invalid
from .request_fields import (
    FIRST_ERROR,
    MAX_ITEMS,
    MAX_TOKEN_ID,
    Fields,
    RequestFields,
    TokenId,
    TokenIds,
    parse_fields,
    read_object,
)
from .unsupported_fields import REFUSED_IN_CHATS, REFUSED_IN_COMPLETIONS


class TextPart(Fields):
    """A part of a message's content. Only text is supported."""

    type: Literal["text"]
    text: StrictStr

    @classmethod
    def _drop_neutral(cls, fields: dict[str, Any]) -> dict[str, Any]:
        # For an image, report the type and not the fields that come with it.
        return fields if fields.get("type") == "text" else {"type": fields.get("type")}


#: Empty fields of responses, which clients send back.
_EMPTY: list[tuple[str, list[Any]]] = [("annotations", []), ("tool_calls", [])]


class Message(Fields):
    """A message of a chat. `name` is accepted; most chat templates do not show it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: StrictStr | Annotated[list[TextPart], Field(max_length=MAX_ITEMS), FIRST_ERROR] = ""
    name: StrictStr | None = None

    @classmethod
    def _drop_neutral(cls, fields: dict[str, Any]) -> dict[str, Any]:
        # Messages of the assistant that a client sends back have many null fields.
        return {name: value for name, value in fields.items() if value is not None and (name, value) not in _EMPTY}

    def as_template_input(self) -> dict[str, str]:
        """Return the message for a chat template; "developer" is OpenAI's newer name for "system"."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS), FIRST_ERROR]


#: Maximum length: a salt is stored for as long as any of its blocks can be hit.
MAX_SALT = 1024
#: Maximum length of a session id, as in the cache.
MAX_SESSION_ID = 200
Salt = Annotated[StrictStr, Field(min_length=1, max_length=MAX_SALT)]
SessionId = Annotated[StrictStr, Field(min_length=1, max_length=MAX_SESSION_ID)]
_Text = StrictStr
_StopString = Annotated[StrictStr, Field(min_length=1, max_length=256)]
_Penalty = Annotated[StrictFloat, Field(ge=-MAX_PENALTY, le=MAX_PENALTY, allow_inf_nan=False)]


class StreamOptions(Fields):
    """Options of a stream.

    Attributes:
        include_usage: whether a last chunk has the token counts.
        continuous_usage_stats: whether every chunk has them (vLLM's).
        include_obfuscation: accepted without effect.
    """

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False
    include_obfuscation: StrictBool = False


def _token_biases(value: Any) -> Any:
    """Return `logit_bias` with token ids as keys. Raises for the first bad entry only."""
    if not isinstance(value, dict):
        raise PydanticCustomError("not_a_dict", "it must be an object from token ids to numbers")
    if len(value) > MAX_BIASES:
        counts = {"found": len(value), "limit": MAX_BIASES}
        raise PydanticCustomError("too_many_biases", "it has {found} tokens; the limit is {limit}", counts)
    for token, bias in value.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise PydanticCustomError("bad_token", "its keys must be token ids; one is '{name}'", {"name": token[:40]})
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            limits = {"name": token, "limit": int(MAX_BIAS)}
            raise PydanticCustomError("bad_bias", "the bias of token {name} must be from -{limit} to {limit}", limits)
    return {int(token): float(bias) for token, bias in value.items()}


class GenerationFields(RequestFields):
    """Fields of completions and chats. Those after `seed` are not OpenAI's; other servers have them too."""

    model: StrictStr
    temperature: Annotated[StrictFloat, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Annotated[StrictFloat, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    n: Annotated[StrictInt, Field(ge=1, le=128)] = 1
    stop: _StopString | Annotated[list[_StopString], Field(max_length=16), FIRST_ERROR] = Field(default_factory=list)
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    logit_bias: Annotated[dict[int, float], BeforeValidator(_token_biases)] = Field(default_factory=dict)
    seed: Annotated[StrictInt, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, le=MAX_TOKEN_ID)] = 0
    min_p: Annotated[StrictFloat, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    repetition_penalty: Annotated[StrictFloat, Field(gt=0, le=2, allow_inf_nan=False)] = 1.0
    min_tokens: Annotated[StrictInt, Field(ge=0)] = 0
    ignore_eos: StrictBool = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64), FIRST_ERROR] = Field(default_factory=list)
    priority: Annotated[StrictInt, Field(ge=-(2**20), le=2**20)] = 0
    cache_salt: Salt | None = None
    session_id: SessionId | None = None
    resume: StrictBool = True

    @property
    def wants_usage(self) -> bool:
        """True if the last chunk of a stream has the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_continuous_usage(self) -> bool:
        """True if every chunk of a stream has the token counts so far."""
        return self.stream_options is not None and self.wants_usage and self.stream_options.continuous_usage_stats

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end a completion."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report with each token, 0 for the sampled token only; None for no logprobs."""
        raise NotImplementedError

    @property
    def token_limit(self) -> int | None:
        """Maximum of new tokens per completion; None if the client sets none."""
        raise NotImplementedError

    def prompts(self) -> list[Any]:
        """Return the prompts as the encoder takes them: text, token ids or messages."""
        raise NotImplementedError


def _require_few(prompt: Any) -> Any:
    """Raise for too many prompts before the union is validated: each of its members would read all of them."""
    if isinstance(prompt, list) and len(prompt) > MAX_ITEMS and not isinstance(prompt[0], int):
        counts = {"found": len(prompt), "limit": MAX_ITEMS}
        raise PydanticCustomError("too_many_prompts", "it has {found} prompts; the limit is {limit}", counts)
    return prompt


class CompletionRequest(GenerationFields):
    """POST /v1/completions. `prompt` is one or several prompts, each as text or token ids."""

    refused = REFUSED_IN_COMPLETIONS
    prompt: Annotated[
        _Text
        | TokenIds
        | Annotated[list[_Text], Field(min_length=1), FIRST_ERROR]
        | Annotated[list[TokenIds], Field(min_length=1), FIRST_ERROR],
        BeforeValidator(_require_few),
    ]
    max_tokens: Annotated[StrictInt, Field(ge=1)] = 16
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    def prompts(self) -> list[Any]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions."""

    refused = REFUSED_IN_CHATS
    messages: Messages
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] = 0

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def prompts(self) -> list[Any]:
        return [[message.as_template_input() for message in self.messages]]


GenerationT = TypeVar("GenerationT", bound=GenerationFields)


def parse_request(kind: type[GenerationT], body: bytes) -> GenerationT:
    """Parse the body of a request that generates. Raises `ApiError` (400) if it is invalid or unsupported."""
    request = parse_fields(kind, read_object(body))
    if request.stream_options is not None and not request.stream:
        raise invalid("'stream_options' requires 'stream': true", "stream_options")
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise invalid("'top_logprobs' requires 'logprobs': true", "top_logprobs")
    return request
