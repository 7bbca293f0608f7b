"""The plan of a step: every array against an example worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from blockyard import BlockyardError, SeqStatus, StepPlan
from blockyard.errors import StalePlan

from ..support.checked import Checked, prompt

SCHEDULED, NO_BLOCKS, WAITS = SeqStatus.SCHEDULED, SeqStatus.NO_BLOCKS, SeqStatus.WAITS_FOR_PREFIX

DTYPES = {
    "rows": np.int64,
    "status": np.uint8,
    "fits": np.bool_,
    "num_scheduled": np.int64,
    "num_computed": np.int32,
    "seq_lens": np.int32,
    "query_start_loc": np.int32,
    "slot_mapping": np.int64,
    "input_ids": np.int32,
    "positions": np.int64,
    "copies": np.int32,
    "block_tables": np.int32,
    "indptr": np.int32,
    "indices": np.int32,
    "last_page_len": np.int32,
}
#: These follow from the live block table, and die with the next change.
TABLES = ("slot_mapping", "input_ids", "block_tables", "indices")


def arrays(plan: StepPlan) -> dict[str, object]:
    return {name: getattr(plan, name).tolist() for name in DTYPES}


class Scene:
    """Blocks of four. A decodes its 7th token, B prefills 9 in chunks of 5, C decodes across the end of a block."""

    def __init__(self, **settings: int) -> None:
        self.cache = Checked(**settings)
        self.a = self.cache.prefilled(prompt(1, 6), [7])
        self.b = self.cache.allocate(prompt(2, 9))
        self.c = self.cache.prefilled(prompt(3, 4), [7])
        assert [self.cache.row(seq) for seq in (self.a, self.b, self.c)] == [[1, 2], [3, 4, 5], [6]]


def test_prefill_and_decode_in_one_step() -> None:
    scene = Scene()
    plan = scene.cache.reserve([scene.a, scene.b, scene.c], [1, 5, 1])
    assert arrays(plan) == {
        "rows": [0, 1, 2],
        "status": [SCHEDULED] * 3,
        "fits": [True] * 3,
        "num_scheduled": [1, 5, 1],
        "num_computed": [6, 0, 4],
        "seq_lens": [7, 5, 5],
        "query_start_loc": [0, 1, 6, 7],
        # A: block 2, offset 2. B: all of block 3 and the first slot of block 4. C: a new block, 7.
        "slot_mapping": [10, 12, 13, 14, 15, 16, 28],
        "input_ids": [7, 200, 201, 202, 203, 204, 7],
        "positions": [6, 0, 1, 2, 3, 4, 4],
        "copies": [],
        # B holds block 5 for tokens 8 and later: it stands in the table, but no attention of this step reads it.
        "block_tables": [[1, 2, 0], [3, 4, 5], [6, 7, 0]],
        "indptr": [0, 2, 4, 6],
        "indices": [1, 2, 3, 4, 6, 7],
        "last_page_len": [3, 1, 1],
    }
    assert plan.all_fit


def test_the_types_of_the_arrays() -> None:
    scene = Scene()
    plan = scene.cache.reserve([scene.a, scene.b], 1)
    assert {name: getattr(plan, name).dtype for name in DTYPES} == DTYPES
    assert plan.copies.shape == (0, 2)
    assert isinstance(plan.all_fit, bool)


def test_the_order_is_that_of_the_call() -> None:
    scene = Scene()
    plan = scene.cache.reserve([scene.c, scene.a, scene.b], [1, 1, 2])
    assert plan.rows.tolist() == [2, 0, 1]
    assert plan.slot_mapping.tolist() == [28, 10, 12, 13]
    assert plan.query_start_loc.tolist() == [0, 1, 2, 4]
    assert plan.block_tables.tolist() == [[6, 7, 0], [1, 2, 0], [3, 4, 5]]
    assert (plan.indptr.tolist(), plan.indices.tolist()) == ([0, 2, 4, 5], [6, 7, 1, 2, 3])
    assert plan.last_page_len.tolist() == [1, 3, 2]


def test_block_tables_are_a_copy_whatever_the_rows() -> None:
    scene = Scene()
    cache, table = scene.cache, scene.cache.block_table
    assert table.shape == (8, 16)
    for seqs in (
        [scene.a, scene.b, scene.c],
        [scene.b, scene.c],
        [scene.b],
        [scene.a, scene.c],
        [scene.b, scene.a],
    ):
        plan = cache.reserve(seqs, 1)
        tables = plan.block_tables
        assert not np.shares_memory(tables, table)
        assert tables.flags.c_contiguous
        rows = plan.rows
        assert tables.tolist() == table[rows, : tables.shape[1]].tolist()
        assert not table[rows, tables.shape[1] :].any(), "what is cut off is padding"


def test_what_is_live_or_shared_cannot_be_written() -> None:
    scene = Scene()
    plan = scene.cache.reserve([scene.a, scene.b], 1)
    for view in (scene.cache.block_table, plan.slot_mapping, plan.num_scheduled, plan.rows):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1


def test_non_adjacent_rows() -> None:
    """Row 1 has gone; rows 0 and 2 are left, and a newcomer takes row 1 again."""
    scene = Scene()
    cache = scene.cache
    cache.free(scene.b)
    plan = cache.reserve([scene.a, scene.c], 1)
    assert plan.rows.tolist() == [0, 2]
    # B computed nothing, so its blocks 3, 4 and 5 are the next to be given: C gets 3.
    assert plan.block_tables.tolist() == [[1, 2], [6, 3]]
    assert plan.slot_mapping.tolist() == [10, 12]
    cache.commit([scene.a, scene.c], 1, [8, 8])
    d = cache.allocate([50])
    plan = cache.reserve([scene.a, d, scene.c], 1)
    assert plan.rows.tolist() == [0, 1, 2]
    assert plan.block_tables.tolist() == [[1, 2], [4, 0], [6, 3]]


def test_one_that_is_not_scheduled_has_no_slots_and_keeps_its_place() -> None:
    """No block is free: C gets none. A and B have room in theirs."""
    scene = Scene(num_blocks=7)
    plan = scene.cache.reserve([scene.a, scene.c, scene.b], [1, 1, 5])
    assert arrays(plan) == {
        "rows": [0, 2, 1],
        "status": [SCHEDULED, NO_BLOCKS, SCHEDULED],
        "fits": [True, False, True],
        "num_scheduled": [1, 0, 5],
        "num_computed": [6, 4, 0],
        "seq_lens": [7, 4, 5],
        "query_start_loc": [0, 1, 1, 6],
        "slot_mapping": [10, 12, 13, 14, 15, 16],
        "input_ids": [7, 200, 201, 202, 203, 204],
        "positions": [6, 0, 1, 2, 3, 4],
        "copies": [],
        "block_tables": [[1, 2, 0], [6, 0, 0], [3, 4, 5]],
        "indptr": [0, 2, 3, 5],
        "indices": [1, 2, 6, 3, 4],
        "last_page_len": [3, 4, 1],
    }
    assert not plan.all_fit


def test_one_that_waits_for_its_prefix() -> None:
    """The joiner has no computed token of its own; its length counts what it joined."""
    cache = Checked()
    owner, joiner = cache.allocate(prompt(1, 9)), cache.allocate(prompt(1, 9))
    plan = cache.reserve([owner, joiner], [5, 1])
    assert plan.status.tolist() == [SCHEDULED, WAITS]
    assert plan.num_scheduled.tolist() == [5, 0]
    assert plan.num_computed.tolist() == [0, 8]
    assert plan.seq_lens.tolist() == [5, 8]
    assert plan.block_tables.tolist() == [[1, 2, 3], [1, 2, 4]]
    plan = cache.reserve([owner, joiner], [9, 1])
    assert plan.all_fit
    assert plan.slot_mapping.tolist() == [*range(4, 13), 16]
    assert (plan.indptr.tolist(), plan.indices.tolist()) == ([0, 3, 6], [1, 2, 3, 1, 2, 4])
    assert plan.last_page_len.tolist() == [1, 1]


def test_copies_come_in_the_order_of_the_batch() -> None:
    cache = Checked()
    first, second = cache.prefilled(prompt(1, 6), [7]), cache.prefilled(prompt(2, 6), [7])
    fork_1, fork_2 = cache.fork(first)[0], cache.fork(second)[0]
    plan = cache.reserve([fork_2, fork_1, first, second], 1)
    assert plan.copies.tolist() == [[4, 5], [2, 6]]
    assert plan.block_tables.tolist() == [[3, 5], [1, 6], [1, 2], [3, 4]]
    assert plan.slot_mapping.tolist() == [22, 26, 10, 18]


def test_a_step_of_no_tokens() -> None:
    """Nothing is written; the lengths are what is computed, and a sequence of none has no page."""
    scene = Scene()
    plan = scene.cache.reserve([scene.a, scene.b, scene.c], 0)
    assert plan.all_fit
    assert plan.slot_mapping.tolist() == []
    assert plan.seq_lens.tolist() == [6, 0, 4]
    assert plan.query_start_loc.tolist() == [0, 0, 0, 0]
    assert plan.indptr.tolist() == [0, 2, 2, 3]
    assert plan.indices.tolist() == [1, 2, 6]
    assert plan.last_page_len.tolist() == [2, 0, 4]


def test_a_step_of_nobody() -> None:
    scene = Scene()
    plan = scene.cache.reserve([], 1)
    assert plan.all_fit
    assert plan.block_tables.shape == (0, 0)
    assert plan.query_start_loc.tolist() == plan.indptr.tolist() == [0]
    for name in ("rows", "status", "slot_mapping", "seq_lens", "indices", "last_page_len"):
        assert getattr(plan, name).tolist() == []
    scene.cache.commit([], 1)


@pytest.mark.parametrize(
    ("length", "pages", "last"), [(1, 1, 1), (3, 1, 3), (4, 1, 4), (5, 2, 1), (8, 2, 4), (9, 3, 1)]
)
def test_the_last_page_is_never_empty(length: int, pages: int, last: int) -> None:
    """FlashInfer counts 1 to block_size tokens in the last page: a full one is 4, not 0 of the next."""
    cache = Checked()
    plan = cache.reserve([cache.allocate(prompt(1, length))], length)
    assert plan.indptr.tolist() == [0, pages]
    assert plan.indices.tolist() == list(range(1, pages + 1))
    assert plan.last_page_len.tolist() == [last]


def test_slots_of_every_block_size() -> None:
    """A slot is block_id * block_size + offset; a chunk may begin and end anywhere in a block."""
    for block_size in (1, 3, 4, 16):
        cache = Checked(num_blocks=70, block_size=block_size)
        cache.allocate(prompt(9, 3))
        seq = cache.allocate(prompt(1, 50))
        blocks = cache.row(seq)
        position = 0
        for chunk in (1, 2, 16, 13, 18):
            plan = cache.reserve([seq], chunk)
            assert plan.slot_mapping.tolist() == [
                blocks[token // block_size] * block_size + token % block_size
                for token in range(position, position + chunk)
            ]
            cache.commit([seq], chunk)
            position += chunk


def test_slots_of_a_step_longer_than_any_before() -> None:
    """Long steps have their slots made when asked for; an earlier plan's slots stay its own."""
    cache = Checked(num_blocks=1000, max_model_len=3000)
    first, second = cache.allocate(prompt(1, 5)), cache.allocate(prompt(2, 2500))
    earlier = cache.reserve([first], 5).slot_mapping
    later = cache.reserve([second], 2500).slot_mapping
    assert later.tolist() == list(range(12, 2512))
    assert earlier.tolist() == [4, 5, 6, 7, 8]


