"""What hands a decode step over: as arrays, into the engine's own arrays, as bytes to another rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from blockyard import CacheConfig, KVCacheManager
from blockyard.steps import PlanReceiver, PlanSender, StepBuffers

from .measure import Figure, figure
from .workload import BLOCK_SIZE

NUM_SEQS = 1024
#: Tokens of a sequence.
LENGTHS = (512, 4096)
MAX_MODEL_LEN = 8192
#: Steps of one figure: a multiple of the block size.
NUM_STEPS = 160


class Decode:
    """Sequences that decode together; their ends are spread over the block, as in service."""

    def __init__(self, num_tokens: int, num_seqs: int = NUM_SEQS) -> None:
        num_blocks = 2 * num_seqs * (num_tokens + 5 * NUM_STEPS) // BLOCK_SIZE
        self.config = CacheConfig(num_blocks, BLOCK_SIZE, max_num_seqs=num_seqs, max_model_len=MAX_MODEL_LEN)
        self.cache = KVCacheManager(self.config)
        rng = np.random.default_rng(7)
        lengths = num_tokens - np.arange(num_seqs) % BLOCK_SIZE
        self.seqs = np.array([self.cache.allocate(rng.integers(0, 128_000, n, dtype=np.int32)) for n in lengths])
        self.sampled = rng.integers(0, 128_000, num_seqs)
        self.ones = np.ones(num_seqs, np.int64)
        plan = self.cache.reserve(self.seqs)
        self.cache.commit(self.seqs, plan.num_scheduled, self.sampled)

    def time(self, work: Callable[[Any], object]) -> list[float]:
        """Nanoseconds that `work` takes with the plan of each step."""
        samples = []
        for _ in range(NUM_STEPS):
            plan = self.cache.reserve(self.seqs, self.ones)
            start = time.perf_counter_ns()
            work(plan)
            samples.append(float(time.perf_counter_ns() - start))
            self.cache.commit(self.seqs, self.ones, self.sampled)
        return samples[BLOCK_SIZE:]


def new_buffers() -> StepBuffers:
    """All that a plan can be written into."""
    wide = [np.zeros(NUM_SEQS, np.int64) for _ in range(3)]
    narrow = np.zeros(NUM_SEQS, np.int32), np.zeros(NUM_SEQS + 1, np.int32)
    tables = np.zeros((NUM_SEQS, MAX_MODEL_LEN // BLOCK_SIZE), np.int32)
    return StepBuffers(wide[0], tables, *narrow, *wide[1:])


def step_figures() -> Iterator[Figure]:
    """One decode step of 1,024 sequences, handed over in each way."""
    for num_tokens in LENGTHS:
        yield from _handing_figures(num_tokens)
    yield from input_figures()


def input_figures(num_seqs: int = 256, num_tokens: int = 512) -> Iterator[Figure]:
    """Tokens and positions of a decode step: from lists that an engine keeps for each sequence, and from the plan."""
    decode = Decode(num_tokens, num_seqs)
    lists = [decode.cache.token_ids(seq).tolist() for seq in decode.seqs]

    def from_lists(plan: Any) -> tuple[Any, Any]:
        starts, counts = plan.num_computed.tolist(), plan.num_scheduled.tolist()
        chunks = [known[-count:] for known, count in zip(lists, counts, strict=True)]
        ids = np.concatenate([np.asarray(chunk, np.int64) for chunk in chunks])
        return ids, np.concatenate([np.arange(a, a + n) for a, n in zip(starts, counts, strict=True)])

    size = f"{num_seqs} seqs"
    yield figure("inputs, from lists of tokens", size, decode.time(from_lists), "us", "", 1e-3)
    yield figure("inputs, of the plan", size, decode.time(lambda p: (p.input_ids, p.positions)), "us", "", 1e-3)


def _handing_figures(num_tokens: int) -> Iterator[Figure]:
    size = f"{num_tokens} tok"
    decode = Decode(num_tokens)
    buffers, received = new_buffers(), new_buffers()
    yield figure("plan.block_tables, a copy", size, decode.time(lambda plan: plan.block_tables), "us", "", 1e-3)
    yield figure("plan.input_ids", size, decode.time(lambda plan: plan.input_ids), "us", "", 1e-3)
    yield figure("plan.fill, everything", size, decode.time(lambda plan: plan.fill(buffers)), "us", "≤ 15", 1e-3)
    sender, receiver = PlanSender(decode.config), PlanReceiver(decode.config)
    messages: list[bytes] = []
    yield figure(
        "plan to bytes", size, decode.time(lambda plan: messages.append(sender.to_bytes(plan))), "us", "", 1e-3
    )
    reads, fills = [], []
    for message in messages:
        start = time.perf_counter_ns()
        plan: Any = receiver.from_bytes(message)
        middle = time.perf_counter_ns()
        plan.fill(received)
        fills.append(float(time.perf_counter_ns() - middle))
        reads.append(float(middle - start))
    yield figure("plan from bytes, checked", size, reads[BLOCK_SIZE:], "us", "", 1e-3)
    yield figure("fill of a received plan", size, fills[BLOCK_SIZE:], "us", "", 1e-3)
    yield figure("bytes of a plan", size, [float(len(message)) for message in messages[BLOCK_SIZE:]], "kB", "", 1e-3)
