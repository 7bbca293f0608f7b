"""A vLLM worker's block reads and writes without a model; each read must find what the tokens before wrote.

A token's keys and values, and the state behind it, are here one number: a checksum of all tokens up to it. Attention
groups have such a number a slot, state groups one a block, moved as `preprocess_mamba` moves states in mode "align".
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from vllm.v1.kv_cache_interface import MambaSpec


class Worker:
    """The blocks of one engine. `run` carries out what the scheduler planned, and checks what the step reads."""

    def __init__(self, kv_cache_config: Any, token_of: Any) -> None:
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.sizes = [spec.block_size for spec in specs]
        self.states = [isinstance(spec, MambaSpec) for spec in specs]
        self.token_of = token_of
        #: Of each block: a number a slot, of which a state takes the first.
        self.memory = np.zeros((kv_cache_config.num_blocks, max(self.sizes)), np.int64)
        self.tables: dict[str, list[list[int]]] = {}
        self.columns: dict[str, int] = {}
        self.sums: dict[str, list[int]] = {}
        self.num_states_read = 0

    def sums_of(self, request: Any, end: int) -> np.ndarray:
        """The checksum behind each of a request's first tokens, those included that it has not got yet."""
        sums = self.sums.setdefault(request.request_id, [])
        prompt = request.prompt_token_ids
        salt = zlib.crc32(repr(request.cache_salt).encode())
        for place in range(len(sums), end):
            token = prompt[place] if place < len(prompt) else self.token_of(request.request_id, place)
            sums.append(zlib.crc32(int(token).to_bytes(4, "big"), sums[-1] if sums else salt))
        return np.array(sums[:end], np.int64)

    def run(self, output: Any, requests: dict[str, Any]) -> None:
        """One step: tables, copies, then all keys and values before what is read of them, then states."""
        cached = output.scheduled_cached_reqs
        for name in (*output.finished_req_ids, *(output.preempted_req_ids or ()), *cached.resumed_req_ids):
            self.columns.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for name, ids, count in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            computed[name] = count
            if name in cached.resumed_req_ids:
                self.tables[name] = [list(group) for group in ids]
            elif ids is not None:
                for table, more in zip(self.tables[name], ids, strict=True):
                    table.extend(more)
        for copy in output.kv_cache_block_copies or ():
            self.memory[copy.dst_block_id] = self.memory[copy.src_block_id]
        steps = [(requests[name], computed[name], count) for name, count in output.num_scheduled_tokens.items()]
        for request, start, count in steps:
            self._attend(request, start, start + count, writes=True)
        for request, start, count in steps:
            self._attend(request, start, start + count, writes=False)
        found = [self._move_state(request, start, start + count) for request, start, count in steps]
        for blocks, state in found:
            self.memory[blocks, 0] = state

    def _attend(self, request: Any, start: int, end: int, writes: bool) -> None:
        sums = self.sums_of(request, end)
        for table, size, is_state in zip(self.tables[request.request_id], self.sizes, self.states, strict=True):
            if is_state:
                continue
            places = np.arange(start if writes else 0, end)
            blocks, slots = np.array(table)[places // size], places % size
            assert blocks.all(), "the null block is never read or written"
            if writes:
                self.memory[blocks, slots] = sums[start:]
            else:
                assert (self.memory[blocks, slots] == sums).all(), f"{request.request_id} reads what it did not write"

    def _move_state(self, request: Any, start: int, end: int) -> tuple[list[int], int]:
        """Check the state that a step goes on from; returns the blocks that get the one behind it, and that."""
        name, found = request.request_id, []
        sums = self.sums_of(request, end)
        column = -1
        for table, size, is_state in zip(self.tables[name], self.sizes, self.states, strict=True):
            if not is_state:
                continue
            before, column = self.columns.get(name, (start - 1) // size), (end - 1) // size
            if start:
                self.num_states_read += 1
                assert table[before], f"{name} has no block with its state after {start} tokens"
                state = self.memory[table[before], 0]
                assert state == sums[start - 1], f"{name} goes on from another state than that after {start} tokens"
            assert table[column], f"{name} has no block for its state after {end} tokens"
            found.append(table[column])
        if column >= 0:
            self.columns[name] = column
        return found, int(sums[end - 1])
