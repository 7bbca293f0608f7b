"""States of hybrid models: hits, plans, and refused arguments."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from blockyard import (
    Admission,
    CacheConfig,
    InvalidArgument,
    InvariantError,
    KVCacheManager,
    LayerGroup,
    StateConfig,
    StateHints,
    StateSpec,
)
from blockyard.answers import HintOutcome
from blockyard.config import cache_config
from blockyard.core.store.save_records import SaveRecords
from blockyard.tenants import Tenant
from blockyard_testing.seeds import draws, run_seed
from blockyard_testing.state_loads import Request, pattern
from blockyard_testing.state_memory import StateMemory, compute

from ..support.snapshot import snapshot

ATTENTION = LayerGroup(16, token_bytes=1000)


def hybrid(num_blocks: int = 4000, state_blocks: int = 3, **fields: Any) -> KVCacheManager:
    state = StateSpec(state_bytes=16_000 * state_blocks, checkpoint_every=16)
    return KVCacheManager(
        cache_config(**{"num_blocks": num_blocks, "groups": (ATTENTION, state), "track_misses": True, **fields})
    )


def serve(cache: KVCacheManager, memory: StateMemory, request: Request, **fields: Any) -> int:
    """One request from begin to end; returns the tokens that it hit."""
    seq = cache.allocate(request.prompt, **fields)
    hit = int(cache.num_computed_tokens(seq))
    compute(cache, memory, seq, list(request.prompt), request.output)
    cache.free(seq)
    cache.check()
    return hit


# ---------------------------------------------------------------- the pattern of vllm#45238


@pytest.mark.parametrize(("shared", "unique"), [(1600, 600), (1500, 700)])
def test_the_second_request_hits_half_and_the_third_all(shared: int, unique: int) -> None:
    cache = hybrid()
    memory = StateMemory(cache)
    hits = [serve(cache, memory, request) for request in pattern(shared, unique, 8)]
    assert hits == [0, 1024] + [shared // 16 * 16] * 6
    assert memory.num_loaded == 7


def test_where_the_last_position_alone_is_kept_nothing_is_hit() -> None:
    cache = hybrid(state_checkpoints=("last",))
    memory = StateMemory(cache)
    assert [serve(cache, memory, request) for request in pattern(1600, 600, 4)] == [0] * 4
    causes = cache.miss_totals()
    assert causes.num_no_state == 3 * 1600
    assert causes.num_never_seen == 2192 + 3 * (2192 - 1600)


@pytest.mark.parametrize("kind", ["requested", "waiting"])
def test_told_or_waited_for_all_is_hit_from_the_second(kind: str) -> None:
    cache = hybrid()
    memory = StateMemory(cache)
    requests = pattern(1500, 700, 5)
    hits = []
    for number, request in enumerate(requests):
        others = [other.prompt for other in requests[number + 1 :]]
        states = StateHints(request.requested) if kind == "requested" else StateHints(waiting_prompts=others)
        hits.append(serve(cache, memory, request, states=states))
    assert hits == [0] + [1488] * 4


@pytest.mark.parametrize(("shared", "unique"), [(1600, 600), (1500, 700)])
def test_eight_in_flight_hit_all_from_the_tenth(shared: int, unique: int) -> None:
    cache = hybrid(8000, max_num_seqs=8)
    memory = StateMemory(cache)
    requests = pattern(shared, unique, 14)
    running: list[tuple[int, Request]] = []
    hits = []
    for request in requests:
        if len(running) == 8:
            seq, first = running.pop(0)
            compute(cache, memory, seq, list(first.prompt), first.output)
            cache.free(seq)
        running.append((cache.allocate(request.prompt), request))
        hits.append(int(cache.num_computed_tokens(running[-1][0])))
    full = shared // 16 * 16
    assert hits == [0] * 8 + [1024] + [full] * 5


# ---------------------------------------------------------------- what a hit needs, and what goes


def test_the_next_turn_goes_on_from_the_end_of_the_answer() -> None:
    cache = hybrid()
    memory = StateMemory(cache)
    first = Request(list(range(100)), list(range(1000, 1061)), [])
    assert serve(cache, memory, first) == 0
    again = first.prompt + first.output
    assert serve(cache, memory, Request([*again, 5, 6, 7], [1], [])) == 160
    # Of an output the last state is kept, of the prompt the last position: 96 and 160, and of the second turn's.
    assert serve(cache, memory, Request([*first.prompt, 9], [1], [])) == 96


@pytest.mark.parametrize("order", ["lru", "index"])
@pytest.mark.parametrize("is_late", [False, True])
def test_states_of_a_session_that_is_over_go_first_and_shared_ones_stay(order: str, is_late: bool) -> None:
    cache = hybrid(200, 10, state_order=order, state_checkpoints=("branch", "last"))
    memory = StateMemory(cache)
    system = list(range(160))
    chats = {name: [*system, *range(1000 * key, 1000 * key + 320)] for key, name in enumerate("abc", 1)}
    for name, tokens in chats.items():
        assert serve(cache, memory, Request(tokens, [1], []), session=name) in (0, 160)
    serve(cache, memory, Request([*chats["a"], 5], [1], []), session="a")  # of all chats the latest used
    assert cache.hint("a", over=True) is HintOutcome.ACCEPTED
    if is_late:  # taken back and said again
        cache.hint("a")
        cache.hint("a", over=True)
    serve(cache, memory, Request(list(range(50_000, 50_000 + 16 * 85)), [1], []))
    hits = {name: cache.num_cached_tokens([*tokens, 7]) for name, tokens in chats.items()}
    assert hits == {"a": 160, "b": 464, "c": 464}
    assert cache.stats().num_hinted_evictions >= 10


def test_blocks_of_sixteen_stay_beside_states_of_any_size() -> None:
    for state_blocks in (1, 7, 150):
        cache = hybrid(2000, state_blocks)
        memory = StateMemory(cache)
        request = Request(list(range(40)), [1, 2], [])
        assert [serve(cache, memory, request) for _ in range(3)] == [0, 32, 32]


def test_states_stand_at_multiples_of_their_own_block_size() -> None:
    cache = hybrid(groups=(ATTENTION, StateSpec(state_bytes=1, checkpoint_every=64)))
    memory = StateMemory(cache)
    assert [serve(cache, memory, Request(list(range(250)), [1], [])) for _ in range(2)] == [0, 192]


def test_several_state_groups_are_kept_as_one_state_at_positions_of_all() -> None:
    groups = (
        StateSpec(state_bytes=16_000 * 2 + 1, checkpoint_every=16),
        ATTENTION,
        StateSpec(state_bytes=7_000, checkpoint_every=64),
        StateSpec(state_bytes=1, checkpoint_every=32),
    )
    cache = hybrid(groups=groups)
    assert cache.config.state_blocks == 3
    memory = StateMemory(cache)
    assert [serve(cache, memory, Request(list(range(250)), [1], [])) for _ in range(3)] == [0, 192, 192]


def test_a_prompt_that_fits_an_empty_pool_fits_one_full_of_states() -> None:
    cache = hybrid(40, 10, watermark=0.0)
    memory = StateMemory(cache)
    for number in range(6):
        prompt = [number % 2, *range(500)]
        serve(cache, memory, Request(prompt, [1], []))
    assert cache.num_free_blocks == 39


def test_a_step_is_never_refused_for_a_save() -> None:
    cache = hybrid(12, 10, watermark=0.0)
    memory = StateMemory(cache)
    assert serve(cache, memory, Request(list(range(150)), list(range(20)), [])) == 0
    assert cache.stats().num_saved_states == 0


@pytest.mark.parametrize("has_tenants", [False, True])
def test_a_state_that_there_is_no_room_for_evicts_nothing(has_tenants: bool) -> None:
    """Nine blocks are free, or twelve including three of another tenant's guarantee; a state takes ten."""
    tenants = (Tenant("kept", min_blocks=3),) if has_tenants else ()
    num_blocks = 23 if has_tenants else 20
    cache = hybrid(num_blocks, 10, watermark=0.0, state_checkpoints=("last",), state_order="lru", tenants=tenants)
    memory = StateMemory(cache)
    assert serve(cache, memory, Request(list(range(70)), [1], [])) == 0
    seq = cache.allocate([9] * 150)
    num_cached = cache.num_cached_blocks
    assert num_cached > 0
    plan = cache.reserve([seq], [144])
    assert plan.all_fit
    assert plan.states.saves.tolist() == []
    assert cache.num_cached_blocks == num_cached
    cache.check()


