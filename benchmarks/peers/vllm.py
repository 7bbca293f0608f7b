"""vLLM's own KVCacheManager, with one group of full attention and the sha256 block hash that it uses by default."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm import __version__
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from ..workload import BLOCK_SIZE
from .peer import Peer

MAX_MODEL_LEN = 1 << 20


class VLLM(Peer):
    """A request is hashed when it is made: `look_up` makes it, `admit` is given it."""

    name = "vLLM"
    prompt_form = "a list"

    def __init__(self) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._sampling = SamplingParams(max_tokens=1)
        self._num_requests = 0

    def version(self) -> str:
        return f"vLLM {__version__}"

    def open(self, num_blocks: int, order: npt.NDArray[np.int32] | None) -> None:
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self._manager = KVCacheManager(
            config, MAX_MODEL_LEN, scheduler_block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE
        )
        if order is not None:
            pool = self._manager.block_pool
            pool.get_new_blocks(num_blocks - 1)
            pool.free_blocks([pool.blocks[block_id] for block_id in order.tolist()])

    def prompt(self, tokens: np.ndarray) -> list[int]:
        return tokens.tolist()

    def request(self, prompt: list[int]) -> Request:
        self._num_requests += 1
        return Request(str(self._num_requests), prompt, self._sampling, None, block_hasher=self._hasher)

    def look_up(self, prompt: list[int]) -> int:
        return self._manager.get_computed_blocks(self.request(prompt))[1]

    def hold_and_release(self, prompt: list[int]) -> int:
        request = self.request(prompt)
        blocks, num_hit, _ = self._manager.get_computed_blocks(request)
        pool = self._manager.block_pool
        pool.touch(blocks.blocks[0])
        pool.free_blocks(reversed(blocks.blocks[0]))
        return num_hit

    def admit(self, request: Request) -> Request:
        self._allocate(request, request.num_tokens)
        return request

    def free(self, holding: Request) -> None:
        self._manager.free(holding)

    def open_batch(self, prompts: list[list[int]]) -> None:
        self._batch = [self.admit(self.request(prompt)) for prompt in prompts]
        for request in self._batch:
            request.num_computed_tokens = request.num_tokens

    def decode_step(self, sampled: list[int]) -> None:
        """The share of the scheduler alone: token, hash, slots. Its worker makes slot mapping and rows elsewhere."""
        for request, token in zip(self._batch, sampled, strict=True):
            request.append_output_token_ids(token)
            self._allocate(request, 1)
            request.num_computed_tokens += 1

    def serve(self, prompt: list[int], output: list[int]) -> int:
        request, hit = self.begin(prompt)
        self.generate(request, output)
        self._manager.free(request)
        return BLOCK_SIZE * len(hit)

    def begin(self, prompt: list[int]) -> tuple[Request, list[int]]:
        """A request whose prompt is computed, and the ids of the blocks that it hit."""
        request = self.request(prompt)
        blocks, num_hit, _ = self._manager.get_computed_blocks(request)
        self._allocate(request, request.num_tokens - num_hit, num_hit, blocks)
        request.num_computed_tokens = request.num_tokens
        return request, blocks.get_block_ids()[0]

    def generate(self, request: Request, output: list[int]) -> None:
        """Its next tokens, in blocks of their own, and computed."""
        request.append_output_token_ids(output)
        self._allocate(request, len(output))
        request.num_computed_tokens = request.num_tokens

    def free_ids(self) -> list[int]:
        """The free blocks in the order in which they are used."""
        return [block.block_id for block in self._manager.block_pool.free_block_queue.get_all_free_blocks()]

    def _allocate(self, request: Request, *counts: Any) -> None:
        if self._manager.allocate_slots(request, *counts) is None:
            raise MemoryError(f"vLLM has no blocks left for request {request.request_id}")