# ---------------------------------------------------------------- stale plans


def decode(scene: Scene) -> None:
    scene.cache.commit([scene.a], 1, [8])


CHANGES: dict[str, Callable[[Scene], object]] = {
    "allocate": lambda scene: scene.cache.allocate([50]),
    "reserve": lambda scene: scene.cache.reserve([scene.b], 1),
    "commit": decode,
    "fork": lambda scene: scene.cache.fork(scene.c),
    "truncate": lambda scene: scene.cache.truncate(scene.c, 2),
    "free": lambda scene: scene.cache.free(scene.b),
    "reset_prefix_cache": lambda scene: scene.cache.reset_prefix_cache(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_tables_of_a_plan_die_with_the_next_change(change: str) -> None:
    """They are views of live rows: read later, they could show another sequence's blocks."""
    scene = Scene()
    plan = scene.cache.reserve([scene.a], 1)
    before = arrays(plan)
    version = scene.cache.cache._parts.sequences.version
    CHANGES[change](scene)
    assert scene.cache.cache._parts.sequences.version > version, "it only rises, or two changes could look like none"
    for name in TABLES:
        with pytest.raises(StalePlan, match=r"^the cache has changed since this plan was made"):
            getattr(plan, name)
    left = [name for name in DTYPES if name not in TABLES]
    assert {name: getattr(plan, name).tolist() for name in left} == {name: before[name] for name in left}


def test_questions_and_refusals_leave_a_plan_fresh() -> None:
    scene = Scene()
    cache = scene.cache
    plan = cache.reserve([scene.a], 1)
    before = arrays(plan)
    cache.can_allocate([1, 2, 3])
    cache.stats()
    cache.block(1)
    cache.token_ids(scene.a)
    for call in (
        lambda: cache.allocate([]),
        lambda: cache.free([scene.a, 5]),
        lambda: cache.reserve([scene.a], -1),
        lambda: cache.commit([scene.a], 2),
        lambda: cache.fork(scene.a),
        lambda: cache.truncate(scene.a, 1),
    ):
        with pytest.raises(BlockyardError):
            call()
    assert arrays(plan) == before