def test_many_states_in_one_chunk_where_kernels_give_them() -> None:
    cache = hybrid(cut_chunks=False)
    memory = StateMemory(cache)
    seq = cache.allocate(list(range(2200)))
    plan = cache.reserve([seq])
    assert plan.num_scheduled.tolist() == [2200]
    assert plan.states.save_positions.tolist() == [256, 512, 1024, 2048, 2192]
    memory.prepare(plan)
    memory.run(plan, [seq], {seq: list(range(2200))})
    cache.commit([seq], 2200, [1])
    cache.free(seq)
    assert cache.num_cached_tokens(list(range(2100))) == 2048


def test_a_failed_step_leaves_no_state() -> None:
    cache = hybrid()
    seq = cache.allocate(list(range(40)))
    assert cache.reserve([seq]).states.save_positions.tolist() == [32]
    cache.commit([seq], 0)
    cache.check()
    assert cache.stats().num_kept_states == 0
    cache.free(seq)
    assert cache.num_free_blocks == 3999


def test_a_reservation_that_is_replaced_leaves_no_state() -> None:
    cache = hybrid()
    memory = StateMemory(cache)
    request = Request(list(range(40)), [1], [])
    seq = cache.allocate(request.prompt)
    memory.prepare(cache.reserve([seq]))
    plan = cache.reserve([seq])
    memory.prepare(plan)
    memory.run(plan, [seq], {seq: request.prompt})
    cache.commit([seq], 32)
    assert (cache.stats().num_saved_states, cache.stats().num_kept_states) == (2, 1)
    cache.free(seq)
    # The state that is hit is the one of the step that was run.
    assert serve(cache, memory, request) == 32


