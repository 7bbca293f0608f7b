"""The requests of vLLM's /tokenize and /detokenize, and their answers, which show the prompt's blocks if asked to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import StrictBool, StrictStr

from ..errors import invalid
from .fields import FIRST_ERROR, RequestFields, TokenId, parse_fields, read_object
from .protocol import Messages
from .unsupported_fields import REFUSED_IN_CHATS, REFUSED_IN_COMPLETIONS


class PromptFields(RequestFields):
    """A prompt that nothing is generated for is a text or a chat; these are the fields that both have."""

    model: StrictStr | None = None

    @property
    def prompt_field(self) -> str:
        """Return the name of the field that has the prompt."""
        raise NotImplementedError

    @property
    def content(self) -> Any:
        """Return the prompt, as the engine takes it."""
        raise NotImplementedError

    @property
    def adds_special_tokens(self) -> bool:
        """Whether a text gets the special tokens that the tokenizer puts around it; a chat has its template's."""
        return True


class TextFields(PromptFields):
    """The prompt is a text."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        name: values for name, values in REFUSED_IN_COMPLETIONS.items() if name != "add_special_tokens"
    }
    prompt: StrictStr
    add_special_tokens: StrictBool = True

    @property
    def prompt_field(self) -> str:
        """A text is in the field "prompt"."""
        return "prompt"

    @property
    def content(self) -> str:
        """Return the text."""
        return self.prompt

    @property
    def adds_special_tokens(self) -> bool:
        """Does as the client asks."""
        return self.add_special_tokens


class ChatFields(PromptFields):
    """The prompt is a list of messages, which go through the chat template."""

    refused = REFUSED_IN_CHATS
    messages: Messages

    @property
    def prompt_field(self) -> str:
        """A chat is in the field "messages"."""
        return "messages"

    @property
    def content(self) -> list[dict[str, str]]:
        """Return the messages, for the chat template."""
        return [message.as_template_input() for message in self.messages]


class TokenizeFields(PromptFields):
    """These are /tokenize's own. return_token_strs: each token as the vocabulary has it. return_blocks: the text of
    each block; not vLLM's."""

    return_token_strs: StrictBool = False
    return_blocks: StrictBool = False


class TokenizeText(TextFields, TokenizeFields):
    """This is POST /tokenize for a text."""


class TokenizeChat(ChatFields, TokenizeFields):
    """This is POST /tokenize for messages."""


class DetokenizeRequest(RequestFields):
    """POST /detokenize."""

    refused = REFUSED_IN_COMPLETIONS
    model: StrictStr | None = None
    tokens: Annotated[list[TokenId], FIRST_ERROR]


def parse_tokenize(body: bytes) -> TokenizeFields:
    """Read a body of /tokenize. Raises `ApiError` (400) for what is not understood."""
    fields = read_prompt(body)
    return parse_fields(TokenizeChat, fields) if "messages" in fields else parse_fields(TokenizeText, fields)


def read_prompt(body: bytes) -> dict[str, Any]:
    """Read an object that has a text or messages. Raises `ApiError` (400) for one with both."""
    fields = read_object(body)
    if "messages" in fields and "prompt" in fields:
        raise invalid("'prompt' and 'messages' are both there; one request has one of them", "prompt")
    return fields


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Read a body of /detokenize. Raises `ApiError` (400) for what is not understood."""
    return parse_fields(DetokenizeRequest, read_object(body))


def tokenize_answer(
    request: TokenizeFields, token_ids: list[int], tokenizer: Any, max_model_len: int, block_size: int
) -> dict[str, Any]:
    """vLLM's answer, with the size of a block; a block that is not full is the last and cannot be hit. O(tokens)."""
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
    """Return the tokens as text, special ones too; a character that is cut shows as U+FFFD. O(tokens)."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _block(token_ids: list[int], start: int, block_size: int, tokenizer: Any) -> dict[str, Any]:
    inside = token_ids[start : start + block_size]
    return {"start": start, "end": start + len(inside), "text": text_of(tokenizer, inside)}
