"""`python -m benchmarks.peers.vllm_aging FOLDER SIZE`: whether a trace leaves vLLM's free blocks as it leaves ours.

Run by vLLM's interpreter; FOLDER has the trace and our order (`python -m benchmarks.aging --folder FOLDER`). vLLM's own
KVCacheManager serves the trace in the same turns. Says how many of its free blocks stand where ours do.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..service import Service
from ..workload import BLOCK_SIZE, ORDER_FILE, TRACE_FILE, Request, read_requests
from .vllm import VLLM

#: vLLM's request, and the tokens that it has not generated yet.
Sequence = tuple[Any, list[int]]


class VLLMEngine:
    """vLLM's manager as a service drives it; it publishes blocks as they fill."""

    def __init__(self, num_blocks: int) -> None:
        self._peer = VLLM()
        self._peer.open(num_blocks, None)
        self.num_blocks = num_blocks

    def admit(self, request: Request) -> tuple[Sequence, npt.NDArray[np.int32]]:
        asked, hit = self._peer.begin(request.prompt().tolist())
        return (asked, request.output().tolist()), np.array(hit, np.int32)

    def grow(self, sequence: Sequence) -> None:
        """Generate what is missing in the last block, and a block more."""
        request, output = sequence
        count = -request.num_tokens % BLOCK_SIZE + BLOCK_SIZE
        self._peer.generate(request, output[:count])
        del output[:count]

    def end(self, sequence: Sequence) -> None:
        request, output = sequence
        if output:
            self._peer.generate(request, output)
        self._peer.free(request)

    def free_blocks(self) -> npt.NDArray[np.int32]:
        """Ids in the order in which they are used."""
        return np.array(self._peer.free_ids(), np.int32)


def main() -> None:
    """One line."""
    folder, num_blocks = Path(sys.argv[1]), int(sys.argv[2])
    engine = VLLMEngine(num_blocks)
    service = Service(engine)
    service.run(read_requests(str(folder / TRACE_FILE)))
    ours, theirs = np.load(folder / ORDER_FILE.format(num_blocks)), engine.free_blocks()
    print(f"{num_blocks:,} blocks, {service.num_hits:,} hit: {int((ours == theirs).sum()):,} stand where ours do")


if __name__ == "__main__":
    main()
