"""Tiers below several ranks: the tokens of a plain engine, objects of all ranks or none, ranks that end."""

from __future__ import annotations

import copy
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from blockyard import InvalidArgument
from blockyard_engine import Engine, RankError
from blockyard_engine.model import quiet_transformers
from blockyard_engine.ranks import group
from blockyard_engine.ranks.sharing import RankCopies
from blockyard_testing.hybrid_models import hybrid_model
from blockyard_testing.patience import PATIENCE_SECONDS, wait_until
from blockyard_testing.rank_loop import children, is_alive
from blockyard_testing.seeds import run_seed
from blockyard_testing.thread_ranks import ThreadPeers
from blockyard_testing.tiers_offload_world import FaultyTier
from blockyard_testing.tiny_models import tiny_model
from blockyard_tiers import FileTier, KVBlocks, TierUse
from blockyard_tiers.tier import BAD_OBJECT

from .test_engine_world import random_options
from .test_tiers import LONG, PROMPT, answer, check, run_life, traffic

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="ranks share memory as Linux has it")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(group, "STEP_SECONDS", 60)
    with quiet_transformers():
        yield


def engine_on(model: Any, folder: Path, peers: Any, way: str = "tensor_parallel", **options: Any) -> Engine:
    """Return an engine with a frozen clock, so that no load is late."""
    given = {"num_blocks": 60, "block_size": 4, way: peers, "clock": lambda: 0.0, **options}
    return Engine(model, **given, tiers=[FileTier(folder, 2**30)])


def served(model: Any, folder: Path, size: int, way: str, **options: Any) -> tuple[list[int], int]:
    """Return the answer of an engine that then closes, and the prompt tokens that the tier supplied."""
    peers = ThreadPeers(size)
    engine = engine_on(model, folder, peers, way, **options)
    try:
        result = answer(engine)
        assert engine.offload is not None
        assert not engine.offload.read().tiers[0].stats.load_misses
        return result.token_ids, result.num_tier_cached_tokens
    finally:
        engine.close()
        peers.require_ended()


TENSOR = [("llama-gqa", 2), ("smollm2", 2), ("gemma3", 2), ("llama-mqa", 3), ("deepseek-v3", 2)]
CONTEXT = [("llama-gqa", 2), ("gemma3", 3), ("deepseek-v3", 2)]


@pytest.mark.parametrize(
    ("way", "shape", "size"),
    [*(("tensor_parallel", *each) for each in TENSOR), *(("context_parallel", *each) for each in CONTEXT)],
)
def test_a_prompt_hits_in_the_next_engine(way: str, shape: str, size: int, tmp_path: Path) -> None:
    """Heads that do not divide, heads on several ranks, windows, and context parallel ranks."""
    model = tiny_model(shape)
    alone = answer(Engine(model, num_blocks=60, block_size=4))
    options = {} if way == "tensor_parallel" else {"context_interleave": 2}
    assert served(model, tmp_path, size, way, **options) == (alone.token_ids, 0)
    whole = 4 if way == "tensor_parallel" else 4 * size
    assert served(model, tmp_path, size, way, **options) == (alone.token_ids, 60 // whole * whole)


@pytest.mark.parametrize(
    ("name", "way"),
    [("qwen3_next", "tensor_parallel"), ("qwen3_next", "context_parallel"), ("falcon_h1", "context_parallel")],
)
def test_a_hybrid_model_continues_from_a_checkpoint(name: str, way: str, tmp_path: Path) -> None:
    model = hybrid_model(name)
    options = {"num_blocks": 600, "cache_options": {"state_checkpoints": ("every:16", "ends")}}
    alone = answer(Engine(model, block_size=4, **options))
    assert served(model, tmp_path, 2, way, **options) == (alone.token_ids, 0)
    num_hit = 60 if way == "tensor_parallel" else 56
    assert served(model, tmp_path, 2, way, **options) == (alone.token_ids, num_hit)


def test_other_numbers_of_ranks_hit_nothing_of_one_another(tmp_path: Path) -> None:
    model = tiny_model("llama-mqa")  # whose one head is the same bytes on every rank
    ways = [("tensor_parallel", 1), ("tensor_parallel", 2), ("tensor_parallel", 4)]
    ways += [("context_parallel", 2), ("context_parallel", 4)]
    expected = answer(Engine(model, num_blocks=60, block_size=4)).token_ids
    for way, size in ways:
        assert served(model, tmp_path, size, way) == (expected, 0)
    assert served(model, tmp_path, 2, "context_parallel", context_interleave=2) == (expected, 0)
    for way, size in ways:
        tokens, num_hit = served(model, tmp_path, size, way)
        assert (tokens, num_hit > 40) == (expected, True)


def test_a_part_that_is_the_same_on_all_ranks_is_stored_once(tmp_path: Path) -> None:
    model = tiny_model("deepseek-v3")
    sizes = []
    for size in (1, 3):
        peers = ThreadPeers(size)
        engine = engine_on(model, tmp_path, peers)
        assert engine.offload is not None
        sizes.append(engine.offload.blocks.object_bytes)
        engine.close()
        peers.require_ended()
    assert sizes[0] == sizes[1]


def test_other_weights_on_another_rank_alone_hit_nothing(tmp_path: Path) -> None:
    """The ranks do not notice: they compare only a sample of the weights when they meet."""
    model = tiny_model("llama-gqa")
    expected = served(model, tmp_path, 2, "tensor_parallel")[0]
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].self_attn.k_proj.weight.view(-1)[-1] += 1e-6
    for models, num_hit in (([other], 0), ([copy.deepcopy(model)], 60)):
        engine = engine_on(model, tmp_path, ThreadPeers(2, models))
        result = answer(engine)
        assert (result.token_ids, result.num_tier_cached_tokens) == (expected, num_hit)
        engine.close()


