"""`plan.fill`: a step's inputs in the caller's own arrays, equal to the plan's, and nothing written where it raises."""

from __future__ import annotations

import array
import contextlib
import random
from typing import Any

import numpy as np
import pytest

from blockyard import BlockyardError, CacheConfig, ConcurrentCall, InvalidArgument, KVCacheManager, LayerGroup, compiled
from blockyard.errors import StalePlan
from blockyard.steps import StepBuffers
from blockyard_testing.seeds import run_seed

from ..support.checked import Checked, prompt

NAMES = ("slot_mapping", "block_tables", "seq_lens", "query_start_loc", "input_ids", "positions")
#: What stands in an array that nobody has written yet.
OLD = 77


def arrays(num_seqs: int, num_tokens: int, width: int, dtype: Any = np.int64) -> dict[str, np.ndarray[Any, Any]]:
    shapes: dict[str, Any] = dict.fromkeys(("slot_mapping", "input_ids", "positions"), num_tokens)
    shapes |= {"block_tables": (num_seqs, width), "seq_lens": num_seqs, "query_start_loc": num_seqs + 1}
    return {name: np.full(shapes[name], OLD, dtype=dtype) for name in NAMES}


def padded(plan: Any, group: int, num_seqs: int, num_tokens: int, width: int) -> dict[str, Any]:
    """What the arrays must hold, by the slow way: the plan's own arrays and padding."""
    part, more_seqs = plan.groups[group], num_seqs - len(plan.rows)
    more_tokens = num_tokens - plan.num_tokens
    tables = np.zeros((num_seqs, width), np.int64)
    own = part.block_tables
    tables[: own.shape[0], : own.shape[1]] = own
    return {
        "slot_mapping": [*part.slot_mapping.tolist(), *[-1] * more_tokens],
        "block_tables": tables.tolist(),
        "seq_lens": [*plan.seq_lens.tolist(), *[0] * more_seqs],
        "query_start_loc": [*plan.query_start_loc.tolist(), *[plan.num_tokens] * more_seqs],
        "input_ids": [*plan.input_ids.tolist(), *[0] * more_tokens],
        "positions": [*plan.positions.tolist(), *[0] * more_tokens],
    }


def shown(made: dict[str, Any], num_seqs: int, num_tokens: int) -> dict[str, Any]:
    lengths = dict.fromkeys(("slot_mapping", "input_ids", "positions"), num_tokens)
    lengths |= {"block_tables": num_seqs, "seq_lens": num_seqs, "query_start_loc": num_seqs + 1}
    return {name: np.asarray(made[name])[: lengths[name]].tolist() for name in NAMES}


class Scene:
    """Blocks of four: A decodes its 7th token, B prefills five of nine, C decodes across the end of a block."""

    def __init__(self, **settings: Any) -> None:
        self.cache = Checked(**settings)
        self.a = self.cache.prefilled(prompt(1, 6), [7])
        self.b = self.cache.allocate(prompt(2, 9))
        self.c = self.cache.prefilled(prompt(3, 4), [8])

    def plan(self) -> Any:
        return self.cache.reserve([self.a, self.b, self.c], [1, 5, 1])


# ---------------------------------------------------------------- inputs


def test_the_inputs_of_a_step_by_hand() -> None:
    plan = Scene().plan()
    assert plan.num_tokens == 7
    assert plan.input_ids.tolist() == [7, 200, 201, 202, 203, 204, 8]
    assert plan.positions.tolist() == [6, 0, 1, 2, 3, 4, 4]
    assert (plan.input_ids.dtype, plan.positions.dtype) == (np.int32, np.int64)


def test_tokens_that_are_not_known_are_minus_one() -> None:
    scene = Scene()
    plan = scene.cache.reserve([scene.a, scene.c], [3, 2])
    assert plan.input_ids.tolist() == [7, -1, -1, 8, -1]
    assert plan.positions.tolist() == [6, 7, 8, 4, 5]


