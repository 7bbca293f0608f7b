"""The adapter's options, `--additional-config '{"blockyard": {...}}'`, and the versions of vLLM it supports.

A contract lists the arguments of each vLLM method that the adapter overrides or calls. A vLLM whose methods differ is
refused with their names (`blockyard.signatures`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from blockyard import InvalidArgument
from blockyard.cache_options import require_checkpoint_rules
from blockyard.engine_versions import VLLM
from blockyard.policies import POLICIES, make_policy
from blockyard.signatures import listed, moved_methods, release_of, require_version

LEVELS = ("auto", "tokens", "names")
COUNTS = ("residency_sample", "retention_blocks", "miss_causes")
ONLY_FOR_TOKENS = ("residency_sample", "retention_blocks", "events", "admission")
RULES = ("last", "branch", "ends", "pow2", "waiting", "requested")
ADMISSION_ORDERS = ("arrival", "fewest", "room")


@dataclass(frozen=True)
class Options:
    """Options of the adapter.

    Args:
        level: "tokens" proves hits by tokens (models with one full-attention group), "names" by vLLM's hashes (every
            model), "auto" takes the first that supports the model.
        eviction_policy: a name, as in `CacheConfig`.
        residency_sample: number of blocks to sample for residency times; level "tokens" only.
        retention_blocks: most blocks that `scheduler.kv_cache_manager.pool.retain` may keep; level "tokens" only.
        miss_causes: number of evicted hashes to remember, to explain misses; 0 turns explanations off.
        events: address where `blockyard.events` publishes the pool's contents, such as "tcp://127.0.0.1:5557"; "" for
            none; level "tokens" only.
        state_checkpoints: rules for checkpointing a hybrid model's states, as in `StateConfig`, and "waiting" and
            "requested"; empty for vLLM's own rules; level "names" only.
        admission: order of the waiting requests: "arrival" (vLLM's), "fewest" missing tokens first, or "room";
            level "tokens" only.
        admission_lane: with "fewest" and "room", the request that waits longest gets one part in this many of the time.

    Raises:
        ValueError: for an invalid option; it names the option, its value and the allowed values.
    """

    level: str = "auto"
    eviction_policy: str = "lru"
    residency_sample: int = 0
    retention_blocks: int = 0
    miss_causes: int = 0
    events: str = ""
    state_checkpoints: tuple[str, ...] = ()
    admission: str = "arrival"
    admission_lane: float = 4.0

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"blockyard: {name} is {value!r}; it must be an integer from 0")
        if not isinstance(self.events, str) or (self.events and "://" not in self.events):
            raise ValueError(f"blockyard: events is {self.events!r}; it must be an address like tcp://127.0.0.1:5557")
        names = self.state_checkpoints
        try:
            if not isinstance(names, list | tuple):
                raise InvalidArgument("not a list")
            rules = tuple(name for name in names if name not in ("waiting", "requested"))
            require_checkpoint_rules("state_checkpoints", rules)
        except InvalidArgument:
            raise ValueError(
                f"blockyard: state_checkpoints is {names!r}; it must be a list of names of {', '.join(RULES)}, "
                f"or every:N"
            ) from None
        object.__setattr__(self, "state_checkpoints", tuple(names))
        if self.admission not in ADMISSION_ORDERS:
            raise ValueError(
                f"blockyard: admission is {self.admission!r}; it must be one of {', '.join(ADMISSION_ORDERS)}"
            )
        lane = self.admission_lane
        if type(lane) not in (int, float) or not 1 <= lane < float("inf"):
            raise ValueError(f"blockyard: admission_lane is {lane!r}; it must be a number from 1")
        if self.level not in LEVELS:
            raise ValueError(f"blockyard: level is {self.level!r}; it must be one of {', '.join(LEVELS)}")
        try:
            make_policy(self.eviction_policy if isinstance(self.eviction_policy, str) else None, 2)
        except InvalidArgument:
            raise ValueError(
                f"blockyard: eviction_policy is {self.eviction_policy!r}; it must be one of "
                f"{', '.join(sorted(POLICIES))}"
            ) from None

    @property
    def only_for_tokens(self) -> list[str]:
        """Options in use that level "names" does not support."""
        return [name for name in ONLY_FOR_TOKENS if getattr(self, name) not in (0, "", "arrival")]


def options_of(additional_config: Any) -> Options:
    """Return the options in vLLM's `additional_config`.

    Raises:
        ValueError: for an unknown option or an invalid value.
    """
    if not isinstance(additional_config, Mapping):
        return Options()
    given = additional_config.get("blockyard", {})
    if not isinstance(given, Mapping):
        raise ValueError(f'additional_config["blockyard"] is {given!r}; it must be a dict of options')
    known = [field.name for field in fields(Options)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f'additional_config["blockyard"] has {unknown[0]!r}; it may have {", ".join(known)}')
    return Options(**given)


VLLM_VERSIONS = VLLM.versions
POOL = "vllm.v1.core.block_pool:BlockPool"
MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
BLOCKS = "vllm.v1.core.kv_cache_manager:KVCacheBlocks"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
QUEUE = "vllm.v1.core.sched.request_queue:RequestQueue"
#: vLLM's manager of one kind of layers. Level "names" skips these methods when they would change nothing.
GROUP = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"

_COMMON = {
    f"{SCHEDULER}._mamba_block_aligned_split": "self, request, num_new_tokens, num_new_local_computed_tokens=, "
    "num_external_computed_tokens=",
    f"{SCHEDULER}.update_from_output": "self, scheduler_output, model_runner_output",
    f"{QUEUE}.add_request": "self, request",
    f"{QUEUE}.prepend_requests": "self, requests",
    f"{QUEUE}.remove_requests": "self, requests",
    f"{QUEUE}.peek_request": "self",
    f"{QUEUE}.pop_request": "self",
    f"{POOL}.cache_partial_block": "self, request, block, num_tokens, kv_cache_group_id, block_size, "
    "replace_existing_hashes=",
    f"{POOL}.get_cached_block": "self, block_hash, kv_cache_group_ids",
    f"{POOL}.get_new_blocks": "self, num_blocks",
    f"{POOL}._notify_reuse": "self, blocks",
    f"{POOL}._maybe_evict_cached_block": "self, block",
    f"{POOL}._remove_cached_block_hashes": "self, block",
    f"{POOL}._insert_block_hash": "self, block_hash_with_group_id, block, num_tokens",
    f"{POOL}.touch": "self, blocks",
    f"{POOL}.free_blocks": "self, ordered_blocks",
    f"{POOL}.unpin_blocks": "self, blocks, on_reuse",
    f"{POOL}.evict_blocks": "self, block_ids",
    f"{POOL}.reset_prefix_cache": "self",
    f"{POOL}.get_num_free_blocks": "self",
    f"{POOL}.get_usage": "self",
    f"{POOL}.take_events": "self",
    f"{MANAGER}.allocate_slots": "self, request, num_new_tokens, num_new_computed_tokens=, new_computed_blocks=, "
    "num_lookahead_tokens=, num_external_computed_tokens=, delay_cache_blocks=, num_encoder_tokens=, "
    "full_sequence_must_fit=, reserved_blocks=, has_scheduled_reqs=, skip_zeroing_group_ids=",
    f"{MANAGER}.free": "self, request",
    f"{MANAGER}.remove_skipped_blocks": "self, request_id, processed_computed_tokens, num_prompt_tokens=",
    f"{MANAGER}.pop_blocks_for_free": "self, request",
    f"{MANAGER}.evict_blocks": "self, block_ids",
    f"{MANAGER}.reset_prefix_cache": "self",
    f"{MANAGER}.take_events": "self",
    f"{MANAGER}.get_blocks": "self, request_id",
    f"{MANAGER}.get_block_ids": "self, request_id",
    f"{MANAGER}.get_block_ids_for_computed_tokens": "self, request_id, num_computed_tokens",
    f"{MANAGER}.estimate_cached_tokens": "self, request",
    f"{MANAGER}.cache_blocks": "self, request, num_computed_tokens",
    f"{MANAGER}.create_kv_cache_blocks": "self, blocks",
    f"{MANAGER}.truncate_computed_blocks": "self, blocks, num_computed_tokens",
    f"{MANAGER}.take_new_block_ids": "self",
    f"{MANAGER}.record_blocks_for_zeroing": "self, request_id, start_token",
    f"{MANAGER}.take_kv_cache_block_copies": "self",
    f"{MANAGER}.take_boundary_state_offloads": "self",
    f"{MANAGER}.finalize_partial_tail_offloads": "self, request",
    f"{MANAGER}.new_step_starts": "self",
    f"{MANAGER}.record_prefix_cache_stats": "self, request, num_hits",
    f"{MANAGER}.make_prefix_cache_stats": "self",
    f"{BLOCKS}.get_block_ids": "self, allow_none=, group_ids=",
    f"{BLOCKS}.get_unhashed_block_ids": "self",
    f"{BLOCKS}.get_unhashed_block_ids_all_groups": "self",
    f"{BLOCKS}.new_empty": "self",
    f"{GROUP}.get_num_blocks_to_allocate": "self, request_id, num_tokens, new_computed_blocks, total_computed_tokens, "
    "num_local_computed_tokens, num_tokens_main_model, apply_admission_cap=, prefill_end=",
    f"{GROUP}.allocate_new_blocks": "self, request_id, num_tokens, num_tokens_main_model",
    f"{GROUP}.cache_blocks": "self, request, num_tokens, retention_interval=, replay_boundaries",
    f"{GROUP}.remove_skipped_blocks": "self, request_id, processed_computed_tokens, num_prompt_tokens=",
}
_MANAGER_0_32 = (
    "self, kv_cache_config, max_model_len, scheduler_block_size, hash_block_size, max_in_flight_tokens=, "
    "enable_caching=, use_eagle=, num_prefill_lookahead=, log_stats=, enable_kv_cache_events=, dcp_world_size=, "
    "pcp_world_size=, metrics_collector=, watermark=, enable_mamba_shared_prefix_checkpoint="
)
_POOL_0_32 = (
    "self, num_gpu_blocks, enable_caching, hash_block_size, enable_kv_cache_events=, metrics_collector=, medium="
)

CONTRACTS: dict[str, dict[str, str]] = {
    "0.32": _COMMON
    | {
        f"{POOL}.__init__": _POOL_0_32,
        f"{MANAGER}.__init__": _MANAGER_0_32,
        f"{MANAGER}.get_computed_blocks": "self, request",
        f"{MANAGER}.get_computed_blocks_for_connector": "self, request",
    },
    "0.33": _COMMON
    | {
        f"{POOL}.__init__": _POOL_0_32.replace("medium=", "num_hash_lookahead_tokens=, medium="),
        f"{MANAGER}.__init__": _MANAGER_0_32.replace("use_eagle=, ", "use_eagle=, num_hash_lookahead_tokens=, "),
        f"{MANAGER}.get_computed_blocks": "self, request, max_cache_hit_length=",
        f"{MANAGER}.get_computed_blocks_for_connector": "self, request, max_cache_hit_length=",
    },
}


def require_known_vllm() -> None:
    """Check the installed vLLM. A development build is compared with the newest known version.

    Raises:
        MissingExtra: for an unsupported version.
        RuntimeError: if methods of a supported version differ; it names some.
    """
    import vllm

    require_version(VLLM, "blockyard_vllm")
    moved = moved_methods(CONTRACTS[release_of(VLLM, vllm.__version__) or VLLM_VERSIONS[-1]])
    if moved:
        raise RuntimeError(
            f"blockyard_vllm needs {VLLM}: pip install {VLLM.requirement}; "
            f"in vLLM {vllm.__version__} these methods differ: {listed(moved)}"
        )