@pytest.mark.parametrize(
    ("shape", "way", "size"),
    [
        ("llama-gqa", "tensor_parallel", 2),
        pytest.param("gemma3", "context_parallel", 3, marks=pytest.mark.drawn),
        pytest.param("qwen3_next", "tensor_parallel", 2, marks=pytest.mark.drawn),
    ],
)
def test_random_traffic_over_faulty_tiers_gets_the_right_tokens(shape: str, way: str, size: int) -> None:
    """Two engines, one after another, on tiers that refuse, fail, hang and lose objects, with all features."""
    seed = 700
    rng = np.random.default_rng(seed)
    is_hybrid = shape == "qwen3_next"
    model = hybrid_model(shape) if is_hybrid else tiny_model(shape)
    requests, expected, tiers = traffic(model, rng, seed)
    num_hits = 0
    for life in range(2):
        options = {**random_options(rng), "enable_prefix_caching": True}
        if is_hybrid:
            options |= {"num_blocks": 300, "speculation": None}
        uses = [TierUse(tiers[0]), TierUse(tiers[1], ("through", "selective")[life])]
        peers = ThreadPeers(size)
        engine = Engine(
            model, **options, **{way: peers}, tiers=uses, tier_buffer_bytes=int(rng.integers(20, 80)) * 8000
        )
        num_hits += run_life(engine, model, tiers, requests, expected, rng)
        for tier in tiers:
            tier.end_process()
        engine.close()
        peers.require_ended()
    assert num_hits > 0


def test_evicted_blocks_are_stored_and_snapshots_restored(tmp_path: Path) -> None:
    model = tiny_model("llama-gqa")
    peers = ThreadPeers(2)
    tiers = [TierUse(FileTier(tmp_path / "tier", 2**30), "back")]
    engine = Engine(model, num_blocks=60, block_size=4, tensor_parallel=peers, tiers=tiers)
    first = answer(engine)
    assert engine.offload is not None
    assert engine.offload.read().tiers[0].stats.num_stored == 0
    assert engine.offload.snapshot(tmp_path / "warm", PATIENCE_SECONDS).error == ""
    for start in range(1, 5):  # the pool evicts
        answer(engine, PROMPT[start:])
    assert engine.offload.read().tiers[0].stats.num_stored > 18
    engine.close()
    peers.require_ended()
    engine = engine_on(model, tmp_path / "tier", ThreadPeers(2))
    assert engine.offload is not None
    assert engine.offload.restore(tmp_path / "warm", PATIENCE_SECONDS) == 72
    again = answer(engine)
    assert (again.token_ids, again.num_cached_tokens, again.num_tier_cached_tokens) == (first.token_ids, 60, 0)
    engine.close()


