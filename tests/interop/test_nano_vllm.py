"""nano-vllm's own scheduler on its own block manager and on a pool: `make interop NANO_VLLM=checkout`."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from blockyard_testing.seeds import run_seed
from engines import nano_vllm

from ..support.checkouts import checkout, import_from
from ..support.nano_engine import drive

BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def sources() -> list[Any]:
    pytest.importorskip("xxhash")
    found = import_from(checkout("NANO_VLLM", "nanovllm"), "engine.scheduler", "engine.sequence", "sampling_params")
    found[1].Sequence.block_size = BLOCK_SIZE
    return found


def run(sources: list[Any], num_blocks: int, seed: int, ours: bool) -> tuple[list[list[int]], int]:
    scheduling, sequence, sampling = sources
    draw = random.Random(seed)
    config = SimpleNamespace(
        max_num_seqs=draw.randint(1, 6),
        max_num_batched_tokens=draw.choice((7, 16, 64)),
        eos=-1,
        num_kvcache_blocks=num_blocks,
        kvcache_block_size=BLOCK_SIZE,
    )
    scheduler = scheduling.Scheduler(config)
    if ours:
        nano_vllm.install(scheduler)
    heads = [[draw.randrange(50) for _ in range(draw.randint(1, 20))] for _ in range(3)]
    sequences = []
    for _ in range(12):
        prompt = draw.choice(heads) + [draw.randrange(50) for _ in range(draw.randint(1, 9))]
        wanted = sampling.SamplingParams(temperature=1.0, max_tokens=draw.randint(1, 12))
        sequences.append(sequence.Sequence(prompt, wanted))
    computed = drive(scheduler, sequences, BLOCK_SIZE)
    if ours:
        scheduler.block_manager.pool.check()
        assert scheduler.block_manager.pool.num_used_blocks == 0
    return [seq.token_ids for seq in sequences], computed


def test_its_scheduler_answers_the_same_and_finds_as_much(sources: list[Any]) -> None:
    base, few = run_seed(), [0, 0]
    for seed in range(base, base + 200):
        for num_blocks in (400, 12):
            theirs, computed_there = run(sources, num_blocks, seed, ours=False)
            ours, computed_here = run(sources, num_blocks, seed, ours=True)
            assert ours == theirs
            if num_blocks == 400:
                assert computed_here == computed_there
            else:
                few[0] += computed_there
                few[1] += computed_here
    print(f"prompt tokens computed with 12 blocks: {few[0]} on its own manager, {few[1]} on a pool (seed {base})")
