"""The engine: requests in, tokens out, over one model and one cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..arguments import require_int
from ..config import CacheConfig
from ..core.manager import KVCacheManager
from ..errors import InvalidArgument, InvariantError, ModelError
from ..sizing import KVCacheSpec
from ..storage import KVCache
from .borrowing import BorrowedModel
from .model import load_model
from .probe import ModelShape, probe_model
from .progress import GenerationBar
from .prompts import Prompt, encode_prompt
from .request import FinishReason, GenerationResult, Request
from .runner import ModelRunner
from .sampling import SamplingParams, choose_tokens
from .scheduler import ScheduledStep, Scheduler

#: KV memory taken when num_blocks is not given. Memory that is never used is never touched on CPU.
_DEFAULT_KV_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did.

    num_tokens: tokens computed; num_seqs: sequences they belong to. new_tokens: (request_id, token) for each token
    chosen. finished: the requests that ended. num_preempted: requests set back to make room. num_running,
    num_waiting: after the step.
    """

    num_tokens: int
    num_seqs: int
    num_preempted: int
    num_running: int
    num_waiting: int
    new_tokens: list[tuple[int, int]] = field(default_factory=list)
    finished: list[GenerationResult] = field(default_factory=list)


class Engine:
    """Continuous batching of a causal language model of Hugging Face transformers over Blockyard's blocks.

    model: any model whose attention goes through transformers' attention interface and is plain causal attention in
        every layer: Llama, Qwen2, Qwen3, Mistral and their like. It is borrowed: its attention is switched during a
        step and put back afterwards.
    tokenizer: the model's; None if all prompts are token ids.
    num_blocks, block_size: the pool; if num_blocks is None, 1 GiB of keys and values.
    max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens computed in one step, at least
        max_num_seqs; a longer prompt is computed in chunks.
    max_model_len: tokens of the longest sequence; the model's own limit if None.
    enable_prefix_caching: whether prompts take the blocks of earlier ones with the same beginning.

    `cache` is the manager and `kv_cache` the tensors, to look at. Keys and values have the model's dtype and device.
    Not safe for use by several threads at once. Raises `InvalidArgument` for sizes outside their limits, `ModelError`
    for a model that the engine cannot serve.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
    ) -> None:
        borrowed = BorrowedModel(model)
        self.shape = probe_model(borrowed, max_model_len)
        self.tokenizer = tokenizer
        if num_blocks is None:
            num_blocks = _default_num_blocks(self.shape, block_size, borrowed.dtype)
        config = CacheConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=self.shape.max_model_len,
            enable_prefix_caching=enable_prefix_caching,
        )
        _require_budget(max_num_batched_tokens, max_num_seqs)
        self.cache = KVCacheManager(config)
        self.kv_cache = KVCache(
            config.num_blocks,
            config.block_size,
            self.shape.num_layers,
            self.shape.num_kv_heads,
            self.shape.head_size,
            dtype=borrowed.dtype,
            device=borrowed.device,
        )
        self._borrowed = borrowed
        self._runner = ModelRunner(borrowed, self.kv_cache, config.max_model_len)
        self._scheduler = Scheduler(self.cache, max_num_batched_tokens)
        self._num_requests = 0

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any
    ) -> Engine:
        """An engine for the model in a folder (safetensors) or a .gguf file, which is converted once.

        options: as for `Engine`. Nothing is downloaded. Raises `ModelError`, in one sentence, if there is no such
        model or it cannot be read.
        """
        model, tokenizer = load_model(path, dtype, device)
        return cls(model, tokenizer, **options)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        on_step: Callable[[StepReport], None] | None = None,
    ) -> list[GenerationResult]:
        """Run prompts to their ends and return their results, in the order of the prompts.

        prompts: each a string, a list of chat messages ({"role": ..., "content": ...}), or a list of token ids.
        sampling: one for all, or one for each; greedy and 128 tokens if None. progress: draw a bar on stderr, if
        that is a terminal. on_step: called after each step.

        Raises `NeverFits` or `InvalidArgument` for a prompt that cannot be served, before any is run. If anything
        else raises, on_step too, every sequence is freed and the cache stays whole.
        """
        if self._scheduler.num_unfinished:
            raise InvalidArgument(
                f"generate: {self._scheduler.num_unfinished} requests of add_request are unfinished; step them first"
            )
        requests = self._make_requests(prompts, sampling)
        for request in requests:
            self._scheduler.add(request)
        results: dict[int, GenerationResult] = {}
        try:
            with self._borrowed, GenerationBar(len(requests), progress) as bar:
                num_tokens = 0
                while self.has_unfinished:
                    report = self.step()
                    num_tokens += len(report.new_tokens)
                    results.update((result.request_id, result) for result in report.finished)
                    bar.update(len(results), report.num_running, report.num_waiting, num_tokens)
                    if on_step is not None:
                        on_step(report)
        except BaseException:
            self._scheduler.abort_all()
            raise
        return [results[request.request_id] for request in requests]

    def add_request(self, prompt: Prompt, sampling: SamplingParams | None = None) -> int:
        """Queue one prompt for `step`; returns its request id. Raises as `generate` does."""
        request = self._make_request("prompt", prompt, sampling or SamplingParams())
        self._scheduler.add(request)
        return request.request_id

    def abort_request(self, request_id: int) -> None:
        """Drop a request that waits or runs. Raises `InvalidArgument` if there is none of this id."""
        if not self._scheduler.abort(request_id):
            raise InvalidArgument(f"request_id is {request_id}; no such request waits or runs")

    @property
    def has_unfinished(self) -> bool:
        """Whether requests wait or run."""
        return self._scheduler.num_unfinished > 0

    def step(self) -> StepReport:
        """Run one step: schedule, compute, choose tokens, and end what is finished.

        If it raises, every request is dropped and its blocks are freed; nothing that was not computed can be hit.
        """
        try:
            step = self._scheduler.schedule()
            if self.has_unfinished and not step.requests and not step.preempted:
                raise InvariantError("no unfinished request can be scheduled; this is a bug, please report it")
            chosen = self._choose_tokens(step) if step.requests else []
            return self._conclude(step, chosen)
        except BaseException:
            self._scheduler.abort_all()
            raise

    def _choose_tokens(self, step: ScheduledStep) -> list[tuple[Request, int]]:
        assert step.plan is not None
        logits = self._runner.run(step, step.plan)
        sampled = [request for request, samples in zip(step.requests, step.samples, strict=True) if samples]
        if not sampled:
            return []
        if not bool(torch.isfinite(logits.amax(dim=-1)).all()):
            raise ModelError("the model's logits are not finite; its weights or its dtype may be unfit")
        params = [request.sampling for request in sampled]
        tokens = choose_tokens(logits, params, [request.num_generated for request in sampled])
        return list(zip(sampled, tokens, strict=True))

    def _conclude(self, step: ScheduledStep, chosen: list[tuple[Request, int]]) -> StepReport:
        ended: list[tuple[Request, FinishReason]] = []
        next_tokens: dict[int, int] = {}
        for request, token in chosen:
            reason = request.append(token)
            if reason is None:
                next_tokens[request.request_id] = token
            else:
                ended.append((request, reason))  # its last token is never computed, so the cache need not know it
        if step.requests:
            self._scheduler.commit(step, _aligned(step.requests, next_tokens))
        self._scheduler.retire([request for request, _ in ended])
        return StepReport(
            num_tokens=int(step.num_scheduled.sum()),
            num_seqs=len(step.requests),
            num_preempted=len(step.preempted),
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            new_tokens=[(request.request_id, token) for request, token in chosen],
            finished=[self._result(request, reason) for request, reason in ended],
        )

    def _result(self, request: Request, reason: FinishReason) -> GenerationResult:
        token_ids = request.token_ids[len(request.prompt_token_ids) :]
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True) if self.tokenizer is not None else ""
        return GenerationResult(
            request_id=request.request_id,
            text=text,
            token_ids=token_ids,
            finish_reason=reason,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=request.num_cached_tokens or 0,
            num_preemptions=request.num_preemptions,
        )

    def _make_requests(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        """Requests for all prompts, or an error that names the first that cannot be served, and none."""
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
            raise InvalidArgument(f"prompts is a {type(prompts).__name__}; it must be a list of prompts")
        if isinstance(sampling, Sequence):
            params = list(sampling)
        else:
            params = [sampling or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidArgument(f"sampling has {len(params)} entries; there are {len(prompts)} prompts")
        return [
            self._make_request(f"prompt {number}", prompt, wanted)
            for number, (prompt, wanted) in enumerate(zip(prompts, params, strict=True))
        ]

    def _make_request(self, name: str, prompt: Prompt, sampling: SamplingParams) -> Request:
        if not isinstance(sampling, SamplingParams):
            raise InvalidArgument(f"sampling of {name} is a {type(sampling).__name__}; it must be SamplingParams")
        token_ids = encode_prompt(name, prompt, self.tokenizer, self.shape.vocab_size)
        self._scheduler.require_fits(name, len(token_ids), sampling.max_tokens)
        stops = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= self.shape.eos_token_ids
        self._num_requests += 1
        return Request(self._num_requests, token_ids, sampling, stops)


def _default_num_blocks(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """As many blocks as fit 1 GiB of keys and values."""
    spec = KVCacheSpec.uniform(
        shape.num_layers, shape.num_kv_heads, shape.head_size, block_size=block_size, dtype=dtype
    )
    return max(2, _DEFAULT_KV_BYTES // spec.bytes_per_block)


def _aligned(requests: list[Request], next_tokens: dict[int, int]) -> NDArray[np.int64]:
    """The next token of each row, -1 for none: what `commit` takes."""
    return np.array([next_tokens.get(request.request_id, -1) for request in requests], np.int64)


def _require_budget(max_num_batched_tokens: int, max_num_seqs: int) -> None:
    if require_int("max_num_batched_tokens", max_num_batched_tokens, 1, 2**31 - 1) < max_num_seqs:
        raise InvalidArgument(
            f"max_num_batched_tokens is {max_num_batched_tokens}; it must be at least max_num_seqs, {max_num_seqs}, "
            f"so that every sequence can decode in every step"
        )
