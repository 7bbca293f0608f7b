"""The data plane of the random program of `tests.world`: what stands in each slot, written and read by plans."""

from __future__ import annotations

import importlib
import random
from collections import Counter
from types import ModuleType
from typing import Any

import numpy as np

NOTHING = -1


class Memory:
    """What stands in each slot of each group: (group, block) → names of its tokens."""

    def __init__(self, num_blocks: int, sizes: list[int]) -> None:
        self.blocks = [np.full((num_blocks, size), NOTHING, dtype=np.int64) for size in sizes]

    def grow(self, num_more: int) -> None:
        for group, blocks in enumerate(self.blocks):
            more = np.full((num_more, blocks.shape[1]), NOTHING, dtype=np.int64)
            self.blocks[group] = np.concatenate([blocks, more])


class Seq:
    """What the program knows of one sequence."""

    def __init__(
        self, handle: int, tokens: list[int], keys: tuple[Any, ...], spans: tuple[Any, ...], generation: int
    ) -> None:
        self.handle = handle
        self.tokens = tokens
        self.keys = keys
        self.spans = spans
        #: Keys and values belong to the weights that were loaded when the sequence began.
        self.generation = generation
        #: Behind the shortest cut everything is text, whatever span reached over it.
        self.text_from = len(tokens)
        #: The tokens that were named last, `text_from` then, and their names.
        self.named: tuple[list[int], int, list[int]] = ([], 0, [])
        self.drafts: list[int] = []
        self.is_swapped = False
        #: Whether all that it has computed was read once, so that it must stay right.
        self.was_read = False
        #: Forks that the allocation set rows aside for.
        self.num_promised = 0

    def names_before(self, tokens: list[int]) -> list[int]:
        """The names of those leading `tokens` that were named already, as a new list."""
        known, text_from, names = self.named
        if text_from != self.text_from:
            return []
        end = min(len(known), len(tokens))
        while known[:end] != tokens[:end]:
            end //= 2
        return names[:end]


class DataPlane:
    """Carries out plans on a memory of names, and reads back all that attention would read."""

    def __init__(self, package: ModuleType, config: Any, seed: int, choose: random.Random) -> None:
        self.config = config
        self.seed = seed
        self.random = choose
        self.sizes = [group.block_size for group in config.layer_groups]
        self.windows = [group.sliding_window for group in config.layer_groups]
        self.gpu = Memory(config.num_blocks, self.sizes)
        self.cpu = Memory(max(config.cpu.num_blocks, 1), self.sizes)
        self.counts: Counter[str] = Counter()
        #: An engine's own tables, which every step is written into, for each group.
        self.tables = [self._new_table(size) for size in self.sizes]
        steps = importlib.import_module(f"{package.__name__}.steps")
        self.buffers = [steps.StepBuffers(block_tables=table) for table in self.tables]

    def _new_table(self, block_size: int) -> Any:
        return np.full((self.config.max_num_seqs, -(-self.config.max_model_len // block_size)), NOTHING)

    def names(self, seq: Seq, tokens: list[int]) -> list[int]:
        """For each token, a name for it and all that its keys and values depend on; those made before are kept."""
        names = seq.names_before(tokens)
        name = names[-1] if names else hash((seq.keys, seq.generation))
        for position in range(len(names), len(tokens)):
            spans = seq.spans if position < seq.text_from else ()
            here = tuple((s.content, position - s.start, s.length) for s in spans if s.start <= position < s.end)
            name = hash((name, tokens[position], here)) >> 2
            names.append(name)
        seq.named = (tokens, seq.text_from, names)
        return names

    def carry_out(self, plan: Any) -> None:
        """What the data plane does before anything is written, each list in a shuffled order."""
        self.move(plan.swap_outs, plan.swap_out_groups, self.gpu, self.cpu)
        self.move(plan.swap_ins, plan.swap_in_groups, self.cpu, self.gpu)
        is_step = hasattr(plan, "copies")
        self.counts["blocks saved" if is_step else "blocks swapped out"] += len(plan.swap_outs)
        self.counts["blocks loaded" if is_step else "blocks swapped in"] += len(plan.swap_ins)
        if is_step:
            self.move(plan.copies, plan.copy_groups, self.gpu, self.gpu)

    def move(self, pairs: Any, groups: Any, source: Memory, target: Memory) -> None:
        moves = list(zip(pairs.tolist(), groups.tolist(), strict=True))
        self.counts["blocks moved"] += len(moves)
        self.random.shuffle(moves)
        targets = [(group, after) for (_, after), group in moves]
        assert len(set(targets)) == len(targets), "a target stands in a list twice"
        for (before, after), group in moves:
            assert before > 0
            assert after > 0
            target.blocks[group][after] = source.blocks[group][before]

    def check_inputs(self, plan: Any, seqs: list[Seq]) -> None:
        """The tokens of the step, with -1 for drafts, and its tables in old arrays, are what they should be."""
        tokens: list[int] = []
        for seq, start, count in zip(seqs, plan.num_computed.tolist(), plan.num_scheduled.tolist(), strict=True):
            known = seq.tokens[start : start + count]
            tokens += known + [-1] * (count - len(known))
        assert plan.input_ids.tolist() == tokens, self.seed
        for view, table, buffers in zip(plan.groups, self.tables, self.buffers, strict=True):
            view.fill(buffers, pad_to=len(table))
            own = view.block_tables
            assert (table[: own.shape[0], : own.shape[1]] == own).all(), self.seed
            assert not table[own.shape[0] :].any(), self.seed
            assert not table[:, own.shape[1] :].any(), self.seed

    def write(self, plan: Any, seqs: list[Seq], group: int, fails: bool) -> None:
        view = plan.groups[group]
        starts, slots, filled = plan.num_computed.tolist(), view.slot_mapping.tolist(), 0
        if len(plan.groups) == 1:
            assert slots == plan.slot_mapping.tolist()
        memory = self.gpu.blocks[group].reshape(-1)
        assert min(slots, default=self.sizes[group]) >= self.sizes[group], "a slot of the null block"
        assert len(set(slots)) == len(slots), "a slot is written twice in one step"
        for seq, start, count in zip(seqs, starts, plan.num_scheduled.tolist(), strict=True):
            names = self.names(seq, seq.tokens + seq.drafts)
            memory[slots[filled : filled + count]] = NOTHING if fails else names[start : start + count]
            filled += count

    def read(self, plan: Any, index: int, seq: Seq, count: int) -> None:
        """All that the new tokens attend to stands where the tables say."""
        end = int(plan.seq_lens[index])
        names = self.names(seq, seq.tokens + seq.drafts)
        for group, window in enumerate(self.windows):
            first = max(end - count - window + 1, 0) if window else 0
            self.read_back(group, plan.groups[group].block_tables[index], names, first, end)
        self.counts["contexts read"] += 1

    def read_back(self, group: int, table: Any, names: list[int], first: int, end: int) -> None:
        """Positions `first` to `end` of a sequence with these names stand where its block table says."""
        positions = np.arange(first, end)
        size = self.sizes[group]
        stored = self.gpu.blocks[group][table[positions // size], positions % size]
        wrong = np.flatnonzero(stored != np.array(names[first:end], dtype=np.int64))
        if len(wrong):
            position = first + int(wrong[0])
            block = int(table[position // size])
            raise AssertionError(
                f"{self.seed}: group {group}, position {position} of {end}, block {block}: wrong keys and values"
            )
