"""Responses in OpenAI's formats, whole and streamed. Completions and chats have different formats of logprobs."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from blockyard_engine import Completion, GenerationResult, TokenLogprob

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """Decodes single tokens, and caches their texts."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """Return the text of a token; an incomplete character becomes U+FFFD. O(1)."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def for_chat(self, found: list[TokenLogprob]) -> dict[str, Any]:
        """Return log probabilities in the format of chats."""
        content = [
            {**self._entry(one.token_id, one.logprob), "top_logprobs": [self._entry(*pair) for pair in one.top]}
            for one in found
        ]
        return {"content": content, "refusal": None}

    def for_completion(self, found: list[TokenLogprob]) -> dict[str, Any]:
        """Return log probabilities in the format of completions: four lists of equal length."""
        return {
            "tokens": [self.text(one.token_id) for one in found],
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": [self._by_text(one) for one in found],
            "text_offset": [one.text_offset for one in found],
        }

    def _by_text(self, one: TokenLogprob) -> dict[str, float]:
        """Return the likeliest tokens and the sampled one, which may not be among them: up to `logprobs` + 1."""
        by_text: dict[str, float] = {}
        for token_id, logprob in one.top:
            by_text.setdefault(self.text(token_id), logprob)  # of tokens with equal text, the likeliest
        by_text[self.text(one.token_id)] = one.logprob
        return by_text

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.text(token_id)
        # The tokenizer does not reveal the bytes of an incomplete character.
        encoded = None if _REPLACEMENT in text else list(text.encode("utf-8", "replace"))
        return {"token": text, "logprob": logprob, "bytes": encoded}


Choice = dict[str, Any]


def usage(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """Return the token counts of a request and its number of cached prompt tokens."""
    num_prompt = sum(result.num_prompt_tokens for result in results)
    num_new = sum(len(completion.token_ids) for result in results for completion in result.completions)
    cached = {"cached_tokens": sum(result.num_cached_tokens for result in results)}
    return {**token_counts(num_prompt, num_new), "prompt_tokens_details": cached}


def token_counts(num_prompt: int, num_new: int) -> dict[str, int]:
    """Return the three counts of every `usage` object."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


class ResponseBuilder(ABC):
    """Builds the response of one request. Every chunk has the same id and `created`."""

    whole: str
    piece: str
    prefix: str

    def __init__(self, model_name: str, texts: TokenTexts, wants_logprobs: bool) -> None:
        self._texts = texts
        self._wants_logprobs = wants_logprobs
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": model_name,
        }

    def response(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """Return the whole response, with the choices in order of prompts. O(its size)."""
        choices = [
            self._choice(number, completion)
            for number, completion in enumerate(each for result in results for each in result.completions)
        ]
        return {**self._head, "object": self.whole, "choices": choices, "usage": usage(results)}

    def chunk(self, choice: Choice) -> dict[str, Any]:
        """Return a chunk of a stream."""
        return {**self._head, "object": self.piece, "choices": [choice]}

    def usage_chunk(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """Return the last chunk of a stream, with the token counts."""
        return {**self._head, "object": self.piece, "choices": [], "usage": usage(results)}

    def opening(self, index: int) -> Choice | None:  # noqa: ARG002
        """Return the choice to send before a completion's first text, if any."""
        return None

    @abstractmethod
    def text_choice(self, index: int, text: str, logprob: TokenLogprob | None) -> Choice:
        """Return a choice with text."""

    @abstractmethod
    def end_choice(self, index: int, finish_reason: str) -> Choice:
        """Return the choice that ends a completion."""

    @abstractmethod
    def _choice(self, index: int, completion: Completion) -> Choice: ...


class CompletionBuilder(ResponseBuilder):
    """Responses of POST /v1/completions."""

    whole = "text_completion"
    piece = "text_completion"
    prefix = "cmpl"

    def text_choice(self, index: int, text: str, logprob: TokenLogprob | None) -> Choice:
        return self._make(index, text, [logprob] if logprob else [], None)

    def end_choice(self, index: int, finish_reason: str) -> Choice:
        return self._make(index, "", [], finish_reason)

    def _choice(self, index: int, completion: Completion) -> Choice:
        end = len(completion.text)  # tokens of the stop string, which is cut off, get the end as offset
        found = [replace(one, text_offset=min(one.text_offset, end)) for one in completion.logprobs or []]
        return self._make(index, completion.text, found, str(completion.finish_reason))

    def _make(self, index: int, text: str, found: list[TokenLogprob], reason: str | None) -> Choice:
        logprobs = self._texts.for_completion(found) if self._wants_logprobs and found else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


class ChatBuilder(ResponseBuilder):
    """Responses of POST /v1/chat/completions."""

    whole = "chat.completion"
    piece = "chat.completion.chunk"
    prefix = "chatcmpl"

    def opening(self, index: int) -> Choice:
        """Return a choice with the role."""
        return self._delta(index, {"role": "assistant", "content": ""}, [], None)

    def text_choice(self, index: int, text: str, logprob: TokenLogprob | None) -> Choice:
        return self._delta(index, {"content": text}, [logprob] if logprob else [], None)

    def end_choice(self, index: int, finish_reason: str) -> Choice:
        return self._delta(index, {}, [], finish_reason)

    def _choice(self, index: int, completion: Completion) -> Choice:
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self._logprobs(completion.logprobs or []),
            "finish_reason": str(completion.finish_reason),
        }

    def _delta(self, index: int, delta: dict[str, str], found: list[TokenLogprob], reason: str | None) -> Choice:
        return {"index": index, "delta": delta, "logprobs": self._logprobs(found), "finish_reason": reason}

    def _logprobs(self, found: list[TokenLogprob]) -> dict[str, Any] | None:
        return self._texts.for_chat(found) if self._wants_logprobs and found else None
