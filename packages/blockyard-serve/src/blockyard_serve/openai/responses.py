"""Answers in OpenAI's shapes, whole and in the pieces of a stream: one form for completions, one for chats.

Log probabilities have two shapes as well: one for chats, an older one for completions.
"""

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
    """What a token looks like alone. decode: of a tokenizer; what was asked for once is kept, at most a vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """Return the token as text; a part of a character shows as U+FFFD. O(1)."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def for_chat(self, found: list[TokenLogprob]) -> dict[str, Any]:
        """{"content": [{"token", "logprob", "bytes", "top_logprobs"}, ...]}."""
        return {"content": [self._chat_token(one) for one in found], "refusal": None}

    def for_completion(self, found: list[TokenLogprob]) -> dict[str, Any]:
        """Return four lists of equal length."""
        return {
            "tokens": [self.text(one.token_id) for one in found],
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": [self._by_text(one) for one in found],
            "text_offset": [one.text_offset for one in found],
        }

    def _by_text(self, one: TokenLogprob) -> dict[str, float]:
        """Return the likeliest tokens and, whether it is one of them or not, the chosen one: up to `logprobs` + 1."""
        by_text: dict[str, float] = {}
        for token_id, logprob in one.top:
            by_text.setdefault(self.text(token_id), logprob)  # of tokens that look alike, the likeliest
        by_text[self.text(one.token_id)] = one.logprob
        return by_text

    def _chat_token(self, one: TokenLogprob) -> dict[str, Any]:
        alternatives = [self._entry(token, logprob) for token, logprob in one.top]
        return {**self._entry(one.token_id, one.logprob), "top_logprobs": alternatives}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.text(token_id)
        # A part of a character has no text of its own; which bytes it stands for, the tokenizer does not say.
        encoded = None if _REPLACEMENT in text else list(text.encode("utf-8", "replace"))
        return {"token": text, "logprob": logprob, "bytes": encoded}


Choice = dict[str, Any]


def usage(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """Return what the prompts and completions of a request come to, and how much of the prompts the cache had."""
    num_prompt = sum(result.num_prompt_tokens for result in results)
    num_new = sum(len(completion.token_ids) for result in results for completion in result.completions)
    cached = {"cached_tokens": sum(result.num_cached_tokens for result in results)}
    return {**token_counts(num_prompt, num_new), "prompt_tokens_details": cached}


def token_counts(num_prompt: int, num_new: int) -> dict[str, int]:
    """The three counts that every usage has."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


class Form(ABC):
    """The shape of one request's answer. `created` and the id are the same in every piece of it."""

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
        """Return the whole answer: the completions of the first prompt, then those of the next. O(its size)."""
        choices = [
            self._choice(number, completion)
            for number, completion in enumerate(each for result in results for each in result.completions)
        ]
        return {**self._head, "object": self.whole, "choices": choices, "usage": usage(results)}

    def chunk(self, choice: Choice) -> dict[str, Any]:
        """Return a piece of a stream."""
        return {**self._head, "object": self.piece, "choices": [choice]}

    def usage_chunk(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """Return the last piece, for a client that asked for it."""
        return {**self._head, "object": self.piece, "choices": [], "usage": usage(results)}

    def opening(self, index: int) -> Choice | None:  # noqa: ARG002
        """Return what is sent before a completion's first text; None for nothing."""
        return None

    @abstractmethod
    def text_choice(self, index: int, text: str, logprob: TokenLogprob | None) -> Choice:
        """Return a piece of text."""

    @abstractmethod
    def end_choice(self, index: int, finish_reason: str) -> Choice:
        """Return the end of a completion."""

    @abstractmethod
    def _choice(self, index: int, completion: Completion) -> Choice: ...


class CompletionForm(Form):
    """POST /v1/completions."""

    whole = "text_completion"
    piece = "text_completion"
    prefix = "cmpl"

    def text_choice(self, index: int, text: str, logprob: TokenLogprob | None) -> Choice:
        """Return a piece of text, with the offset of its token."""
        return self._make(index, text, [logprob] if logprob else [], None)

    def end_choice(self, index: int, finish_reason: str) -> Choice:
        """Return the end of a completion: no text, and the reason."""
        return self._make(index, "", [], finish_reason)

    def _choice(self, index: int, completion: Completion) -> Choice:
        end = len(completion.text)  # a stop string is cut off, and tokens within it stand at the end
        found = [replace(one, text_offset=min(one.text_offset, end)) for one in completion.logprobs or []]
        return self._make(index, completion.text, found, str(completion.finish_reason))

    def _make(self, index: int, text: str, found: list[TokenLogprob], reason: str | None) -> Choice:
        logprobs = self._texts.for_completion(found) if self._wants_logprobs and found else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


class ChatForm(Form):
    """POST /v1/chat/completions."""

    whole = "chat.completion"
    piece = "chat.completion.chunk"
    prefix = "chatcmpl"

    def opening(self, index: int) -> Choice:
        """Return the role, which a chat sends before any text."""
        return self._delta(index, {"role": "assistant", "content": ""}, [], None)

    def text_choice(self, index: int, text: str, logprob: TokenLogprob | None) -> Choice:
        """Return a piece of text as a delta."""
        return self._delta(index, {"content": text}, [logprob] if logprob else [], None)

    def end_choice(self, index: int, finish_reason: str) -> Choice:
        """Return the end of an answer: an empty delta, and the reason."""
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