def test_uncopied_blocks_are_not_stored_and_no_step_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that copies asynchronously, on rank 1 only."""
    has_copied = threading.Event()

    def mark(blocks: KVBlocks) -> Any:
        return None if blocks.kv_cache.shard.rank == 0 else has_copied.is_set

    monkeypatch.setattr(KVBlocks, "mark", mark)
    model = tiny_model("llama-gqa")
    engine = engine_on(model, tmp_path, ThreadPeers(2))
    (first,) = engine.generate([PROMPT], LONG)
    offload = engine.offload
    assert offload is not None
    assert not offload.settle(0.05)
    assert offload.read().tiers[0].stats.num_stored == 0
    has_copied.set()
    assert offload.settle(PATIENCE_SECONDS)
    check(engine)
    assert offload.read().tiers[0].stats.num_stored == 18
    engine.cache.reset_prefix_cache()
    again = answer(engine)
    assert (again.token_ids, again.num_tier_cached_tokens) == (first.token_ids, 60)
    engine.close()


@pytest.mark.parametrize("fails_at", [0, 3])
def test_a_rank_whose_copy_fails_ends_all_and_what_it_had_to_copy_is_not_stored(
    fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter(range(100))
    begin = RankCopies._begin

    def failing(*arguments: Any) -> Any:
        if next(numbers) == fails_at:
            raise MemoryError("no more")
        return begin(*arguments)

    monkeypatch.setattr(RankCopies, "_begin", failing)
    model = tiny_model("llama-gqa")
    engine = engine_on(model, tmp_path, ThreadPeers(2), max_num_seqs=4, max_num_batched_tokens=8)
    with pytest.raises(RankError, match="rank 1 failed: MemoryError: no more"):
        engine.generate([PROMPT], LONG)
    offload = engine.offload
    assert offload is not None
    wait_until(lambda: not offload.settle(0.0) and offload.read().tiers[0].stats.num_stored == 2 * fails_at)
    check(engine)
    assert engine.cache.num_used_blocks == 0
    engine.close()
    monkeypatch.setattr(RankCopies, "_begin", begin)
    expected = answer(Engine(model, num_blocks=60, block_size=4)).token_ids
    assert served(model, tmp_path, 2, "tensor_parallel") == (expected, 8 * fails_at)


def test_ranks_that_cannot_share_memory_and_small_buffers_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama-gqa")
    peers = ThreadPeers(2)
    with pytest.raises(InvalidArgument, match="buffer_bytes is 3000; it must hold two objects of 1536"):
        engine_on(model, tmp_path, peers, tier_buffer_bytes=3000)
    peers.require_ended()
    peers = ThreadPeers(2)
    peers.is_local = False
    with pytest.raises(InvalidArgument, match="tiers need all 2 ranks on one machine"):
        engine_on(model, tmp_path, peers)
    peers.require_ended()


# Processes.


def step_to_the_end(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step()


@pytest.mark.drawn
def test_a_rank_that_is_killed_in_mid_load_leaves_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = tiny_model("llama-gqa")
    tier = FaultyTier(random.Random(0), faults=0.0)
    others = children(os.getpid())
    engine = Engine(model, num_blocks=60, block_size=4, tensor_parallel=2, tiers=[tier])
    (first,) = engine.generate([PROMPT], LONG)
    offload = engine.offload
    assert offload is not None
    while offload._context.copies or tier.transfers:
        offload.poll()
        tier.work()
    engine.cache.reset_prefix_cache()
    engine.add_request(PROMPT, LONG)
    engine.step()
    assert (engine.num_loading, len(tier.transfers)) == (1, 1)
    (pid,) = [child for child in children(os.getpid()) if child not in others]
    os.kill(pid, signal.SIGKILL)
    while tier.transfers:
        tier.work()
    with pytest.raises(RankError, match=rf"rank 1 \(process {pid}\) was killed by SIGKILL"):
        step_to_the_end(engine)
    check(engine)
    assert engine.cache.num_used_blocks == 0
    num_objects = len(tier.objects)
    engine.close()
    assert len(tier.objects) == num_objects
    assert not is_alive(pid)
    peers = ThreadPeers(2)
    engine = Engine(model, num_blocks=60, block_size=4, tensor_parallel=peers, tiers=[tier])
    tier.is_live = True
    (again,) = engine.generate([PROMPT], LONG)
    assert (again.token_ids, again.num_tier_cached_tokens) == (first.token_ids, 60)
    engine.close()


_KILLED = """
import sys
from pathlib import Path
import blockyard_testing.plugin
from tests.engine.test_tiers_on_ranks import LONG, PROMPT, engine_on
from blockyard_testing.tiny_models import tiny_model
engine = engine_on(tiny_model("llama-gqa"), Path(sys.argv[1]), 2)
for turn in range(10**6):
    engine.generate([[*PROMPT[: 20 + turn % 40], turn % 97, turn % 89, *PROMPT[:9]], PROMPT], LONG)
    print("answered", flush=True)
"""


@pytest.mark.drawn
def test_all_processes_killed_in_mid_save_leave_objects_that_are_right_or_missed(tmp_path: Path) -> None:
    draw = random.Random(run_seed())
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _KILLED, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        for _ in range(draw.randint(1, 6)):
            assert process.stdout.readline() == b"answered\n"
        time.sleep(draw.random() / 20)
        victims = [process.pid, *children(process.pid)]
        assert len(victims) == 2
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
    model = tiny_model("llama-gqa")
    model.save_pretrained(tmp_path / "model")  # as for processes: its config says more from then on
    engine, alone = engine_on(model, tmp_path, ThreadPeers(2)), Engine(model, num_blocks=60, block_size=4)
    turns = [[*PROMPT[: 20 + turn % 40], turn % 97, turn % 89, *PROMPT[:9]] for turn in range(6)]
    for prompt in [PROMPT, *turns]:
        assert answer(engine, prompt).token_ids == answer(alone, prompt).token_ids
    assert engine.offload is not None
    assert engine.offload.read().tiers[0].num_hit_tokens > 0
    assert not any(cause in BAD_OBJECT for cause in engine.offload.read().tiers[0].stats.load_misses)
    engine.close()


def test_processes_share_rows_and_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = tiny_model("smollm2")
    alone = answer(Engine(model, num_blocks=60, block_size=4))
    for num_hit in (0, 56):
        engine = engine_on(model, tmp_path, 2, "context_parallel")
        result = answer(engine)
        assert (result.token_ids, result.num_tier_cached_tokens) == (alone.token_ids, num_hit)
        engine.close()
