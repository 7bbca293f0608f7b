"""vLLM's scheduler without a model: a token is a function of its request and its place."""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as StockAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from blockyard_vllm import AsyncScheduler, Scheduler

from .worker import Worker

#: A configuration without weights, which `model_configs.py` writes.
MODEL = "Qwen/Qwen3-0.6B"
BLOCK_SIZE = 16
LEVELS = ("tokens", "names")
NO_TOKEN = 50256
init_none_hash(sha256)
HASHER = get_request_block_hasher(BLOCK_SIZE, sha256)


def config_of(num_blocks: int, **others: Any) -> tuple[VllmConfig, KVCacheConfig]:
    """vLLM's configuration, and one group of full attention; with `window` a second one that slides.

    page: a group of states besides, cached as vLLM's "align" does; blocks of both have so many tokens. unit: tokens a
    hash, as `--prefix-match-unit` has it.
    """
    max_len, budget = others.get("max_model_len", 2048), others.get("max_num_batched_tokens", 2048)
    connector = others.get("connector")
    page = others.get("page", 0)
    size = page or BLOCK_SIZE
    is_cached = others.get("is_cached", True)
    cache = CacheConfig(block_size=size, gpu_memory_utilization=0.9, enable_prefix_caching=is_cached)
    cache.mamba_cache_mode = "align" if is_cached else "none"
    cache.prefix_cache_retention_interval = others.get("retention", 0)
    cache.num_gpu_blocks = num_blocks
    vllm_config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=others.get("max_num_seqs", 64),
            max_num_batched_tokens=budget,
            max_model_len=max_len,
            enable_chunked_prefill=True,
            async_scheduling=others.get("asynchronous", False),
            is_encoder_decoder=False,
            watermark=0.0,
        ),
        model_config=ModelConfig(model=MODEL, dtype="float16", skip_tokenizer_init=True, max_model_len=max_len),
        cache_config=cache,
        parallel_config=ParallelConfig(data_parallel_size=4, data_parallel_rank=others["rank"])
        if "rank" in others
        else ParallelConfig(),
        kv_transfer_config=connector and KVTransferConfig(**connector),
        kv_events_config=others.get("events"),
        additional_config={"blockyard": others["options"]} if others.get("options") else {},
    )
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    if window := others.get("window"):
        sliding = SlidingWindowSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=window
        )
        groups.append(KVCacheGroupSpec(["windowed layer"], sliding))
    if page:
        states = MambaSpec(
            block_size=page if is_cached else max_len,
            shapes=((spec.page_size_bytes // 4,),),
            dtypes=(torch.float32,),
            mamba_cache_mode=cache.mamba_cache_mode,
            num_speculative_blocks=others.get("drafted", 0),
            num_prefill_checkpoint_blocks=others.get("inside", 0),
        )
        groups += [KVCacheGroupSpec(["layer with a state"], states), KVCacheGroupSpec(["another one"], states)]
    interval = cache.prefix_cache_retention_interval if page else None
    return vllm_config, KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=interval,
    )


def request_of(
    name: str,
    tokens: list[int],
    num_new: int,
    hasher: Callable[[Request], list[Any]] = HASHER,
    salt: str | None = None,
    requested: list[int] | None = None,
) -> Request:
    """A request that ends after `num_new` tokens. requested: where its application wants states."""
    extra = {"checkpoint_positions": requested} if requested else None
    params = SamplingParams(max_tokens=num_new, ignore_eos=True, temperature=0, extra_args=extra)
    params.update_from_generation_config({}, NO_TOKEN)
    return Request(name, tokens, params, None, block_hasher=hasher, cache_salt=salt)


def token_of(name: str, place: int) -> int:
    """Return the next token of the "model"."""
    return zlib.crc32(f"{name} {place}".encode()) % 50_000


class Engine:
    """One scheduler, stock or on a level of ours. An asynchronous one is a step ahead of its outputs.

    other_class: with the class that vLLM has for the other way, as one who passes the wrong flag. scheduler_class:
    instead of vLLM's and ours.
    """

    #: Whether blocks have contents, which are checked as they are read.
    works = False

    def __init__(
        self, level: str, num_blocks: int, asynchronous: bool = False, other_class: bool = False, **others: Any
    ) -> None:
        self.level = level
        own_class = others.pop("scheduler_class", None)
        classes = (
            (own_class, own_class)
            if own_class
            else (StockScheduler, StockAsyncScheduler)
            if level == "stock"
            else (Scheduler, AsyncScheduler)
        )
        options = others.pop("options", {})
        if level != "stock":
            options = {"level": level} | options
        vllm_config, cache_config = config_of(num_blocks, asynchronous=asynchronous, options=options, **others)
        register_all_kvcache_specs(vllm_config)
        self.scheduler: Any = classes[asynchronous != other_class](
            vllm_config=vllm_config,
            kv_cache_config=cache_config,
            block_size=math.lcm(*(group.kv_cache_spec.block_size for group in cache_config.kv_cache_groups)),
            hash_block_size=others.get("unit") if others.get("is_cached", True) else None,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(vllm_config),
        )
        self.ahead = int(asynchronous)
        self.worker = Worker(cache_config, token_of)
        self.pending: deque[tuple[Any, dict[str, int]]] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.hits = self.queries = 0

    @property
    def manager(self) -> Any:
        """The block manager."""
        return self.scheduler.kv_cache_manager

    @property
    def pool(self) -> Any:
        """Blockyard's pool, None with stock."""
        return getattr(self.manager.block_pool, "pool", None)

    @property
    def num_free_blocks(self) -> int:
        """Free blocks, cached ones included."""
        return int(self.manager.block_pool.get_num_free_blocks())

    def add(self, request: Request) -> None:
        """Put a request into the waiting queue."""
        self.scheduler.add_request(request)

    def schedule(self) -> dict[str, int]:
        """Plan one step; return the tokens of each request."""
        output = self.scheduler.schedule()
        if self.works:
            self.worker.run(output, self.scheduler.requests)
        samples = {}
        for name in output.num_scheduled_tokens:
            request = self.scheduler.requests[name]
            if not request.is_prefill_chunk:
                samples[name] = token_of(name, request.num_computed_tokens)
        self.pending.append((output, samples))
        return dict(output.num_scheduled_tokens)

    def finish_step(self, failed_blocks: frozenset[int] = frozenset()) -> None:
        """The oldest step's outputs come in; failed_blocks: whose load by a connector failed."""
        output, samples = self.pending.popleft()
        names = list(output.num_scheduled_tokens)
        connected = KVConnectorOutput(invalid_block_ids=set(failed_blocks)) if failed_blocks else None
        answer = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[[samples[name]] if name in samples else [] for name in names],
            kv_connector_output=connected,
        )
        for outputs in self.scheduler.update_from_output(output, answer).values():
            for one in outputs.outputs:
                self.tokens.setdefault(one.request_id, []).extend(one.new_token_ids)
            if outputs.scheduler_stats is not None:
                self.hits += outputs.scheduler_stats.prefix_cache_stats.hits
                self.queries += outputs.scheduler_stats.prefix_cache_stats.queries

    def step(self) -> dict[str, int]:
        """Plan a step, and process the outputs of the step that is due."""
        planned = self.schedule()
        if len(self.pending) > self.ahead:
            self.finish_step()
        return planned

    def drain(self, limit: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.scheduler.has_unfinished_requests():
                while self.pending:
                    self.finish_step()
                return
            self.step()
        raise AssertionError(f"requests are left after {limit} steps")

    def abort(self, names: list[str]) -> None:
        """Abort requests, as for clients that have disconnected."""
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def check(self) -> None:
        """Check the invariants of Blockyard's pool."""
        if self.pool is not None:
            self.pool.check()

    def require_empty(self) -> None:
        """Check that every block is free and the prefix cache can be reset."""
        self.check()
        assert self.num_free_blocks == self.manager.block_pool.num_gpu_blocks - 1
        if self.pool is not None:
            assert not self.pool.leases()
        assert not getattr(self.manager, "keys", None), "of a request that is gone"
        assert self.scheduler.reset_prefix_cache()
        self.check()