# ---------------------------------------------------------------- the latest state of an output

#: Nobody is told of parts; somebody is, of each.
KINDS = [{"track_misses": False}, {"track_misses": True}]


def answering(num_known: int, **fields: Any) -> tuple[KVCacheManager, int, list[int]]:
    """A cache in which the sequence with these tokens is in its output, and all but one of them are computed."""
    cache = hybrid(state_checkpoints=("ends",), **fields)
    tokens = list(range(num_known))
    seq = cache.allocate(tokens[:20])
    cache.commit([seq], cache.reserve([seq]).num_scheduled)
    cache.commit([seq], cache.reserve([seq]).num_scheduled, [20])
    for token in tokens[21:]:
        cache.commit([seq], cache.reserve([seq]).num_scheduled, [token])
    return cache, seq, tokens


@pytest.mark.parametrize("fields", KINDS)
@pytest.mark.parametrize("state_blocks", [1, 3])
def test_the_next_state_of_an_output_takes_the_blocks_of_the_one_before(
    fields: dict[str, Any], state_blocks: int
) -> None:
    cache, seq, tokens = answering(48, state_blocks=state_blocks, **fields)
    blocks = cache.states.blocks(tokens[:32]).tolist()
    assert len(blocks) == state_blocks
    for end in (48, 64, 80):
        taken = cache.stats().num_allocated_blocks
        plan = cache.reserve([seq])
        assert plan.states.save_positions.tolist() == [end]
        assert sorted(plan.states.save_blocks[0].tolist()) == sorted(blocks)
        assert cache.stats().num_allocated_blocks == taken + state_blocks
        # What is written over is found no more.
        assert not len(cache.states.blocks(tokens[: end - 16]))
        cache.check()
        cache.commit([seq], 1, [end])
        cache.check()
        tokens.append(end)
        assert cache.states.blocks(tokens[:end]).tolist() == plan.states.save_blocks[0].tolist()
        for token in range(end + 1, end + 16):
            cache.commit([seq], cache.reserve([seq]).num_scheduled, [token])
            tokens.append(token)
    assert cache.stats().num_replaced_states == 3
    cache.free(seq)
    cache.check()
    assert cache.num_cached_tokens([*tokens, 0]) == 80


