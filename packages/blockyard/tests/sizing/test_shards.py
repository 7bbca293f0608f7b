"""Which heads each rank of a tensor-parallel model has: every query head on one rank, beside the KV head it reads."""

from __future__ import annotations

import pytest

from blockyard import InvalidArgument
from blockyard.sizing import AttentionLayer, KVCacheSpec, Shard


def shards(size: int) -> list[Shard]:
    return [Shard(rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", range(1, 17))
def test_parts_are_a_bijection(size: int) -> None:
    for number in range(100):
        parts = [shard.part(number) for shard in shards(size)]
        assert [item for part in parts for item in part] == list(range(number))
        lengths = [len(part) for part in parts]
        assert max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("num_kv_heads", range(1, 13))
@pytest.mark.parametrize("group", [1, 2, 3, 7, 8])
def test_query_heads_are_a_bijection_and_go_with_their_kv_heads(group: int, num_kv_heads: int) -> None:
    num_heads = group * num_kv_heads
    for size in range(1, num_heads + 1):
        queries = [shard.query_heads(num_heads, num_kv_heads) for shard in shards(size)]
        kept = [shard.kv_heads(num_kv_heads) for shard in shards(size)]
        assert [head for part in queries for head in part] == list(range(num_heads))
        for part, heads in zip(queries, kept, strict=True):
            assert {head // group for head in part} == set(heads)
            # Attention reads as many query heads for each KV head of a rank.
            assert len(part) % len(heads) == 0
            assert [head // group for head in part] == [
                heads.start + place // (len(part) // len(heads)) for place in range(len(part))
            ]
        assert {head for heads in kept for head in heads} == set(range(num_kv_heads))
        if size <= num_kv_heads:
            assert sum(map(len, kept)) == num_kv_heads, "no head is kept twice"
        else:
            assert all(len(heads) == 1 for heads in kept)


def test_fewer_query_heads_than_ranks_is_refused() -> None:
    with pytest.raises(
        InvalidArgument, match="number of ranks is 5; it must be at most the number of attention heads, 4"
    ):
        Shard(0, 5).query_heads(4, 2)
    with pytest.raises(InvalidArgument, match="num_heads is 7; it must be a multiple of num_kv_heads, 2"):
        Shard(0, 2).query_heads(7, 2)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0), (True, 2), (0, 2.0), ("0", 2), (0, 5000)])
def test_a_shard_outside_its_limits_is_refused(rank: object, size: object) -> None:
    with pytest.raises(InvalidArgument, match=r"(rank|size) is"):
        Shard(rank, size)  # type: ignore[arg-type]


def test_bytes_of_a_block_on_each_rank() -> None:
    layers = tuple(AttentionLayer(index, 3, 64, 64) for index in range(30))
    whole = KVCacheSpec(layers, dtype="float32").bytes_per_block

    def of(rank: int, size: int) -> int:
        return KVCacheSpec(
            layers, dtype="float32", tensor_parallel_size=size, tensor_parallel_rank=rank
        ).bytes_per_block

    assert [of(rank, 2) for rank in range(2)] == [whole * 2 // 3, whole // 3]
    assert [of(rank, 3) for rank in range(3)] == [whole // 3] * 3
    assert [of(rank, 5) for rank in range(5)] == [whole // 3] * 5
    with pytest.raises(InvalidArgument, match="tensor_parallel_size is 2; it must divide num_kv_heads, 3"):
        KVCacheSpec(layers, tensor_parallel_size=2)
    with pytest.raises(InvalidArgument, match="tensor_parallel_rank is 2; it must be from 0 to 1"):
        KVCacheSpec(layers, tensor_parallel_size=2, tensor_parallel_rank=2)


def test_latent_layers_are_whole_on_every_rank() -> None:
    layers = (AttentionLayer(0, 16, 576, 0, is_latent=True),)
    whole = KVCacheSpec(layers).bytes_per_block
    for rank in range(3):
        assert KVCacheSpec(layers, tensor_parallel_size=3, tensor_parallel_rank=rank).bytes_per_block == whole
