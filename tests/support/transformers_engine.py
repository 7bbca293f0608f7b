"""transformers' own batch processor, scheduler and offloading around a cache, with numbers in place of a model.

A slot of the cache holds one number that stands for a token and all tokens before it, in the bytes where keys would
be. Every step reads all that attention would read, so a block that holds something else is seen at once.
"""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from transformers import MistralConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import continuous_api, offloading_manager
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestState

from blockyard_testing.slot_memory import SlotMemory, chained

VOCAB = 89
_CONFIG: dict[str, Any] = {
    "sliding_window": None,
    "hidden_size": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
}
TMP_TOKEN = -9


def next_token(tokens: list[int]) -> int:
    """What the "model" says after these."""
    number = 1
    for token in tokens:
        number = chained(number, token)
    return number % VOCAB


def answer(prompt: list[int], num_new: int) -> list[int]:
    """What it says in all."""
    tokens = list(prompt)
    for _ in range(num_new):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Memory:
    """In place of the tensors of inputs and outputs, and of the forward pass. lag: batches in flight besides one."""

    compute_stream = None

    def __init__(self, cache: Any, lag: int) -> None:
        self.cache, self.lag = cache, lag
        [self.allocator] = cache.cache_allocators.values()
        self.slots = SlotMemory(self.allocator._kv_token_views[0][0].view(torch.int64).flatten().numpy())
        self.reset()

    def reset(self) -> None:
        self.prepared: list[Any] = []
        self.computed: deque[tuple[list[Any], list[int]]] = deque()

    def prepare_batch_tensors(self, requests_in_batch: list[Any], **_: Any) -> None:
        self.prepared = []
        for future in requests_in_batch:
            state, past, length = future.state, future.state.position_offset, future.query_length
            state.position_offset += length
            places = (state.request_id, past, length)
            written = self.allocator.get_write_indices(*places)
            read = self.allocator.get_read_indices(*places)
            self.prepared.append((future, list(state.tokens_to_process), past, written, read))
            if future.has_new_token:
                state.tokens_to_process = [TMP_TOKEN]

    def compute(self) -> None:
        """Write, then read all: each request finds its own tokens."""
        new_tokens = []
        # Of the batch before, which the requests do not know yet.
        carried = {f.state.request_id: token for f, token in self._outputs(self.computed)} if self.lag else {}
        for future, tokens, past, written, read in self.prepared:
            state = future.state
            told = [carried[state.request_id]] if state.request_id in carried and past else tokens
            known = (state.initial_tokens + state.generated_tokens + told)[: past + len(told)]
            assert told == known[past:], f"{state.request_id}: {told} at {past} of {known}"
            assert list(read[past:]) == list(written), f"{state.request_id}: it reads elsewhere than it writes"
            number = self.slots.compute(state.request_id, known, read, past)
            if future.has_new_token:
                new_tokens.append(number % VOCAB)
        self.computed.append(([prepared[0] for prepared in self.prepared], new_tokens))

    def _outputs(self, batches: Any) -> list[tuple[Any, int]]:
        """The requests of the last batch that got a token, and which."""
        if not batches:
            return []
        futures, tokens = batches[-1]
        return list(zip([future for future in futures if future.has_new_token], tokens, strict=True))

    def prepare_batch_update(self) -> tuple[list[Any], list[int], None]:
        if not self.computed:
            return [], [], None
        return *self.computed.popleft(), None


class SmallProcessor(continuous_api.ContinuousBatchProcessor):  # type: ignore[misc]  # untyped
    """cpu_blocks: blocks that can be offloaded. lag: 1 for asynchronous batching."""

    def __init__(
        self,
        num_blocks: int,
        page_size: int = 4,
        scheduler: str = "fifo",
        cpu_blocks: int = 0,
        lag: int = 0,
        config: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        options = {"max_batch_tokens": 16, "max_requests_per_batch": 64, "max_memory_percent": 0.5} | more
        self.cb_config = ContinuousBatchingConfig(
            num_blocks=num_blocks,
            page_size=page_size,
            max_blocks_per_request=0,
            use_async_batching=bool(lag),
            **options,
        )
        self.distributed_helper = DistributedHelper(None, None)
        self.config = MistralConfig(**_CONFIG | (config or {}))
        self.cache = PagedAttentionCache(self.config, self.cb_config, "cpu", self.distributed_helper, torch.float32)
        made = continuous_api.SCHEDULER_MAPPING[scheduler]
        self.scheduler = made(self.cache, self.cb_config.safety_margin, self.cb_config.max_requests_per_batch)
        self.use_async_batching = bool(lag)
        self.inputs_and_outputs = Memory(self.cache, lag)
        self.offloading_manager = self._offloading(cpu_blocks)
        self.model_runner = SimpleNamespace(maybe_pad_inputs=lambda *given: given[:2], pad_inputs=False)
        self.logit_processor = SimpleNamespace(check_kwargs=lambda _: None)
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.cancel_queue: queue.Queue[str] = queue.Queue()
        self.output_router = continuous_api.OutputRouter()
        self.background_thread_status = continuous_api.BackgroundThreadStatus()
        self.max_batch_tokens = self.cache.max_batch_tokens

    def _offloading(self, cpu_blocks: int) -> Any:
        empty = torch.empty
        unpinned = mock.patch.object(
            offloading_manager.torch, "empty", lambda *given, pin_memory=False, **named: empty(*given, **named)
        )
        gib = cpu_blocks * self.cache.bytes_per_sector / 2**30
        with unpinned:
            return offloading_manager.OffloadingManager(
                self.cache, self.scheduler, gib, 0.5, None, self.distributed_helper
            )

    def __del__(self) -> None:
        """Nothing: there are no graphs."""

    def add(self, name: str, prompt: list[int], num_new: int, num_children: int = 0) -> None:
        self.input_queue.put(RequestState(name, list(prompt), max_new_tokens=num_new, num_children=num_children))

    def cancel(self, name: str) -> None:
        self.cancel_queue.put(name)

    def step(self) -> bool:
        """One step; False if there was nothing to compute. With a lag, the step before it is taken in."""
        is_prepared = bool(self.prepare_next_batch())
        if is_prepared:
            self.inputs_and_outputs.compute()
        if len(self.inputs_and_outputs.computed) > (self.inputs_and_outputs.lag if is_prepared else 0):
            self.update_batch()
        return is_prepared

    def outputs(self) -> dict[str, Any]:
        """What has ended since the last call."""
        ended = {}
        with contextlib.suppress(queue.Empty):
            while True:
                output = self.output_router.output_queue.get_nowait()
                ended[output.request_id] = output
        return ended
