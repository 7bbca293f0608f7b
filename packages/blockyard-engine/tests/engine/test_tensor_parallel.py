"""Tensor parallelism: the tokens of one rank, the same blocks on all, and ranks that disagree or fail.

The ranks are threads here (`thread_ranks`); `test_rank_processes.py` has processes.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from blockyard import BlockyardError, CacheConfig, CPUPoolConfig, InvalidArgument, KVCacheManager, StepPlan
from blockyard.steps import PlanReceiver, PlanSender
from blockyard.storage import KVCache, Shard
from blockyard.wire.connection import SocketConnection
from blockyard.wire.message import Message, pack
from blockyard_engine import Engine, ModelError, PromptLookup, RankError, SamplingParams
from blockyard_engine.moves import move_lists
from blockyard_engine.parallel import PeerMismatch
from blockyard_engine.ranks import group, joining
from blockyard_engine.ranks import peers as peers_module
from blockyard_engine.ranks.follower import Inbox, read_plan
from blockyard_engine.ranks.peers import Peer
from blockyard_engine.runner import ForwardBatch
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.thread_ranks import ThreadPeers
from blockyard_testing.tiny_models import (
    SHAPES,
    WINDOWED,
    mixed_prompts,
    reference_tokens,
    tiny_model,
    tokens_of,
)

LENGTHS = (1, 2, 15, 16, 17, 33, 5, 48, 64, 3)
SPLIT = [name for name in {**SHAPES, **WINDOWED} if name != "gpt-oss"]
NUM_TOKENS = 6


@contextmanager
def engine_on(peers: ThreadPeers, model: Any, **options: Any) -> Iterator[Engine]:
    sizes = {"num_blocks": 80, "max_num_seqs": 5, "max_num_batched_tokens": 64}
    engine = Engine(model, tensor_parallel=peers, **{**sizes, **options})
    try:
        yield engine
    finally:
        engine.close()
        peers.require_ended()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "STEP_SECONDS", 20)


# ---------------------------------------------------------------- the same tokens


@pytest.mark.parametrize(
    ("shape", "size"),
    [(shape, 2 + place % 2) for place, shape in enumerate(SPLIT)] + [("smollm2", 3), ("smollm2", 2), ("llama-mqa", 3)],
)
def test_every_shape_agrees_with_generate_on_several_ranks(shape: str, size: int) -> None:
    model = tiny_model(shape)
    prompts = mixed_prompts(LENGTHS, shared=20)
    expected = reference_tokens(model, prompts, NUM_TOKENS)
    with engine_on(ThreadPeers(size), model) as engine:
        assert tokens_of(engine.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS))) == expected
        engine.cache.check()
        assert engine.cache.num_used_blocks == 0
    assert (
        model.generate(torch.tensor([prompts[5]]), max_new_tokens=NUM_TOKENS, do_sample=False)[0, -1]
        == (expected[5][-1])
    ), "the model that was patched computes as before"


#: num_kv_heads of 6 query heads, and which a rank keeps.
KEPT = {
    ("llama-mha", 4): [(0, 2), (2, 4), (4, 5), (5, 6)],
    ("smollm2", 2): [(0, 2), (2, 3)],
    ("llama-gqa", 3): [(0, 1), (0, 1), (1, 2)],
    ("llama-mqa", 2): [(0, 1), (0, 1)],
    ("phi3", 2): [(0, 2), (0, 2)],
    ("deepseek-v3", 2): [(0, 1), (0, 1)],
}


@pytest.mark.parametrize(("shape", "size"), KEPT)
def test_each_rank_keeps_its_heads_of_a_single_ranks_blocks(shape: str, size: int) -> None:
    """With forks, a CPU pool, swaps, preemption and prefix hits, every block has the bytes of one rank's."""
    model = tiny_model(shape)
    prompts = mixed_prompts((33, 37, 31, 42, 29), shared=16)
    options: dict[str, Any] = {"num_blocks": 18, "block_size": 8, "num_cpu_blocks": 14, "preemption": "swap"}
    options |= {"cache_options": {"hash_seed": 5}, "speculation": PromptLookup(), "max_num_seqs": 4}
    sampling = [SamplingParams(max_tokens=20, n=n, temperature=0.7, seed=3, ignore_eos=True) for n in (1, 2, 1, 2, 1)]
    alone = Engine(model, max_num_batched_tokens=64, **options)
    expected = alone.generate(prompts, sampling)
    peers = ThreadPeers(size)
    with engine_on(peers, model, **options) as engine:
        results = engine.generate(prompts, sampling)
        assert [[each.token_ids for each in result.completions] for result in results] == [
            [each.token_ids for each in result.completions] for result in expected
        ]
        assert engine.num_preemptions == alone.num_preemptions > 0
    moved = [moves for moves, _ in peers.followers[0].steps if moves]
    assert sum(len(each.swap_outs) for moves in moved for each in moves) > 0
    assert sum(len(each.swap_ins) for moves in moved for each in moves) > 0
    assert sum(len(each.copies) for moves in moved for each in moves) > 0
    caches = [engine.kv_cache, *(follower.kv_cache for follower in peers.followers)]
    assert [(cache.kv_heads.start, cache.kv_heads.stop) for cache in caches] == KEPT[shape, size]
    for cache in caches:
        _require_part(cache, alone.kv_cache)


