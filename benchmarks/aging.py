"""Pools as service leaves them: a trace runs in the pool, many requests at a time, before anything is measured in it.

It runs (`benchmarks/service.py`) until the pool has been taken twice over, or the trace ends. What is left is the order
of the free blocks, and, until something evicts it, what the trace cached. The peers' free blocks are brought into the
same order. The trace is a file or a generator of the lab; by default one that the lab makes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from blockyard import BlockLease, BlockPool
from blockyard_lab.traces import open_trace
from blockyard_lab.traces.writing import write_trace

from .service import Service, neighbours
from .workload import BLOCK_SIZE, ORDER_FILE, SIZES, TRACE_FILE, Request, read_requests, size_name

DEFAULT_TRACE = "mix:requests=40000,seed=1,hash_block_size=64"
#: Its lease, how many of its blocks the prompt has cached, and all of its tokens.
Sequence = tuple[BlockLease, int, npt.NDArray[np.int32]]


class PoolEngine:
    """A BlockPool as a service drives it."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.num_blocks = pool.num_blocks

    def admit(self, request: Request) -> tuple[Sequence, npt.NDArray[np.int32]]:
        prompt = request.prompt()
        lease = self._pool.get_cached_blocks(prompt[:-1])
        hit = lease.block_ids
        self._pool.extend(lease, -(-len(prompt) // BLOCK_SIZE) - len(hit))
        self._pool.cache_full_blocks(lease, prompt, num_cached_blocks=len(hit))
        return (lease, len(prompt) // BLOCK_SIZE, np.concatenate([prompt, request.output()])), hit

    def grow(self, sequence: Sequence) -> None:
        self._pool.extend(sequence[0], 1)

    def end(self, sequence: Sequence) -> None:
        lease, num_cached, tokens = sequence
        self._pool.cache_full_blocks(lease, tokens, num_cached_blocks=num_cached)
        self._pool.free_blocks(lease)


def aged_pool(num_blocks: int, requests: list[Request]) -> tuple[BlockPool, Service]:
    """A pool in which the requests ran, and the service that ran them. SystemExit where they are too few to fill it."""
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    service = Service(PoolEngine(pool))
    service.run(requests)
    if service.num_taken < num_blocks:
        raise SystemExit(f"the trace takes {service.num_taken:,} blocks: too short to age a pool of {num_blocks:,}")
    return pool, service


def read_trace(trace: str, folder: Path | None = None) -> list[Request]:
    """All requests of what open_trace takes, which is written to the folder in Mooncake's form if there is one."""
    with TemporaryDirectory() as temporary:
        path = (folder or Path(temporary)) / TRACE_FILE
        write_trace(open_trace(trace), path)
        return list(read_requests(str(path)))


def write_folder(trace: str, folder: Path) -> Iterator[str]:
    """Put the trace and, for each size, the order in which it leaves the free blocks into a folder; say what it did."""
    requests = read_trace(trace, folder)
    for size in SIZES:
        pool, service = aged_pool(size, requests)
        order = pool.free_block_ids()
        np.save(folder / ORDER_FILE.format(size), order)
        yield (
            f"{size_name(size)} blocks: {service.num_taken:,} taken, {service.num_hits:,} hit, of which "
            f"{service.adjacency:.1%} lie beside the block before, and of the free blocks {neighbours(order):.1%}"
        )


def add_trace_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        default=DEFAULT_TRACE,
        help="what ages the pools: a file, or a generator of the lab (default: %(default)s)",
    )


def main() -> None:
    """`python -m benchmarks.aging [--trace TRACE] [--folder FOLDER]`: what a trace does to the order of blocks."""
    parser = argparse.ArgumentParser(prog="benchmarks.aging", description=__doc__)
    add_trace_option(parser)
    parser.add_argument("--folder", type=Path, help="keep the trace and the orders here")
    args = parser.parse_args()
    with TemporaryDirectory() as temporary:
        for line in write_folder(args.trace, args.folder or Path(temporary)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
