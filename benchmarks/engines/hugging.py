"""transformers: `generate` on one padded batch, and `generate_batch`, its continuous batching."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

from blockyard_engine.model import quiet_transformers

from .contestant import Answer, Contestant
from .ours import STEP_TOKENS
from .work import Size, Work

#: Tokens of a page; at the default, 256, a request of 192 tokens would hold a third more than it uses.
PAGE_SIZE = 64


class Generate(Contestant):
    """All requests as one rectangle, padded on the left: the fastest way where all are equally long."""

    name = "transformers generate"

    def __init__(self, model: Any) -> None:
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self._model = model

    def answer(self, work: Work) -> Answer:
        width = max(map(len, work.prompts))
        padded = [[0] * (width - len(prompt)) + prompt for prompt in work.prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in work.prompts]
        start = time.perf_counter()
        with torch.inference_mode(), quiet_transformers():
            output = self._model.generate(
                torch.tensor(padded), attention_mask=torch.tensor(mask), generation_config=greedy(work.num_new)
            )
        return Answer(output[:, width:].tolist(), time.perf_counter() - start)


class GenerateBatch(Contestant):
    """Continuous batching over pages, in transformers itself. It makes its cache anew in every call."""

    name = "transformers generate_batch"

    def __init__(self, model: Any, size: Size) -> None:
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self._model = model
        pages = -(-(size.num_prompt_tokens + size.num_new) // PAGE_SIZE)
        self._paging = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=size.num_requests * (pages + 1),
            max_batch_tokens=max(STEP_TOKENS, size.num_requests),
            max_requests_per_batch=size.num_requests,
        )

    def answer(self, work: Work) -> Answer:
        start = time.perf_counter()
        with quiet_transformers():
            outputs = self._model.generate_batch(
                work.prompts, generation_config=greedy(work.num_new), continuous_batching_config=self._paging
            )
        seconds = time.perf_counter() - start
        return Answer([list(output.generated_tokens) for output in outputs.values()], seconds)


def greedy(num_new: int) -> GenerationConfig:
    """The n likeliest tokens, past any end: no token of a vocabulary is -1."""
    return GenerationConfig(do_sample=False, max_new_tokens=num_new, eos_token_id=-1, pad_token_id=0)