def _require_part(cache: KVCache, whole: KVCache) -> None:
    heads = slice(cache.kv_heads.start, cache.kv_heads.stop)
    for layer in range(whole.num_layers):
        for part, all_heads in (
            (cache.key_cache(layer), whole.key_cache(layer)),
            (cache.value_cache(layer), whole.value_cache(layer)),
        ):
            torch.testing.assert_close(part, all_heads[:, :, heads], atol=2e-3, rtol=1e-3)
    assert (cache.num_blocks, cache.num_cpu_blocks) == (whole.num_blocks, whole.num_cpu_blocks)
    assert cache.num_bytes * whole.num_kv_heads == whole.num_bytes * cache.num_kv_heads


def test_block_tables_are_the_same_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    to_bytes = PlanSender.to_bytes

    def note(self: PlanSender, plan: Any, moves_only: bool = False, token_ids: Any = None) -> bytes:
        groups = [] if moves_only else plan.groups
        sent.append([(np.copy(rows.block_tables), np.copy(rows.slot_mapping)) for rows in groups])
        return to_bytes(self, plan, moves_only, token_ids)

    monkeypatch.setattr(PlanSender, "to_bytes", note)
    peers = ThreadPeers(3)
    with engine_on(peers, tiny_model("gemma3")) as engine:
        engine.generate(mixed_prompts(LENGTHS), SamplingParams(max_tokens=NUM_TOKENS))
    assert len(sent) > 10
    for follower in peers.followers:
        assert len(follower.steps) == len(sent)
        for (_, batch), groups in zip(follower.steps, sent, strict=True):
            assert batch is not None
            for rows, (tables, slots) in zip(batch.shape.groups, groups, strict=True):
                assert rows.block_tables.tolist() == tables.tolist()
                assert rows.slot_mapping.tolist() == slots.tolist()


def test_two_ranks_run_beams_and_gather_columns() -> None:
    model = tiny_model("llama-gqa")
    prompts = mixed_prompts((20, 33))
    alone = Engine(model, num_blocks=80, max_num_seqs=8).beam_search_batch(prompts, 3, 8)
    with engine_on(ThreadPeers(2), model, max_num_seqs=8) as engine:
        found = engine.beam_search_batch(prompts, 3, 8)
    assert [[beam.token_ids for beam in beams] for beams in found] == [
        [beam.token_ids for beam in beams] for beams in alone
    ]


def test_a_pool_of_default_size_fits_every_rank() -> None:
    peers = ThreadPeers(2)
    with engine_on(peers, tiny_model("smollm2"), num_blocks=None, block_size=64) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        assert engine.kv_cache.num_blocks == peers.followers[0].kv_cache.num_blocks
        assert engine.memory.kv_bytes == engine.kv_cache.num_bytes <= 2**30
        assert peers.followers[0].kv_cache.num_bytes * 2 == engine.kv_cache.num_bytes


