"""Arithmetic of context parallelism: every token in one slot of one rank, and the merge of partial attention."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from blockyard import CacheConfig, InvalidArgument, KVCacheManager, LayerGroup
from blockyard.sizing import KVCacheSpec
from blockyard.storage import ContextShard
from blockyard_engine.attention.context import merge, partial_attention
from blockyard_engine.attention.softmax import Extras, softmax_attention

SHAPES = [(1, 1, 4), (2, 1, 2), (2, 4, 8), (3, 1, 1), (3, 2, 4), (4, 16, 16), (5, 3, 6)]


@pytest.mark.parametrize(("size", "interleave", "local"), SHAPES)
def test_slots_are_a_bijection(size: int, interleave: int, local: int) -> None:
    """Over random block tables, each of the manager's slots is one slot of one rank, and no slot is unused."""
    group = LayerGroup(local * size, shards=size, interleave=interleave)
    slots = np.arange(10 * group.block_size)
    seen = []
    for rank in range(size):
        shard = ContextShard(rank, size, interleave)
        own = slots[shard.is_own(slots)]
        mine = shard.local_slots(own)
        assert sorted(mine.tolist()) == list(range(10 * local)), "a rank's slots are dense"
        assert (mine // local == own // group.block_size).all(), "a block has one id on all ranks"
        seen += own.tolist()
    assert sorted(seen) == slots.tolist()


@pytest.mark.parametrize(("size", "interleave", "local"), SHAPES)
def test_a_sequences_tokens_are_dense_on_each_rank(size: int, interleave: int, local: int) -> None:
    group = LayerGroup(local * size, shards=size, interleave=interleave)
    config = CacheConfig(64, group.block_size, max_num_seqs=2, max_model_len=16 * group.block_size)
    cache = KVCacheManager(config)
    for num_tokens in range(1, 4 * group.block_size + 2):
        seq = cache.allocate(list(range(num_tokens)))
        plan = cache.reserve([seq])
        positions = np.arange(num_tokens)
        table = plan.block_tables[0]
        total = 0
        for rank in range(size):
            shard = ContextShard(rank, size, interleave)
            own = positions[shard.is_own(positions)]
            count = len(own)
            total += count
            assert own.tolist() == [i for i in range(num_tokens) if i // interleave % size == rank]
            assert count == shard.num_local(np.array([num_tokens]))[0]
            assert shard.positions(count).tolist() == own.tolist()
            slots = shard.local_slots(plan.slot_mapping[shard.is_own(plan.slot_mapping)])
            # The rank's own table and block size find its tokens one after another.
            assert slots.tolist() == [int(table[place // local]) * local + place % local for place in range(count)]
        assert total == num_tokens
        cache.free(seq)
    cache.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 16, "shards": 3}, "block_size is 16; it must be a multiple of shards . interleave, 3 . 1"),
        ({"block_size": 16, "shards": 2, "interleave": 3}, "must be a multiple of shards . interleave, 2 . 3"),
        ({"shards": 0}, "shards is 0"),
        ({"interleave": 0}, "interleave is 0"),
    ],
)
def test_a_group_that_cannot_be_shared_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        LayerGroup(**options)


def test_a_ranks_sizes_are_those_of_its_shard() -> None:
    whole = KVCacheSpec.uniform(4, 2, 8, block_size=16)
    shared = KVCacheSpec(whole.layers, 16, whole.dtype, context_parallel_size=4, interleave=2)
    assert shared.bytes_per_block == whole.bytes_per_block, "of a rank"
    assert shared.cache_config(10).block_size == 64
    assert shared.groups == (LayerGroup(64, name="full", shards=4, interleave=2, token_bytes=whole.bytes_per_token),)
    assert shared.cache_config(10).block_bytes == whole.bytes_per_block
    assert shared.sequence_blocks(640) * 4 == whole.sequence_blocks(640)
    asked = (spec.max_concurrent_sequences(640, num_blocks=101) for spec in (whole, shared))
    assert list(asked) == [2, 10]
    with pytest.raises(InvalidArgument, match=r"must be a multiple of shards \* interleave"):
        KVCacheSpec(whole.layers, 16, whole.dtype, context_parallel_size=2, interleave=3)


@pytest.mark.parametrize("seed", range(12))
def test_merged_parts_are_the_attention_over_all_keys(seed: int) -> None:
    """Any division of the keys, empty parts included; caps, sinks and windows."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    num_keys, num_new, num_parts = int(rng.integers(1, 40)), int(rng.integers(1, 5)), int(rng.integers(1, 6))
    num_new = min(num_new, num_keys)
    query = torch.randn(1, 2, 3, num_new, 8, generator=generator)
    key, value = (torch.randn(1, num_keys, 2, size, generator=generator) for size in (8, 5))
    positions = np.arange(num_keys - num_new, num_keys)[:, None]
    hidden = np.arange(num_keys) > positions
    if seed % 3 == 1:
        hidden |= np.arange(num_keys) <= positions - 7
    sinks = torch.randn(6, generator=generator) if seed % 2 else None
    extras = Extras(4.0 if seed % 4 == 1 else None, sinks)
    mask = torch.zeros(hidden.shape).masked_fill_(torch.from_numpy(hidden), float("-inf"))
    expected = softmax_attention(query, key, value, mask, None, extras)
    owner = rng.integers(0, num_parts, num_keys)
    outputs, sums = [], []
    for part in range(num_parts):
        mine = torch.from_numpy(np.flatnonzero(owner == part))
        own = Extras(extras.softcap, sinks if part == 0 else None)
        found = partial_attention(
            query, key[:, mine], value[:, mine], torch.from_numpy(hidden)[None, :, mine], None, own
        )
        outputs.append(found[0])
        sums.append(found[1])
    torch.testing.assert_close(merge(torch.stack(outputs), torch.stack(sums)), expected, atol=1e-5, rtol=1e-5)
