"""Prompts to token ids, in a thread of their own: a long prompt must stop neither the engine nor other clients."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jinja2

from ...engine.prompts import EncodedPrompt, encode_prompt
from ...errors import InvalidArgument
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

    async def encode(self, name: str, prompt: Any, add_special_tokens: bool = True) -> EncodedPrompt:
        """The token ids of text, of messages (through the model's chat template) or of token ids.

        name: the field of the request. add_special_tokens: those that the tokenizer puts around a text. Raises
        `ApiError` (400) for a prompt that has no tokens or cannot be read.
        """
        return await self.ask(lambda tokenizer: self._encode(tokenizer, name, prompt, add_special_tokens))

    async def ask(self, question: Callable[[Any], AnswerT]) -> AnswerT:
        """Call `question` with the tokenizer, in its thread."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, question, self._tokenizer)

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _encode(self, tokenizer: Any, name: str, prompt: Any, add_special_tokens: bool) -> EncodedPrompt:
        try:
            token_ids = encode_prompt(name, prompt, tokenizer, self._vocab_size, add_special_tokens)
        except InvalidArgument as error:
            raise invalid(str(error), name) from None
        except jinja2.TemplateError as error:  # a template raises, for example, for roles in an order it does not know
            raise invalid(f"the model's chat template refuses these messages: {error}", name) from None
        return EncodedPrompt(token_ids, self._vocab_size)
