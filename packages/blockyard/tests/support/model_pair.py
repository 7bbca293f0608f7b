"""The manager and its reference model, driven together and compared whole after every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import blockyard
from blockyard import BlockyardError, KVCacheManager, SeqStatus
from blockyard.config import cache_config
from blockyard.core.blocks.block import KVCacheBlock

from .reference import WAITS_FOR_PREFIX, ReferenceManager, Refused, Step
from .reference import Sequence as ModelSequence
from .snapshot import snapshot

#: A few of the oldest are enough where there are many.
MOST_BLOCKS_COMPARED = 40
STATS = ("num_prompt_tokens", "num_hit_tokens", "num_evicted_blocks", "num_copied_blocks", "peak_used_blocks")


class Pair:
    """Every method calls both sides, compares what they answer, and then the two states.

    `live` holds the sequences of the model, oldest first; `handle_of` their handles in the manager.
    """

    def __init__(self, num_blocks: int, block_size: int, compares_all: bool = False, **config: Any) -> None:
        self.compares_all = compares_all
        settings = {"max_num_seqs": 4, "max_model_len": 64, "watermark": 0.0, **config}
        self.config = cache_config(num_blocks, block_size, **settings)
        self.cache = KVCacheManager(self.config)
        self.model = ReferenceManager(
            num_blocks,
            block_size,
            self.config.max_num_seqs,
            self.config.max_model_len,
            self.config.enable_prefix_caching,
            self.config.watermark_blocks,
            self.config.max_steps_in_flight,
        )
        self.live: list[ModelSequence] = []
        self.handle_of: dict[ModelSequence, int] = {}
        self.names: list[ModelSequence] = []
        self.dead_handles: list[int] = []
        #: The calls so far, as a program that `test_manager_model.py` can run again.
        self.log = [f"pair = Pair({num_blocks}, {block_size}, **{settings})"]
        self.num_calls = 0
        self.num_waits = 0
        self.refusals: Counter[str] = Counter()
        #: Sequences of which `commit` took nothing, because their reservation had ended.
        self.num_left_out = 0

    # ------------------------------------------------------------------ calls

    def note(self, call: str, *arguments: object) -> None:
        names = {seq: f"s{index}" for index, seq in enumerate(self.names)}
        text = ", ".join(_written(argument, names) for argument in arguments)
        self.log.append(f"pair.{call}({text})")

    def allocate(self, tokens: Sequence[int], keys: tuple[Any, ...] = ()) -> ModelSequence | None:
        """The new sequence, or None where both sides refuse."""
        self.note("allocate", list(tokens), keys)
        answer = self.cache.can_allocate(list(tokens), extra_keys=keys).name
        assert answer == self.model.can_allocate(list(tokens), keys)
        seq, handle = self._both(
            lambda: self.model.allocate(list(tokens), keys),
            lambda: self.cache.allocate(
                np.array(tokens, dtype=np.int32), holder=f"seq {self.num_calls}", extra_keys=keys
            ),
        )
        if seq is not None:
            self.add(seq, handle)
        self.compare()
        return seq

    def reserve(self, seqs: list[ModelSequence], num_new: list[int]) -> Step | None:
        self.note("reserve", seqs, num_new)
        handles = self.handles(seqs)
        step, plan = self._both(
            lambda: self.model.reserve(seqs, num_new),
            lambda: self.cache.reserve(handles, np.array(num_new, dtype=np.int64)),
        )
        if step is not None:
            self.num_waits += step.status.count(WAITS_FOR_PREFIX)
            self.compare_plan(step, plan)
            assert plan.step == self.model.num_begun
        self.compare()
        return step

    def commit(
        self,
        seqs: list[ModelSequence],
        num_computed: list[int],
        appended: list[list[int]] | None = None,
        step: int | None = None,
    ) -> bool:
        """Whether both sides took it."""
        self.note("commit", seqs, num_computed, appended, step)
        handles = np.array(self.handles(seqs), dtype=np.int64)
        rows = None
        if appended is not None:
            width = max([1, *map(len, appended)])
            rows = np.array([new + [-1] * (width - len(new)) for new in appended], dtype=np.int64)
            rows = rows.reshape(len(seqs), width)
        refused = self.refusals.total()
        left_out, answer = self._both(
            lambda: self.model.commit(seqs, num_computed, appended, step),
            lambda: self.cache.commit(handles, np.array(num_computed, dtype=np.int64), rows, step=step),
        )
        assert [self.handle_of[seq] for seq in left_out or []] == list(answer or ())
        self.num_left_out += len(left_out or [])
        self.compare()
        return self.refusals.total() == refused

    def end_step(self, step: int) -> None:
        self.note("end_step", step)
        self._both(lambda: self.model.end_step(step), lambda: self.cache.end_step(step))
        self.compare()

    def fork(self, seq: ModelSequence, num_children: int) -> list[ModelSequence]:
        self.note("fork", seq, num_children)
        children, handles = self._both(
            lambda: self.model.fork(seq, num_children),
            lambda: self.cache.fork(self.handle_of[seq], num_children),
        )
        for child, handle in zip(children or [], handles or [], strict=True):
            self.add(child, handle)
        self.compare()
        return children or []

    def truncate(self, seq: ModelSequence, num_tokens: int) -> None:
        self.note("truncate", seq, num_tokens)
        self._both(
            lambda: self.model.truncate(seq, num_tokens),
            lambda: self.cache.truncate(self.handle_of[seq], num_tokens),
        )
        self.compare()

    def free(self, seqs: list[ModelSequence]) -> None:
        self.note("free", seqs)
        handles = self.handles(seqs)
        self._both(lambda: self.model.free(seqs), lambda: self.cache.free(handles))
        for seq in seqs:
            self.live.remove(seq)
            self.dead_handles.append(self.handle_of.pop(seq))
        self.compare()

    def reset(self) -> None:
        self.note("reset")
        self.model.reset_prefix_cache()
        self.cache.reset_prefix_cache()
        self.compare()

    def add(self, seq: ModelSequence, handle: int) -> None:
        call = self.log[-1]
        separator = ", " if " = pair." in call else (", = " if call.startswith("pair.fork") else " = ")
        self.log[-1] = f"s{len(self.names)}{separator}{call}"
        self.names.append(seq)
        self.live.append(seq)
        self.handle_of[seq] = handle

    def refuse(self, error: type[BlockyardError], call: Callable[[], object]) -> BlockyardError:
        """`call` must raise exactly `error` and leave everything as it was, to the last attribute if asked."""
        before = snapshot(self.cache) if self.compares_all else None
        with pytest.raises(BlockyardError) as caught:
            call()
        assert type(caught.value) is error, f"{caught.value!r} instead of {error.__name__}"
        self.compare()
        assert not self.compares_all or snapshot(self.cache) == before
        return caught.value

    def handles(self, seqs: list[ModelSequence]) -> list[int]:
        return [self.handle_of[seq] for seq in seqs]

    def _both(self, model_call: Callable[[], Any], cache_call: Callable[[], Any]) -> tuple[Any, Any]:
        """Both answers; (None, None) where both refuse with the same error."""
        self.num_calls += 1
        try:
            expected = model_call()
        except Refused as refused:
            self.refusals[f"{self.log[-1].partition('(')[0]}: {refused}"] += 1
            self.refuse(getattr(blockyard, refused.name), cache_call)
            return None, None
        return expected, cache_call()

    # ------------------------------------------------------------------ comparisons

    def compare_plan(self, step: Step, plan: blockyard.StepPlan) -> None:
        assert [SeqStatus(status).name for status in plan.status.tolist()] == step.status
        assert plan.num_scheduled.tolist() == step.num_scheduled
        assert plan.slot_mapping.tolist() == step.slots
        assert [tuple(copy) for copy in plan.copies.tolist()] == step.copies
        assert plan.num_computed.tolist() == step.num_computed
        fits = [status == "SCHEDULED" for status in step.status]
        assert plan.fits.tolist() == fits
        assert plan.all_fit == all(fits)
        seq_lens = [a + b for a, b in zip(step.num_computed, step.num_scheduled, strict=True)]
        assert plan.seq_lens.tolist() == seq_lens
        assert plan.query_start_loc.tolist() == np.cumsum([0, *step.num_scheduled]).tolist()
        self._compare_tables(step, plan, seq_lens)
        self._compare_types(plan, len(seq_lens))

    def _compare_tables(self, step: Step, plan: blockyard.StepPlan, seq_lens: list[int]) -> None:
        tables = plan.block_tables.tolist()
        width = max([0, *map(len, step.tables)])
        assert tables == [table + [0] * (width - len(table)) for table in step.tables]
        assert plan.indptr.tolist() == np.cumsum([0, *map(len, step.pages)]).tolist()
        assert plan.indices.tolist() == [block for pages in step.pages for block in pages]
        size = self.config.block_size
        assert plan.last_page_len.tolist() == [(n - 1) % size + 1 if n else 0 for n in seq_lens]

    def _compare_types(self, plan: blockyard.StepPlan, num_seqs: int) -> None:
        assert plan.status.dtype == np.uint8
        assert plan.fits.dtype == np.bool_
        assert plan.slot_mapping.dtype == plan.num_scheduled.dtype == np.int64
        for array in (plan.query_start_loc, plan.seq_lens, plan.num_computed, plan.block_tables):
            assert array.dtype == np.int32
        for array in (plan.indptr, plan.indices, plan.last_page_len, plan.copies):
            assert array.dtype == np.int32
        assert plan.copies.ndim == 2
        assert plan.copies.shape[1] == 2
        assert plan.block_tables.shape[0] == num_seqs

    def compare(self) -> None:
        """The two states are the same, and every law holds."""
        cache, model, pool = self.cache, self.model, self.cache.pool
        assert pool.free_block_ids().tolist() == model.queue
        assert pool.ref_counts().tolist() == model.ref_counts
        assert np.flatnonzero(pool.cached_mask()).tolist() == sorted(model.node_of)
        num_free = len(model.queue)
        num_used = self.config.num_blocks - 1 - num_free
        assert (cache.num_free_blocks, cache.num_used_blocks) == (num_free, num_used)
        assert cache.num_cached_blocks == len(model.node_of)
        assert cache.num_fenced_blocks == len(model.until)
        assert list(cache.steps_in_flight) == list(range(model.num_ended + 1, model.num_begun + 1))
        assert cache.num_seqs == len(self.live) == len(model.running)
        assert cache.usage == num_used / (self.config.num_blocks - 1)
        for seq in self.live:
            self._compare_sequence(seq)
        cached = list(model.node_of)[:MOST_BLOCKS_COMPARED]
        for block in cached[:1]:
            self._compare_block(block, cache.block(block))  # looks for its holders too: O(held blocks)
        for block in cached[1:]:
            self._compare_block(block, pool.block(block))
        stats = cache.stats()
        size = self.config.block_size
        wasted = [max(0, len(seq.blocks) * size - len(seq.tokens)) for seq in self.live]
        assert stats.num_wasted_slots == sum(wasted)
        for name in STATS:
            assert getattr(stats, name) == getattr(model, name), name
        cache.check()

    def _compare_block(self, block: int, seen: KVCacheBlock) -> None:
        """A cached block shows the tokens of its content, and whether they are computed."""
        assert seen.token_ids == list(self.model.node_of[block].tokens)
        assert seen.is_computed == (block not in self.model.owner_of)
        assert seen.ref_cnt == self.model.ref_counts[block]

    def _compare_sequence(self, seq: ModelSequence) -> None:
        cache, handle = self.cache, self.handle_of[seq]
        assert cache.num_tokens(handle) == len(seq.tokens)
        assert cache.num_computed_tokens(handle) == seq.num_computed
        assert cache.block_ids(handle).tolist() == seq.blocks
        assert list(cache.token_ids(handle)) == seq.tokens


def _written(value: object, names: dict[ModelSequence, str]) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_written(item, names) for item in value) + "]"
    return names[value] if isinstance(value, ModelSequence) else repr(value)
