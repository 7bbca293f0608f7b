"""Prompts to token ids, in a thread of their own: a long prompt must stop neither the engine nor other clients.

What is short goes first: a megabyte of text takes seconds, and one client may send many of them.
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
    """Encodes prompts with a copy of the engine's tokenizer: the engine decodes with its own at the same time.

    Raises `InvalidArgument` where there is no tokenizer: a server answers in text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        if tokenizer is None:
            raise InvalidArgument("engine has no tokenizer; a server needs one to read prompts and to answer")
        self._tokenizer: Any = copy.deepcopy(tokenizer)
        self._vocab_size = vocab_size
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="blockyard-prompts")
        self._lock = threading.Lock()
        #: (size, number, answer, question), the smallest first; the worker has a call of `_answer_shortest` for each.
        self._waiting: list[tuple[int, int, Future[Any], Callable[[Any], Any]]] = []
        self._numbers = count()

    async def encode(self, name: str, prompt: Any, add_special_tokens: bool = True) -> EncodedPrompt:
        """Return the token ids of text, of messages (through the model's chat template) or of token ids.

        name: the field of the request. add_special_tokens: those that the tokenizer puts around a text. Raises
        `ApiError` (400) for a prompt that has no tokens or cannot be read.
        """
        size = _size_of(prompt)
        return await self.ask(lambda tokenizer: self._encode(tokenizer, name, prompt, add_special_tokens), size)

    async def ask(self, question: Callable[[Any], AnswerT], size: int = 0) -> AnswerT:
        """Call `question` with the tokenizer, in its thread, when none of a smaller size waits. O(log waiting)."""
        answer: Future[AnswerT] = Future()
        with self._lock:
            self._worker.submit(self._answer_shortest)
            heappush(self._waiting, (size, next(self._numbers), answer, question))
        return await asyncio.wrap_future(answer)

    def _answer_shortest(self) -> None:
        with self._lock:
            *_, answer, question = heappop(self._waiting)
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(question(self._tokenizer))
            except BaseException as error:
                answer.set_exception(error)

    def close(self) -> None:
        """End the thread; what waits is cancelled."""
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


def _size_of(prompt: Any) -> int:
    """Count the characters or tokens of a prompt. O(messages)."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        return sum(len(message["content"]) for message in prompt)
    return len(prompt)