def test_a_token_that_waits_for_its_block_is_known() -> None:
    """C's blocks are full, so token 8 waits in its row; NO_BLOCKS gives it none."""
    scene = Scene()
    assert scene.cache.reserve([scene.c], [1]).input_ids.tolist() == [8]
    tight = Scene(num_blocks=7)
    plan = tight.cache.reserve([tight.c, tight.a], 1)
    assert plan.num_scheduled.tolist() == [0, 1]
    assert plan.input_ids.tolist() == [7]


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 16])
def test_inputs_are_the_tokens_whatever_the_blocks(block_size: int) -> None:
    cache = Checked(num_blocks=70, block_size=block_size)
    tokens = [2**31 - 1, 0, *prompt(5, 40)]
    seq = cache.allocate(tokens)
    done = 0
    for chunk in (1, 2, 7, 16, 1, 15):
        plan = cache.reserve([seq], chunk)
        assert plan.input_ids.tolist() == tokens[done : done + chunk]
        assert plan.positions.tolist() == list(range(done, done + chunk))
        cache.commit([seq], chunk)
        done += chunk
    assert done == len(tokens)


def test_inputs_of_forks_are_their_own() -> None:
    """They share their last block; each has a token of its own that no shared block can hold."""
    cache = Checked()
    first = cache.prefilled(prompt(1, 6))
    group = [first, *cache.fork(first, 2)]
    cache.append(group, [7, 8, 9])
    assert cache.reserve(group, 1).input_ids.tolist() == [7, 8, 9]


@pytest.mark.parametrize("name", ["input_ids"])
def test_inputs_die_with_the_next_change(name: str) -> None:
    scene = Scene()
    plan = scene.plan()
    ids = plan.input_ids
    scene.cache.commit([scene.a, scene.b, scene.c], [1, 5, 1], [1, -1, 2])
    with pytest.raises(StalePlan):
        getattr(plan, name)
    assert ids.tolist() == [7, 200, 201, 202, 203, 204, 8]
    assert plan.positions.tolist() == [6, 0, 1, 2, 3, 4, 4]


def test_what_a_plan_hands_out_never_changes_afterwards() -> None:
    scene = Scene(max_num_seqs=3)
    plan = scene.plan()
    names = ("block_tables", "slot_mapping", "input_ids", "positions", "indices", "seq_lens", "rows", "num_scheduled")
    handed = {name: getattr(plan, name) for name in names}
    before = {name: value.tolist() for name, value in handed.items()}
    scene.cache.free([scene.a, scene.b, scene.c])
    for number in range(3):
        scene.cache.prefilled(prompt(10 + number, 20))
    assert {name: value.tolist() for name, value in handed.items()} == before


# ---------------------------------------------------------------- fill


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_arrays_hold_the_step(dtype: Any) -> None:
    plan = Scene().plan()
    made = arrays(5, 12, 16, dtype)
    plan.fill(StepBuffers(**made), pad_to=4, pad_tokens_to=9)
    assert shown(made, 4, 9) == padded(plan, 0, 4, 9, 16)
    assert made["slot_mapping"].tolist() == [10, 12, 13, 14, 15, 16, 28, -1, -1, OLD, OLD, OLD]
    assert made["block_tables"][3].tolist() == [0] * 16
    assert made["block_tables"][4].tolist() == [OLD] * 16, "what lies behind the padding is left as it is"
    assert made["seq_lens"].tolist() == [7, 5, 5, 0, OLD]
    assert made["query_start_loc"].tolist() == [0, 1, 6, 7, 7, OLD]


def test_a_decode_step_is_padded_to_a_graph() -> None:
    scene = Scene()
    plan = scene.cache.reserve([scene.a, scene.c], 1)
    made = arrays(8, 8, 4)
    plan.fill(StepBuffers(**made), pad_to=4)
    assert shown(made, 4, 4) == padded(plan, 0, 4, 4, 4)
    plan.fill(StepBuffers(**made))
    assert shown(made, 2, 2) == padded(plan, 0, 2, 2, 4)


def test_any_part_may_be_left_out() -> None:
    plan = Scene().plan()
    whole = arrays(3, 7, 4)
    plan.fill(StepBuffers(**whole))
    for name in NAMES:
        made = arrays(3, 7, 4)
        plan.fill(StepBuffers(**{name: made[name]}))
        assert made[name].tolist() == whole[name].tolist()
    plan.fill(StepBuffers())


def test_buffers_of_other_kinds() -> None:
    torch = pytest.importorskip("torch")
    plan = Scene().plan()
    slots, tables = torch.full((9,), OLD), torch.full((3, 4), OLD, dtype=torch.int32)
    ids = array.array("i", [OLD] * 9)
    plan.fill(StepBuffers(slots, tables, input_ids=ids), pad_tokens_to=9)
    assert slots.tolist() == [*plan.slot_mapping.tolist(), -1, -1]
    assert tables.tolist() == [[1, 2, 0, 0], [3, 4, 5, 0], [6, 7, 0, 0]]
    assert ids.tolist() == [*plan.input_ids.tolist(), 0, 0]