@pytest.mark.parametrize("fields", KINDS)
@pytest.mark.parametrize("end", ["failed", "dropped", "freed", "reset", "replaced"])
def test_a_state_that_was_to_be_written_over_is_gone_where_the_step_fails(fields: dict[str, Any], end: str) -> None:
    cache, seq, tokens = answering(48, **fields)
    plan = cache.reserve([seq])
    assert plan.states.save_positions.tolist() == [48]
    if end == "replaced":
        assert cache.reserve([seq]).states.save_positions.tolist() == [48]
    if end == "reset":
        cache.reset_prefix_cache()
    if end == "freed":
        cache.free(seq)
    else:
        if end == "dropped":
            cache.states.drop_checkpoints(seq)
        cache.commit([seq], 0 if end == "failed" else 1)
    cache.check()
    # What is kept of an output in its next step is kept as ever.
    assert len(cache.states.blocks(tokens[:48])) == (3 if end == "replaced" else 0)
    assert not len(cache.states.blocks(tokens[:32]))
    if end != "freed":
        cache.commit([seq], cache.reserve([seq]).num_scheduled)
        cache.check()
        cache.free(seq)
    cache.check()
    assert cache.num_used_blocks == 0


@pytest.mark.parametrize("fields", KINDS)
def test_a_state_stays_where_the_step_may_end_before_the_next(fields: dict[str, Any]) -> None:
    cache, seq, tokens = answering(47, **fields)
    plan = cache.reserve([seq], [2])  # the second token is drafted
    assert plan.states.save_positions.tolist() == [48]
    before = cache.states.blocks(tokens[:32]).tolist()
    assert len(before) == 3
    assert not set(before) & set(plan.states.save_blocks[0].tolist())
    cache.commit([seq], 1)
    cache.free(seq)
    cache.check()
    assert cache.num_cached_tokens(tokens) == 32


def test_a_state_that_another_prompt_hit_stays() -> None:
    cache, seq, tokens = answering(48, track_misses=False)
    other = cache.allocate([*tokens[:32], 7, 7])
    assert cache.num_computed_tokens(other) == 32
    cache.commit([other], cache.reserve([other]).num_scheduled)
    before = cache.states.blocks(tokens[:32]).tolist()
    plan = cache.reserve([seq])
    assert not set(before) & set(plan.states.save_blocks[0].tolist())
    cache.commit([seq], 1)
    assert cache.states.blocks(tokens[:32]).tolist() == before
    assert len(cache.states.blocks(tokens)) == 3
    cache.free([seq, other])
    cache.check()


def test_in_a_full_pool_an_output_keeps_its_states_and_evicts_nothing_for_them() -> None:
    cache, seq, tokens = answering(48, num_blocks=16, track_misses=False)
    others = [cache.allocate([number, *range(20)]) for number in (100, 200)]
    cache.commit(others, cache.reserve(others, [1, 1]).num_scheduled)
    lease = cache.pool.get_new_blocks(cache.num_free_blocks - 3)
    plan = cache.reserve([seq])
    assert plan.all_fit
    assert plan.states.save_positions.tolist() == [48]
    assert cache.num_free_blocks == 0
    cache.commit([seq], 1)
    assert len(cache.states.blocks(tokens)) == 3
    cache.check()
    cache.pool.free_blocks(lease)
    cache.free([seq, *others])


