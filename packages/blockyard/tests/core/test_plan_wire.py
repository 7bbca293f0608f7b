"""Plans as bytes: every rank has the plan that was made, or says at that step that it has not."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from blockyard import CacheConfig, InvalidArgument, KVCacheManager, LayerGroup, StateSpec, StepPlan
from blockyard.config import cache_config
from blockyard.errors import PeerMismatch, StalePlan
from blockyard.steps import DivergedRank, PlanReceiver, PlanSender, StepBuffers, SwapPlan
from blockyard.wire.message import Message, pack, split
from blockyard_testing import damaged_bytes as damage
from blockyard_testing.interrupter import Interrupter
from blockyard_testing.seeds import draws, run_seed
from blockyard_testing.states_world import World as StateWorld
from blockyard_testing.states_world import config as state_config
from blockyard_testing.world import World

from ..support.checked import Checked, prompt

NAMES = (
    "rows",
    "status",
    "fits",
    "num_scheduled",
    "num_computed",
    "seq_lens",
    "query_start_loc",
    "slot_mapping",
    "input_ids",
    "positions",
    "copies",
    "copy_groups",
    "block_tables",
    "indptr",
    "indices",
    "last_page_len",
    "swap_outs",
    "swap_out_groups",
    "swap_ins",
    "swap_in_groups",
)
IN_GROUPS = ("slot_mapping", "block_tables", "indptr", "indices", "last_page_len", "block_size")


def contents(plan: Any) -> dict[str, Any]:
    """All that a plan says, types included."""
    if not isinstance(plan, StepPlan):
        return {name: getattr(plan, name).tolist() for name in NAMES if name.startswith("swap")}
    names = [name for name in NAMES if name not in IN_GROUPS or len(plan.groups) == 1]
    said: dict[str, Any] = {name: getattr(plan, name).tolist() for name in names}
    said["dtypes"] = [(name, getattr(plan, name).dtype) for name in names]
    said |= {"num_tokens": plan.num_tokens, "all_fit": plan.all_fit}
    said["groups"] = [[np.asarray(getattr(group, name)).tolist() for name in IN_GROUPS] for group in plan.groups]
    return said


class Chain:
    """A cache, the sender of its plans, and two ranks that read them; each plan is compared on both."""

    def __init__(self, num_blocks: int = 20, block_size: int = 4, **settings: Any) -> None:
        self.cache = Checked(num_blocks, block_size, **settings)
        config = self.cache.cache.config
        self.sender = PlanSender(config)
        self.ranks = [PlanReceiver(config, f"rank {number}") for number in (1, 2)]
        self.num_bytes = self.num_words = 0

    def send(self, plan: Any) -> Any:
        """The plan as the last rank has it."""
        data = self.sender.to_bytes(plan)
        self.num_bytes, self.num_words = len(data), len(Message.of(data).items)
        read = [rank.from_bytes(data) for rank in self.ranks]
        assert all(contents(one) == contents(plan) for one in read)
        assert {rank.digest for rank in self.ranks} == {self.sender.digest}
        return read[-1]

    def step(self, seqs: list[int], counts: Any = None) -> Any:
        return self.send(self.cache.reserve(seqs, counts))


def test_a_rank_has_the_plan_that_was_made() -> None:
    chain = Chain()
    a = chain.cache.allocate(prompt(1, 6))
    b = chain.cache.allocate(prompt(2, 9))
    plan = chain.step([a, b], [6, 5])
    assert isinstance(plan, StepPlan)
    assert plan.slot_mapping.tolist() == [4, 5, 6, 7, 8, 9, 12, 13, 14, 15, 16]
    assert plan.input_ids.tolist() == [*prompt(1, 6), *prompt(2, 9)[:5]]
    assert plan.block_tables.tolist() == [[1, 2, 0], [3, 4, 5]]
    chain.cache.commit([a, b], [6, 5], [7, -1])
    assert chain.step([b, a]).input_ids.tolist() == [*prompt(2, 9)[5:], 7]


def test_a_step_sends_only_what_is_new_of_the_tables() -> None:
    chain = Chain(num_blocks=200, max_model_len=400)
    seq = chain.cache.allocate(prompt(1, 300))
    chain.step([seq])
    whole = chain.num_words
    chain.cache.commit([seq], 300, [5])
    sizes = []
    for _ in range(5):
        chain.step([seq])
        chain.cache.commit([seq], 1, [5])
        sizes.append(chain.num_words)
    # The shape, then row, start, count, token; a new block brings 4 words of its row and its id.
    assert sizes[1:] == [3 + 4] * 3 + [3 + 4 + 5]
    assert whole == 3 + 3 + 300 + 4 + 75
    assert chain.num_bytes - 4 * sizes[-1] < 150, "a head, and a size for each array"


def test_unserved_sequences_and_empty_steps() -> None:
    chain = Chain(num_blocks=7)
    owner, joiner = chain.cache.allocate(prompt(1, 9)), chain.cache.allocate(prompt(1, 9))
    assert chain.step([owner, joiner], [5, 1]).status.tolist() == [0, 2]
    assert chain.step([], 1).num_tokens == 0
    chain.step([owner], 0)
    chain.step([owner], [9])
    chain.cache.commit([owner], 9, [7])
    assert chain.step([joiner, owner], [30, 1]).status.tolist() == [1, 0]


def test_a_received_plan_dies_with_the_next_one() -> None:
    chain = Chain()
    seq = chain.cache.allocate(prompt(1, 6))
    first = chain.step([seq], 2)
    ids = first.input_ids
    chain.cache.commit([seq], 2)
    chain.step([seq])
    for name in ("block_tables", "slot_mapping", "input_ids", "indices"):
        with pytest.raises(StalePlan):
            getattr(first, name)
    assert first.num_scheduled.tolist() == [2]
    assert ids.tolist() == [100, 101]


def test_a_received_plan_fills_buffers() -> None:
    chain = Chain()
    seqs = [chain.cache.allocate(prompt(number, 6)) for number in (1, 2)]
    tables, slots = np.full((4, 8), 9, np.int32), np.full(20, 9)
    buffers = StepBuffers(slots, tables)
    for _ in range(9):
        plan = chain.step(seqs)
        plan.fill(buffers, pad_to=3, pad_tokens_to=15)
        own = plan.block_tables
        assert tables[:2, : own.shape[1]].tolist() == own.tolist()
        assert not tables[:2, own.shape[1] :].any()
        assert not tables[2].any()
        assert slots[: plan.num_tokens].tolist() == plan.slot_mapping.tolist()
        chain.cache.commit(seqs, plan.num_scheduled, [3, 4])


def test_swaps_and_the_moves_of_a_plan_that_is_not_run() -> None:
    chain = Chain(6, num_cpu_blocks=20)
    cache = chain.cache
    seq = cache.prefilled(list(range(12)))
    out = chain.send(cache.swap_out([seq]))
    assert type(out) is SwapPlan
    assert out.swap_outs.tolist() == [[3, 1], [2, 2], [1, 3]]
    chain.send(cache.swap_in([seq]))
    fork = cache.fork(seq)[0]
    cache.append([seq, fork], [7, 8])
    stale = cache.reserve([seq, fork], 1)
    fresh = cache.reserve([seq], 1)
    with pytest.raises(StalePlan):
        chain.sender.to_bytes(stale)
    moves = chain.ranks[0].from_bytes(data := chain.sender.to_bytes(stale, moves_only=True))
    chain.ranks[1].from_bytes(data)
    assert isinstance(moves, StepPlan)
    assert moves.copies.tolist() == stale.copies.tolist()
    assert moves.num_tokens == len(moves.rows) == 0
    chain.send(fresh)


GROUPS = (LayerGroup(4), LayerGroup(4, sliding_window=6), LayerGroup(8))


@pytest.mark.parametrize("kind", ["plain", "groups"])
def test_windows_slide_on_every_rank(kind: str) -> None:
    chain = Chain(150, groups=GROUPS if kind == "groups" else ())
    seqs = [chain.cache.allocate(prompt(number, 10 * number)) for number in (1, 2, 3)]
    for _ in range(25):
        plan = chain.step(seqs)
        chain.cache.commit(seqs, plan.num_scheduled, [1, 2, 3])
    chain.cache.free(seqs[1])
    seqs[1] = chain.cache.allocate(prompt(2, 15))
    chain.step(seqs)


class WireWorld(World):
    """The random program, carried out on what a rank has read instead of the plan that was made."""

    def __init__(self, package: Any, seed: int) -> None:
        super().__init__(package, seed)
        self.sender = PlanSender(self.config)
        self.rank = PlanReceiver(self.config)
        #: Draws of its own: the world's tell its story.
        self.draw = random.Random(seed)
        self.last = b"no message"
        self.num_damaged = 0

    def resize(self) -> str:
        answer = super().resize()
        self.rank.resize(len(self.gpu.blocks[0]))
        return answer

    def carry_out(self, plan: Any) -> None:
        data = self.sender.to_bytes(plan)
        if self.draw.random() < 0.2:
            changed = self.draw.choice(damage.DAMAGES)(self.draw, data, self.last)
            if changed != data:
                with pytest.raises(damage.REFUSED):
                    self.rank.from_bytes(changed)
                self.num_damaged += 1
        self.last = data
        self.read_plan = self.rank.from_bytes(data)
        assert contents(self.read_plan) == contents(plan), self.seed
        super().carry_out(self.read_plan)

    def compute(self, plan: Any, seqs: Any) -> None:
        super().compute(self.read_plan, seqs)


def test_a_random_world_runs_on_what_a_rank_has_read() -> None:
    import blockyard

    seed = run_seed()
    num_worlds = draws(180, 6)
    num_steps = num_damaged = 0
    for number in range(num_worlds):
        world = WireWorld(blockyard, seed + number)
        world.run(150)
        assert world.sender.digest == world.rank.digest
        num_steps += world.sender.num_steps
        num_damaged += world.num_damaged
    assert num_steps > 10 * num_worlds
    assert num_damaged > num_worlds


STATES = ("copies", "clears", "loads", "load_blocks", "saves", "save_positions", "save_blocks", "refused")


class StatesOverTheWire(StateWorld):
    """A world with states that runs on the plans that a rank has read."""

    def __init__(self, draw: random.Random, config: CacheConfig) -> None:
        super().__init__(draw, config, False)
        self.sender, self.rank = PlanSender(config), PlanReceiver(config)
        self.num_told = 0

    def told_of(self, plan: StepPlan) -> Any:
        for name in STATES:
            self.num_told += len(getattr(plan.states, name))
        if self.draw.random() < 0.1:  # not run: what is to be carried out all the same comes first, and once more
            moves = self.rank.from_bytes(self.sender.to_bytes(plan, moves_only=True))
            assert isinstance(moves, StepPlan)
            said = {name: getattr(moves.states, name).tolist() for name in STATES}
            assert said == {name: getattr(plan.states, name).tolist() if name in STATES[:4] else [] for name in STATES}
        read = self.rank.from_bytes(self.sender.to_bytes(plan))
        assert contents(read) == contents(plan)
        for name in STATES:
            mine, theirs = getattr(plan.states, name), getattr(read.states, name)
            assert mine.dtype == theirs.dtype
            assert mine.tolist() == theirs.tolist()
        return read


def test_a_random_world_with_states_runs_on_what_a_rank_has_read() -> None:
    draw = random.Random(f"{run_seed()} states over the wire")
    num_told = 0
    for _ in range(draws(30, 3)):
        world = StatesOverTheWire(draw, state_config(draw, draw.choice([60, 400])))
        world.run(100)
        assert world.sender.digest == world.rank.digest
        num_told += world.num_told
    assert num_told > 0


@pytest.mark.parametrize(
    ("array", "numbers", "words"),
    [
        (0, [3], r"states of \[3\] blocks; this rank has 2"),
        (1, [0, 4], "among copies of states"),
        (1, [0], "1 numbers of copies of states; it must be a multiple of 2"),
        (2, [-1], "among clears of states"),
        (3, [0, 5, 0], "among loads of states"),
        (3, [0, 5, 40], "among loads of states"),
        (4, [0, 33, 5, 6], "saves slot 0 after 33 tokens; its step computes tokens 0 to 32"),
        (4, [1, 16, 5, 6], "saves slot 1 after 16 tokens; its step computes tokens 0 to 0"),
        (5, [0, -1], "among refused states"),
    ],
)
def test_states_outside_of_a_rank_are_refused(array: int, numbers: list[int], words: str) -> None:
    groups = (LayerGroup(16, token_bytes=10), StateSpec(state_bytes=300, checkpoint_every=16))
    config = CacheConfig(40, groups=groups, max_num_seqs=4)
    cache = KVCacheManager(config)
    plan = cache.reserve([cache.allocate(list(range(40)))])
    sender, rank = PlanSender(config), PlanReceiver(config)
    message = sender.to_bytes(plan)
    arrays = [each.tolist() for each in split(Message.of(message).items, Message.of(message).sizes)]
    arrays[len(arrays) - 6 + array] = numbers
    with pytest.raises(InvalidArgument, match=words):
        rank.from_bytes(resealed(message, [np.array(each, np.int32) for each in arrays]))
    assert rank.from_bytes(message).states.save_positions.tolist() == plan.states.save_positions.tolist()


# ---------------------------------------------------------------- ranks that diverged


def sent(num_steps: int) -> tuple[Chain, list[bytes]]:
    """The messages of some steps, which nobody has read."""
    chain = Chain()
    seq = chain.cache.allocate(prompt(1, 6))
    messages = []
    for _ in range(num_steps):
        plan = chain.cache.reserve([seq])
        messages.append(chain.sender.to_bytes(plan))
        chain.cache.commit([seq], plan.num_scheduled, [7])
    return chain, messages


def test_a_rank_that_is_interrupted_knows_what_it_has_read() -> None:
    """Either it is where it was and reads the step again, or it has read it and goes on with the next one."""
    chain, messages = sent(4)
    whole = PlanReceiver(chain.cache.cache.config)
    for message in messages:
        whole.from_bytes(message)
    outcomes = set()
    for line in itertools.count(1):
        rank = PlanReceiver(chain.cache.cache.config)
        for message in messages[:2]:
            rank.from_bytes(message)
        if not Interrupter("blockyard/wire/message", line).run(lambda rank=rank: rank.from_bytes(messages[2])):
            break
        outcomes.add(rank.num_steps)
        if rank.num_steps == 2:
            rank.from_bytes(messages[2])
        rank.from_bytes(messages[3])
        assert rank.digest == chain.sender.digest
        assert tables_of(rank) == tables_of(whole)
    assert outcomes == {2, 3}


def test_a_sender_that_is_interrupted_goes_on_as_if_the_call_had_not_been() -> None:
    for line in itertools.count(1):
        chain = Chain()
        seq = chain.cache.allocate(prompt(1, 6))
        chain.step([seq], [3])
        chain.cache.commit([seq], [3])
        plan = chain.cache.reserve([seq])
        if not Interrupter("blockyard/wire/message", line).run(
            lambda chain=chain, plan=plan: chain.sender.to_bytes(plan)
        ):
            break
        assert chain.sender.num_steps == 1
        chain.send(plan)
    assert line > 5


def test_an_end_that_is_interrupted_behind_any_call_takes_the_next_one() -> None:
    """Ctrl-C is looked for when a function is entered, and behind a call of C: not even there an end stays closed."""
    chain, messages = sent(2)
    plan = chain.cache.reserve([chain.cache.allocate(prompt(7, 6))])
    rank = PlanReceiver(chain.cache.cache.config)
    for event in itertools.count(1):
        sending = interrupted_behind(event, lambda: chain.sender.to_bytes(plan))
        assert len(chain.sender.to_bytes(plan)) > 0
        rank = PlanReceiver(chain.cache.cache.config)
        reading = interrupted_behind(event, lambda rank=rank: rank.from_bytes(messages[0]))
        rank.from_bytes(messages[rank.num_steps])
        if not sending and not reading:
            break
    assert event > 10


def interrupted_behind(event: int, call: Callable[[], object]) -> bool:
    """Raise KeyboardInterrupt in a call, at this event in the frames of a wire; returns whether it came."""
    left = event

    def profile(frame: FrameType, what: str, argument: object) -> None:
        nonlocal left
        if what in ("call", "c_return") and frame.f_code.co_filename.endswith("plans.py"):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def test_a_rank_that_missed_a_step_is_named_at_the_next() -> None:
    chain, messages = sent(4)
    rank = chain.ranks[0]
    rank.from_bytes(messages[0])
    digest, expected = rank.digest, Message.of(messages[1]).digest.hex()
    said = f"the plan is step 3 and continues step 2 with digest {expected}"
    with pytest.raises(DivergedRank, match=f"^rank 1 is at step 1 with digest {digest}; {said}$"):
        rank.from_bytes(messages[2])
    assert (rank.num_steps, rank.digest) == (1, digest)
    for message in messages[1:]:
        rank.from_bytes(message)
    assert rank.digest == chain.sender.digest


def test_a_doubled_step_and_one_of_another_sender_are_refused() -> None:
    chain, messages = sent(3)
    rank = chain.ranks[0]
    rank.from_bytes(messages[0])
    with pytest.raises(DivergedRank, match=r"^rank 1 is at step 1 .* the plan is step 1 and continues step 0"):
        rank.from_bytes(messages[0])
    other, others = sent(3)
    changed = other.cache.allocate([5, 5])
    with pytest.raises(DivergedRank):
        rank.from_bytes(other.sender.to_bytes(other.cache.reserve([changed])))
    rank.from_bytes(messages[1])
    assert others[0] == messages[0], "equal steps are equal bytes"


def test_a_history_that_differs_is_seen_though_the_step_number_is_right() -> None:
    _, messages = sent(2)
    cache = Checked()
    sender, rank = PlanSender(cache.cache.config), PlanReceiver(cache.cache.config, "rank 3")
    seq = cache.allocate(prompt(2, 6))
    rank.from_bytes(sender.to_bytes(cache.reserve([seq])))
    with pytest.raises(DivergedRank, match=r"^rank 3 is at step 1 with digest"):
        rank.from_bytes(messages[1])


def test_a_late_rank_is_refused() -> None:
    chain, messages = sent(2)
    with pytest.raises(DivergedRank, match=r"^this rank is at step 0 with digest 0{32}; the plan is step 2"):
        PlanReceiver(chain.cache.cache.config).from_bytes(messages[1])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"block_size": 8}, "message has block size 4 and 16 blocks a sequence in group 0; rank 5 has 8 and 8"),
        ({"max_model_len": 32}, "message has block size 4 and 16 blocks a sequence in group 0; rank 5 has 4 and 8"),
        ({"max_num_seqs": 9}, "message is a plan of 1 groups and 8 sequences at once; rank 5 has 1 and 9"),
        ({"groups": GROUPS}, "message is a plan of 1 groups and 8 sequences at once; rank 5 has 3 and 8"),
        ({"num_blocks": 2}, "message has block 2 in a table; it must be from 0 to 1"),
    ],
)
def test_ranks_of_another_shape_are_refused_with_both_values(config: dict[str, Any], message: str) -> None:
    _, messages = sent(1)
    settings = {"num_blocks": 20, "block_size": 4, "max_num_seqs": 8, "max_model_len": 64, **config}
    if "groups" in config:
        settings.pop("block_size")
    with pytest.raises(InvalidArgument, match=f"^{message}$"):
        PlanReceiver(cache_config(**settings), "rank 5").from_bytes(messages[0])


# ---------------------------------------------------------------- hostile bytes


def tables_of(rank: PlanReceiver) -> Any:
    return [
        [np.array(column).tolist() for column in (table.blocks, table.num_blocks, table.num_null)]
        for table in rank._copy.tables
    ]


def resealed(data: bytes, arrays: list[Any]) -> bytes:
    """A message of other arrays whose sizes and digest are right."""
    message = Message.of(data)
    return pack(message.kind, {}, [np.asarray(array, np.int32) for array in arrays], message.number, message.before)


@pytest.mark.parametrize(
    "data", [b"", b"x", b"BYRD", bytes(56), b"BYRD" + bytes(52), None, 7, "text", [1, 2], np.zeros(9), pack("offer")]
)
def test_what_is_no_message(data: Any) -> None:
    with pytest.raises((InvalidArgument, PeerMismatch, DivergedRank), match=r"^(message|protocol version|this rank) "):
        PlanReceiver(CacheConfig(20, 4, max_model_len=64)).from_bytes(data)


def test_every_flipped_byte_is_seen_and_changes_nothing() -> None:
    chain, messages = sent(2)
    rank = chain.ranks[0]
    rank.from_bytes(messages[0])
    before = tables_of(rank)
    for place in range(len(messages[1])):
        changed = bytearray(messages[1])
        changed[place] ^= 1 << (place % 8)
        with pytest.raises((InvalidArgument, PeerMismatch)):
            rank.from_bytes(changed)
    for length in range(len(messages[1])):
        with pytest.raises(InvalidArgument):
            rank.from_bytes(messages[1][:length])
    assert tables_of(rank) == before
    rank.from_bytes(memoryview(messages[1]))


def test_hostile_words_under_a_right_digest_never_reach_outside() -> None:
    """Each word of a body is set to each of many values, alone and in pairs: refused, or a plan within its limits."""
    choose = random.Random(run_seed())
    cache = Checked(30, groups=GROUPS, num_cpu_blocks=10)
    config = cache.cache.config
    sender = PlanSender(config)
    seqs = [cache.allocate(prompt(number, 14)) for number in (1, 2)]
    messages = []
    for _ in range(3):
        plan = cache.reserve(seqs)
        messages.append(sender.to_bytes(plan))
        cache.commit(seqs, plan.num_scheduled, [1, 2])
    values = (-(2**31), -1, 0, 1, 2, 3, 5, 8, 29, 30, 31, 1000, 2**27, 2**31 - 1)
    accepted = refused = 0
    for message in (messages[0], messages[2]):
        body, sizes = Message.of(message).items.astype(np.int64), Message.of(message).sizes
        changes = [{place: value} for place in range(len(body)) for value in values]
        changes += [
            {choose.randrange(len(body)): choose.choice(values) for _ in range(choose.randint(2, 4))}
            for _ in range(draws(6000, 1000))
        ]
        for change in changes:
            rank = PlanReceiver(config)
            for earlier in messages[: messages.index(message)]:
                rank.from_bytes(earlier)
            before = tables_of(rank)
            hostile = body.copy()
            hostile[list(change)] = list(change.values())
            try:
                read = rank.from_bytes(resealed(message, split(hostile, sizes)))
            except InvalidArgument:
                refused += 1
                assert tables_of(rank) == before
            else:
                accepted += 1
                require_within(read, config)
    for _ in range(300):  # integers that move from one array to the next
        moved = list(sizes)
        giver, taker = choose.sample(range(len(moved)), 2)
        count = choose.randint(0, moved[giver])
        moved[giver] -= count
        moved[taker] += count
        rank = PlanReceiver(config)
        for earlier in messages[:2]:
            rank.from_bytes(earlier)
        try:
            read = rank.from_bytes(resealed(messages[2], split(body, moved)))
        except InvalidArgument:
            refused += 1
        else:
            accepted += 1
            require_within(read, config)
    assert accepted > 100
    assert refused > 1000


def require_within(plan: Any, config: CacheConfig) -> None:
    for group, part in zip(config.layer_groups, plan.groups, strict=True):
        for array, end in ((part.block_tables, 30), (part.slot_mapping, 30 * group.block_size)):
            assert array.size == 0 or (array.min() >= 0 and array.max() < end)
        _ = part.indices, part.indptr, part.last_page_len
    assert len(plan.input_ids) == len(plan.positions) == plan.num_tokens == plan.num_scheduled.sum()
    assert plan.rows.size == 0 or (plan.rows.min() >= 0 and plan.rows.max() < config.max_num_seqs)
    for group in plan.groups:
        group.fill(StepBuffers(np.zeros(5000, np.int64), np.zeros((8, 16), np.int32)))


def test_random_bytes() -> None:
    choose = random.Random(run_seed())
    _, messages = sent(1)
    rank = PlanReceiver(CacheConfig(20, 4, max_num_seqs=8, max_model_len=64))
    for _ in range(3000):
        body = np.array([choose.choice((0, 1, 2, 4, 8, 16, choose.randint(-9, 99))) for _ in range(40)])
        sizes = [choose.randint(0, 6) for _ in range(choose.randint(0, 12))]
        data = resealed(messages[0], split(np.resize(body, sum(sizes)), sizes))
        with pytest.raises(InvalidArgument):
            rank.from_bytes(data)
    rank.from_bytes(messages[0])


# ---------------------------------------------------------------- misuse


def test_a_refused_plan_leaves_the_chain_as_it_was() -> None:
    chain = Chain()
    seq = chain.cache.allocate(prompt(1, 6))
    chain.step([seq], 2)
    before = (chain.sender.num_steps, chain.sender.digest)
    other = Checked().reserve([], 1)
    stale = chain.cache.reserve([seq], 2)
    chain.cache.reserve([seq], 1)
    for plan, error in ((other, InvalidArgument), (stale, StalePlan), (None, InvalidArgument), (b"", InvalidArgument)):
        with pytest.raises(error):
            chain.sender.to_bytes(plan)
    wide = KVCacheManager(CacheConfig(20, 8, max_num_seqs=8, max_model_len=64))
    with pytest.raises(InvalidArgument, match=r"^plan has block sizes \[8\], .* this sender's config has \[4\]"):
        chain.sender.to_bytes(wide.reserve([], 1))
    with pytest.raises(InvalidArgument, match="moves_only"):
        chain.sender.to_bytes(stale, 1)
    assert (chain.sender.num_steps, chain.sender.digest) == before
    chain.step([seq], 1)


@pytest.mark.parametrize("make", [PlanSender, PlanReceiver])
def test_the_ends_are_made_from_a_config_and_are_not_copied(make: Any) -> None:
    for wrong in (None, 5, {}, "config"):
        with pytest.raises(InvalidArgument, match=r"^config is .*; it must be a CacheConfig$"):
            make(wrong)
    end = make(CacheConfig(20, 4))
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            copier(end)


def test_a_rank_that_resizes_its_tensors() -> None:
    rank = PlanReceiver(CacheConfig(20, 4))
    for wrong in (1, 2**27 + 1, "9", True, None):
        with pytest.raises(InvalidArgument, match=r"^num_blocks is"):
            rank.resize(wrong)
    rank.resize(40)
