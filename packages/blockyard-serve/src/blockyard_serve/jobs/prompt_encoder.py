"""Encodes prompts in a separate thread, so that a long one blocks neither the engine nor other clients.

Short prompts go first: a megabyte of text takes seconds, and one client may send many of them.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from heapq import heappop, heappush
from itertools import count
from typing import Any, TypeVar

from blockyard.errors import InvalidArgument
from blockyard_engine.prompt_encoding import EncodedPrompt, encode_prompt

from ..errors import invalid

AnswerT = TypeVar("AnswerT")


class PromptEncoder:
    """Encodes prompts with a copy of the engine's tokenizer, because the engine decodes with its own at the same time.

    Raises `InvalidArgument` if `tokenizer` is None.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        if tokenizer is None:
            raise InvalidArgument("engine has no tokenizer; a server needs one to encode prompts and decode answers")
        self._tokenizer: Any = copy.deepcopy(tokenizer)
        self._vocab_size = vocab_size
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="blockyard-prompts")
        self._lock = threading.Lock()
        #: A heap of (size, number, answer, function); the worker has a call of `_run_smallest` for each.
        self._waiting: list[tuple[int, int, Future[Any], Callable[[Any], Any]]] = []
        self._numbers = count()

    async def encode(self, name: str, prompt: Any, add_special_tokens: bool = True) -> EncodedPrompt:
        """Return the token ids of a prompt. Raises `ApiError` (400) for a prompt that is empty or cannot be encoded.

        Args:
            name: field of the request, for errors.
            prompt: text, messages (for the model's chat template), or token ids.
            add_special_tokens: whether the tokenizer adds its special tokens to a text.
        """
        is_chat = isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)
        size = sum(len(message["content"]) for message in prompt) if is_chat else len(prompt)
        return await self.call(lambda tokenizer: self._encode(tokenizer, name, prompt, add_special_tokens), size)

    async def call(self, function: Callable[[Any], AnswerT], size: int = 0) -> AnswerT:
        """Call `function` with the tokenizer in its thread, smaller sizes first. O(log waiting)."""
        answer: Future[AnswerT] = Future()
        with self._lock:
            self._worker.submit(self._run_smallest)
            heappush(self._waiting, (size, next(self._numbers), answer, function))
        return await asyncio.wrap_future(answer)

    def _run_smallest(self) -> None:
        with self._lock:
            *_, answer, function = heappop(self._waiting)
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(function(self._tokenizer))
            except BaseException as error:
                answer.set_exception(error)

    def close(self) -> None:
        """Stop the thread and cancel waiting calls."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            while self._waiting:
                self._waiting.pop()[2].cancel()

    def _encode(self, tokenizer: Any, name: str, prompt: Any, add_special_tokens: bool) -> EncodedPrompt:
        try:
            token_ids = encode_prompt(name, prompt, tokenizer, self._vocab_size, add_special_tokens)
        except InvalidArgument as error:
            raise invalid(str(error), name) from None
        return EncodedPrompt(token_ids, self._vocab_size)
