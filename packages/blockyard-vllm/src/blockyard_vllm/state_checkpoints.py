"""Checkpoints of hybrid models' states at the positions of docs/states.md, in vLLM's own managers (level "names").

vLLM caches a state where a chunk of a prompt ends. Its scheduler ends chunks at a prompt's last full block, and at
the end of the prefix that attention layers have cached. With the option `state_checkpoints`, chunks end at the
positions chosen by its rules instead, and vLLM's managers cache the state there, and the keys and values up to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core import single_type_kv_cache_manager as groups
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from blockyard.policies import CheckpointRules

# A child of vLLM's logger, so that its handlers apply.
logger = init_logger(f"vllm.{__name__}")

#: Hashes for `BUDGETS` times the pool's tokens are remembered, as in Blockyard's own manager, at most `MOST_HASHES`.
BUDGETS, MOST_HASHES = 4, 2**19
#: Most waiting requests to compare with, and most positions in a request's `extra_args`.
MOST_QUEUED, MOST_REQUESTED = 16, 64
REQUEST_KEY = "checkpoint_positions"


class CheckpointPlanner:
    """Chooses each request's checkpoint positions.

    Args:
        names: rules of `CheckpointRules`, and "waiting" and "requested".
        unit: tokens between positions at which a state can be cached.
        num_hashes: prompt hashes to remember, to find where a prompt leaves earlier ones.
        hash_size: tokens per hash.
    """

    def __init__(self, names: Sequence[str], unit: int, num_hashes: int, hash_size: int) -> None:
        self.unit = unit
        self.hash_size = hash_size
        self.rules = CheckpointRules(tuple(name for name in names if name not in ("waiting", "requested")), unit)
        self.takes_waiting, self.takes_requested = "waiting" in names, "requested" in names
        #: Python's hash of each block hash, least recent first. A collision can only misplace a checkpoint.
        self.known: OrderedDict[int, None] = OrderedDict()
        self.num_hashes = min(num_hashes, MOST_HASHES)
        #: The scheduler's queue, next request first.
        self.queue: Iterable[Any] = ()

    def plan(self, request: Any, hit: int, known: int) -> None:
        """Choose the positions for a request. O(hashes).

        Args:
            request: vLLM's request; its `blockyard_stops` is set.
            hit: tokens that hit.
            known: tokens that would hit if there were only attention layers.
        """
        unit, prompt = self.unit, request.num_prompt_tokens
        seen = 0
        for block_hash in request.block_hashes:
            if hash(block_hash) not in self.known:
                break
            seen += self.hash_size
        last, requested, branches = (
            (prompt - 1) // unit * unit,
            self._requested(request),
            self._waiting_branches(request),
        )
        self.rules.choose(hit, max(seen, known), last, 0, requested, branches)
        request.blockyard_stops = sorted(self.rules.positions)

    def _requested(self, request: Any) -> list[int]:
        """Return the positions in the request's `extra_args`; an invalid list is logged and ignored."""
        given = getattr(request.sampling_params, "extra_args", None) if self.takes_requested else None
        positions = given.get(REQUEST_KEY, []) if given else []
        is_short_list = isinstance(positions, list) and len(positions) <= MOST_REQUESTED
        if not is_short_list or not all(type(position) is int and position > 0 for position in positions):
            logger.warning_once(
                "blockyard: %s of a request is not a list of at most %d positive integers: left out",
                REQUEST_KEY,
                MOST_REQUESTED,
            )
            return []
        return positions

    def _waiting_branches(self, request: Any) -> list[int]:
        """Return where the request branches off from waiting ones. Hashes are chained, so bisection finds it."""
        if not self.takes_waiting:
            return []
        found, own = [], request.block_hashes
        for other in islice(self.queue, MOST_QUEUED + 1):
            if other is request:
                continue
            theirs = other.block_hashes
            low, high = 0, min(len(own), len(theirs))
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if own[middle - 1] == theirs[middle - 1] else (low, middle - 1)
            found.append(low * self.hash_size)
        return found

    def remember(self, request: Any) -> None:
        """Remember the request's hashes. Those at its end are forgotten first. O(hashes)."""
        known = self.known
        for block_hash in reversed(list(request.block_hashes)):
            key = hash(block_hash)
            known[key] = None
            known.move_to_end(key)
        while len(known) > self.num_hashes:
            known.popitem(last=False)


def first_stop(request: Any, start: int, end: int) -> int:
    """Return where a chunk from `start` to `end` must end: at the first checkpoint inside it, or at `end`."""
    return next((stop for stop in stops_of(request) if start < stop < end), end)


def stops_of(request: Any) -> list[int]:
    """Return the request's checkpoint positions, ascending."""
    return getattr(request, "blockyard_stops", [])