# ---------------------------------------------------------------- models that are not split


@pytest.mark.parametrize(
    ("shape", "size", "error", "message"),
    [
        (
            "gpt-oss",
            2,
            ModelError,
            "GptOssForCausalLM cannot be split over ranks: its config has no base_model_tp_plan",
        ),
        (
            "llama-gqa",
            7,
            InvalidArgument,
            "number of ranks is 7; it must be at most the number of attention heads, 6",
        ),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(
    shape: str, size: int, error: type[BlockyardError], message: str
) -> None:
    """By rank 0's own error, or another rank's if that comes first: all of them check the same model."""
    peers = ThreadPeers(size)
    with pytest.raises((error, RankError), match=message), engine_on(peers, tiny_model(shape)):
        pass
    peers.require_ended()


def test_a_layer_that_is_not_plain_is_refused() -> None:
    class OwnLinear(torch.nn.Linear):
        pass

    model = tiny_model("llama-gqa")
    model.model.layers[1].mlp.up_proj.__class__ = OwnLinear
    peers = ThreadPeers(2)
    message = "layers.1.mlp.up_proj is a OwnLinear; only plain linear layers can be split"
    with pytest.raises((ModelError, RankError), match=message), engine_on(peers, model):
        pass
    peers.require_ended()


def test_a_wrong_plan_is_found_before_anything_is_served() -> None:
    model = tiny_model("llama-gqa")
    plan = dict(model.config.base_model_tp_plan)
    plan["layers.*.mlp.down_proj"] = "rowwise_split_input"  # it is given its own inputs alone, and takes a part of them
    model.config.base_model_tp_plan = plan
    peers = ThreadPeers(2)
    with pytest.raises((ModelError, RankError)), engine_on(peers, model):
        pass
    model.config.base_model_tp_plan = {"layers.*.mlp.gate_proj": "colwise_gather_output", "layers.*.mlp.down_proj": ""}
    with engine_on(ThreadPeers(2), model):
        pass


def test_sums_that_are_left_out_are_found_by_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group.ProcessGroup, "all_reduce", lambda _, tensor: tensor)
    both = (ModelError, RankError)  # whichever rank compares first
    with pytest.raises(both, match="computes other logits"), engine_on(ThreadPeers(2), tiny_model("llama-gqa")):
        pass


@pytest.mark.parametrize("size", [0, -1, True, "2", 1.5, 2**40])
def test_a_number_of_ranks_outside_its_limits_is_refused(size: Any) -> None:
    with pytest.raises(InvalidArgument, match="tensor_parallel is"):
        Engine(tiny_model("llama-gqa"), tensor_parallel=size)


# ---------------------------------------------------------------- ranks that disagree


def other_model(change: str) -> Any:
    if change == "layers":
        return tiny_model("llama-gqa", num_hidden_layers=2)
    model = tiny_model("llama-gqa")
    if change == "dtype":
        return model.bfloat16()
    if change == "weights":
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(1.001)
    if change == "config":
        model.config.rms_norm_eps = 0.5
    if change == "class":
        return tiny_model("qwen2")
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("layers", "rank 2 has num_layers 2; rank 0 has 3, and they must be equal"),
        ("dtype", "rank 2 has dtype 'bfloat16'; rank 0 has 'float32'"),
        ("weights", r"rank 2 has weights \(a sample's digest\) '[0-9a-f]+'; rank 0 has"),
        ("config", "rank 2 has config.rms_norm_eps 0.5; rank 0 has 1e-06"),
        ("class", "rank 2 has model 'Qwen2ForCausalLM'; rank 0 has 'LlamaForCausalLM'"),
        ("block_size", "rank 2 has block_size 32; rank 0 has 16"),
    ],
)
def test_ranks_that_disagree_are_refused_with_both_values(change: str, message: str) -> None:
    models = [other_model("nothing"), other_model(change)]
    peers = ThreadPeers(3, models, [16, 32] if change == "block_size" else None)
    with pytest.raises(RankError, match=message), engine_on(peers, tiny_model("llama-gqa")):
        pass
    peers.require_ended()


