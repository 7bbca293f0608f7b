"""A small engine over a manager and an offload: its memory holds what each token depends on, its tier does all wrong.

Every token that is read is compared with what computing would have written, so a block of another prompt, of other
weights, of a torn load, or a buffer that was used again too early is found at once.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from blockyard import (
    BlockyardError,
    CacheSalt,
    InvalidArgument,
    KVCacheManager,
    LayerGroup,
    Span,
    StateSpec,
    StepPlan,
)
from blockyard.cache_options import STATE_ORDERS
from blockyard.config import cache_config
from blockyard_tiers import (
    Cause,
    FirstMatch,
    Offload,
    Prefix,
    Snapshot,
    TierStats,
    TierUse,
    Transfer,
    TransferResult,
)

from .patience import PATIENCE_SECONDS

POISON = 0x5A


def number_of(before: int, token: int) -> int:
    return int.from_bytes(blake2b(f"{before} {token}".encode(), digest_size=7).digest(), "little")


class SmallBlocks:
    """Eight bytes for each token of each group; a write of rows is seen at once."""

    def __init__(self, num_blocks: int, block_size: int, num_groups: int, num_rows: int) -> None:
        self.block_size = block_size
        self.data = np.full((num_groups, num_blocks, block_size), -1, np.int64)
        self.object_bytes = num_groups * block_size * 8
        self.num_rows = num_rows
        self.rows = np.full((num_rows, self.object_bytes), POISON, np.uint8)

    def layout(self) -> dict[str, Any]:
        return {"block_size": self.block_size, "groups": len(self.data)}

    def buffer(self, row: int) -> memoryview:
        return memoryview(self.rows[row])

    def read(self, block_ids: Any, rows: Sequence[int]) -> None:
        for ids, row in zip(block_ids, rows, strict=True):
            parts = [self.data[group, block] for group, block in enumerate(ids)]
            self.rows[row] = np.concatenate(parts).view(np.uint8)

    def write(self, block_ids: Any, rows: Sequence[int]) -> None:
        for ids, row in zip(block_ids, rows, strict=True):
            parts = self.rows[row].view(np.int64).reshape(len(ids), self.block_size)
            for group, block in enumerate(ids):
                assert block > 0
                self.data[group, block] = parts[group]


class SmallStates:
    """A slot for each row, and parts of states in the blocks of the pool; a state is a number, written many times."""

    def __init__(self, blocks: SmallBlocks, num_slots: int, num_bytes: int) -> None:
        self.blocks = blocks
        self.object_bytes = num_bytes
        self.part_bytes = 8 * blocks.block_size
        self.num_rows = -(-num_bytes // self.part_bytes)
        self.slots = np.full((num_slots, self.num_rows, self.part_bytes), POISON, np.uint8)
        self.pool = np.full((blocks.data.shape[1], self.part_bytes), POISON, np.uint8)

    def state(self, number: int) -> bytes:
        """The bytes of a state; of no tokens, zeros."""
        return (number.to_bytes(8, "little") * (self.object_bytes // 8 + 1))[: self.object_bytes]

    def has(self, slot: int) -> bytes:
        return self.slots[slot].tobytes()[: self.object_bytes]

    def set(self, slot: int, number: int) -> None:
        self.slots[slot].reshape(-1)[: self.object_bytes] = np.frombuffer(self.state(number), np.uint8)

    def prepare(self, moves: Any) -> None:
        for source, target in moves.copies.tolist():
            self.slots[target] = self.slots[source]
        for slot in moves.clears.tolist():
            self.set(slot, 0)
        for slot, ids in zip(moves.loads.tolist(), moves.load_blocks.tolist(), strict=True):
            self.slots[slot] = self.pool[ids]

    def save(self, slot: int, ids: list[int]) -> None:
        self.pool[ids] = self.slots[slot]
        self.blocks.data[:, ids] = -1

    def layout(self) -> list[Any]:
        return [self.object_bytes]

    def buffers(self, rows: Sequence[int]) -> list[memoryview]:
        left = [min(self.object_bytes - at * self.part_bytes, self.part_bytes) for at in range(self.num_rows)]
        return [memoryview(self.blocks.rows[row])[:size] for row, size in zip(rows, left, strict=True)]

    def read(self, block_ids: Any, rows: Sequence[int]) -> None:
        self.blocks.rows[rows, : self.part_bytes] = self.pool[block_ids]

    def write(self, slot: int, rows: Sequence[int], kept: Any) -> None:
        self.slots[slot] = self.blocks.rows[rows, : self.part_bytes]
        for ids in kept.tolist():
            self.save(slot, ids)


def whole(buffer: Any) -> bytes:
    return b"".join(map(bytes, buffer)) if isinstance(buffer, list) else bytes(buffer)


def fill(buffer: Any, data: bytes) -> None:
    for piece in buffer if isinstance(buffer, list) else [buffer]:
        piece[:], data = data[: len(piece)], data[len(piece) :]


@dataclass
class FaultyTier:
    """A place in memory whose jobs end when `work` is called: some are refused, fail, hang for long, or miss objects.

    While it has a job it scribbles into the buffers of loads, and requires that those of stores stay as they are.
    """

    choose: random.Random
    name: str = "faulty"
    objects: dict[bytes, tuple[bytes, bytes, bytes]] = field(default_factory=dict)
    transfers: list[tuple[Transfer, bool, list[bytes]]] = field(default_factory=list)
    results: list[TransferResult] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    faults: float = 0.1
    #: Whether jobs end by themselves.
    is_live: bool = False

    def _fails(self) -> bool:
        return self.choose.random() < self.faults

    def end_process(self) -> None:
        """The process that uses it dies; what it stored stays."""
        self.transfers.clear()
        self.results.clear()

    def store(self, transfer: Transfer) -> Cause | None:
        return self._take(transfer, False)

    def load(self, transfer: Transfer) -> Cause | None:
        return self._take(transfer, True)

    def _take(self, transfer: Transfer, is_load: bool) -> Cause | None:
        if self._fails():
            return Cause.QUEUE_FULL
        assert all(transfer.id != other.id for other, _, _ in self.transfers)
        if is_load:
            for buffer in transfer.buffers:
                fill(buffer, bytes([POISON]) * len(whole(buffer)))
        self.transfers.append((transfer, is_load, [whole(buffer) for buffer in transfer.buffers]))
        return None

    def work(self) -> None:
        """End some of the jobs."""
        self.choose.shuffle(self.transfers)
        for _ in range(self.choose.randrange(len(self.transfers) + 1)):
            transfer, is_load, before = self.transfers.pop()
            assert [whole(buffer) for buffer in transfer.buffers] == before, "a buffer was used while the tier had it"
            causes = self._load(transfer) if is_load else self._store(transfer)
            self.counts[f"{'loads' if is_load else 'stores'} {'failed' if causes else 'done'}"] += 1
            self.results.append(TransferResult(transfer.id, causes, sum(map(len, before)), 0.001))

    def _store(self, transfer: Transfer) -> dict[int, Cause]:
        if self._fails():
            return dict.fromkeys(range(len(transfer.names)), Cause.FULL)
        for name, tokens, buffer in zip(transfer.names, transfer.digests, transfer.buffers, strict=True):
            self.objects[name] = (tokens, transfer.layout, whole(buffer))
        return {}

    def _load(self, transfer: Transfer) -> dict[int, Cause]:
        causes = {}
        for place, (name, tokens) in enumerate(zip(transfer.names, transfer.digests, strict=True)):
            found = self.objects.get(name)
            if found is None or self._fails():
                causes[place] = Cause.GONE
                continue
            assert found[:2] == (tokens, transfer.layout), "a name stands for other tokens, or another layout"
            fill(transfer.buffers[place], found[2])
        for buffer in transfer.buffers if causes else ():
            fill(buffer, bytes(len(whole(buffer))))
        return causes

    def longest_prefix(self, names: Sequence[bytes]) -> Prefix:
        found = next((at for at, name in enumerate(names) if name not in self.objects), len(names))
        if self._fails():
            return Prefix(self.choose.randrange(found + 1), False)
        return Prefix(found, True)

    def first_present(self, names: Sequence[bytes]) -> FirstMatch:
        found = next((at for at, name in enumerate(names) if name in self.objects), len(names))
        if self._fails():
            return FirstMatch(self.choose.randrange(found + 1), False)
        return FirstMatch(found, True)

    def drop(self, names: Sequence[bytes]) -> Cause | None:
        for name in names:
            self.objects.pop(name, None)
        return None

    def evict(self) -> None:
        """Another engine makes room."""
        for name in self.choose.sample(sorted(self.objects), len(self.objects) // 4):
            del self.objects[name]

    def take_results(self) -> list[TransferResult]:
        if self.is_live:
            self.work()
        results, self.results = self.results, []
        return results

    def stats(self) -> TierStats:
        return TierStats(num_waiting=len(self.transfers))

    def close(self, timeout: float = 10.0) -> bool:
        return True


@dataclass(eq=False)
class Request:
    tokens: list[int]
    keys: tuple[CacheSalt | Span, ...]
    seq: int = -1
    weights: int = 0

    def numbers(self, count: int) -> list[int]:
        """What stands for each token: it depends on all before, the keys and the weights."""
        salts = [key.value for key in self.keys if isinstance(key, CacheSalt)]
        spans = {key.start: key for key in self.keys if isinstance(key, Span)}
        made, number = [], number_of(self.weights, len(salts))
        for at, token in enumerate(self.tokens[:count]):
            number = number_of(number, token)
            if at in spans:
                number = number_of(number, int(spans[at].content) * 100 + spans[at].length)
            made.append(number)
        return made


class OffloadWorld:
    """Requests that come, are computed in chunks, preempted, forked, cancelled, and start with equal tokens."""

    def __init__(
        self,
        seed: int,
        tiers: list[FaultyTier],
        write: str = "through",
        snapshot: Path | None = None,
        has_states: bool = False,
    ) -> None:
        self.choose = random.Random(seed)
        self.tiers, self.write = tiers, write
        self.now = 0.0
        self.weights = 0
        self.counts: Counter[str] = Counter()
        self.num_groups = 1 if write == "back" else self.choose.choice((1, 1, 2))
        self.block_size = self.choose.choice((2, 4))
        self.has_cpu = write != "back" and self.choose.random() < 0.5
        self.partial = self.choose.random() < 0.3
        self.state_bytes = self.choose.choice((1, 30, 90)) if has_states else 0
        self.state_fields: dict[str, Any] = {}
        if has_states:
            self.state_fields["state_checkpoints"] = self.choose.choice(
                (("branch", "ends", "pow2"), ("every:8",), ("last",))
            )
            self.state_fields["state_order"] = self.choose.choice(STATE_ORDERS)
            self.state_fields["cut_chunks"] = self.choose.random() < 0.7
        self.is_plain = self.num_groups == 1 and not self.has_cpu and not has_states
        self.path = snapshot
        self.snapshot: Snapshot | None = None
        self.start()

    def start(self) -> None:
        """A new process: an empty pool and the same tiers, without the jobs of the one before."""
        windows = [0, 5][: self.num_groups]
        groups = tuple(LayerGroup(self.block_size, sliding_window=window, token_bytes=8) for window in windows)
        if self.state_bytes:
            groups += (StateSpec(state_bytes=self.state_bytes, checkpoint_every=self.block_size),)
        options: dict[str, Any] = {"num_cpu_blocks": 12} if self.has_cpu else {}
        options |= self.state_fields
        if self.partial and self.num_groups == 1 and not self.state_bytes:
            options["partial_hits"] = True
        num_blocks = self.choose.randrange(20, 48)
        self.config = cache_config(num_blocks, groups=groups, max_num_seqs=5, max_model_len=60, **options)
        self.cache = KVCacheManager(self.config)
        num_rows = self.choose.randrange(4, 40) + 2 * self.config.state_blocks
        self.blocks = SmallBlocks(num_blocks + 20, self.block_size, self.num_groups, num_rows)
        self.states = SmallStates(self.blocks, 5, self.state_bytes) if self.state_bytes else None
        self.cpu = np.full((12, self.block_size), -1, np.int64)
        for tier in self.tiers:
            tier.end_process()
        uses = [TierUse(tier, self.write) for tier in self.tiers]
        self.offload = Offload(
            self.cache,
            self.blocks,
            uses,
            lambda: {"weights": self.weights},
            step_tokens=8,
            on_plan=self.carry_out,
            clock=lambda: self.now,
            states=self.states,
        )
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.snapshot = None
        if self.path is not None and self.path.exists():
            self.restore(self.path)

    def restore(self, path: Path) -> None:
        for tier in self.tiers:
            tier.is_live = True
        try:
            self.counts["restored"] += bool(self.offload.restore(path, PATIENCE_SECONDS))
        except InvalidArgument:  # of the other weights
            assert self.cache.num_cached_blocks == 0
            self.counts["refused snapshots"] += 1
        for tier in self.tiers:
            tier.is_live = False
        assert self.cache.num_used_blocks == 0
        self.cache.check()
        self.offload.check()

    def take_snapshot(self) -> None:
        if self.path is not None and self.is_plain and (self.snapshot is None or self.snapshot.is_done):
            self.snapshot = self.offload.begin_snapshot(self.path)

    def carry_out(self, plan: Any) -> None:
        data = self.blocks.data
        for group in range(self.num_groups):
            for pairs, groups, source, target in (
                (plan.swap_outs, plan.swap_out_groups, data[group], self.cpu),
                (plan.swap_ins, plan.swap_in_groups, self.cpu, data[group]),
                (plan.copies, plan.copy_groups, data[group], data[group]),
            ):
                mine = pairs[groups == group]
                target[mine[:, 1]] = source[mine[:, 0]].copy()
        if self.states is not None and isinstance(plan, StepPlan):
            self.states.prepare(plan.states)

    # What happens.

    def turn(self) -> None:
        """One thing that happens, then a step of the engine; all is checked after it."""
        self.now += self.choose.random()
        act = self.choose.choices(
            [
                self.come,
                self.cancel,
                self.preempt,
                self.fork,
                self.cut,
                self.change,
                self.resize,
                self.reset,
                self.evict,
                self.restart,
                self.take_snapshot,
            ],
            [40, 6, 6, 4, 6, 2, 2, 1, 1, 1, 1],
        )[0]
        act()
        for tier in self.tiers:
            tier.work()
        self.step()
        self.cache.check()
        self.offload.check()

    def come(self) -> None:
        if len(self.waiting) < 6:
            topic = 1000 * self.choose.randrange(3)
            base = list(range(topic, topic + self.choose.randrange(1, 40)))
            own = [self.choose.randrange(3) for _ in range(self.choose.randrange(1, 8))]
            keys: list[CacheSalt | Span] = [CacheSalt("salt")] if self.choose.random() < 0.2 else []
            if self.choose.random() < 0.2:
                length = self.choose.randrange(1, len(base) + 1)
                keys.append(Span(str(self.choose.randrange(2)), self.choose.randrange(len(base) - length + 1), length))
            self.waiting.append(Request(base + own, tuple(keys)))

    def cancel(self) -> None:
        if self.waiting and self.choose.random() < 0.5:
            self.offload.forget(self.waiting.pop(self.choose.randrange(len(self.waiting))))
        elif self.running:
            self.end(self.choose.choice(self.running))

    def end(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.free(request.seq)
        self.offload.forget(request)

    def preempt(self) -> None:
        if self.running:
            request = self.choose.choice(self.running)
            self.end(request)
            request.seq = -1
            self.waiting.insert(0, request)
            self.counts["preempted"] += 1

    def fork(self) -> None:
        ready = [each for each in self.running if self.is_computed(each)]
        if ready and self.cache.num_seqs < self.config.max_num_seqs:
            parent = self.choose.choice(ready)
            child = Request(list(parent.tokens), parent.keys, weights=parent.weights)
            (child.seq,) = self.cache.fork(parent.seq)
            self.offload.fork(parent, [child])
            token = self.choose.randrange(9)
            self.cache.append([parent.seq, child.seq], [token, token + 1])
            parent.tokens.append(token)
            child.tokens.append(token + 1)
            self.running.append(child)
            self.counts["forked"] += 1

    def cut(self) -> None:
        """A running request goes on from earlier, with another token or the same ones. Behind spans it is forgotten."""
        if not self.running:
            return
        request = self.choose.choice(self.running)
        least = max([1, *(key.end for key in request.keys if isinstance(key, Span))])
        if least >= len(request.tokens):
            return
        length = self.choose.randrange(least, len(request.tokens))
        try:
            self.cache.truncate(request.seq, length)
        except BlockyardError:  # what is computed behind a window or a state stays
            return
        if any(isinstance(key, Span) for key in request.keys):
            self.offload.forget(request)
        token = self.choose.choice((request.tokens[length], 7))
        request.tokens = request.tokens[:length]
        if self.is_computed(request) or not self.state_bytes:
            self.cache.append([request.seq], [token])
            request.tokens = [*request.tokens, token]
        self.counts["cut"] += 1

    def change(self) -> None:
        """A request that waits is another one than its loads were begun for, and nobody says so."""
        if self.waiting:
            request = self.choose.choice(self.waiting)
            at = self.choose.randrange(len(request.tokens))
            request.tokens = [*request.tokens[:at], 8, *request.tokens[at + 1 :]]
            self.counts["changed"] += 1

    def resize(self) -> None:
        self.cache.resize(self.choose.randrange(20, len(self.blocks.data[0])))

    def reset(self) -> None:
        """Other weights, or those of before: what they computed may be hit again."""
        self.weights = self.choose.randrange(2)
        self.cache.reset_prefix_cache()

    def evict(self) -> None:
        for tier in self.tiers:
            tier.evict()

    def restart(self) -> None:
        self.start()
        self.counts["restarted"] += 1

    # A step.

    def is_computed(self, request: Request) -> bool:
        return int(self.cache.num_computed_tokens(request.seq)) == len(request.tokens)

    def step(self) -> None:
        self.offload.poll()
        self.admit()
        rows = [each for each in self.running if self.choose.random() < 0.8 and not self.is_computed(each)]
        left = [len(each.tokens) - int(self.cache.num_computed_tokens(each.seq)) for each in rows]
        counts = [self.choose.randrange(1, min(number, 8) + 1) for number in left]
        if rows:
            self.compute(rows, counts)
        for request in [each for each in self.running if self.is_computed(each)]:
            if len(request.tokens) >= 55 or self.choose.random() < 0.3:
                self.end(request)
            elif self.choose.random() < 0.7:
                request.tokens.append(self.choose.randrange(5))
                self.cache.append(request.seq, [request.tokens[-1]])

    def admit(self) -> None:
        for request in list(self.waiting):
            if self.offload.prepare(request, request.tokens, request.keys, may_load=self.choose.random() < 0.95):
                self.counts["waited"] += 1
                continue
            seq = self.cache.try_allocate(request.tokens, extra_keys=request.keys)
            if not isinstance(seq, int):
                break
            request.seq, request.weights = seq, self.weights
            self.waiting.remove(request)
            self.running.append(request)
            self.counts["filled"] += self.offload.fill(request, seq)
            self.require_right(request)

    def compute(self, rows: list[Request], counts: list[int]) -> None:
        plan = self.cache.reserve([each.seq for each in rows], counts)
        self.carry_out(plan)
        scheduled, slots = plan.num_scheduled.tolist(), plan.rows.tolist()
        fit = [(row, count) for row, count, ok in zip(rows, scheduled, plan.status == 0, strict=True) if ok]
        saved = self.put_states(plan, rows, scheduled)
        if not fit:
            if rows and not (plan.status == 0).any() and self.choose.random() < 0.5:
                self.end(rows[0])
            return
        for row, count in fit:
            self.put(row, count)
        if self.choose.random() < 0.05:
            self.counts["failed steps"] += 1
            for row, slot in zip(rows, slots, strict=True):
                self.set_state(slot, row, int(self.cache.num_computed_tokens(row.seq)))
            return  # the step failed: nothing of it is committed
        for row, count in fit:
            computed = int(self.cache.num_computed_tokens(row.seq)) + count
            self.offload.save(row, row.seq, row.tokens, computed, saved.get(slots[rows.index(row)], ()))
        self.cache.commit([row.seq for row, _ in fit], [count for _, count in fit])
        for row, _ in fit:
            self.require_right(row)

    def put_states(self, plan: Any, rows: list[Request], scheduled: list[int]) -> dict[int, list[int]]:
        """The slots go on from the states before to those behind the step's tokens; returns what is saved, by slot."""
        saved: dict[int, list[int]] = {}
        if self.states is None:
            return saved
        moves = plan.states
        kept = zip(moves.saves.tolist(), moves.save_positions.tolist(), moves.save_blocks.tolist(), strict=True)
        kept_of: dict[int, list[tuple[int, list[int]]]] = {}
        for slot, position, ids in kept:
            kept_of.setdefault(slot, []).append((position, ids))
            saved.setdefault(slot, []).append(position)
        for slot, row, count in zip(plan.rows.tolist(), rows, scheduled, strict=True):
            first = int(self.cache.num_computed_tokens(row.seq))
            if count:
                self.require_state(slot, row, first)
            for position, ids in kept_of.get(slot, []):
                self.set_state(slot, row, position)
                self.states.save(slot, ids)
            if count:
                self.set_state(slot, row, first + count)
        return saved

    def set_state(self, slot: int, request: Request, count: int) -> None:
        if self.states is not None and slot >= 0:
            self.states.set(slot, request.numbers(count)[-1] if count else 0)

    def require_state(self, slot: int, request: Request, count: int) -> None:
        if self.states is not None:
            wanted = self.states.state(request.numbers(count)[-1] if count else 0)
            assert self.states.has(slot) == wanted, f"the state behind {count} tokens is another's"
            self.counts["states right"] += 1

    def put(self, request: Request, count: int) -> None:
        first = int(self.cache.num_computed_tokens(request.seq))
        numbers = request.numbers(first + count)
        for group in range(self.num_groups):
            ids = self.cache.block_ids(request.seq, group)
            for at in range(first, first + count):
                self.blocks.data[group, ids[at // self.block_size], at % self.block_size] = numbers[at]
                if self.states is not None:
                    self.states.pool[ids[at // self.block_size]] = POISON

    def require_right(self, request: Request) -> None:
        """All that attention would read is what computing these tokens under these weights writes."""
        count = int(self.cache.num_computed_tokens(request.seq))
        plan = self.cache.reserve([request.seq], [1]) if self.cache.can_append(request.seq) else None
        if plan is None or int(plan.status[0]) != 0:
            return
        self.carry_out(plan)  # what a hit of the CPU pool or of a part of a block still has to bring
        numbers = request.numbers(count)
        for group, window in zip(range(self.num_groups), (0, 5), strict=False):
            ids = self.cache.block_ids(request.seq, group)
            for at in range(max(count - window + 1, 0) if window else 0, count):
                found = self.blocks.data[group, ids[at // self.block_size], at % self.block_size]
                assert found == numbers[at], f"token {at} of {count} in group {group} is another's"
        self.require_state(int(plan.rows[0]), request, count)
        self.cache.commit([request.seq], 0)
