"""Random programs on the manager and on the reference model: the same answers and the same state, step by step."""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import blockyard
from blockyard import CacheSalt, LoRA
from blockyard_testing import seeds
from blockyard_testing.seeds import draws, run_seed

from ..support.model_pair import Pair
from ..support.reference import SCHEDULED
from ..support.reference import Sequence as ModelSequence

STEPS_AN_EXAMPLE = 60
NUM_EXAMPLES = draws(380, 64)
BLOCK_SIZES = (1, 2, 3, 4, 16)
#: What a step chooses by. One drawn number, and not each choice, goes to hypothesis: it steps faster, explores more
#: evenly, and shrinks to fewer steps; `Pair.log` then tells what they were.
CHOICES = st.integers(0, 2**32).map(random.Random)
#: BLOCKYARD_SHRINK=0 shows a failing program as it was found, at once; shrinking it can take minutes.
PHASES = [p for p in Phase if p != Phase.shrink or os.environ.get("BLOCKYARD_SHRINK") != "0"]
MIXED, CROWD, LONG = "mixed", "crowd", "long"
#: Blocks that a lookup takes in one pass; long prompts come near multiples of it.
TILE = 64
KEYS: tuple[tuple[Any, ...], ...] = ((), (), (), (), (), (LoRA("a"),), (CacheSalt("a"),))


class Tally:
    """Steps run and how they ended, over all examples of a test run."""

    num_steps = 0
    num_seqs = 0
    num_hits = 0
    num_waits = 0
    num_copies = 0
    refusals: ClassVar[Counter[str]] = Counter()