def test_another_version_is_refused_with_both_values() -> None:
    own = {"blockyard": "0.1.0", "config": {"a": 1}}
    joining.require_same(1, own, own)
    with pytest.raises(RankError, match=r"blockyard '0\.2\.0'; rank 0 has '0\.1\.0', and they must be equal"):
        joining.require_same(1, own | {"blockyard": "0.2.0"}, own)
    with pytest.raises(RankError, match=r"rank 1 has config\.b 2; rank 0 has None"):
        joining.require_same(1, own | {"config": {"a": 1, "b": 2}}, own)


# ---------------------------------------------------------------- ranks that break


def run_until_lost(peers: ThreadPeers, engine: Engine) -> str:
    told: list[str] = []
    engine.on_rank_failure(told.append)
    with pytest.raises(RankError) as caught:
        engine.generate(mixed_prompts(LENGTHS), SamplingParams(max_tokens=NUM_TOKENS))
    peers.require_ended()
    assert engine.rank_failure == str(caught.value)
    assert told == [engine.rank_failure]
    engine.on_rank_failure(told.append)
    assert told == [engine.rank_failure] * 2, "who asks later is told at once"
    engine.cache.check()
    assert engine.cache.num_used_blocks == 0
    with pytest.raises(RankError, match=str(caught.value)[:20]):
        engine.generate([[1, 2, 3]])
    assert not engine.has_unfinished
    return str(caught.value)


@pytest.mark.parametrize("step", [0, 3])
def test_a_rank_that_fails_ends_all_with_its_sentence(step: int) -> None:
    peers = ThreadPeers(3)

    def fail(number: int) -> None:
        if number == step:
            raise RuntimeError("the device is on fire")

    with engine_on(peers, tiny_model("llama-gqa")) as engine:
        peers.followers[1].before_step = fail
        why = run_until_lost(peers, engine)
    assert why == "rank 2 failed: RuntimeError: the device is on fire"


def test_a_rank_that_fails_without_a_reason_ends_all() -> None:
    peers = ThreadPeers(3)
    with engine_on(peers, tiny_model("llama-gqa")) as engine:
        follower = peers.followers[1]
        follower.before_step = lambda _: follower._connection.send_bytes(pack("failed"))
        why = run_until_lost(peers, engine)
    assert why == "rank 2 failed without a reason"


def test_a_close_without_a_reason_ends_a_rank_normally() -> None:
    ends = [SocketConnection(each) for each in socket.socketpair()]
    told: list[str] = []
    inbox = Inbox(ends[1], told.append)
    ends[0].send_bytes(pack("close"))
    with pytest.raises(SystemExit):
        inbox.expect("step")
    assert told == []
    for end in ends:
        end.close()


