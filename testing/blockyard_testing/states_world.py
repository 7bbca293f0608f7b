"""A random world over a cache with states, beside a model of it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from blockyard import (
    Admission,
    BlockyardError,
    CacheConfig,
    CacheSalt,
    KVCacheManager,
    LayerGroup,
    StateHints,
    StateSpec,
)
from blockyard.config import cache_config

from .state_memory import StateMemory

State = tuple[int, ...]


class Reference:
    """Which states there are, by all tokens before them, and what of prompts has keys and values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.states: set[tuple[object, State]] = set()
        self.rolling: dict[int, tuple[object, State]] = {}
        self.shared: set[tuple[object, State]] = set()

    def hit(self, salt: object, tokens: list[int]) -> int:
        last = (len(tokens) - 1) // self.size * self.size
        return max((end for end in range(self.size, last + 1, self.size) if self.has(salt, tokens[:end])), default=0)

    def has(self, salt: object, tokens: list[int]) -> bool:
        return (salt, tuple(tokens)) in self.states

    def keep(self, seq: int, salt: object, tokens: list[int], is_output: bool) -> None:
        state = (salt, tuple(tokens))
        if state in self.states:
            return
        self.states.add(state)
        if is_output:
            before = self.rolling.get(seq, (None, ()))
            if before not in self.shared:
                self.states.discard(before)
            self.rolling[seq] = state