# ---------------------------------------------------------------- forks, cuts, swaps


def test_forks_copy_the_slot_once() -> None:
    cache = hybrid(max_num_seqs=4)
    memory = StateMemory(cache)
    tokens = list(range(20))
    seq = cache.allocate(tokens)
    compute(cache, memory, seq, tokens, [])
    cache.append([seq], [7])
    (child,) = cache.fork(seq)
    (grandchild,) = cache.fork(child)
    cache.free(child)
    plan = cache.reserve([grandchild, seq], 1)
    assert plan.states.copies.tolist() == [[0, 2]]
    memory.prepare(plan)
    known = {grandchild: [*tokens, 7], seq: [*tokens, 7]}
    memory.run(plan, [grandchild, seq], known)
    cache.check()


def running(cache: KVCacheManager, memory: StateMemory, prompts: list[list[int]]) -> dict[int, list[int]]:
    """Sequences of these prompts, all computed and one token sampled, by handle."""
    known = {}
    for prompt in prompts:
        seq = cache.allocate(prompt)
        compute(cache, memory, seq, prompt, [])
        cache.append([seq], [7])
        known[seq] = [*prompt, 7]
    return known


def step_all(cache: KVCacheManager, memory: StateMemory, known: dict[int, list[int]]) -> list[list[int]]:
    """One decode step of all; each goes on from a state of its own. Returns the copies of slots."""
    plan = cache.reserve(list(known), 1)
    memory.prepare(plan)
    memory.run(plan, list(known), known)
    cache.commit(list(known), 1, 7)
    for tokens in known.values():
        tokens.append(7)
    cache.check()
    copies: list[list[int]] = plan.states.copies.tolist()
    return copies


def test_a_slot_is_copied_before_a_fork_of_another_is_copied_over_it() -> None:
    cache = hybrid(max_num_seqs=4)
    memory = StateMemory(cache)
    known = running(cache, memory, [[1] * 20, [2] * 20])
    first, second = known
    (child,) = cache.fork(first)
    cache.free(first)
    (over,) = cache.fork(second)
    (grandchild,) = cache.fork(child)
    known = {child: known[first], grandchild: [*known[first]], second: known[second], over: [*known[second]]}
    assert step_all(cache, memory, known) == [[0, 2], [1, 0], [2, 3]]


def test_slots_that_change_places_are_copied_by_way_of_a_free_one() -> None:
    cache = hybrid(max_num_seqs=3)
    memory = StateMemory(cache)
    known = running(cache, memory, [[1] * 20, [2] * 20])
    first, second = known
    (aside,) = cache.fork(first)
    cache.free(first)
    (there,) = cache.fork(second)
    cache.free(second)
    (back,) = cache.fork(aside)
    cache.free(aside)
    assert step_all(cache, memory, {there: known[second], back: known[first]}) == [[0, 2], [1, 0], [2, 1]]


def test_forks_and_frees_between_two_steps_leave_to_each_its_own_state() -> None:
    choose = random.Random(run_seed())
    num_worlds = num_circles = 0
    while num_worlds < draws(600, 30) or num_circles == 0:
        num_worlds += 1
        limit = choose.randint(2, 6)
        cache = hybrid(max_num_seqs=limit, state_checkpoints=())
        memory = StateMemory(cache)
        known = running(cache, memory, [[number] * 5 for number in range(choose.randint(1, limit))])
        for _ in range(4):
            for _ in range(choose.randint(1, 20)):
                seq = choose.choice(list(known))
                if len(known) == limit or (len(known) > 1 and choose.random() < 0.4):
                    cache.free(seq)
                    del known[seq]
                else:
                    (child,) = cache.fork(seq)
                    known[child] = [*known[seq]]
            copies = step_all(cache, memory, known)
            targets = [target for _, target in copies]
            # A circle goes by way of a slot that is written again, or that nobody runs in.
            num_circles += len(targets) > len(set(targets) & {seq % 2**20 for seq in known})
            assert len(copies) <= limit + limit // 2


