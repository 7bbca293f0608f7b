"""Blockyard's reference engine."""

from __future__ import annotations

import time
from typing import Any

import blockyard
from blockyard.cli import build_name
from blockyard_engine import Engine, SamplingParams

from .contestant import Answer, Contestant
from .work import BLOCK_SIZE, Size, Work

#: Tokens computed in one step; vLLM gets the same.
STEP_TOKENS = 2048


class Blockyard(Contestant):
    """All requests at once, prefix cache on, as it is by default."""

    name = "Blockyard"

    def __init__(self, model: Any, size: Size) -> None:
        self.version = f"Blockyard {blockyard.__version__}, {build_name()}"
        max_len = size.num_prompt_tokens + size.num_new
        self._engine = Engine(
            model,
            num_blocks=size.num_requests * (-(-max_len // BLOCK_SIZE) + 1) + 1,
            block_size=BLOCK_SIZE,
            max_num_seqs=size.num_requests,
            max_num_batched_tokens=max(STEP_TOKENS, size.num_requests),
        )

    def answer(self, work: Work) -> Answer:
        params = SamplingParams(max_tokens=work.num_new, ignore_eos=True)
        start = time.perf_counter()
        results = self._engine.generate(work.prompts, params)
        return Answer([result.token_ids for result in results], time.perf_counter() - start)