class World:
    """Sequences that are admitted, run in batches, forked, cut, swapped and freed, in any order."""

    def __init__(self, draw: random.Random, config: CacheConfig, is_ample: bool) -> None:
        self.draw = draw
        self.cache = KVCacheManager(config)
        self.memory = StateMemory(self.cache)
        self.reference = Reference(config.hit_alignment) if is_ample else None
        self.tokens: dict[int, list[int]] = {}
        self.salts: dict[int, object] = {}
        self.lasts: dict[int, int] = {}
        self.flying: list[tuple[Any, list[int], dict[int, list[int]]]] = []
        self.leases: list[Any] = []
        self.texts = [[draw.randrange(3) for _ in range(150)] for _ in range(3)]
        self.num_hits = 0
        self.num_replaced = 0
        #: In half of all worlds outputs grow long.
        self.num_steps = draw.choice([8, 80])
        self.now = 0

    # What may happen.

    def admit(self) -> None:
        draw = self.draw
        text = draw.choice([*self.texts, *self.tokens.values()])
        prompt = text[: draw.randint(1, 90)] + [draw.randrange(3) for _ in range(draw.randint(0, 20))]
        salt = draw.choice([None, None, "a"])
        fields: dict[str, Any] = {"extra_keys": (CacheSalt(str(salt)),) if salt else ()}
        checkpoints = [draw.randint(1, len(prompt)) for _ in range(3)] if draw.random() < 0.3 else []
        waiting_prompts = [draw.choice(self.texts)] if draw.random() < 0.2 else []
        if checkpoints or waiting_prompts:
            fields["states"] = StateHints(checkpoints, waiting_prompts)
        if draw.random() < 0.4:
            fields["session"] = draw.choice("xyz")
        seq = self.cache.try_allocate(prompt, **fields)
        if isinstance(seq, Admission):
            assert self.reference is None or len(self.tokens) == self.cache.config.max_num_seqs
            return
        hit = int(self.cache.num_computed_tokens(seq))
        if self.reference is not None:
            assert hit == self.reference.hit(salt, prompt)
            # Another sequence goes on from it: it is no longer one's own.
            self.reference.shared.add((salt, tuple(prompt[:hit])))
        self.num_hits += hit > 0
        self.tokens[seq] = prompt
        self.salts[seq] = salt
        size = self.cache.config.hit_alignment
        self.lasts[seq] = (len(prompt) - 1) // size * size

    def step(self) -> None:
        cache, draw = self.cache, self.draw
        if len(self.flying) >= cache.config.max_steps_in_flight:
            self.land()
        ready = [seq for seq in self.tokens if not cache.is_swapped_out(seq)]
        seqs = draw.sample(ready, draw.randint(0, len(ready)))
        counts = []
        for seq in seqs:
            ahead = sum(int(plan.num_scheduled[batch.index(seq)]) for plan, batch, _ in self.flying if seq in batch)
            left = len(self.tokens[seq]) - int(cache.num_computed_tokens(seq)) - ahead
            # Behind what is known tokens are drafted, where nothing is in flight.
            counts.append(max(draw.choice([left, left, min(left, 7), left + 2 * (not self.flying)]), 0))
        lying = self._lying(seqs)
        plan = cache.reserve(seqs, counts)
        self._note_replaced(plan, lying)
        drafted = {seq: self.tokens[seq] + [3, 3] for seq in seqs}
        told = self.told_of(plan)
        self.memory.prepare(told)
        if cache.config.max_steps_in_flight == 1 and draw.random() < 0.1:
            return  # The plan is not run: another one takes its place.
        self.memory.run(told, seqs, drafted)
        self.flying.append((plan, seqs, drafted))
        if cache.config.max_steps_in_flight == 1 or draw.random() < 0.5:
            self.land()

    def land(self) -> None:
        """The oldest step is over: all of it, or nothing, or the drafts were wrong."""
        plan, seqs, _ = self.flying.pop(0)
        step = plan.step or None
        scheduled = dict(zip(seqs, plan.num_scheduled.tolist(), strict=True))
        rows = dict(zip(seqs, plan.rows.tolist(), strict=True))
        starts = dict(zip(seqs, plan.num_computed.tolist(), strict=True))
        live = [seq for seq in seqs if seq in self.tokens]
        is_failed = self.draw.random() < 0.1
        counts, new, fell_short = [], [], set()
        for seq in live:
            known = len(self.tokens[seq])
            # A step behind one that failed has ended with it.
            is_there = int(self.cache.num_computed_tokens(seq)) == starts[seq]
            count = 0 if is_failed or not is_there else min(scheduled[seq], known - starts[seq])
            counts.append(count)
            if is_there and count < scheduled[seq]:
                fell_short.add(seq)
            is_whole = count > 0 and starts[seq] + count == known and not self._is_flying(seq)
            new.append(self.draw.randrange(3) if is_whole and self.draw.random() < 0.8 else -1)
        saves = self._saves(plan)
        self.cache.commit(live, counts, new, step=step)
        for seq, count, token in zip(live, counts, new, strict=True):
            computed = starts[seq] + count
            if seq in fell_short:
                self.memory.settle(rows[seq], self.tokens[seq], computed)
            for position in saves.get(rows[seq], []):
                if self.reference is not None and count and position <= computed:
                    kept = self.tokens[seq][:position]
                    self.reference.keep(seq, self.salts[seq], kept, position > self.lasts[seq])
            if token >= 0:
                self.tokens[seq].append(token)
        if step:
            self.cache.end_step(step)

    def _lying(self, seqs: list[int]) -> dict[int, list[int]]:
        """Return where the latest states of these outputs lie, sorted."""
        rolling = {} if self.reference is None else self.reference.rolling
        lying = {}
        for seq in set(seqs) & rolling.keys():
            salt, tokens = rolling[seq]
            blocks = self.cache.states.blocks(list(tokens), extra_keys=(CacheSalt(str(salt)),) if salt else ())
            lying[seq] = sorted(blocks.tolist())
        return lying

    def _note_replaced(self, plan: Any, lying: dict[int, list[int]]) -> None:
        """A state whose blocks are written over is there no more."""
        written = [sorted(blocks) for blocks in plan.states.save_blocks.tolist()]
        for seq, blocks in lying.items():
            if self.reference is not None and blocks and blocks in written:
                self.reference.states.discard(self.reference.rolling.pop(seq))
                self.num_replaced += 1

    def _is_flying(self, seq: int) -> bool:
        return any(seq in seqs and plan.num_scheduled[seqs.index(seq)] for plan, seqs, _ in self.flying)

    def _saves(self, plan: Any) -> dict[int, list[int]]:
        saves: dict[int, list[int]] = {}
        for row, position in zip(plan.states.saves.tolist(), plan.states.save_positions.tolist(), strict=True):
            saves.setdefault(row, []).append(position)
        return saves

    def fork(self) -> None:
        seq = self.draw.choice([*self.tokens])
        try:
            children = self.cache.fork(seq, self.draw.randint(1, 2))
        except BlockyardError:
            return
        for child in children:
            self.tokens[child] = list(self.tokens[seq])
            self.salts[child] = self.salts[seq]
            self.lasts[child] = self.lasts[seq]

    def cut(self) -> None:
        seq = self.draw.choice([*self.tokens])
        length = self.draw.randint(1, len(self.tokens[seq]))
        try:
            self.cache.truncate(seq, length)
        except BlockyardError:
            return
        del self.tokens[seq][length:]

    def swap(self) -> None:
        seq = self.draw.choice([*self.tokens])
        try:
            if self.cache.is_swapped_out(seq):
                self.cache.swap_in(seq)
            else:
                self.cache.swap_out(seq)
        except BlockyardError:
            return

    def free(self) -> None:
        seq = self.draw.choice([*self.tokens])
        self.cache.free(seq)
        del self.tokens[seq]
        self.salts.pop(seq)

    def lease(self) -> None:
        if self.leases and self.draw.random() < 0.6:
            self.cache.pool.free_blocks(self.leases.pop())
        else:
            self.leases.append(self.cache.hold_cached(self.draw.choice(self.texts)))

    def retain(self) -> None:
        try:
            self.cache.retain(self.draw.choice(self.texts), priority=self.draw.randint(0, 3))
        except BlockyardError:
            return

    def hint(self) -> None:
        target = self.draw.choice([*"xyz", *self.tokens])
        self.cache.hint(target, **self.draw.choice([{"over": True}, {}]))
        self.now += 1
        self.cache.advance_time(self.now)

    def told_of(self, plan: Any) -> Any:
        """Return the plan as those have it who carry it out."""
        return plan

    def acted(self) -> None:
        """Look at what an act has changed."""

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            acts = [self.step] * self.num_steps + [self.admit] * 3
            if self.tokens:
                acts += [self.free, self.fork, self.cut, self.swap, self.swap]
            acts += [self.lease, self.retain, self.hint]
            self.draw.choice(acts)()
            self.acted()
            if self.draw.random() < 0.3:
                self.cache.check()
        while self.flying:
            self.land()
        for lease in self.leases:
            self.cache.pool.free_blocks(lease)
        self.cache.free([*self.tokens])
        self.cache.check()
        assert self.cache.num_used_blocks == 0
        for _ in range(4):
            self.ask()

    def ask(self) -> None:
        """Nothing runs and nothing is leased, so waiting brings nothing: the answer is OK, and true, or NEVER."""
        draw, limit = self.draw, self.cache.config.max_num_seqs
        prompts = [draw.choice(self.texts)[: draw.randint(1, 90)] for _ in range(draw.randint(1, 3))]
        if self.cache.can_allocate_batch(prompts) is not Admission.NEVER:
            self.cache.free(self.cache.allocate_batch(prompts))
        num_seqs = draw.randint(1, limit)
        if self.cache.can_allocate(prompts[0], num_seqs=num_seqs) is not Admission.NEVER:
            self.cache.free(self.cache.allocate(prompts[0], num_seqs=num_seqs))
        self.cache.check()


