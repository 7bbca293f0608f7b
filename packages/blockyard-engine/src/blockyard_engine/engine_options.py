"""The engine's options, checked before anything is loaded. Nothing here needs torch.

`Engine` documents each option, `blockyard.config.CacheConfig` the fields of the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockyard.arguments import require_int, require_number, require_str, shown
from blockyard.config import CACHE_OPTIONS, STATE_OPTIONS, CacheConfig, cache_config
from blockyard.errors import InvalidArgument, ModelError
from blockyard.groups import LayerGroup, StateSpec
from blockyard.sizing import MAX_BYTES, KVCacheSpec, require_utilization

from .decoding.speculation import PromptLookup, require_speculation
from .memory.account import swap_blocks

if TYPE_CHECKING:
    from .shape import KVShape

#: Values of `attention_backend`, in order of preference; "auto" is the first that supports the tensors.
BACKEND_NAMES = ("auto", "flash_attention_3", "sdpa")
#: Values of `admission`; docs/admission.md explains them.
ADMISSION_ORDERS = ("arrival", "fewest", "room")
#: Placeholder for a number of blocks that is not known yet: the smallest valid one.
_MIN_BLOCKS = 2


class Preemption(StrEnum):
    """Destination of a preempted sequence's keys and values (vLLM had both: Kwon et al., SOSP 2023).

    RECOMPUTE: blocks are freed; tokens that are no longer cached at the next admission are computed again. SWAP: blocks
    move to the CPU pool and back; if that is full, they are recomputed.
    """

    RECOMPUTE = "recompute"
    SWAP = "swap"

    @classmethod
    def parse(cls, value: object, num_cpu_blocks: int) -> Preemption:
        """Return the mode called `value`. Raises `InvalidArgument` for others, and for SWAP without a CPU pool."""
        name = require_str("preemption", str(value) if isinstance(value, Preemption) else value)
        if name not in [way.value for way in cls]:
            raise InvalidArgument(f"preemption is {name!r}; it must be 'recompute' or 'swap'")
        if name == cls.SWAP and num_cpu_blocks == 0:
            raise InvalidArgument(
                "preemption is 'swap' and num_cpu_blocks is 0; give num_cpu_blocks or swap_space_bytes"
            )
        return cls(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of an engine, as `Engine` documents them."""

    num_blocks: int | None
    kv_cache_memory_bytes: int | None
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    enable_prefix_caching: bool
    gpu_memory_utilization: float
    num_cpu_blocks: int
    swap_space_bytes: int
    preemption: str
    speculation: PromptLookup | None
    attention_backend: str
    cache_options: Mapping[str, Any] | None
    kv_events: str | Mapping[str, Any] | None
    admission: str = "arrival"
    admission_lane: float = 4.0

    def require_valid(self) -> None:
        """Raise `InvalidArgument` for invalid options that are not fields of the cache's config."""
        require_speculation(self.speculation)
        require_utilization(self.gpu_memory_utilization)
        self._require_one_size()
        require_step_budget(self.max_num_batched_tokens, self.max_num_seqs)
        if self.attention_backend not in BACKEND_NAMES:
            raise InvalidArgument(
                f"attention_backend is {self.attention_backend!r}; it must be one of {', '.join(BACKEND_NAMES)}"
            )
        if require_str("admission", self.admission) not in ADMISSION_ORDERS:
            raise InvalidArgument(
                f"admission is {shown(self.admission)}; it must be one of {', '.join(ADMISSION_ORDERS)}"
            )
        if require_number("admission_lane", self.admission_lane) < 1:
            raise InvalidArgument(f"admission_lane is {self.admission_lane}; it must be 1 or more")
        if self.admission != "arrival" and require_options(self.cache_options).get("tenants"):
            raise InvalidArgument(
                f"admission is {self.admission!r} and cache_options has tenants, whose quotas set the order of "
                "admission; use admission='arrival', or no tenants"
            )

    def _require_one_size(self) -> None:
        if self.kv_cache_memory_bytes is None:
            return
        size = require_int("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, MAX_BYTES)
        if self.num_blocks is not None:
            raise InvalidArgument(
                f"kv_cache_memory_bytes is {size} and num_blocks is {self.num_blocks}; both size the same pool, so "
                f"give one"
            )

    @property
    def is_sized(self) -> bool:
        """True if the pool's size was given, in blocks or in bytes."""
        return self.num_blocks is not None or self.kv_cache_memory_bytes is not None

    def require_valid_without_a_model(self) -> None:
        """Raise `InvalidArgument` for options that are invalid for every model."""
        options = self._cache_fields(self.num_cpu_blocks or int(self.swap_space_bytes > 0) * _MIN_BLOCKS)
        groups: tuple[LayerGroup | StateSpec, ...] = ()
        if any(name in options for name in STATE_OPTIONS):
            groups = (
                LayerGroup(self.block_size, token_bytes=1),
                StateSpec(state_bytes=1, checkpoint_every=self.block_size),
            )
        config = cache_config(
            num_blocks=_MIN_BLOCKS if self.num_blocks is None else self.num_blocks,
            block_size=self.block_size,
            max_model_len=1 if self.max_model_len is None else self.max_model_len,
            groups=groups,
            **options,
        )
        if self.num_blocks is not None:
            self.with_tenants(config)
        self.require_valid()
        Preemption.parse(self.preemption, self.num_cpu_blocks or self.swap_space_bytes)

    def config(self, shape: KVShape, spec: KVCacheSpec) -> CacheConfig:
        """Return the cache's config; its number of blocks is a placeholder unless it was given."""
        num_cpu_blocks = swap_blocks(self.swap_space_bytes, self.num_cpu_blocks, spec)
        fields = {"max_model_len": shape.max_model_len, **self._cache_fields(num_cpu_blocks)}
        config = shape.cache_config(spec, self.num_blocks, **fields)
        if self.kv_cache_memory_bytes is None:
            return config
        self._require_one_size()
        return replace(config, num_blocks=config.blocks_in(self.kv_cache_memory_bytes, "kv_cache_memory_bytes"))

    def require_servable(self, shape: KVShape) -> None:
        """Raise `InvalidArgument` for options that a model with states does not support."""
        if shape.states is not None and self.speculation is not None:
            raise InvalidArgument(
                "speculation is given for a model with states, which cannot be rolled back when drafts are rejected; "
                "leave it out"
            )

    def _cache_fields(self, num_cpu_blocks: int) -> dict[str, Any]:
        """Return the fields of the config that do not depend on the model."""
        return {
            "max_num_seqs": self.max_num_seqs,
            "num_cpu_blocks": num_cpu_blocks,
            "enable_prefix_caching": self.enable_prefix_caching,
            "enable_kv_cache_events": self.kv_events is not None,
            **{name: value for name, value in require_options(self.cache_options).items() if name != "tenants"},
        }

    def with_tenants(self, config: CacheConfig) -> CacheConfig:
        """Return a config of final size with the tenants of `cache_options`, whose guarantees must fit."""
        tenants = (self.cache_options or {}).get("tenants", ())
        usable = config.num_blocks - 1 - config.watermark_blocks
        return replace(config, tenants=tenants(usable) if callable(tenants) else tenants)


def require_step_budget(max_num_batched_tokens: object, max_num_seqs: int) -> None:
    """Raise `InvalidArgument` for a token budget that is too small for every sequence to decode."""
    if require_int("max_num_batched_tokens", max_num_batched_tokens, 1, 2**31 - 1) < max_num_seqs:
        raise InvalidArgument(
            f"max_num_batched_tokens is {max_num_batched_tokens}; it must be at least max_num_seqs, "
            f"{max_num_seqs}, because every running sequence decodes one token a step"
        )


def require_options(cache_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options as a dict. Raises `InvalidArgument` for names that are not in `CACHE_OPTIONS`."""
    if cache_options is None:
        return {}
    if not isinstance(cache_options, Mapping):
        raise InvalidArgument(f"cache_options is a {type(cache_options).__name__}; it must be a dict")
    for name, value in cache_options.items():
        if name not in CACHE_OPTIONS:
            raise InvalidArgument(
                f"cache_options has {name!r}: {value!r}; it may have {', '.join(CACHE_OPTIONS)} (other fields of "
                f"CacheConfig follow from the engine's own options)"
            )
    return dict(cache_options)


def require_model_path(path: Path) -> Path:
    """Return `path` if it is a .gguf file or a folder with a config. Raises `ModelError`."""
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"there is no file {path}; give an existing .gguf file")
    elif not path.is_dir():
        raise ModelError(f"there is no model folder {path}; give one with config.json and safetensors, or a .gguf file")
    elif not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json; give a folder that Hugging Face's save_pretrained wrote")
    return path