def test_a_stale_plan_writes_nothing() -> None:
    scene = Scene()
    plan = scene.plan()
    scene.cache.free([scene.b])
    made = arrays(3, 7, 4)
    with pytest.raises(StalePlan):
        plan.fill(StepBuffers(**made))
    assert all((value == OLD).all() for value in made.values())


TOO_SMALL = {
    "slot_mapping": (6, "slot_mapping has room for 6; this step needs 7"),
    "input_ids": (6, "input_ids has room for 6; this step needs 7"),
    "positions": (0, "positions has room for 0; this step needs 7"),
    "seq_lens": (2, "seq_lens has room for 2; this step needs 3"),
    "query_start_loc": (3, "query_start_loc has room for 3; this step needs 4"),
}


@pytest.mark.parametrize("name", [*TOO_SMALL, "rows", "columns"])
def test_an_array_that_is_too_small_is_named_and_nothing_is_written(name: str) -> None:
    plan = Scene().plan()
    made = arrays(3, 7, 3)
    if name in TOO_SMALL:
        size, message = TOO_SMALL[name]
        made[name] = np.full(size, OLD)
    else:
        shape = (2, 3) if name == "rows" else (3, 2)
        made["block_tables"] = np.full(shape, OLD)
        message = f"block_tables has 2 {name}; this step needs 3"
    with pytest.raises(InvalidArgument, match=f"^{message}$"):
        plan.fill(StepBuffers(**made))
    assert all((value == OLD).all() for value in made.values())


@pytest.mark.parametrize(
    ("padding", "message"),
    [
        ({"pad_to": 2}, "pad_to is 2; the step has 3 sequences"),
        ({"pad_tokens_to": 6}, "pad_tokens_to is 6; the step has 7 tokens"),
        ({"pad_to": 4}, "seq_lens has room for 3; this step needs 4"),
        ({"pad_to": 8}, "slot_mapping has room for 7; this step needs 8"),
        ({"pad_tokens_to": 8}, "slot_mapping has room for 7; this step needs 8"),
        ({"pad_to": -1}, "pad_to is -1"),
        ({"pad_to": True}, "pad_to is True"),
        ({"pad_to": 2**70}, "pad_to is"),
        ({"pad_tokens_to": "7"}, "pad_tokens_to is '7'"),
    ],
)
def test_padding_has_limits(padding: dict[str, Any], message: str) -> None:
    plan = Scene().plan()
    made = arrays(3, 7, 3)
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        plan.fill(StepBuffers(**made), **padding)
    assert all((value == OLD).all() for value in made.values())


class Copies:
    """Looks like a tensor whose numpy() is not its memory."""

    def numpy(self) -> Any:
        return np.zeros(9, np.int64)