class ManagerMachine(RuleBasedStateMachine):
    """Small pools, few tokens and few prompts, so that everything collides with everything.

    Crowds are prompts that branch off one another, in a pool that holds them all, computed slowly, so that sequences
    join blocks that others have yet to compute, and lose those others. Long prompts have more blocks than a lookup
    takes in one pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pair: Pair = None  # type: ignore[assignment]
        self.mood = MIXED

    @initialize(
        block_size=st.sampled_from(BLOCK_SIZES),
        num_blocks=st.sampled_from((2, 3, 5, 8, 12, 16, 20, 24, 30)),
        max_num_seqs=st.sampled_from((1, 2, 4, 6, 8, 10)),
        max_pages=st.sampled_from((1, 2, 4, 6, 8, 10)),
        caching=st.sampled_from([True, True, True, True, False]),
        watermark=st.sampled_from([0.0, 0.0, 0.0, 0.2]),
        hash_seed=st.integers(0, 3),
        compares_all=st.sampled_from([False] * 9 + [True]),
        mood=st.sampled_from([MIXED] * 9 + [CROWD] * 9 + [LONG] * 2),
        max_steps=st.sampled_from([1, 1, 1, 2, 3]),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        max_pages: int,
        caching: bool,
        watermark: float,
        hash_seed: int,
        compares_all: bool,
        mood: str,
        max_steps: int,
    ) -> None:
        self.mood = mood
        if mood != MIXED:
            block_size, caching, watermark = min(block_size, 2), True, 0.0
            num_blocks, max_num_seqs, max_pages = (60, 10, 7) if mood == CROWD else (450, 3, 140)
        self.pair = Pair(
            num_blocks,
            block_size,
            compares_all,
            max_num_seqs=max_num_seqs,
            max_model_len=max_pages * block_size,
            enable_prefix_caching=caching,
            watermark=watermark,
            hash_seed=hash_seed,
            max_steps_in_flight=max_steps,
        )
        self.count()

    def count(self) -> None:
        Tally.num_steps += 1

    def teardown(self) -> None:
        if self.pair is not None:
            hypothesis.note("\n".join(self.pair.log))
            model = self.pair.model
            Tally.num_seqs += len(self.pair.names)
            Tally.num_waits += self.pair.num_waits
            Tally.num_hits += model.num_hit_tokens
            Tally.num_copies += model.num_copied_blocks
            Tally.refusals += self.pair.refusals
            if sys.exc_info()[0] is None:
                self.pair.free(list(self.pair.live))
                if model.num_begun > model.num_ended:
                    self.pair.end_step(model.num_begun)
                assert self.pair.cache.num_used_blocks == 0

    def choose(self, draw: random.Random, least: int = 1) -> list[ModelSequence]:
        live = self.pair.live
        return draw.sample(live, draw.randint(min(least, len(live)), len(live)))

    @property
    def has_live(self) -> bool:
        return self.pair is not None and bool(self.pair.live)

    # ------------------------------------------------------------------ admission

    def prompt(self, draw: random.Random) -> list[int]:
        """A few pages of equal or nearly equal tokens, or the beginning of what a sequence holds, and more."""
        size = self.pair.config.block_size
        if self.mood == LONG:
            num_tokens = (TILE * draw.randint(1, 2) + draw.choice((-1, 0, 1, 2, 5))) * size + draw.choice((0, 1))
            return [1] * (num_tokens - 1) + [draw.choice((1, 2))]
        if self.mood == CROWD:
            branch = draw.randint(0, 6) * size
            tokens = [1] * branch + [draw.choice((1, 1, 2))] * draw.randint(0, 3 * size)
            return tokens[: self.pair.config.max_model_len] or [1]
        tokens: list[int] = []
        if self.pair.live and draw.random() < 0.5:
            base = draw.choice(self.pair.live).tokens
            tokens = base[: draw.randint(0, len(base))]
        for _ in range(draw.choice((0, 0, 1, 1, 2, 2, 3, 4))):
            tokens = tokens + [draw.choice((1, 1, 1, 2))] * size
        tokens = tokens + [1] * draw.randint(0, size)
        too_long = draw.random() < 0.03
        return tokens[: self.pair.config.max_model_len + too_long] or [1]

    @rule(draw=CHOICES)
    def allocate(self, draw: random.Random) -> None:
        self.count()
        self.admit(draw, self.prompt(draw), draw.choice(KEYS))

    def admit(self, draw: random.Random, tokens: list[int], keys: tuple[Any, ...]) -> None:
        """What is refused makes room, most of the time, so that it is admitted later."""
        keys = () if self.mood == CROWD else keys
        if self.pair.allocate(tokens, keys) is None and self.pair.live and draw.random() < 0.8:
            self.pair.free([draw.choice(self.pair.live)])

    @rule(draw=CHOICES)
    def allocate_a_few(self, draw: random.Random) -> None:
        """The same prompt, or nearly, several times: they join one another's blocks."""
        self.count()
        prompt, keys = self.prompt(draw), draw.choice(KEYS)
        for _ in range(draw.randint(2, 3)):
            if self.mood == CROWD:
                prompt = self.prompt(draw)
            self.admit(draw, prompt[: draw.choice((len(prompt), len(prompt) - 1))] or [1], keys)

    # ------------------------------------------------------------------ steps

    @precondition(lambda self: self.has_live)
    @rule(draw=CHOICES, most=st.sampled_from((1, 2, 5, 40)))
    def reserve(self, draw: random.Random, most: int) -> None:
        self.count()
        seqs = self.choose(draw)
        room = [self.pair.config.max_model_len - self.pair.model.start_of(seq) for seq in seqs]
        too_many = draw.random() < 0.02
        self.pair.reserve(seqs, [min(draw.randint(0, most), free) + too_many for free in room])

    @precondition(lambda self: self.has_live)
    @rule(draw=CHOICES, share=st.sampled_from((0.0, 0.5, 1.0)))
    def commit(self, draw: random.Random, share: float) -> None:
        self.count()
        seqs = self.choose(draw)
        step = self.some_step(draw, seqs)
        if step is not None and draw.random() < 0.8:
            seqs = [seq for seq in seqs if seq.open and seq.open[0][0] == step] or seqs
        self.pair.commit(seqs, *self.outcome(draw, seqs, share), step)

    def some_step(self, draw: random.Random, seqs: list[ModelSequence]) -> int | None:
        """One that may be committed, of a step that is; None where steps have no numbers."""
        if self.pair.model.max_steps == 1:
            return None
        return draw.choice([seq.open[0][0] for seq in seqs if seq.open] or [max(self.pair.model.num_begun, 1)])

    @precondition(lambda self: self.pair is not None and self.pair.model.max_steps > 1)
    @rule(draw=CHOICES)
    def end_step(self, draw: random.Random) -> None:
        self.count()
        model = self.pair.model
        self.pair.end_step(draw.choice((model.num_ended, *[model.num_ended + 1] * 4, model.num_begun)))

    def flight_step(self, draw: random.Random, chunk: int) -> None:
        """A step behind those in flight, one token beyond those known where all of these are; then perhaps one ends."""
        model = self.pair.model
        if model.num_begun - model.num_ended == model.max_steps:
            self.land_oldest(draw)
        limit = self.pair.config.max_model_len
        seqs = [seq for seq in self.choose(draw) if model.start_of(seq) < limit]
        self.pair.reserve(seqs, [min(chunk, max(len(seq.tokens) - model.start_of(seq), 1)) for seq in seqs])
        if draw.random() < 0.5:
            self.land_oldest(draw)

    def land_oldest(self, draw: random.Random) -> None:
        """The oldest step is committed, mostly as a whole, and ends."""
        step = self.pair.model.num_ended + 1
        seqs = [seq for seq in self.pair.live if seq.open and seq.open[0][0] == step]
        if not self.pair.commit(seqs, *self.outcome(draw, seqs, draw.choice((1.0, 1.0, 0.5))), step):
            self.pair.commit(seqs, [0] * len(seqs), None, step)
        self.pair.end_step(step)

    def outcome(
        self, draw: random.Random, seqs: list[ModelSequence], share: float
    ) -> tuple[list[int], list[list[int]]]:
        """How much of each reservation was computed (`share` of the time all), and the tokens that came out."""
        num_computed, appended = [], []
        for seq in seqs:
            done = seq.num_reserved if draw.random() < share else draw.randint(0, seq.num_reserved)
            missing = max(0, seq.num_computed + done - len(seq.tokens))
            room = self.pair.config.max_model_len - len(seq.tokens)
            num_new = missing + draw.choice((0, 0, 0, 1, 1, 2))
            num_computed.append(done)
            appended.append([draw.choice((1, 1, 2)) for _ in range(min(num_new, room))])
        return num_computed, appended

    @precondition(lambda self: self.has_live)
    @rule(draw=CHOICES)
    def two_engine_steps(self, draw: random.Random) -> None:
        """Most of a serving manager's life; a rule of its own makes it as likely here."""
        self.engine_step(draw, 2 if self.mood == CROWD else 64)
        self.engine_step(draw, 64)

    @precondition(lambda self: self.has_live)
    @rule(draw=CHOICES, chunk=st.sampled_from((1, 3, 64)))
    def engine_step(self, draw: random.Random, chunk: int) -> None:
        """What an engine does: all sequences, what they still lack, everything computed, a token sampled."""
        self.count()
        pair = self.pair
        if pair.model.max_steps > 1:
            self.flight_step(draw, chunk)
            return
        room = pair.config.max_model_len
        seqs = [s for s in pair.live if s.num_computed < len(s.tokens) and s.num_computed < room]
        if self.mood == CROWD:
            seqs = draw.sample(seqs, draw.randint(0, min(3, len(seqs))))
        if not seqs:
            return
        step = pair.reserve(seqs, [min(chunk, len(s.tokens) - s.num_computed) for s in seqs])
        assert step is not None
        done = [seq for seq, status in zip(seqs, step.status, strict=True) if status == SCHEDULED]
        sampled = [
            [draw.choice((1, 2))] if s.num_computed + s.num_reserved == len(s.tokens) < room else [] for s in done
        ]
        pair.commit(done, [seq.num_reserved for seq in done], sampled)

    # ------------------------------------------------------------------ the rest of a life

    @precondition(lambda self: self.has_live)
    @rule(draw=CHOICES)
    def fork_between_steps(self, draw: random.Random) -> None:
        """Several completions of a prompt: computed, forked, and each writes into the block that they share."""
        self.engine_step(draw, 64)
        self.fork(draw, draw.choice((1, 1, 2)))
        self.engine_step(draw, 64)

    @precondition(lambda self: self.has_live)
    @rule(draw=CHOICES, num_children=st.sampled_from((1, 1, 2, 3)))
    def fork_one(self, draw: random.Random, num_children: int) -> None:
        self.fork(draw, num_children)

    def fork(self, draw: random.Random, num_children: int) -> None:
        self.count()
        self.pair.fork(draw.choice(self.pair.live), num_children)

    @precondition(lambda self: self.has_live)
    @rule(draw=CHOICES)
    def truncate(self, draw: random.Random) -> None:
        self.count()
        seq = draw.choice(self.pair.live)
        self.pair.truncate(seq, draw.randint(1, len(seq.tokens)))

    @precondition(lambda self: self.has_live)
    @rule(draw=CHOICES)
    def free(self, draw: random.Random) -> None:
        self.count()
        num_seqs = draw.choice((1, 1, 1, 1, 2, 3))
        self.pair.free(draw.sample(self.pair.live, min(num_seqs, len(self.pair.live))))

    @rule(draw=CHOICES)
    def something_rare(self, draw: random.Random) -> None:
        """Resets and the caller's bugs; one rule, so that they stay rare."""
        self.count()
        actions = [self.pair.reset, lambda: self.use_a_dead_handle(draw), lambda: self.break_the_rules(draw)]
        draw.choice(actions)()

    # ------------------------------------------------------------------ the caller's bugs

    def use_a_dead_handle(self, draw: random.Random) -> None:
        pair, cache = self.pair, self.pair.cache
        dead = draw.choice(pair.dead_handles) if pair.dead_handles else 12345
        batch = [*pair.handles(pair.live), dead]
        draw.shuffle(batch)
        if pair.model.max_steps > 1 and pair.model.num_begun == 0:
            pair.reserve([], [])
        step = self.some_step(draw, [])
        for call in (
            lambda: cache.free(batch),
            lambda: cache.reserve(batch, 1),
            lambda: cache.commit(batch, 0, step=step),
            lambda: cache.fork(dead, 1),
            lambda: cache.truncate(dead, 1),
        ):
            pair.refuse(blockyard.UnknownSequence, call)

    def break_the_rules(self, draw: random.Random) -> None:
        pair, cache = self.pair, self.pair.cache
        if not pair.live:
            return
        seq = draw.choice(pair.live)
        handle = pair.handle_of[seq]
        batch = pair.handles(pair.live)
        if pair.model.max_steps > 1 and pair.model.num_begun - pair.model.num_ended == pair.model.max_steps:
            self.land_oldest(draw)
        step = self.some_step(draw, [seq])
        calls: tuple[Callable[[], object], ...] = (
            lambda: cache.free([*batch, handle]),
            lambda: cache.reserve([*batch, handle], 1),
            lambda: cache.reserve([handle], -1),
            lambda: cache.reserve([handle], [1, 2]),
            lambda: cache.reserve(batch, pair.config.max_model_len + 1),
            lambda: cache.commit([handle], seq.num_reserved + 1, step=step),
            lambda: cache.commit([handle], -1, step=step),
            lambda: cache.commit([handle], 0, np.array([-2]), step=step),
            lambda: cache.commit([handle], 0, np.array([1, 1]), step=step),
            lambda: cache.truncate(handle, 0),
            lambda: cache.truncate(handle, len(seq.tokens) + 1),
            lambda: cache.fork(handle, 0),
            lambda: cache.allocate([]),
            lambda: cache.allocate([-1]),
        )
        for call in calls:
            pair.refuse(blockyard.InvalidArgument, call)