def config(draw: random.Random, num_blocks: int, **fields: Any) -> CacheConfig:
    shards = draw.choice([1, 1, 2, 3])  # each rank has a part of the tokens, and whole states
    local = draw.choice([1, 4])
    size = local * shards
    attention = LayerGroup(size, shards=shards, interleave=draw.choice([1, local]), token_bytes=8)
    groups: list[LayerGroup | StateSpec] = [attention]
    if draw.random() < 0.4:
        groups.append(replace(attention, sliding_window=draw.choice([1, 9]), token_bytes=draw.choice([8, 5])))
    state = StateSpec(checkpoint_every=draw.choice([size, 8]), state_bytes=draw.choice([1, 8 * local, 24 * local]))
    groups.insert(draw.randrange(len(groups) + 1), state)
    if draw.random() < 0.3:
        groups.append(StateSpec(checkpoint_every=draw.choice([1, size]), state_bytes=draw.choice([1, 20])))
    drawn = {
        "groups": tuple(groups),
        "max_num_seqs": draw.choice([3, 8]),
        "max_model_len": 200,
        "num_cpu_blocks": draw.choice([0, 60]),
        "state_order": draw.choice(["index", "lru"]),
        "state_checkpoints": draw.choice(
            [("branch", "ends", "pow2"), ("ends",), ("last",), ("every:8",), ("branch", "every:24"), ()]
        ),
        "cut_chunks": draw.random() < 0.7,
        "max_steps_in_flight": draw.choice([1, 1, 3]),
        **draw.choice([{}, {"track_misses": True, "history_size": 50}]),
    }
    return cache_config(num_blocks, **{**drawn, **fields})
