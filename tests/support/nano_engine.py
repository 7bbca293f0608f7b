"""A small engine around nano-vllm's interface of a block manager.

The scheduler has nano-vllm's calls: `add`, `schedule`, `postprocess`, prompts before decoding, a prompt computed in
chunks if it is the first of its step, the newest sequence preempted where blocks are missing. `drive` takes it, or
nano-vllm's own.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

from blockyard_testing.slot_memory import SlotMemory
from engines.nano_vllm import BlockManager

BLOCK_SIZE = 4


class SmallSequence:
    """What nano-vllm's sequences have."""

    _ids = itertools.count()

    def __init__(self, token_ids: list[int], max_tokens: int) -> None:
        self.seq_id = next(self._ids)
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(token_ids)
        self.max_tokens = max_tokens
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0
        self.block_table: list[int] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        return -(-len(self) // BLOCK_SIZE)

    @property
    def is_finished(self) -> bool:
        return len(self) == self.num_prompt_tokens + self.max_tokens


class SmallScheduler:
    """Its block manager is called as nano-vllm calls its own."""

    def __init__(self, num_blocks: int, max_num_seqs: int, budget: int) -> None:
        self.block_manager = BlockManager(num_blocks, BLOCK_SIZE)
        self.waiting: deque[SmallSequence] = deque()
        self.running: deque[SmallSequence] = deque()
        self.max_num_seqs = max_num_seqs
        self.budget = budget

    def add(self, seq: SmallSequence) -> None:
        self.waiting.append(seq)

    def is_finished(self) -> bool:
        return not self.waiting and not self.running

    def schedule(self) -> tuple[list[SmallSequence], bool]:
        prompts = self._prompts()
        return (prompts, True) if prompts else (self._decodes(), False)

    def _prompts(self) -> list[SmallSequence]:
        scheduled: list[SmallSequence] = []
        left = self.budget
        while self.waiting and left and len(scheduled) < self.max_num_seqs:
            seq = self.waiting[0]
            num_cached = seq.num_cached_tokens // BLOCK_SIZE
            if not seq.block_table:
                num_cached = self.block_manager.can_allocate(seq)
            missing = len(seq) - max(num_cached * BLOCK_SIZE, seq.num_cached_tokens)
            if num_cached < 0 or (scheduled and missing > left):
                break
            if not seq.block_table:
                self.block_manager.allocate(seq, num_cached)
            seq.num_scheduled_tokens = min(missing, left)
            left -= seq.num_scheduled_tokens
            scheduled.append(seq)
            if seq.num_cached_tokens + seq.num_scheduled_tokens < len(seq):
                break
            self.running.append(self.waiting.popleft())
        return scheduled

    def _decodes(self) -> list[SmallSequence]:
        scheduled: list[SmallSequence] = []
        queue, self.running = self.running, deque()
        while queue:
            seq = queue.popleft()
            while not self.block_manager.can_append(seq) and queue:
                self._preempt(queue.pop())
            if not self.block_manager.can_append(seq):
                self._preempt(seq)
                continue
            self.block_manager.may_append(seq)
            seq.num_scheduled_tokens = 1
            scheduled.append(seq)
        self.running.extend(scheduled)
        return scheduled

    def _preempt(self, seq: SmallSequence) -> None:
        self.block_manager.deallocate(seq)
        self.waiting.appendleft(seq)

    def postprocess(self, seqs: list[SmallSequence], token_ids: list[int], is_prefill: bool) -> None:
        for seq, token_id in zip(seqs, token_ids, strict=True):
            self.block_manager.hash_blocks(seq)
            seq.num_cached_tokens += seq.num_scheduled_tokens
            seq.num_scheduled_tokens = 0
            if is_prefill and seq.num_cached_tokens < len(seq):
                continue
            seq.token_ids.append(token_id)
            if seq.is_finished:
                self.block_manager.deallocate(seq)
                self.running.remove(seq)


def compute(memory: SlotMemory, seq: Any, block_size: int) -> int:
    """Compute a sequence's scheduled tokens from what its blocks hold; the next token, as a model would say it."""
    tokens = seq.token_ids[: seq.num_cached_tokens + seq.num_scheduled_tokens]
    places = [block * block_size + offset for block in seq.block_table for offset in range(block_size)]
    return memory.compute(f"sequence {seq.seq_id}", tokens, places, seq.num_cached_tokens) % 50


def drive(scheduler: Any, sequences: list[Any], block_size: int) -> int:
    """Run sequences to their ends; returns how many prompt tokens were computed. Bounded."""
    memory, computed = SlotMemory(), 0
    for seq in sequences:
        scheduler.add(seq)
    for _ in range(10_000):
        if scheduler.is_finished():
            return computed
        seqs, is_prefill = scheduler.schedule()
        computed += sum(seq.num_scheduled_tokens for seq in seqs) if is_prefill else 0
        scheduler.postprocess(seqs, [compute(memory, seq, block_size) for seq in seqs], is_prefill)
    raise AssertionError("the sequences do not end")