def test_a_fork_that_writes_into_a_shared_block() -> None:
    """It copies the block first. The random program below seldom does: nineteen of twenty examples copy none."""
    pair = Pair(20, 4)
    seq = pair.allocate([1, 1, 1, 2, 2, 2])
    assert seq is not None
    pair.reserve([seq], [6])
    pair.commit([seq], [6], [[1]])
    [child] = pair.fork(seq, 1)
    pair.reserve([seq, child], [1, 1])
    pair.commit([seq, child], [1, 1], [[1], [2]])
    assert pair.model.num_copied_blocks == 1


def test_thousands_of_random_steps() -> None:
    Tally.num_steps = 0
    machine = hypothesis.seed(run_seed())(ManagerMachine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=NUM_EXAMPLES,
            stateful_step_count=STEPS_AN_EXAMPLE,
            deadline=None,
            print_blob=True,
            report_multiple_bugs=False,
            phases=PHASES,
            suppress_health_check=list(HealthCheck),
        ),
    )
    seeds.lines.append(
        f"model: {Tally.num_steps} steps, {Tally.num_seqs} sequences, {Tally.num_hits} tokens hit, "
        f"{Tally.num_waits} waits, {Tally.num_copies} blocks copied, {Tally.refusals.total()} refusals"
    )
    for why, count in Tally.refusals.most_common():
        print(f"{count:>7}  {why}")
    assert Tally.num_steps >= 50 * NUM_EXAMPLES
    assert min(Tally.num_hits, Tally.num_waits, Tally.refusals.total()) > 0