def test_a_state_cannot_be_cut() -> None:
    cache = hybrid()
    memory = StateMemory(cache)
    tokens = list(range(40))
    seq = cache.allocate(tokens)
    compute(cache, memory, seq, tokens, [])
    with pytest.raises(InvalidArgument, match="at least 40 are needed, because a state cannot be cut"):
        cache.truncate(seq, 39)
    cache.append([seq], [1])
    cache.truncate(seq, 40)
    cache.check()


def test_a_state_to_load_is_held_until_the_first_step() -> None:
    cache = hybrid(num_cpu_blocks=100)
    memory = StateMemory(cache)
    request = Request(list(range(40)), [1], [])
    serve(cache, memory, request)
    seq = cache.allocate(request.prompt)
    cache.swap_out(seq)
    cache.swap_in(seq)
    plan = cache.reserve([seq])
    memory.prepare(plan)
    memory.run(plan, [seq], {seq: request.prompt})
    cache.commit([seq], 8, [3])
    cache.swap_out(seq)
    cache.swap_in(seq)
    plan = cache.reserve([seq])
    memory.prepare(plan)
    memory.run(plan, [seq], {seq: [*request.prompt, 3]})
    cache.check()


def test_a_lease_holds_the_state_too() -> None:
    cache = hybrid(60, 4, watermark=0.0)
    memory = StateMemory(cache)
    prompt = list(range(100))
    serve(cache, memory, Request(prompt, [1], []))
    lease = cache.hold_cached(prompt)
    assert len(lease) == 6 + 4
    for number in range(1, 9):
        serve(cache, memory, Request([number * 1000 + token for token in range(300)], [1], []))
    assert cache.num_cached_tokens(prompt) == 96
    cache.pool.free_blocks(lease)
    cache.check()


def test_a_reset_forgets_states_on_their_way() -> None:
    cache = hybrid()
    prompt = list(range(40))
    seq = cache.allocate(prompt)
    cache.reserve([seq])
    cache.reset_prefix_cache()
    cache.commit([seq], 32)
    cache.check()
    cache.free(seq)
    assert (cache.stats().num_kept_states, cache.num_free_blocks) == (0, 3999)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *[({"state_bytes": value}, "^state_bytes") for value in (0, -1, 10**18, 2**200, 1.5, None, "1")],
        ({"checkpoint_every": 0}, "checkpoint_every is 0; it must be from 1 to 4096"),
        ({"checkpoint_every": 4097}, "checkpoint_every is 4097; it must be from 1 to 4096"),
        ({"checkpoint_every": True}, "checkpoint_every is True"),
        ({"name": b"mamba"}, "name is b'mamba'; it must be a string"),
    ],
)
def test_state_spec_refuses_values_outside_limits(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        StateSpec(**{"state_bytes": 5, **fields})


STATE = StateSpec(state_bytes=100)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"groups": (STATE,)}, "groups has only a StateSpec"),
        ({"groups": (ATTENTION, STATE, StateSpec(state_bytes=2**40))}, "state_bytes is 1099511627876, "),
        ({"groups": (LayerGroup(), STATE)}, r"LayerGroups with token_bytes of \[0\]"),
        ({"groups": (ATTENTION, LayerGroup(), STATE)}, r"token_bytes of \[1000, 0\]"),
        (
            {"groups": (ATTENTION, StateSpec(state_bytes=2**40))},
            "state_bytes is 1099511627776, 68719477",
        ),
        ({"state_checkpoints": ("every:0",)}, "state_checkpoints is"),
        ({"state_checkpoints": "last"}, "state_checkpoints is"),
        ({"state_checkpoints": ("middle",)}, "it must be a tuple of names of last, branch, ends, pow2"),
    ],
)
def test_caches_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        cache_config(**{"num_blocks": 100, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"checkpoints": [41]}, r"checkpoints\[0\] is 41; it must be from 1 to the 40 tokens"),
        ({"checkpoints": [5, 0]}, r"checkpoints\[1\] is 0; it must be from 1"),
        ({"checkpoints": [-3]}, r"checkpoints\[0\] is -3"),
        ({"checkpoints": np.ones(10**6, dtype=np.int64)}, "checkpoints has 1000000 items; the limit is 4096"),
        ({"checkpoints": range(1, 10**6 + 1)}, "checkpoints has 1000000 items; the limit is 4096"),
        ({"checkpoints": [1, 10**18]}, r"checkpoints\[1\] is 1000000000000000000; it must be from 1 to the 40 tokens"),
        ({"checkpoints": [10**30]}, "checkpoints"),
        ({"checkpoints": ["a"]}, "checkpoints"),
        ({"waiting_prompts": 5}, "waiting_prompts is 5; it must be a list of prompts"),
        ({"waiting_prompts": [[1]] * 65}, "waiting_prompts has 65 prompts; the limit is 64"),
        ({"waiting_prompts": [["x"]]}, "token_ids"),
    ],
)
def test_bad_state_hints_are_refused_and_change_nothing(fields: dict[str, Any], message: str) -> None:
    cache = hybrid()
    cache.free(cache.allocate(list(range(40)), states=StateHints(checkpoints=[16, 32])))
    before = snapshot(cache)
    for call in (cache.allocate, cache.try_allocate):
        with pytest.raises(InvalidArgument, match=message):
            call(list(range(40)), states=StateHints(**fields))
        assert snapshot(cache) == before
    cache.check()


