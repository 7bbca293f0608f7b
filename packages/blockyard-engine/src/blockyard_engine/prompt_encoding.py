"""Encodes prompts (text, chat messages or token ids) as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockyard.arguments import require_unicode, shown
from blockyard.errors import InvalidArgument
from blockyard.storage import int_array, require_range

#: Characters that a chat template may add, besides doubling those of the messages.
MAX_TEMPLATE_TEXT = 2**20


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Token ids that `encode_prompt` has already checked for a vocabulary of this size."""

    token_ids: list[int]
    vocab_size: int


#: Text; chat messages, each with "role" and "content"; or token ids (list, numpy array, torch tensor).
Prompt = str | Sequence[Mapping[str, str]] | Sequence[int] | EncodedPrompt | Any


def encode_prompt(
    name: str, prompt: Prompt, tokenizer: Any, vocab_size: int, add_special_tokens: bool = True
) -> list[int]:
    """Return the token ids of a prompt; chat messages go through the tokenizer's chat template.

    Raises `InvalidArgument` for a prompt that is empty or of another type, text without a tokenizer or with invalid
    Unicode, a token id outside the vocabulary, and a chat template that raises or whose text is longer than twice the
    messages plus 2**20 characters.

    Args:
        name: name of the prompt in errors.
        prompt: text, chat messages or token ids.
        tokenizer: the model's tokenizer, or None.
        vocab_size: size of the model's vocabulary.
        add_special_tokens: whether the tokenizer adds its special tokens to text.
    """
    if isinstance(prompt, EncodedPrompt) and prompt.vocab_size == vocab_size:
        return prompt.token_ids
    if isinstance(prompt, str):
        text = require_unicode(name, prompt)
        token_ids = _require_tokenizer(name, tokenizer)(text, add_special_tokens=add_special_tokens).input_ids
    elif isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping):
        messages: Any = prompt
        token_ids = _encode_chat(name, messages, _require_tokenizer(name, tokenizer))
    elif isinstance(prompt, Sequence) or hasattr(prompt, "dtype"):
        token_ids = prompt
    else:
        raise InvalidArgument(
            f"{name} is a {type(prompt).__name__}; it must be a string, a list of chat messages or a list of token ids"
        )
    tokens = int_array(name, token_ids, 1)
    if len(tokens) == 0:
        raise InvalidArgument(f"{name} has no tokens; it must have at least 1")
    require_range(name, tokens, 0, vocab_size - 1)
    token_list: list[int] = tokens.tolist()
    return token_list


def _encode_chat(name: str, messages: Sequence[Mapping[str, str]], tokenizer: Any) -> Any:
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise InvalidArgument(f"{name}, message {position}, is {message!r}; it must have 'role' and 'content'")
        for part in message.values():
            if isinstance(part, str):
                require_unicode(f"{name}, message {position}", part)
    if not tokenizer.chat_template:
        raise InvalidArgument(f"{name} is a chat, but the model's tokenizer has no chat template; give it as text")
    text = _rendered(name, messages, tokenizer)
    return tokenizer(text, add_special_tokens=False).input_ids


def _rendered(name: str, messages: Sequence[Mapping[str, str]], tokenizer: Any) -> str:
    """Render a chat with the model's template, an arbitrary program of the model's author."""
    try:
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise InvalidArgument(
            f"{name}: the model's chat template refuses these messages: {said[:200]}{'...' * (len(said) > 200)}"
        ) from error
    given = sum(len(part) for message in messages for part in message.values() if isinstance(part, str))
    limit = 2 * given + MAX_TEMPLATE_TEXT
    if not isinstance(text, str) or len(text) > limit:
        made = f"{len(text):,} characters" if isinstance(text, str) else shown(text)
        raise InvalidArgument(
            f"{name}: the model's chat template makes {made} from messages of {given:,}; the limit is {limit:,}"
        )
    return require_unicode(f"{name}, by the model's chat template", text)


def _require_tokenizer(name: str, tokenizer: Any) -> Any:
    if tokenizer is None:
        raise InvalidArgument(f"{name} is text, but the engine has no tokenizer; give token ids")
    return tokenizer
