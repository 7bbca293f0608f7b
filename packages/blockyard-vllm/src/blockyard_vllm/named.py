"""Level "names": vLLM's own `KVCacheManager` on Blockyard's pool, with a fast path for most steps.

Most steps of a request take no block and fill none. vLLM walks all of its groups to find out; the fast path needs two
comparisons per group. Everything else takes vLLM's path.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from vllm.v1.core import kv_cache_coordinator as coordinators
from vllm.v1.core import single_type_kv_cache_manager as groups
from vllm.v1.core.kv_cache_manager import KVCacheManager as StockManager
from vllm.v1.request import RequestStatus

from .adapter_options import Options
from .misses import StepMisses
from .pool import BlockPool
from .state_checkpoints import AttentionGroup, CheckpointPlanner, StateGroup, enable_checkpoints

#: Exact classes for which it is known when a step takes no block and caches none.
ATTENTION_GROUPS = (groups.FullAttentionManager, AttentionGroup)
STATE_GROUPS = (groups.MambaManager, StateGroup)
PLAIN_GROUPS = (*ATTENTION_GROUPS, *STATE_GROUPS, groups.SlidingWindowManager, groups.ChunkedLocalAttentionManager)
PLAIN_COORDINATORS = (
    coordinators.UnitaryKVCacheCoordinator,
    coordinators.HybridKVCacheCoordinator,
    coordinators.KVCacheCoordinatorNoPrefixCache,
)
_PATCHING = threading.RLock()


def _record_lookup(look_up: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap one of vLLM's lookups to record the causes of misses and plan the request's checkpoints."""

    @wraps(look_up)
    def recorded(manager: NamedManager, request: Any, *args: Any, **kwargs: Any) -> Any:
        found = look_up(manager, request, *args, **kwargs)
        if manager.misses is not None and manager.prefix_cache_lookup_enabled(request):
            manager.misses.record_lookup(request, found[1])
        if manager.planner is not None:
            blocks, hit, branch = found
            manager.planner.plan(request, hit, branch)
            return blocks, hit, 0  # the planner's positions include the branch point, so vLLM needs no stop of its own
        return found

    return recorded