def test_checkpoints_round_down_and_count_once() -> None:
    cache = hybrid(state_checkpoints=())
    seq = cache.allocate(list(range(60)), states=StateHints(checkpoints=[39, 33, 32, 15, 60]))
    plan = cache.reserve([seq])
    assert plan.states.save_positions.tolist() == [32]
    cache.commit([seq], 32)
    assert cache.reserve([seq]).states.save_positions.tolist() == [48]


def test_state_hints_are_refused_without_states() -> None:
    with pytest.raises(
        InvalidArgument, match=r"states is given, but the cache has no states \(groups has no StateSpec\): leave it out"
    ):
        KVCacheManager(CacheConfig(num_blocks=10)).allocate([1, 2], states=StateHints(checkpoints=[1]))


def test_a_pool_below_one_sequence_refuses_it_with_numbers() -> None:
    cache = hybrid(8, 3)
    with pytest.raises(Exception, match="token_ids needs 13 blocks; the pool has 7"):
        cache.allocate(list(range(200)))
    cache.check()


# ---------------------------------------------------------------- what is asked


def test_without_states_there_is_nothing_to_ask() -> None:
    cache = KVCacheManager(CacheConfig(100))
    seq = cache.allocate([1, 2, 3])
    with pytest.raises(InvalidArgument, match=r"states\.blocks needs a StateSpec; groups has none"):
        cache.states.blocks([1])
    with pytest.raises(InvalidArgument, match=r"states\.skip needs a StateSpec; groups has none"):
        cache.states.skip(seq, 2)
    with pytest.raises(InvalidArgument, match=r"states\.slot needs a StateSpec; groups has none"):
        cache.states.slot(seq)
    with pytest.raises(InvalidArgument, match=r"states\.drop_checkpoints needs a StateSpec; groups has none"):
        cache.states.drop_checkpoints(seq)


