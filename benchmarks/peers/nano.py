"""A block manager in the manner of nano-vllm, which is on no package index; written anew for this comparison.

What makes it nano-vllm's: an object a block, free ids in a deque, a dictionary from the chained xxh64 of a block's
tokens to its id, the tokens compared on a hit, one call that looks up, allocates and publishes. Reviving an idle
block removes it from the middle of the deque, which takes time in proportion to the pool.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from ..workload import BLOCK_SIZE
from .peer import Peer


@dataclass(slots=True)
class Block:
    """A block and what it holds once it is full."""

    ref_count: int = 0
    digest: int = 0
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Sequence:
    """Tokens, and the blocks that hold them."""

    tokens: list[int]
    num_hit: int = 0
    table: list[int] = field(default_factory=list)


def digest_of(tokens: list[int], before: int) -> int:
    """The chained hash of one block."""
    hasher = xxhash.xxh64(before.to_bytes(8, "little"))
    hasher.update(np.array(tokens).tobytes())
    return hasher.intdigest()


class NanoLike(Peer):
    """Objects, a deque and a dictionary."""

    name = "nano-vllm-like"
    prompt_form = "a list"

    def version(self) -> str:
        return f"nano-vllm-like, xxhash {xxhash.VERSION}"

    def open(self, num_blocks: int, order: npt.NDArray[np.int32] | None) -> None:
        self._blocks = [Block() for _ in range(num_blocks)]
        self._free_ids = deque(range(1, num_blocks) if order is None else order.tolist())
        self._by_digest: dict[int, int] = {}

    def prompt(self, tokens: np.ndarray) -> list[int]:
        return tokens.tolist()

    def request(self, prompt: list[int]) -> Sequence:
        return Sequence(list(prompt))

    def look_up(self, prompt: list[int]) -> int:
        return BLOCK_SIZE * len(self._hits(prompt)[0])

    def hold_and_release(self, prompt: list[int]) -> int:
        sequence = self.admit(self.request(prompt))
        self.free(sequence)
        return sequence.num_hit

    def admit(self, request: Sequence) -> Sequence:
        """Hits are held, the rest is allocated and published: hashing and a lookup are part of it."""
        hits, digest = self._hits(request.tokens)
        for block_id in hits:
            self._hold(block_id)
        request.table = hits
        request.num_hit = BLOCK_SIZE * len(hits)
        for start in range(request.num_hit, len(request.tokens), BLOCK_SIZE):
            request.table.append(self._take())
            tokens = request.tokens[start : start + BLOCK_SIZE]
            if len(tokens) == BLOCK_SIZE:
                digest = digest_of(tokens, digest)
                self._publish(request.table[-1], digest, tokens)
        return request

    def free(self, holding: Sequence) -> None:
        for block_id in reversed(holding.table):
            self._blocks[block_id].ref_count -= 1
            if self._blocks[block_id].ref_count == 0:
                self._free_ids.append(block_id)
        holding.table = []

    def open_batch(self, prompts: list[list[int]]) -> None:
        self._batch = [self.admit(self.request(prompt)) for prompt in prompts]

    def decode_step(self, sampled: list[int]) -> None:
        """Blocks, then slot mapping and padded rows as lists, made anew each step."""
        for sequence, token in zip(self._batch, sampled, strict=True):
            self._append(sequence, token)
        slots = [s.table[-1] * BLOCK_SIZE + (len(s.tokens) - 1) % BLOCK_SIZE for s in self._batch]
        widest = max(len(sequence.table) for sequence in self._batch)
        rows = [sequence.table + [-1] * (widest - len(sequence.table)) for sequence in self._batch]
        self.step_arrays = np.array(slots, dtype=np.int32), np.array(rows, dtype=np.int32)

    def serve(self, prompt: list[int], output: list[int]) -> int:
        sequence = self.admit(self.request(prompt))
        for token in output:
            self._append(sequence, token)
        self.free(sequence)
        return sequence.num_hit

    def _hits(self, tokens: list[int]) -> tuple[list[int], int]:
        """The cached blocks from the first on, and the digest of the last of them."""
        hits: list[int] = []
        digest = 0
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            block_tokens = tokens[start : start + BLOCK_SIZE]
            reached = digest_of(block_tokens, digest)
            block_id = self._by_digest.get(reached, 0)
            if block_id == 0 or self._blocks[block_id].tokens != block_tokens:
                break
            hits.append(block_id)
            digest = reached
        return hits, digest

    def _hold(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.ref_count == 0:
            self._free_ids.remove(block_id)
        block.ref_count += 1

    def _take(self) -> int:
        block_id = self._free_ids.popleft()
        block = self._blocks[block_id]
        if self._by_digest.get(block.digest) == block_id:
            del self._by_digest[block.digest]
        block.ref_count, block.digest, block.tokens = 1, 0, []
        return block_id

    def _publish(self, block_id: int, digest: int, tokens: list[int]) -> None:
        self._blocks[block_id].digest = digest
        self._blocks[block_id].tokens = tokens
        self._by_digest[digest] = block_id

    def _append(self, sequence: Sequence, token: int) -> None:
        if len(sequence.tokens) % BLOCK_SIZE == 0:
            sequence.table.append(self._take())
        sequence.tokens.append(token)
        if len(sequence.tokens) % BLOCK_SIZE == 0:
            before = self._blocks[sequence.table[-2]].digest if len(sequence.table) > 1 else 0
            tokens = sequence.tokens[-BLOCK_SIZE:]
            self._publish(sequence.table[-1], digest_of(tokens, before), tokens)
