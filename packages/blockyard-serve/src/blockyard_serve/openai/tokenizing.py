"""Requests and responses of vLLM's /tokenize and /detokenize, with the prompt's blocks on request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import StrictBool, StrictStr

from ..errors import invalid
from .protocol import Messages
from .request_fields import FIRST_ERROR, RequestFields, TokenId, parse_fields, read_object
from .unsupported_fields import REFUSED_IN_CHATS, REFUSED_IN_COMPLETIONS


class PromptFields(RequestFields):
    """A prompt without generation: text or messages."""

    model: StrictStr | None = None

    @property
    def prompt_field(self) -> str:
        """Name of the field that holds the prompt."""
        raise NotImplementedError

    @property
    def content(self) -> Any:
        """The prompt as the encoder takes it."""
        raise NotImplementedError

    @property
    def adds_special_tokens(self) -> bool:
        """True if the tokenizer adds special tokens to a text; a chat template has its own."""
        return True


class TextFields(PromptFields):
    """A prompt as text."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        name: values for name, values in REFUSED_IN_COMPLETIONS.items() if name != "add_special_tokens"
    }
    prompt: StrictStr
    add_special_tokens: StrictBool = True

    @property
    def prompt_field(self) -> str:
        return "prompt"

    @property
    def content(self) -> str:
        return self.prompt

    @property
    def adds_special_tokens(self) -> bool:
        return self.add_special_tokens


class ChatFields(PromptFields):
    """A prompt as messages, for the chat template."""

    refused = REFUSED_IN_CHATS
    messages: Messages

    @property
    def prompt_field(self) -> str:
        return "messages"

    @property
    def content(self) -> list[dict[str, str]]:
        return [message.as_template_input() for message in self.messages]


class TokenizeFields(PromptFields):
    """Fields of /tokenize besides the prompt.

    Attributes:
        return_token_strs: whether to return each token as the vocabulary has it.
        return_blocks: whether to return the text of each block (not vLLM's).
    """

    return_token_strs: StrictBool = False
    return_blocks: StrictBool = False


class TokenizeText(TextFields, TokenizeFields):
    """POST /tokenize with text."""


class TokenizeChat(ChatFields, TokenizeFields):
    """POST /tokenize with messages."""


class DetokenizeRequest(RequestFields):
    """POST /detokenize."""

    refused = REFUSED_IN_COMPLETIONS
    model: StrictStr | None = None
    tokens: Annotated[list[TokenId], FIRST_ERROR]


def parse_tokenize(body: bytes) -> TokenizeFields:
    """Parse a body of /tokenize. Raises `ApiError` (400) if it is invalid."""
    fields = read_prompt(body)
    return parse_fields(TokenizeChat, fields) if "messages" in fields else parse_fields(TokenizeText, fields)


def read_prompt(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body with a text or messages. Raises `ApiError` (400) if it has both."""
    fields = read_object(body)
    if "messages" in fields and "prompt" in fields:
        raise invalid("the request has both 'prompt' and 'messages'; send only one of them", "prompt")
    return fields


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Parse a body of /detokenize. Raises `ApiError` (400) if it is invalid."""
    return parse_fields(DetokenizeRequest, read_object(body))


def tokenize_answer(
    request: TokenizeFields, token_ids: list[int], tokenizer: Any, max_model_len: int, block_size: int
) -> dict[str, Any]:
    """Return vLLM's response with the block size and, if requested, the blocks. O(tokens)."""
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": max_model_len,
        "tokens": token_ids,
        "token_strs": tokenizer.convert_ids_to_tokens(token_ids) if request.return_token_strs else None,
        "block_size": block_size,
    }
    if request.return_blocks:
        answer["blocks"] = [
            _block(token_ids, start, block_size, tokenizer) for start in range(0, len(token_ids), block_size)
        ]
    return answer


def text_of(tokenizer: Any, token_ids: list[int]) -> str:
    """Return the text of tokens, special ones included; an incomplete character becomes U+FFFD. O(tokens)."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _block(token_ids: list[int], start: int, block_size: int, tokenizer: Any) -> dict[str, Any]:
    inside = token_ids[start : start + block_size]
    return {"start": start, "end": start + len(inside), "text": text_of(tokenizer, inside)}