def test_a_state_is_no_reason_to_refuse_a_batch_or_a_group() -> None:
    """Nothing runs, and the prompts fit without the idle state that each of them hits: LATER would last forever."""
    groups = (LayerGroup(4, token_bytes=8), StateSpec(state_bytes=8 * 4 * 6, checkpoint_every=4))
    cache = KVCacheManager(
        CacheConfig(14, groups=groups, max_num_seqs=8, max_model_len=64, states=StateConfig(checkpoints=("last",)))
    )
    memory, prompt = StateMemory(cache), list(range(9))
    compute(cache, memory, cache.allocate(prompt), prompt, [])
    cache.free(list(cache.running()))
    assert (cache.config.state_blocks, cache.num_cached_tokens(prompt)) == (6, 8)
    for num_prompts in (2, 3, 4):
        assert cache.can_allocate_batch([prompt] * num_prompts) is Admission.OK
        seqs = cache.allocate_batch([prompt] * num_prompts)
        cache.check()
        cache.free(seqs)
    assert cache.can_allocate_batch([prompt] * 5) is Admission.NEVER
    for num_seqs in (2, 6, 8):
        assert cache.can_allocate(prompt, num_seqs=num_seqs) is Admission.OK
        cache.free(cache.allocate(prompt, num_seqs=num_seqs))
    cache.check()


# ---------------------------------------------------------------- the records of saves


def test_records_of_saves_against_lists() -> None:
    choose = random.Random(run_seed())
    saves = SaveRecords(3, 2)
    lists: list[list[tuple[int, int]]] = [[], [], []]
    apart: list[int] = []
    for step in range(draws(6000, 600)):
        row, action = choose.randrange(3), choose.random()
        if action < 0.5:
            number = int(saves.next_free())
            saves.blocks[2 * number], saves.blocks[2 * number + 1] = step, step + 1
            saves.add(row, step)
            lists[row].append((number, step))
        elif action < 0.9 and lists[row]:
            place = choose.randrange(len(lists[row]))
            number, _ = lists[row].pop(place)
            saves.unlink(row, number, lists[row][place - 1][0] if place else 0)
            apart.append(number)
        elif apart:
            saves.free(apart.pop())
        saves.check(apart)
        for other, expected in enumerate(lists):
            assert saves.numbers_of(other) == [number for number, _ in expected]
            assert [int(saves.position[number]) for number, _ in expected] == [at for _, at in expected]
            assert all(saves.blocks_of(number) == [at, at + 1] for number, at in expected)
    assert len(saves.position) > 64


def test_check_sees_a_record_that_is_lost_and_one_too_many() -> None:
    cache = hybrid(cut_chunks=False, state_checkpoints=("every:32", "ends"))
    seq = cache.allocate(list(range(200)))
    cache.reserve([seq])
    cache.check()
    saves = cache._parts.states._saves.records
    assert saves.total == saves.num_of_row[0] == 6
    saves.num_of_row[0] = 5
    with pytest.raises(InvariantError, match=r"^states: row 0 lists 6 saves, the count is another$"):
        cache.check()
    saves.num_of_row[0] = 6
    saves.total = 7
    with pytest.raises(InvariantError, match=r"^states: 6 saves are listed, the count is 7$"):
        cache.check()
    saves.total = 6
    saves.next_free()
    saves._free = 0
    with pytest.raises(InvariantError, match=r"^states: of 7 records of saves, "):
        cache.check()


def test_the_question_about_a_group_of_sequences_is_answered_as_allocate_does() -> None:
    """A state that does not fit beside the forks' copies is not loaded; the lookup for as many sequences says so."""
    differs = 0
    for num_blocks in range(12, 40):
        cache = hybrid(num_blocks, 10, max_num_seqs=8, max_model_len=256, watermark=0.0, state_checkpoints=("last",))
        tokens = list(range(70))
        seq = cache.allocate(tokens)
        for count in (64, 6):
            plan = cache.reserve([seq], [count])
            cache.commit([seq], plan.num_scheduled)
        cache.free(seq)
        for num_seqs in (1, 2, 5, 8):
            told = cache.num_cached_tokens(tokens, num_seqs=num_seqs)
            if cache.can_allocate(tokens, num_seqs=num_seqs) is Admission.OK:
                again = cache.allocate(tokens, num_seqs=num_seqs)
                assert cache.num_computed_tokens(again) == told, (num_blocks, num_seqs)
                cache.free(again)
                differs += told != cache.num_cached_tokens(tokens)
        cache.check()
    assert differs > 0, "memory must be short in one of them"