def test_unidentified_connections_delay_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that send nothing, half of a secret or a wrong one, before and between the ranks."""
    monkeypatch.setattr(peers_module, "_GREETING_SECONDS", 1000.0)
    monkeypatch.setattr(peers_module, "_MAX_UNIDENTIFIED", 3)
    token = bytes(range(peers_module._TOKEN_BYTES))
    met: list[Peer] = []
    strangers: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        meeting = threading.Thread(target=lambda: met.extend(peers_module._greeted(server, token, 3)), daemon=True)
        meeting.start()

        def connect(*said: bytes) -> socket.socket:
            strangers.append(socket.create_connection(server.getsockname()))
            for part in said:
                strangers[-1].sendall(part)
            return strangers[-1]

        def rank(number: int) -> bytes:
            return number.to_bytes(peers_module._RANK_BYTES, "little")

        for said in (b"", token[:5], bytes(len(token)) + rank(1), token + rank(7), b"", b""):
            connect(said)
        connect(token, rank(2))
        connect(b"")
        connect(token[:9]).sendall(token[9:] + rank(1))
        meeting.join(PATIENCE_SECONDS)
        assert not meeting.is_alive()
    assert [peer.rank for peer in met] == [1, 2]
    for stranger in strangers:
        stranger.close()
    for peer in met:
        peer.connection.close()


def test_a_rank_that_diverged_is_found_at_the_step_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = ThreadPeers(3)
    with engine_on(peers, tiny_model("llama-gqa")) as engine:
        read = PlanReceiver.from_bytes

        def read_another(receiver: PlanReceiver, message: Any) -> Any:
            if receiver.num_steps == 3 and threading.current_thread() is peers.threads[1]:
                message = dataclasses.replace(message, before=bytes(16))
            return read(receiver, message)

        monkeypatch.setattr(PlanReceiver, "from_bytes", read_another)
        why = run_until_lost(peers, engine)
    assert why.startswith("rank 2 diverged: it is at step 3 with digest ")
    assert why.endswith(f"; the plan is step 4 and continues step 3 with digest {bytes(16).hex()}")


def test_a_step_that_was_damaged_on_its_way_ends_all_with_the_rank_s_sentence() -> None:
    peers = ThreadPeers(3)
    with engine_on(peers, tiny_model("llama-gqa")) as engine:
        connection = peers.followers[1]._connection
        receive = connection.recv_bytes

        def receive_another() -> bytearray:
            data = receive()
            data[-1] ^= 1
            return data

        connection.recv_bytes = receive_another  # type: ignore[method-assign]
        why = run_until_lost(peers, engine)
    assert re.fullmatch(
        "rank 2 got a message that cannot be read: message has digest [0-9a-f]{32}, but its bytes have "
        "[0-9a-f]{32}: it was damaged",
        why,
    )


def test_logits_that_are_not_finite_end_no_rank() -> None:
    """Failures after the forward pass concern only rank 0."""
    peers = ThreadPeers(2)
    model = tiny_model("llama-gqa")
    with engine_on(peers, model) as engine:
        head = engine._patched.model.lm_head
        spoiling = head.register_forward_hook(lambda *call: call[2] * float("nan"))
        with pytest.raises(ModelError):
            engine.generate([[1, 2, 3]])
        spoiling.remove()
        assert engine.rank_failure is None
        expected = reference_tokens(model, [[1, 2, 3]], NUM_TOKENS)
        assert tokens_of(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=NUM_TOKENS))) == expected


# ---------------------------------------------------------------- a step's message

CONFIG = CacheConfig(20, 4, max_num_seqs=4, max_model_len=32, cpu=CPUPoolConfig(num_blocks=8))


def messages() -> list[tuple[bytes, Any, ForwardBatch | None]]:
    """Return a cache's steps as rank 0 sends them, and the expected plans: a fork that copies, swaps, drafts."""
    cache, sender = KVCacheManager(CONFIG), PlanSender(CONFIG, b"start")
    sent: list[tuple[bytes, Any, ForwardBatch | None]] = []

    def send(plan: Any, batch: ForwardBatch | None) -> None:
        token_ids = None if batch is None else batch.token_ids
        sent.append((sender.to_bytes(plan, batch is None, token_ids), _pairs(plan), batch))

    first = cache.allocate([1, 2, 3, 4, 5, 6])
    plan = cache.reserve([first])
    send(plan, ForwardBatch.of(plan, CONFIG.layer_groups, [1]))
    cache.commit([first], plan.num_scheduled, [7])
    (second,) = cache.fork(first, 1)
    plan = cache.reserve([first, second], 3)  # two drafts each
    send(plan, ForwardBatch.of(plan, CONFIG.layer_groups, [3, 3], [50, 51, 60, 61]))
    cache.commit([first, second], [1, 1], [8, 9])
    send(cache.swap_out([second]), None)
    send(cache.swap_in([second]), None)
    plan = cache.reserve([first, second])
    send(plan, ForwardBatch.of(plan, CONFIG.layer_groups, [1, 1]))
    return sent


def _pairs(plan: Any) -> list[Any]:
    return [np.asarray(pairs).tolist() for pairs in (plan.swap_outs, plan.swap_ins, getattr(plan, "copies", ()))]


