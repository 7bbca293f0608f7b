"""Sampling parameters of one request, checked on construction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from blockyard.arguments import require_bool, require_int, require_number, shown
from blockyard.errors import InvalidArgument

MAX_COMPLETIONS = 64
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
_MAX_NEW_TOKENS = 2**27
_MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    Raises `InvalidArgument` for a value outside its limits.

    Args:
        max_tokens: maximum number of new tokens, 1 or more.
        min_tokens: until a completion has this many tokens, end-of-sequence and stop tokens cannot be chosen and stop
            strings are ignored; 0 to max_tokens.
        temperature: divides the logits before a draw; 0 takes the most likely token (greedy).
        top_k: draw among this many most likely tokens; 0 for all.
        top_p: draw among the most likely tokens that together reach this probability (Holtzman et al., 2020); 1 for
            all.
        min_p: draw among tokens at least this fraction as likely as the most likely one (Nguyen et al., 2025); 0 for
            all.
        repetition_penalty: divides the logits of tokens in the prompt or answer, and multiplies negative ones (CTRL:
            Keskar et al., 2019); 1 for none. It affects greedy decoding too, as the next three do.
        presence_penalty: subtracted from the logit of each token in the answer; -2 to 2, 0 for none.
        frequency_penalty: subtracted once for each occurrence in the answer; -2 to 2, 0 for none.
        logit_bias: {token id: bias}, added to logits before any penalty; biases from -100 to 100, at most 1024 of them.
        seed: seed of the draws. They depend only on the seed and the completion's number, not on the batch, the order
            or preemptions: equal prompts with equal seeds give equal tokens.
        n: completions of the prompt, 1 to 64; they share the blocks of its keys and values.
        stop: strings that end a completion; its text ends before the first of them.
        stop_token_ids: further tokens that end a completion, also with `ignore_eos`.
        ignore_eos: continue past the model's end-of-sequence tokens, up to `max_tokens`.
        logprobs: report the log probability of each chosen token and of this many most likely ones, 0 to 20; None for
            none.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = field(default=())
    seed: int = 0
    n: int = 1
    stop: tuple[str, ...] = field(default=())
    stop_token_ids: tuple[int, ...] = field(default=())
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        require_int("max_tokens", self.max_tokens, 1, _MAX_NEW_TOKENS)
        require_int("min_tokens", self.min_tokens, 0, _MAX_NEW_TOKENS)
        if self.min_tokens > self.max_tokens:
            raise InvalidArgument(f"min_tokens is {self.min_tokens}; it must be at most max_tokens, {self.max_tokens}")
        require_int("top_k", self.top_k, 0, _MAX_TOKEN_ID)
        require_int("seed", self.seed, 0, 2**63 - 1)
        require_int("n", self.n, 1, MAX_COMPLETIONS)
        require_bool("ignore_eos", self.ignore_eos)
        if self.logprobs is not None:
            require_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._check_numbers()
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_tokens(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs, sorted by token."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def adjusts_logits(self) -> bool:
        """True if biases or penalties change the logits, apart from `min_tokens`."""
        penalties = self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1
        return penalties or bool(self.logit_bias)

    def require_tokens_below(self, vocab_size: int) -> None:
        """Raise `InvalidArgument` if a biased token is outside a vocabulary of this size. O(1)."""
        if self.biases and self.biases[-1][0] >= vocab_size:
            raise InvalidArgument(
                f"logit_bias has token {self.biases[-1][0]}; the model's last token is {vocab_size - 1}"
            )

    def _check_numbers(self) -> None:
        _require_range("temperature", self.temperature, 0.0, math.inf)
        _require_range("top_p", self.top_p, 0.0, 1.0)
        _require_range("min_p", self.min_p, 0.0, 1.0)
        _require_range("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        for name in ("presence_penalty", "frequency_penalty"):
            _require_range(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY)
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                raise InvalidArgument(f"{name} is 0; it must be above 0")


def _require_range(name: str, value: object, low: float, high: float) -> None:
    number = require_number(name, value)
    if not low <= number <= high:
        limit = "0 or more" if high == math.inf else f"from {low:g} to {high:g}"
        raise InvalidArgument(f"{name} is {value}; it must be {limit}")


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (tuple, list)):
        raise InvalidArgument(f"stop is {shown(stop)}; it must be a string or a tuple of strings")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidArgument(f"stop has {shown(string)}; each entry must be a string of at least 1 character")
    return tuple(strings)


def _stop_tokens(stops: object) -> tuple[int, ...]:
    if not isinstance(stops, (tuple, list)):
        raise InvalidArgument(f"stop_token_ids is {shown(stops)}; it must be a tuple of token ids")
    return tuple(require_int("stop_token_ids", token, 0, _MAX_TOKEN_ID) for token in stops)


def _biases(biases: object) -> tuple[tuple[int, float], ...]:
    by_token = _as_dict(biases)
    if len(by_token) > MAX_BIASES:
        raise InvalidArgument(f"logit_bias has {len(by_token)} tokens; the limit is {MAX_BIASES}")
    for token, bias in by_token.items():
        require_int("logit_bias", token, 0, _MAX_TOKEN_ID)
        _require_range(f"logit_bias of token {token}", bias, -MAX_BIAS, MAX_BIAS)
    return tuple(sorted((int(token), float(bias)) for token, bias in by_token.items()))


def _as_dict(biases: object) -> dict[int, float]:
    try:
        return dict(biases)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError):
        raise InvalidArgument(f"logit_bias is {shown(biases)}; it must be a dict from token ids to numbers") from None
