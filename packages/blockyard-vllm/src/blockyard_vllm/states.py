"""vLLM's own scheduler keeps states of hybrid models where the rules of docs/states.md say, on level "names".

vLLM caches a state where a chunk of a prompt ends. Its scheduler ends chunks at the last boundary of a prompt, and
where a prompt leaves what attention has cached. With the option `state_checkpoints` it ends them there instead,
and its managers cache the state, and the keys and values up to it, as they cache the others.
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

#: Hashes are remembered of `BUDGETS` times the pool's tokens, as in a cache of ours, and of `MOST_HASHES` at most.
BUDGETS, MOST_HASHES = 4, 2**19
#: Requests that wait are compared with, and positions that one request may tell.
MOST_QUEUED, MOST_TOLD = 16, 64
TOLD = "state_boundaries"


class StatePlaces:
    """This says where each request leaves states.

    names: rules of `CheckpointRules`, "queue" and "told". unit: tokens between the boundaries at which states stand.
    num_hashes: how many hashes of prompts are remembered, each of hash_size tokens, to know where a prompt leaves what
    was seen before.
    """

    def __init__(self, names: Sequence[str], unit: int, num_hashes: int, hash_size: int) -> None:
        self.unit = unit
        self.hash_size = hash_size
        self.rules = CheckpointRules(tuple(name for name in names if name not in ("queue", "told")), unit)
        self.takes_queue, self.takes_told = "queue" in names, "told" in names
        #: Python's own hash of each, the one seen longest ago first: a mistake would only keep a state in a bad place.
        self.known: OrderedDict[int, None] = OrderedDict()
        self.num_hashes = min(num_hashes, MOST_HASHES)
        #: Requests that wait, those that are served next first; the scheduler's queue.
        self.queue: Iterable[Any] = ()

    def plan(self, request: Any, hit: int, known: int) -> None:
        """Note where a request that hits `hit` tokens leaves states. O(hashes).

        known: tokens that attention alone would hit.
        """
        unit, prompt = self.unit, request.num_prompt_tokens
        seen = 0
        for block_hash in request.block_hashes:
            if hash(block_hash) not in self.known:
                break
            seen += self.hash_size
        self.rules.choose(
            hit, max(seen, known), (prompt - 1) // unit * unit, 0, self._told(request), self._queued(request)
        )
        request.blockyard_stops = sorted(self.rules.positions)

    def _told(self, request: Any) -> list[int]:
        """Return the positions in `extra_args` of its sampling parameters. Other things there are left out."""
        given = getattr(request.sampling_params, "extra_args", None) if self.takes_told else None
        told = given.get(TOLD, []) if given else []
        if not isinstance(told, list) or len(told) > MOST_TOLD or not all(type(one) is int and one > 0 for one in told):
            logger.warning_once(
                "blockyard: %s of a request is not a list of at most %d positive integers: left out", TOLD, MOST_TOLD
            )
            return []
        return told

    def _queued(self, request: Any) -> list[int]:
        """Return where a request parts from those that wait. Hashes are chained, so a bisection finds it."""
        if not self.takes_queue:
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
        """A request's hashes are known from now on, and those of its end are forgotten first. O(hashes)."""
        known = self.known
        for block_hash in reversed(list(request.block_hashes)):
            key = hash(block_hash)
            known[key] = None
            known.move_to_end(key)
        while len(known) > self.num_hashes:
            known.popitem(last=False)


def first_stop(request: Any, start: int, end: int) -> int:
    """Return where a chunk of a request from start to end must end, in tokens."""
    return next((stop for stop in stops_of(request) if start < stop < end), end)


def stops_of(request: Any) -> list[int]:
    """Return the positions at which a request leaves states, in ascending order."""
    return getattr(request, "blockyard_stops", [])


class StateGroup(groups.MambaManager):
    """In vLLM's manager of one kind of states, those at a stop are cached as vLLM caches one at a junction.

    So are those of an output where it crosses a block, if `keeps_ends`: the next step goes on in another block. Inside
    a block each step writes over the state.
    """

    shared_prefix_checkpoint: bool
    keeps_ends = False

    def cache_blocks(
        self, request: Any, num_tokens: int, retention_interval: int | None = None, *, replay_boundaries: Sequence[int]
    ) -> None:
        """Cache the state after these tokens, where it is wanted."""
        before = request.shared_prefix_boundary, self.shared_prefix_checkpoint
        is_output = self.keeps_ends and num_tokens > request.num_prompt_tokens and num_tokens % self.block_size == 0
        if is_output or num_tokens in stops_of(request):
            request.shared_prefix_boundary, self.shared_prefix_checkpoint = num_tokens, True
        try:
            super().cache_blocks(request, num_tokens, retention_interval, replay_boundaries=replay_boundaries)
        finally:
            request.shared_prefix_boundary, self.shared_prefix_checkpoint = before


class AttentionGroup(groups.FullAttentionManager):
    """In vLLM's manager of full attention, a block has a name for each stop inside it: keys and values only grow."""

    def cache_blocks(
        self, request: Any, num_tokens: int, retention_interval: int | None = None, *, replay_boundaries: Sequence[int]
    ) -> None:
        """Cache what vLLM does, and keys and values that states stand behind. They take O(stops) more."""
        super().cache_blocks(request, num_tokens, retention_interval, replay_boundaries=replay_boundaries)
        pool, size, number = self.block_pool, self.block_size, self.kv_cache_group_id
        blocks = self.req_to_blocks[request.request_id]
        for stop in reversed(stops_of(request)):  # a longer name takes shorter ones away when it comes later
            if stop <= num_tokens and stop % size:
                block = blocks[stop // size]
                key = make_block_hash_with_group_id(request.block_hashes[stop // pool.hash_block_size - 1], number)
                if not pool.cached_block_hash_to_block.contain(key, block.block_id):
                    pool.cache_partial_block(request, block, stop, number, size)


#: vLLM's managers that can keep states at places of ours, and what they are then.
KEEPING: dict[type, type] = {groups.MambaManager: StateGroup, groups.FullAttentionManager: AttentionGroup}


def why_no_places(coordinator: Any) -> str:
    """Return why states of a model cannot be kept at places of ours; "" where they can."""
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


def keep_states(names: Sequence[str], coordinator: Any, num_blocks: int) -> StatePlaces:
    """Let vLLM's managers keep states at places of ours; returns these. Raises ValueError where they cannot."""
    reason = why_no_places(coordinator)
    if reason:
        raise ValueError(f"blockyard: state_checkpoints does not serve this model: {reason}")
    for manager in coordinator.single_type_managers:
        manager.__class__ = KEEPING[type(manager)]
        if isinstance(manager, StateGroup):
            manager.keeps_ends = "ends" in names
    pool, size = coordinator.block_pool, coordinator.scheduler_block_size
    unit = pool.hash_block_size if coordinator.enable_partial_hash_hits else size
    logger.info("blockyard: states are kept at %s, at multiples of %d tokens", ", ".join(names), unit)
    return StatePlaces(names, unit, BUDGETS * num_blocks * size // pool.hash_block_size, pool.hash_block_size)