def read(receiver: PlanReceiver, data: bytes) -> Any:
    return read_plan(receiver, Message.of(data))


def test_a_message_reads_as_it_was_written() -> None:
    receiver = PlanReceiver(CONFIG, "it", b"start")
    num_moves = 0
    for message, expected_moves, expected in messages():
        plan = read(receiver, message)
        assert [_pairs(lists) for lists in move_lists(plan)] == [expected_moves] * any(expected_moves)
        num_moves += sum(map(len, expected_moves))
        assert (isinstance(plan, StepPlan) and len(plan.rows) > 0) == (expected is not None)
        if expected is None:
            continue
        batch = ForwardBatch.of(plan, CONFIG.layer_groups, [0] * len(plan.rows))
        assert batch.token_ids.tolist() == expected.token_ids.tolist()
        assert batch.logits_indices.tolist() == []
        assert batch.positions.tolist() == expected.positions.tolist()
        assert batch.shape.num_scheduled.tolist() == expected.shape.num_scheduled.tolist()
        for rows, others in zip(batch.shape.groups, expected.shape.groups, strict=True):
            assert rows.slot_mapping.tolist() == others.slot_mapping.tolist()
            assert rows.block_tables.tolist() == others.block_tables.tolist()
    assert num_moves > 3


def test_any_changed_byte_is_found() -> None:
    message = messages()[0][0]
    for place in range(len(message)):
        changed = bytearray(message)
        changed[place] ^= 1 << place % 8
        with pytest.raises((InvalidArgument, PeerMismatch), match=r"^(message|protocol version)"):
            Message.of(changed)
    with pytest.raises(RankError, match=r"^diverged: it is at step 0 with digest .* the plan is step 1 and continues"):
        read(PlanReceiver(CONFIG, "it", b"another start"), message)


def test_missed_and_repeated_messages_are_detected() -> None:
    sent = [message for message, _, _ in messages()]
    receiver = PlanReceiver(CONFIG, "it", b"start")
    read(receiver, sent[0])
    with pytest.raises(RankError, match=r"diverged: it is at step 1 with digest .* the plan is step 3"):
        read(receiver, sent[2])
    with pytest.raises(RankError, match=r"diverged: it is at step 1 with digest .* the plan is step 1"):
        read(receiver, sent[0])
    other = CacheConfig(20, 4, max_num_seqs=5, max_model_len=32, cpu=CPUPoolConfig(num_blocks=8))
    with pytest.raises(RankError, match=r"^got step 1, which cannot be carried out: message is a plan"):
        read(PlanReceiver(other, "it", b"start"), sent[0])


def test_a_sharded_cache_has_only_its_own_heads() -> None:
    cache = KVCache(4, 16, 2, 3, 8, shard=Shard(0, 2))
    assert (cache.num_kv_heads, cache.kv_heads) == (2, range(2))
    assert cache.key_cache(0).shape == (4, 16, 2, 8)
    assert KVCache(4, 16, 2, 3, 8, shard=Shard(1, 2)).bytes_per_block * 2 == cache.bytes_per_block
    assert KVCache(4, 16, 2, 3, 8).kv_heads == range(3)
    with pytest.raises(InvalidArgument, match=r"shard is \(0, 2\); it must be a Shard"):
        KVCache(4, 16, 2, 3, 8, shard=(0, 2))  # type: ignore[arg-type]


def test_a_copied_model_shares_unsplit_weights() -> None:
    model = tiny_model("llama-gqa")
    with engine_on(ThreadPeers(2), model) as engine:
        own = engine._patched.model
        assert own is not model
        assert own.lm_head.weight is model.lm_head.weight
        assert own.model.layers[0].mlp.up_proj.weight.shape == (48, 48)
        assert own.model.layers[0].mlp.down_proj.weight.shape == (48, 48)
        assert own.model.layers[0].self_attn.o_proj.weight.shape == (48, 24)
        assert copy.copy(own.config) is not model.config