class NamedManager(StockManager):
    """vLLM's own manager. `misses` explains misses, `planner` chooses checkpoint positions."""

    planner: CheckpointPlanner | None = None

    def __init__(self, state_checkpoints: tuple[str, ...] = (), **given: Any) -> None:
        super().__init__(**given)
        if state_checkpoints:
            self.planner = enable_checkpoints(state_checkpoints, self.coordinator, given["kv_cache_config"].num_blocks)
        self.misses: StepMisses | None = getattr(self.block_pool, "misses", None)
        plain = self.coordinator.single_type_managers
        size = given["hash_block_size"]
        states = tuple(group for group in plain if type(group) in STATE_GROUPS)
        # If blocks and hashes differ in size, a step of a prompt may cache a part of a block, or copy one.
        self._is_finer = any(group.block_size != size for group in plain)
        is_plain = (
            type(self.coordinator) in PLAIN_COORDINATORS
            and all(type(group) in PLAIN_GROUPS for group in plain)
            and not any(group.num_speculative_blocks or group.has_prefill_checkpoint_blocks for group in states)
            and (states or not self._is_finer)
            and all(group.mamba_cache_mode == "align" for group in states)
        )
        self._plain: tuple[Any, ...] = plain if is_plain else ()
        self._states = states if is_plain else ()
        self._windows = tuple(group for group in self._plain if type(group) not in ATTENTION_GROUPS)

    get_computed_blocks = _record_lookup(StockManager.get_computed_blocks)
    get_computed_blocks_for_connector = _record_lookup(StockManager.get_computed_blocks_for_connector)

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
        """Count the recorded lookup, now that the request is admitted."""
        super().record_prefix_cache_stats(request, num_hits)
        if self.misses is not None:
            self.misses.count_admission(request)
        if self.planner is not None:
            self.planner.remember(request)

    def pop_blocks_for_free(self, request: Any) -> Any:
        """Remember the output of a request that ends or is preempted."""
        if self.planner is not None:
            self.planner.remember(request)
        return super().pop_blocks_for_free(request)

    def free(self, request: Any) -> None:
        """Remember the request's output."""
        if self.planner is not None:
            self.planner.remember(request)
        super().free(request)

    def reset_prefix_cache(self) -> bool:
        """Forget all prompts if vLLM's reset succeeds."""
        was_reset: bool = super().reset_prefix_cache()
        if was_reset and self.planner is not None:
            self.planner.known.clear()
        return was_reset

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> Any:
        """Return vLLM's answer, in O(groups) if a running request has room in its last blocks."""
        if (
            self._plain
            and num_new_tokens
            and new_computed_blocks is None
            and request.status is RequestStatus.RUNNING
            and not (num_new_computed_tokens or num_external_computed_tokens)
            and not (full_sequence_must_fit or reserved_blocks)
            and self._has_room(request, num_new_tokens, num_lookahead_tokens, delay_cache_blocks)
        ):
            return self.empty_kv_cache_blocks
        return super().allocate_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens,
            new_computed_blocks,
            num_lookahead_tokens,
            num_external_computed_tokens,
            delay_cache_blocks,
            num_encoder_tokens,
            full_sequence_must_fit,
            reserved_blocks,
            has_scheduled_reqs,
            skip_zeroing_group_ids,
        )

    def _has_room(self, request: Any, num_new_tokens: int, num_lookahead_tokens: int, delay_cache_blocks: bool) -> bool:
        """Return whether the step takes no block and caches none. Frees blocks that have left a window."""
        name, longest, computed = request.request_id, self.max_model_len, request.num_computed_tokens
        after = (computed if computed < longest else longest) + num_new_tokens
        end = after + num_lookahead_tokens
        if end > longest:
            end = longest
        if self._is_finer and computed <= request.num_prompt_tokens:
            return False
        is_cached = self.enable_caching and not delay_cache_blocks
        for group in self._states:
            # There is a block to copy, or the state is still another request's.
            if name in group._partial_hit_reqs or name not in group._allocated_block_reqs:
                return False
            # While the state before the running one is kept, vLLM reports it again as cached in this step, so that
            # requests that share it wait.
            blocks = group.req_to_blocks[name]
            if is_cached and len(blocks) > 1 and not blocks[-2].is_null:
                return False
        for group in self._plain:
            size = group.block_size
            if end > len(group.req_to_blocks.get(name, ())) * size:
                return False
            if is_cached and after >= (group.num_cached_block.get(name, 0) + 1) * size:
                return False
        if self._windows:
            processed = max(0, min(computed, longest) - request.num_in_flight_tokens)
            for group in self._windows:
                group.remove_skipped_blocks(name, processed, request.num_prompt_tokens)
        return True


def named_manager(options: Options, **given: Any) -> Any:
    """Return vLLM's own manager on Blockyard's pool.

    Args:
        options: the adapter's options.
        given: arguments of vLLM's `KVCacheManager`.

    Raises:
        ValueError: if the model does not support `state_checkpoints` or `miss_causes`.
    """
    misses = None
    if options.miss_causes:
        size = given["hash_block_size"]
        others = {group.kv_cache_spec.block_size for group in given["kv_cache_config"].kv_cache_groups} - {size}
        if others:
            raise ValueError(
                f"blockyard: miss_causes needs blocks and hashes of one size; blocks have {min(others)} tokens and "
                f"hashes {size}"
            )
        misses = StepMisses(options.miss_causes, size)
    attributes = {"eviction_policy": options.eviction_policy, "misses": misses}
    made = type("BlockPool", (BlockPool,), attributes)
    with patch_name(coordinators, "BlockPool", made):
        return NamedManager(options.state_checkpoints, **given)


@contextmanager
def patch_name(module: Any, name: str, made: Callable[..., Any]) -> Iterator[None]:
    """Replace a name in one of vLLM's modules for the duration of a `with` block, in one thread at a time."""
    with _PATCHING:
        before = getattr(module, name)
        setattr(module, name, made)
        try:
            yield
        finally:
            setattr(module, name, before)