def read_only() -> Any:
    value = np.zeros(9, np.int64)
    value.flags.writeable = False
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([0] * 9, "slot_mapping is .*memory cannot be written"),
        (7, "slot_mapping is 7.*memory cannot be written"),
        ("text", "slot_mapping is 'text'.*memory cannot be written"),
        (np.zeros(9), "slot_mapping has items of type float64"),
        (np.zeros(9, np.int16), "slot_mapping has items of type int16"),
        (np.zeros(9, ">i8"), "slot_mapping has items of type >i8"),
        (bytearray(72), "slot_mapping has items of type uint8"),
        (np.zeros((3, 3), np.int64), "slot_mapping has shape"),
        (np.zeros(18, np.int64)[::2], "slot_mapping has strides"),
        (read_only(), "slot_mapping is read-only"),
        (Copies(), "slot_mapping has a numpy"),
    ],
)
def test_what_cannot_be_written_is_refused(value: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        StepBuffers(slot_mapping=value)
    with pytest.raises(InvalidArgument, match=r"^block_tables"):
        StepBuffers(block_tables=value[0] if getattr(value, "ndim", 1) == 2 else value)


def test_two_that_overlap_are_refused() -> None:
    whole = np.zeros(20, np.int64)
    StepBuffers(slot_mapping=whole[:10], input_ids=whole[10:])
    with pytest.raises(InvalidArgument, match=r"^input_ids overlaps slot_mapping"):
        StepBuffers(slot_mapping=whole[:10], input_ids=whole[9:])
    with pytest.raises(InvalidArgument, match=r"^block_tables overlaps seq_lens"):
        StepBuffers(seq_lens=whole, block_tables=whole.reshape(4, 5))


@pytest.mark.parametrize("value", [None, 5, {}, np.zeros(3, np.int64)])
def test_only_buffers_are_filled(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^buffers is .*; it must be a StepBuffers"):
        Scene().plan().fill(value)


def test_a_slot_that_does_not_fit_32_bits() -> None:
    """The block id is written into the table: a pool with such a block would take 17 GB here."""
    cache = KVCacheManager(CacheConfig(8, 4096, max_num_seqs=2, max_model_len=8192))
    plan = cache.reserve([cache.allocate([1, 2, 3])])
    plan.groups[0]._table.set_block(0, 0, 2**19 + 5)
    assert plan.slot_mapping[0] > 2**31
    made = {name: array for name, array in arrays(1, 3, 2, np.int32).items() if name != "input_ids"}
    with pytest.raises(InvalidArgument, match=r"^slot_mapping is int32; a slot of this step is 2\*\*31 or more"):
        plan.fill(StepBuffers(**made))
    assert all((value == OLD).all() for value in made.values())
    wide = {name: array for name, array in arrays(1, 3, 2, np.int64).items() if name != "input_ids"}
    plan.fill(StepBuffers(**wide))
    assert wide["slot_mapping"].tolist() == plan.slot_mapping.tolist()


class Acts:
    """An integer that acts when it is read."""

    def __init__(self, act: Any, value: int) -> None:
        self.act, self.value = act, value

    def __index__(self) -> int:
        self.act()
        return self.value


def test_a_free_while_the_padding_is_read_writes_nothing() -> None:
    scene = Scene()
    plan = scene.plan()
    made = arrays(4, 7, 4)
    with pytest.raises(StalePlan):
        plan.fill(StepBuffers(**made), pad_to=Acts(lambda: scene.cache.free([scene.a]), 4))
    assert all((value == OLD).all() for value in made.values())


def test_buffers_are_filled_by_one_call_at_a_time() -> None:
    plan = Scene().plan()
    made = arrays(4, 7, 4)
    buffers = StepBuffers(**made)
    with pytest.raises(ConcurrentCall, match=r"^fill was called while fill runs"):
        plan.fill(buffers, pad_to=Acts(lambda: plan.fill(buffers), 4))
    assert all((value == OLD).all() for value in made.values())
    plan.fill(buffers, pad_to=4)
    assert shown(made, 4, 7) == padded(plan, 0, 4, 7, 4)


def test_tables_that_somebody_else_wrote() -> None:
    scene = Scene()
    plan = scene.plan()
    tables = np.zeros((3, 4), np.int32)
    buffers = StepBuffers(block_tables=tables)
    plan.fill(buffers)
    tables[:] = OLD
    plan.fill(buffers)
    assert (tables == OLD).all(), "what has not changed is not written"
    buffers.forget()
    plan.fill(buffers)
    assert tables.tolist() == [[1, 2, 0, 0], [3, 4, 5, 0], [6, 7, 0, 0]]


def test_buffers_that_another_cache_filled() -> None:
    """Handles and rows are alike; what stands in the arrays is not taken for this cache's."""
    made = arrays(3, 7, 8)
    buffers = StepBuffers(**made)
    for shift in (0, 3):
        scene = Scene()
        if shift:
            other = scene.cache.prefilled(prompt(9, 10))
            plan = scene.cache.reserve([other, scene.a, scene.c], 1)
        else:
            plan = scene.plan()
        plan.fill(buffers)
        assert shown(made, 3, plan.num_tokens) == padded(plan, 0, 3, plan.num_tokens, 8)


@pytest.mark.parametrize("kind", ["plain", "groups", "cpu"])
def test_random_steps_leave_in_the_arrays_what_the_plan_says(kind: str) -> None:
    """Two sets of buffers take turns; sequences come, go, fork, are cut, swapped and slide: rows change in all ways."""
    seed = random.Random(run_seed()).randrange(2**32)
    for number in range(12 if compiled() else 2):
        Life(kind, seed + number).run(60)


class Life:
    """A random life of a cache, each step of which is filled into old arrays and compared."""

    def __init__(self, kind: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        groups = (LayerGroup(4), LayerGroup(4, sliding_window=6), LayerGroup(8)) if kind != "plain" else ()
        self.cache = Checked(40, 4, groups=groups, num_cpu_blocks=30 if kind == "cpu" else 0)
        self.num_groups = max(len(groups), 1)
        self.kind = kind
        self.seqs: list[int] = []
        self.made = [[arrays(10, 700, 20) for _ in range(self.num_groups)] for _ in range(2)]
        self.buffers = [[StepBuffers(**made) for made in turn] for turn in self.made]
        self.num_steps = 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.act()
            self.step()

    def act(self) -> None:
        choose, cache = self.random, self.cache
        kind = choose.randrange(6)
        if kind <= 1 and len(self.seqs) < 8:
            shared = prompt(1, choose.randint(1, 30))
            seq = cache.try_allocate([*shared, *(choose.randint(1, 2) for _ in range(choose.randint(1, 20)))])
            self.seqs += [seq] if isinstance(seq, int) else []
            return
        if not self.seqs:
            return
        seq = choose.choice(self.seqs)
        settled = cache.num_computed_tokens(seq) >= cache.num_tokens(seq) - 1
        if kind == 2:
            cache.free([seq])
            self.seqs.remove(seq)
        elif kind == 3 and settled and len(self.seqs) < 8:
            self.try_(lambda: self.seqs.extend(cache.fork(seq)))
        elif kind == 4 and settled:
            self.try_(lambda: cache.truncate(seq, choose.randint(1, cache.num_tokens(seq))))
        elif kind == 5 and self.kind == "cpu":
            self.try_(lambda: (cache.swap_out([seq]), cache.swap_in([seq])))
            if cache.is_swapped_out(seq):
                cache.free([seq])
                self.seqs.remove(seq)

    def try_(self, call: Any) -> None:
        with contextlib.suppress(BlockyardError):
            call()

    def step(self) -> None:
        choose, cache = self.random, self.cache
        seqs = choose.sample(self.seqs, choose.choice((len(self.seqs), choose.randint(0, len(self.seqs)))))
        counts = [min(cache.num_tokens(s) - cache.num_computed_tokens(s), choose.choice((1, 9, 60))) for s in seqs]
        plan = cache.reserve(seqs, counts)
        pad = choose.choice((len(seqs), 10))
        more = plan.num_tokens + choose.choice((0, 3))
        turn = choose.choice((0, 0, 1))
        for group in range(self.num_groups):
            plan.groups[group].fill(self.buffers[turn][group], pad, more)
            assert shown(self.made[turn][group], pad, more) == padded(plan, group, pad, more, 20), self.seed
        if self.num_groups == 1:
            plan.fill(self.buffers[turn][0], pad, more)
            assert shown(self.made[turn][0], pad, more) == padded(plan, 0, pad, more, 20), self.seed
        done = [(seq, int(count)) for seq, count in zip(seqs, plan.num_scheduled, strict=True) if count]
        ends = [cache.num_computed_tokens(seq) + count == cache.num_tokens(seq) < 60 for seq, count in done]
        tokens = [choose.randint(1, 2) if end else -1 for end in ends]
        self.try_(lambda: cache.commit([seq for seq, _ in done], [count for _, count in done], tokens))
        if any(cache.num_tokens(seq) >= 60 for seq in self.seqs):
            cache.free(self.seqs)
            self.seqs = []


@pytest.mark.parametrize("name", ["slot_mapping", "block_tables", "indptr", "indices", "last_page_len"])
def test_a_plan_of_several_groups_has_no_tables_of_its_own(name: str) -> None:
    """Each group has its own blocks; the first group's would be wrong for the layers of the others."""
    groups = (LayerGroup(4), LayerGroup(4, 8))
    cache = KVCacheManager(CacheConfig(40, groups=groups, max_num_seqs=2, max_model_len=64))
    plan = cache.reserve([cache.allocate([1, 2, 3, 4, 5])])
    with pytest.raises(
        InvalidArgument, match=rf"^plan.{name}: the cache has 2 layer groups; use plan.groups\[number\].{name}$"
    ):
        getattr(plan, name)
    assert len(getattr(plan.groups[1], name)) > 0
    made = arrays(1, 5, 2)
    with pytest.raises(InvalidArgument, match=r"^plan.fill\(buffers\): the cache has 2 layer groups"):
        plan.fill(StepBuffers(**made))
    assert all((value == OLD).all() for value in made.values())
    plan.fill(StepBuffers(input_ids=made["input_ids"]))
    assert made["input_ids"].tolist() == [1, 2, 3, 4, 5]
