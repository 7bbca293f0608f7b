"""The public calls on the states of a hybrid model, `KVCacheManager.states`."""

import numpy as np
import numpy.typing as npt
from mypy_extensions import i64

from ..errors import InvalidArgument, SequenceNotReady
from .calls.in_flight import require_nothing_reserved
from .face import read_int
from .index.prompt import make_prompt
from .parts import Parts
from .sequences.table import read_handle
from .store.state_group import StateGroup


class CacheStates:
    """Finds the states of a cache, for callers that copy them out (tiers, hand-overs) or supply them.

    A running sequence has its state in a slot, outside the pool. A checkpoint is a copy of a state in blocks of the
    pool, from which later prompts continue. Without a `StateSpec` in `groups` there are no states, and calls raise
    `InvalidArgument` (or `UnknownSequence`, which is checked first).
    """

    def __init__(self, parts: Parts) -> None:
        self._gate = parts.gate
        self._token_blocks = parts.token_blocks
        self._kv_pool = parts.kv_pool
        self._sequences = parts.sequences
        self._states = parts.states

    def __repr__(self) -> str:
        if self._states is None:
            return "<CacheStates: none>"
        states = self._states
        return f"<CacheStates: {states.registry.num_cached} cached checkpoints of {states.num_parts} blocks each>"

    def blocks(self, token_ids: object, *, extra_keys: object = ()) -> npt.NDArray[np.int32]:
        """Return the blocks of the checkpoint after exactly these tokens, int32 (n,); (0,) if there is none. O(tokens).

        The blocks are in the order of the state's bytes, as plans have them. No sequence holds them: copy them before
        the next call.

        Args:
            token_ids: the tokens before the checkpoint, integers (n,).
            extra_keys: what else the state depends on, as in `KVCacheManager.allocate`.

        Raises:
            InvalidArgument: if an argument is outside its limits, or the cache has no states.
        """
        self._gate.enter("states.blocks")
        try:
            states = self._require("states.blocks")
            prompt = make_prompt(token_ids, extra_keys, int(self._token_blocks.block_size))
            index = self._token_blocks.index
            count = prompt.num_tokens // self._token_blocks.block_size
            parts: list[int] = []
            if prompt.num_tokens % states.alignment == 0:
                root = index.known_root(prompt.keys)
                found = index.find_under(root, prompt, count)
                if i64(len(found)) == count:
                    parts = states.hits.find(index.content_of(i64(found[count - 1])))
            return np.array(parts, dtype=np.int32)
        finally:
            self._gate.leave()

    def skip(self, seq: object, num_tokens: object, *, checkpoint: object = 0) -> None:
        """Checkpoint no state before `num_tokens`, because the caller supplies the state at that position. O(1).

        The caller also supplies the keys and values before it: reserve up to there in one step, write both, and
        commit. The supplied state is checkpointed if a state can be at that position and is worth it.

        Args:
            seq: handle of the sequence.
            num_tokens: position of the supplied state, above the computed tokens and at most all tokens.
            checkpoint: position of a further supplied state, before `num_tokens`; 0 for none. The plan's saves say
                whether to write it.

        Raises:
            SequenceNotReady: while tokens of the sequence are reserved.
            UnknownSequence: if `seq` is not running.
            InvalidArgument: if a position is outside its limits, `checkpoint` is no checkpoint position, or the cache
                has no states.
        """
        self._gate.enter("states.skip")
        try:
            handle = read_handle(seq)
            row = self._sequences.live_row(handle)
            least, most = self._sequences.num_computed[row] + 1, self._sequences.num_tokens[row]
            count = read_int("num_tokens", num_tokens, least, most)
            position = read_int("checkpoint", checkpoint, 0, count - 1)
            # Reading the arguments may have run the caller's own code.
            self._skip(self._sequences.live_row(handle), count, position)
        finally:
            self._gate.leave()

    def _skip(self, row: i64, num_tokens: i64, checkpoint: i64) -> None:
        states = self._require("states.skip")
        require_nothing_reserved(self._sequences, row, "states.skip")
        least: i64 = 0 if states.is_missing(row) else self._sequences.num_computed[row]
        if checkpoint > 0 and (checkpoint % states.alignment != 0 or checkpoint <= least):
            raise InvalidArgument(
                f"checkpoint is {checkpoint}; it must be a multiple of {states.alignment}, above the {least} computed "
                f"tokens"
            )
        states.skip(row, num_tokens, checkpoint)

    def drop_checkpoints(self, seq: object) -> None:
        """Drop the checkpoints that plans of steps not committed yet asked to save: they were not written. O(saves).

        Their blocks are free again.

        Args:
            seq: handle of the sequence.

        Raises:
            UnknownSequence: if `seq` is not running.
            InvalidArgument: if the cache has no states.
        """
        self._gate.enter("states.drop_checkpoints")
        try:
            self._kv_pool.act("states.drop_checkpoints")
            row = self._sequences.live_row(read_handle(seq))
            self._require("states.drop_checkpoints").drop_saves(row)
        finally:
            self._gate.leave()

    def slot(self, seq: object) -> int:
        """Return the slot that holds the state after the computed tokens of a sequence, until the next plan. O(1).

        Until a plan gives a fork a slot, it is the slot of its parent.

        Args:
            seq: handle of the sequence.

        Raises:
            SequenceNotReady: while tokens of the sequence are reserved, or before a plan has filled the slot.
            UnknownSequence: if `seq` is not running.
            InvalidArgument: if the cache has no states.
        """
        self._gate.enter("states.slot")
        try:
            row = self._sequences.live_row(read_handle(seq))
            states = self._require("states.slot")
            require_nothing_reserved(self._sequences, row, "states.slot")
            name = self._sequences.name(row)
            if states.is_missing(row):
                raise SequenceNotReady(
                    f"states.slot: {name} still waits for its external state; supply it first (external_state_tokens)"
                )
            if not states.is_filled(row):
                raise SequenceNotReady(f"states.slot: {name} has no state in a slot yet; its next step puts one there")
            return int(states.slot_of(row))
        finally:
            self._gate.leave()

    def _require(self, call: str) -> StateGroup:
        if self._states is None:
            raise InvalidArgument(f"{call} needs a StateSpec; groups has none")
        return self._states