class StateGroup(groups.MambaManager):
    """vLLM's manager of one kind of states, which also caches states at the request's checkpoint positions.

    With `keeps_ends` it also caches an output's state at each full block, since the next step continues in another
    block. Inside a block, each step overwrites the state.
    """

    shared_prefix_checkpoint: bool
    keeps_ends = False

    def cache_blocks(
        self, request: Any, num_tokens: int, retention_interval: int | None = None, *, replay_boundaries: Sequence[int]
    ) -> None:
        before = request.shared_prefix_boundary, self.shared_prefix_checkpoint
        is_output = self.keeps_ends and num_tokens > request.num_prompt_tokens and num_tokens % self.block_size == 0
        if is_output or num_tokens in stops_of(request):
            request.shared_prefix_boundary, self.shared_prefix_checkpoint = num_tokens, True
        try:
            super().cache_blocks(request, num_tokens, retention_interval, replay_boundaries=replay_boundaries)
        finally:
            request.shared_prefix_boundary, self.shared_prefix_checkpoint = before


class AttentionGroup(groups.FullAttentionManager):
    """vLLM's full-attention manager, which also caches a block under a name for each checkpoint inside it.

    Such a name covers the block's tokens up to the checkpoint. Later tokens do not change their keys and values.
    """

    def cache_blocks(
        self, request: Any, num_tokens: int, retention_interval: int | None = None, *, replay_boundaries: Sequence[int]
    ) -> None:
        """Cache what vLLM caches, and keys and values up to each checkpoint. O(checkpoints) more."""
        super().cache_blocks(request, num_tokens, retention_interval, replay_boundaries=replay_boundaries)
        pool, size, number = self.block_pool, self.block_size, self.kv_cache_group_id
        blocks = self.req_to_blocks[request.request_id]
        for stop in reversed(stops_of(request)):  # a longer name added later would remove shorter ones
            if stop <= num_tokens and stop % size:
                block = blocks[stop // size]
                key = make_block_hash_with_group_id(request.block_hashes[stop // pool.hash_block_size - 1], number)
                if not pool.cached_block_hash_to_block.contain(key, block.block_id):
                    pool.cache_partial_block(request, block, stop, number, size)


#: vLLM's managers that support checkpoints, and their replacements.
KEEPING: dict[type, type] = {groups.MambaManager: StateGroup, groups.FullAttentionManager: AttentionGroup}


def refusal_reason(coordinator: Any) -> str:
    """Return why a model's states cannot be checkpointed at chosen positions, or "" if they can."""
    managers = coordinator.single_type_managers
    states = [manager for manager in managers if isinstance(manager, groups.MambaManager)]
    other = next((manager for manager in managers if type(manager) not in KEEPING), None)
    if not states:
        return "no layer of the model keeps a state (it has no MambaSpec)"
    if not coordinator.block_pool.enable_caching or any(group.mamba_cache_mode != "align" for group in states):
        return f"mamba_cache_mode is {states[0].mamba_cache_mode!r}, prefix caching is off (--enable-prefix-caching)"
    if other is not None:
        return f"it has layers of {type(other.kv_cache_spec).__name__} besides full attention and states"
    if coordinator.eagle_group_ids or any(group.num_speculative_blocks for group in states):
        return "tokens are drafted (--speculative-config)"
    if any(group.has_prefill_checkpoint_blocks for group in states):
        return "its kernels keep states inside a chunk (num_prefill_checkpoint_blocks of the MambaSpec is not 0)"
    sharded = max(manager.dcp_world_size for manager in managers)
    return f"decode_context_parallel_size is {sharded}; it must be 1" if sharded > 1 else ""


def enable_checkpoints(names: Sequence[str], coordinator: Any, num_blocks: int) -> CheckpointPlanner:
    """Let vLLM's managers checkpoint states at chosen positions, and return the planner of these.

    Raises:
        ValueError: if the model does not support it.
    """
    reason = refusal_reason(coordinator)
    if reason:
        raise ValueError(f"blockyard: state_checkpoints does not support this model: {reason}")
    for manager in coordinator.single_type_managers:
        manager.__class__ = KEEPING[type(manager)]
        if isinstance(manager, StateGroup):
            manager.keeps_ends = "ends" in names
    pool, size = coordinator.block_pool, coordinator.scheduler_block_size
    unit = pool.hash_block_size if coordinator.enable_partial_hash_hits else size
    logger.info("blockyard: states are checkpointed by %s, at multiples of %d tokens", ", ".join(names), unit)
    return CheckpointPlanner(names, unit, BUDGETS * num_blocks * size // pool.hash_block_size, pool.hash_block_size)
