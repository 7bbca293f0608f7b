"""Loads what prompts begin with: from tiers into host buffers, and from there into an admitted request's blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from blockyard import StepPlan
from blockyard.answers import SeqStatus
from blockyard.keys import ExtraKey

from .context import Context
from .finding import Finder, Kept, Range
from .header import NameChain
from .loads import Load, Measure, Piece, Prompt, check_loads
from .memory import IsDone
from .states import state_name
from .stores import JOB_BYTES
from .tier import Job, Outcome
from .uses import TierUse

#: Waiting prompts that are looked at again between two calls of `begin_turn`: each costs a lookup of its tokens.
_MOST_RECHECKS = 16


class Loader:
    """Finds what the tiers have of waiting prompts, loads it into host buffers, and writes it into admitted sequences.

    Args:
        context: what storing and loading share.
        rows: the buffers for loads.
        finder: searches the tiers, and compares loading with computing.
        on_plan: carries out the moves of a plan that is made here.
        missed: counts the tokens that were not loaded, by cause.
    """

    def __init__(
        self,
        context: Context,
        rows: list[int],
        finder: Finder,
        on_plan: Callable[[StepPlan], None] | None,
        missed: Counter[str],
    ) -> None:
        #: Buffers that no load has.
        self.free = rows
        #: Loads that tiers have.
        self.jobs: dict[int, tuple[Piece, list[bytes]]] = {}
        self._context = context
        self._cache, self._blocks, self._states = context.cache, context.blocks, context.states
        self._block_size = context.block_size
        self._finder = finder
        self._on_plan = on_plan
        self._missed = missed
        #: Loads by the name of their first block.
        self._loads: dict[bytes, Load] = {}
        self._num_rechecks = self._num_turns = 0

    def begin_turn(self) -> None:
        """Allow as many rechecks again. Called in each `Offload.poll`."""
        self._num_rechecks, self._num_turns = _MOST_RECHECKS, self._num_turns + 1

    def prepare(
        self,
        key: Hashable,
        prompt: Prompt,
        token_ids: Sequence[int],
        extra_keys: tuple[ExtraKey, ...],
        will_start: bool,
    ) -> None:
        """Go on with a waiting prompt: look for its blocks, begin to load them, or give up what came too late."""
        now = self._context.clock()
        if prompt.load is not None and not prompt.load.is_running:
            self._offer(prompt, prompt.load, token_ids, extra_keys)
        if prompt.needs_turn and self._can_start(token_ids, extra_keys, will_start):
            prompt.needs_turn, prompt.since, prompt.search = False, now, None
        if prompt.load is None and not prompt.needs_turn:
            prompt.chain.extend(token_ids)
            prompt.token_ids = token_ids
            self._look_up(key, prompt, token_ids, extra_keys, now, will_start)
        if prompt.load is not None and now > prompt.load.deadline:
            prompt.is_over = prompt.load.is_running

    def fill(self, seq: int, prompt: Prompt) -> int:
        """Write what was loaded for a prompt into its sequence, end its load, and return the tokens. O(bytes)."""
        filled, cause, is_copied = 0, "late", None
        load = prompt.load
        try:
            if load is not None:
                cause = "late" if load.is_running else "failed"
                filled, is_copied = self._fill(seq, prompt, load)
            if filled and self._states is not None:
                prompt.kept.append(int(self._cache.num_computed_tokens(seq)))
        finally:
            if load is not None:
                self._drop_load(load, is_copied)
        self._count_missed(prompt, seq, cause)
        return filled

    def leave(self, key: Hashable, prompt: Prompt) -> None:
        """Take a request from its load, which ends with the last one."""
        if (load := prompt.load) is not None:
            load.prompts.discard(key)
            if not load.prompts:
                self._drop_load(load)

    def end(self, outcome: Outcome) -> bool:
        """Take in the outcome of a job, and return whether it is a load's."""
        piece, names = self.jobs.pop(outcome.id, (None, []))
        if piece is None:
            return False
        piece.use.note_presence(names, outcome.is_done)
        piece.state = outcome.is_done
        if piece.is_dropped:
            self.free += piece.rows
        measure = piece.measure
        measure.num_running -= 1
        if outcome.is_done:
            measure.num_bytes += outcome.num_bytes
            measure.seconds = max(measure.seconds, outcome.seconds)
        if measure.num_running == 0 and measure.num_bytes:
            piece.use.cost.note(measure.num_bytes, measure.seconds, self._context.clock())
        return True

    def rows(self) -> list[int]:
        """Return the buffers that are free or a load's. O(rows)."""
        pieces = {id(piece): piece for load in self._loads.values() for piece in load.all_pieces()}
        pieces |= {id(piece): piece for piece, _ in self.jobs.values()}
        return [*self.free, *(row for piece in pieces.values() for row in piece.rows)]

    def check(self) -> None:
        """Raise `InvariantError` unless loads and prompts know one another. O(prompts)."""
        check_loads(self._loads.values(), self._context.prompts)

    # Looking for a prompt's blocks.

    def _look_up(
        self,
        key: Hashable,
        prompt: Prompt,
        token_ids: Sequence[int],
        extra_keys: tuple[ExtraKey, ...],
        now: float,
        will_start: bool,
    ) -> None:
        """Ask the tiers for what the pool does not have, and begin to load it, or join a load of the same blocks."""
        names, usable = prompt.chain.names, (len(token_ids) - 1) // self._block_size
        cached = self._cache.num_cached_tokens(token_ids, extra_keys=extra_keys) // self._block_size
        if cached >= usable:
            prompt.needs_turn = True  # until then the pool may evict them
            return
        shared = self._loads.get(names[cached])
        if shared is not None and shared.generation != prompt.generation:
            self._drop_load(shared)
        elif shared is not None:
            stop = shared.pieces[-1].stop
            if shared.kept is None or (stop <= usable and names[stop - 1] == shared.names[stop - 1]):
                prompt.found = prompt.chosen = stop
                self._join(key, prompt, shared)
            else:  # a state behind other tokens is of no use here; what is loaded before it may be in the pool soon
                prompt.is_over = now - prompt.since > self._finder.patience(usable - cached)
            return
        found, pending = self._finder.find(names, cached, usable)
        best, stop = (found[-1][0], found[-1][2]) if found else (None, cached)
        if self._finder.should_wait(prompt, pending, best, usable - stop or usable - cached, now):
            return
        prompt.found, prompt.chosen = stop, cached
        prompt.cause = prompt.rest = self._rest_cause(pending)
        chosen = self._finder.choose(prompt, found, len(self.free), now)
        if prompt.cause == "no_buffers":
            if not self._can_start(token_ids, extra_keys, will_start):
                prompt.needs_turn = True
                return
            self._take_back(stop - cached + (0 if self._states is None else self._states.num_rows))
            prompt.cause = prompt.rest
            chosen = self._finder.choose(prompt, found, len(self.free), now)
            if prompt.cause == "no_buffers" and self._has_rows_out() and self._is_patient(prompt, usable - cached, now):
                return
            if prompt.cause == "no_buffers" and self._loads:
                prompt.needs_turn = True  # others are ahead, and start first
                return
        kept: Kept | None = None
        if self._states is not None and chosen:
            kept, pending, is_searched = self._finder.find_state(
                self._context.state_layout, prompt, cached, chosen[-1][2]
            )
            best = next((use for use in reversed(self._context.uses) if use not in pending), None)
            if self._finder.should_wait(prompt, pending, best, usable - cached, now):
                return
            if not is_searched and self._is_patient(prompt, usable - cached, now):
                return
            chosen = self._finder.up_to_state(prompt, chosen, kept, now)
            if kept is None and (pending or not is_searched):
                prompt.cause = "late"
        prompt.chosen = chosen[-1][2] if chosen else cached
        prompt.is_over = not chosen or not self._begin(key, prompt, chosen, kept, now)

    def _is_patient(self, prompt: Prompt, num_blocks: int, now: float) -> bool:
        return now - prompt.since <= self._finder.patience(num_blocks)

    def _rest_cause(self, pending: list[TierUse]) -> str:
        """Return why no tier has more: it has not answered, it is failing, or it has no more."""
        if pending:
            return "late"
        return "failed" if any(use.tier.stats().is_load_open for use in self._context.uses) else "absent"

    # Buffers of requests that wait.

    def _can_start(self, token_ids: Sequence[int], extra_keys: tuple[ExtraKey, ...], will_start: bool) -> bool:
        """Return whether a waiting request would start now. O(tokens), and False after the most of such lookups."""
        if will_start:
            return True
        self._num_rechecks -= 1
        return self._num_rechecks >= 0 and bool(self._cache.can_allocate(token_ids, extra_keys=extra_keys))

    def _offer(self, prompt: Prompt, load: Load, token_ids: Sequence[int], extra_keys: tuple[ExtraKey, ...]) -> None:
        """Note that a request may start with what was loaded. Drop it if the pool has evicted what is before it."""
        if load.offered_at and load.first and not prompt.is_over and self._num_rechecks > 0:
            self._num_rechecks -= 1
            if self._cache.num_cached_tokens(token_ids, extra_keys=extra_keys) < load.first * self._block_size:
                self._drop_load(load)
        load.offered_at = self._num_turns

    def _take_back(self, num_rows: int) -> None:
        """Drop finished loads of requests that did not start with them, the latest first, until rows are free.

        Requests that were asked about since `begin_turn` are ahead of this one: those that can start keep theirs.
        """
        for load in reversed(list(self._loads.values())):
            if len(self.free) >= num_rows or self._num_rechecks <= 0:
                return
            prompts = [self._context.prompts[key] for key in load.prompts]
            if load.is_running or not load.offered_at:
                continue
            is_ahead = load.offered_at == self._num_turns
            if is_ahead and any(self._can_start(each.token_ids, each.extra_keys, False) for each in prompts):
                continue
            for prompt in prompts:
                prompt.needs_turn = True
            self._drop_load(load)

    def _has_rows_out(self) -> bool:
        """Return whether rows of loads come back by themselves: a job or a copy still has some."""
        return bool(self._context.copies) or any(piece.state is None for piece, _ in self.jobs.values())

    def _begin(self, key: Hashable, prompt: Prompt, chosen: list[Range], kept: Kept | None, now: float) -> bool:
        """Give the tiers their jobs, and say whether they took any; where one is refused, the load ends there.

        With a state it has to be whole: the state is asked for first, and is of use behind all the rest alone.
        """
        cached = chosen[0][1]
        load = Load(prompt.chain.names, cached, prompt.generation, now + self._finder.patience(prompt.chosen - cached))
        each = max(JOB_BYTES // self._blocks.object_bytes, 1)
        if kept is not None:
            load.kept = Piece(kept[0], kept[1], kept[1], Measure(1))
            if not self._load_state(prompt.chain, load.kept):
                return False
        for use, start, end in chosen:
            measure = Measure()
            for first in range(start, end, each):
                piece = Piece(use, first, min(first + each, end), measure)
                if not self._load_piece(prompt.chain, piece):
                    break
                measure.num_running += 1
                load.pieces.append(piece)
            if not load.pieces or load.pieces[-1].stop < end:
                break
        is_of_use = bool(load.pieces) and (kept is None or load.pieces[-1].stop == kept[1])
        if is_of_use:
            self._loads[load.names[cached]] = load
            self._join(key, prompt, load)
        else:
            for piece in load.all_pieces():
                piece.is_dropped = True
        return is_of_use

    def _load_piece(self, chain: NameChain, piece: Piece) -> bool:
        names, digests = chain.names[piece.first : piece.stop], chain.digests[piece.first : piece.stop]
        piece.rows = [self.free.pop() for _ in names]
        buffers = [self._blocks.buffer(row) for row in piece.rows]
        return self._load_objects(piece, self._context.layout(), names, digests, buffers)

    def _load_state(self, chain: NameChain, piece: Piece) -> bool:
        if self._states is None:
            return False
        name = state_name(self._context.state_layout, chain.names[piece.stop - 1])
        piece.rows = [self.free.pop() for _ in range(self._states.num_rows)]
        buffers = [self._states.buffers(piece.rows)]
        return self._load_objects(piece, self._context.state_layout, [name], [chain.digests[piece.stop - 1]], buffers)

    def _load_objects(
        self, piece: Piece, layout: bytes, names: list[bytes], digests: list[bytes], buffers: list[Any]
    ) -> bool:
        job = Job(next(self._context.numbers), layout, names, digests, buffers)
        if piece.use.tier.load(job) is not None:
            self.free += piece.rows
            return False
        self.jobs[job.id] = (piece, names)
        return True

    def _join(self, key: Hashable, prompt: Prompt, load: Load) -> None:
        prompt.load = load
        load.prompts.add(key)

    # Ends of loads.

    def _fill(self, seq: int, prompt: Prompt, load: Load) -> tuple[int, IsDone | None]:
        """Write what is there of a load and is this prompt's, from where the pool's hit ends."""
        size, computed, done = self._block_size, int(self._cache.num_computed_tokens(seq)), load.done()
        usable = (int(self._cache.num_tokens(seq)) - 1) // size
        stop = min(done[-1].stop if done else load.first, usable)
        while stop > load.first and load.names[stop - 1] != prompt.chain.names[stop - 1]:
            stop -= 1  # the load is another prompt's, which goes on differently
        # Blocks before the load may have been evicted since, and a load of older weights is of no use.
        if computed < load.first * size or load.generation != self._cache.generation or stop * size <= computed:
            return 0, None
        # So is one for tokens that the request does not have any more.
        if not prompt.chain.is_of(self._cache.token_ids(seq), 0, stop):
            return 0, None
        rows = {piece.first + at: row for piece in done for at, row in enumerate(piece.rows)}
        if load.kept is not None:
            filled, is_copied = self._write_with_state(seq, computed, stop * size, rows, load.kept)
        else:
            filled, is_copied = self._write(seq, computed, stop * size, rows)
        for piece in done:
            blocks = min(piece.stop, (computed + filled) // size) - max(piece.first, computed // size)
            piece.use.num_hit_tokens += max(blocks, 0) * size
        return filled, is_copied

    def _write(self, seq: int, computed: int, stop: int, rows: dict[int, int]) -> tuple[int, IsDone | None]:
        """Reserve, write and commit, in smaller parts where a window is short of blocks; returns the tokens."""
        size, begun, part = self._block_size, computed, stop - computed
        is_copied = None
        while computed < stop:
            count = min(part, stop - computed)
            plan = self._cache.reserve([seq], [count])
            status = int(plan.status[0])
            if self._on_plan is not None:
                self._on_plan(plan)
            if status == SeqStatus.NO_BLOCKS.value and count > size:
                part = max(count // 2 // size * size, size)
                continue
            if status != SeqStatus.SCHEDULED.value:
                break
            places = range(computed // size, -(-(computed + count) // size))
            ids = self._context.block_ids(seq, places)
            is_copied = self._blocks.write(ids, [rows[place] for place in places])
            self._cache.commit([seq], [count])
            computed += count
        return computed - begun, is_copied

    def _write_with_state(
        self, seq: int, computed: int, stop: int, rows: dict[int, int], kept: Piece
    ) -> tuple[int, IsDone | None]:
        """Reserve, write and commit all up to a state in one step, or nothing: in between there is no state."""
        size, count = self._block_size, stop - computed
        if self._states is None or not kept.state or kept.stop * size != stop:
            return 0, None
        if not self._cache.can_append([seq], [count]):
            return 0, None
        self._cache.states.skip(seq, stop)
        plan = self._cache.reserve([seq], [count])
        if self._on_plan is not None:
            self._on_plan(plan)
        if int(plan.num_scheduled[0]) != count:
            return 0, None
        places = range(computed // size, stop // size)
        self._blocks.write(self._context.block_ids(seq, places), [rows[place] for place in places])
        is_copied = self._states.write(int(plan.rows[0]), kept.rows, plan.states.save_blocks)
        self._cache.commit([seq], [count])
        return count, is_copied

    def _count_missed(self, prompt: Prompt, seq: int, cause: str) -> None:
        """Count the tokens that are to be computed though whole blocks of them could have been loaded, by cause."""
        size = self._block_size
        at, usable = int(self._cache.num_computed_tokens(seq)) // size, (int(self._cache.num_tokens(seq)) - 1) // size
        for stop, why in ((prompt.chosen, cause), (prompt.found, prompt.cause), (usable, prompt.rest)):
            missing = min(stop, usable) - at
            if missing > 0:
                self._missed[why] += missing * size
                at += missing

    def _drop_load(self, load: Load, is_copied: IsDone | None = None) -> None:
        """Give its rows back, those of jobs that run when `finished` names them; its prompts are on their own again.

        is_copied: tells when the device has read the rows.
        """
        if self._loads.get(load.names[load.first]) is not load:
            return
        del self._loads[load.names[load.first]]
        rows = []
        for piece in load.all_pieces():
            piece.is_dropped = True
            if piece.state is not None:
                rows += piece.rows
        if is_copied is None:
            self.free += rows
        else:
            self._context.copies.append((is_copied, lambda: self.free.extend(rows)))
        for key in load.prompts:
            self._context.prompts[key].load = None
            self._context.prompts[key].since = self._context.clock()
        load.prompts.clear()
