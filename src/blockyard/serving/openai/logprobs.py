"""Log probabilities in OpenAI's two shapes: one for chats, an older one for completions."""

from __future__ import annotations

from typing import Any

from ...engine import TokenLogprob

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """What a token looks like alone. decode: of a tokenizer; what was asked for once is kept, at most a vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """The token as text; a part of a character shows as U+FFFD. O(1)."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def for_chat(self, found: list[TokenLogprob]) -> dict[str, Any]:
        """{"content": [{"token", "logprob", "bytes", "top_logprobs"}, ...]}."""
        return {"content": [self._chat_token(one) for one in found], "refusal": None}

    def for_completion(self, found: list[TokenLogprob], offset: int) -> dict[str, Any]:
        """Four lists of equal length. offset: characters of the completion before the first of these tokens."""
        tokens = [self.text(one.token_id) for one in found]
        offsets = [offset]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": [self._by_text(one) for one in found],
            "text_offset": offsets[:-1],
        }

    def _by_text(self, one: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and, whether it is one of them or not, the chosen one: up to `logprobs` + 1."""
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
