"""Every key and value goes through real tensors to its destination: other block sizes, layouts, ranks and groups."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blockyard import InvalidArgument, LayerGroup
from blockyard.storage import KVCache
from blockyard_engine.parallel import HandoffError, HeadShards, Offer, OfferId, PeerInfo
from blockyard_engine.parallel.runs import Lane, receiving_lanes, sending_lanes
from blockyard_engine.parallel.tensors import KVPort
from blockyard_engine.parallel.transport import DistributedTransport, receive_lanes, send_lanes

from ..support.mail import Mail, new_boxes

NUM_BLOCKS = 60


class Side:
    """The ranks of one side, with a block table; index 0 of the table is never used."""

    def __init__(self, name: str, size: int, layout: str, ranks: HeadShards, seed: int, **shape: Any) -> None:
        self.groups = shape.pop("groups", ((0, 1, 2),))
        self.peer = PeerInfo(
            name, 1, tuple(LayerGroup(size) for _ in self.groups), "float32", 3, shape["head_size"], ranks,
            shape.get("value_size", 0), layout, self.groups,
        )  # fmt: skip
        draw = torch.Generator().manual_seed(seed)
        self.caches = [
            KVCache(NUM_BLOCKS, size, 3, count, layout=layout, layer_groups=self.groups, **shape)
            for _, count in ranks.ranges
        ]
        for cache in self.caches:
            cache.data.copy_(torch.randn(cache.data.shape, generator=draw))
        ids = torch.randperm(NUM_BLOCKS - 1, generator=draw).numpy() + 1
        count = len(ids) // len(self.groups)
        self.tables = [ids[number * count :][:count].astype(np.int32) for number in range(len(self.groups))]

    def token(self, layer: int, head: int, position: int) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Return a head of a token on every rank that has it."""
        found = []
        for rank, (first, count) in enumerate(self.peer.shards.ranges):
            if first <= head < first + count:
                cache = self.caches[rank]
                block, offset = divmod(position, cache.block_size)
                block = int(self.tables[cache.places.group(layer)][block])
                place = (block, offset, head - first) if cache.layout == "NHD" else (block, head - first, offset)
                found.append((rank, cache.key_cache(layer)[place], cache.value_cache(layer)[place]))
        return found


def move(
    one: Side, two: Side, start: int, stop: int, checked: bool = False, spoil: bool = False, size: int = 4096
) -> None:
    """Send and receive on every rank: the sender's ranks start at 0, the receiver's at 100."""
    boxes = new_boxes()
    offer = Offer(OfferId("one", 1, 1), np.arange(stop, dtype=np.int32), stop, tuple(one.tables))
    to_ranks, from_ranks = [100 + rank for rank in range(len(two.caches))], list(range(len(one.caches)))
    for rank, cache in enumerate(one.caches):
        lanes = sending_lanes(offer, start, one.peer, two.peer, rank)
        send_lanes(Mail(boxes, rank), KVPort(cache, size), lanes, to_ranks, checked)
    for rank, cache in enumerate(two.caches):
        mail = Mail(boxes, 100 + rank)
        mail.spoil = spoil
        lanes = receiving_lanes(two.tables, start, stop, two.peer, one.peer, rank)
        receive_lanes(mail, KVPort(cache, size), lanes, from_ranks, checked)
    assert all(box.empty() for box in boxes.values()), "every message that was sent was taken"


def require_moved(one: Side, two: Side, start: int, stop: int, before: list[torch.Tensor]) -> None:
    """Check that all moved elements equal the sender's, and that nothing else has changed."""
    num_moved = [0 for _ in two.caches]
    was = Side.__new__(Side)
    was.__dict__ = {
        **two.__dict__,
        "caches": [as_it_was(cache, data) for cache, data in zip(two.caches, before, strict=True)],
    }
    for layer in range(3):
        for head in range(one.peer.num_kv_heads):
            for position in range(start, stop):
                _, key, value = one.token(layer, head, position)[0]
                for new, old in zip(two.token(layer, head, position), was.token(layer, head, position), strict=True):
                    assert torch.equal(new[1], key)
                    assert torch.equal(new[2], value)
                    new[1].copy_(old[1])
                    new[2].copy_(old[2])
                    num_moved[new[0]] += len(key) + len(value)
    for cache, data, moved in zip(two.caches, before, num_moved, strict=True):
        assert torch.equal(cache.data, data)
        assert moved == cache.num_kv_heads * (cache.head_size + cache.value_size) * 3 * (stop - start)


def as_it_was(cache: KVCache, data: torch.Tensor) -> KVCache:
    """Return a copy of the tensors."""
    made = KVCache.__new__(KVCache)
    made.__dict__ = {**cache.__dict__, "data": data}
    return made


@pytest.mark.parametrize("span", [(0, 37), (5, 37), (8, 32), (16, 17), (3, 3)])
@pytest.mark.parametrize(
    ("from_size", "to_size", "from_layout", "to_layout", "from_ranks", "to_ranks", "shape"),
    [
        (4, 4, "NHD", "NHD", 1, 1, {}),
        (4, 4, "HND", "HND", 1, 1, {}),
        (4, 4, "NHD", "HND", 1, 1, {}),
        (4, 8, "NHD", "NHD", 1, 1, {}),
        (8, 3, "HND", "NHD", 2, 1, {}),
        (4, 4, "NHD", "NHD", 2, 2, {}),
        (4, 4, "NHD", "NHD", 1, 3, {}),
        (4, 4, "NHD", "NHD", 2, 3, {"value_size": 3}),
        (4, 5, "HND", "HND", 5, 2, {"value_size": 7}),
        (4, 4, "NHD", "NHD", 1, 1, {"groups": ((0, 2), (1,))}),
        (4, 2, "NHD", "HND", 2, 1, {"groups": ((1,), (0, 2))}),
    ],
)
def test_every_key_and_value_goes_to_its_place_and_nothing_else_changes(
    span: tuple[int, int], from_size: int, to_size: int, from_layout: str, to_layout: str, from_ranks: int,
    to_ranks: int, shape: dict[str, Any],
) -> None:  # fmt: skip
    shape = {"head_size": 2, **shape}
    one = Side("one", from_size, from_layout, HeadShards.even(3, from_ranks), 1, **shape)
    two = Side("two", to_size, to_layout, HeadShards.even(3, to_ranks), 2, **shape)
    before = [cache.data.clone() for cache in two.caches]
    start, stop = span
    move(one, two, start, stop, checked=True)
    require_moved(one, two, start, stop, before)


def test_blocks_in_a_row_are_sent_without_a_copy() -> None:
    cache = KVCache(2000, 16, 2, 4, 32)
    lane = Lane(0, 0, 4, 0, (np.arange(16, 16 * 1001),), (True,))
    views = [piece.view() for piece in KVPort(cache).pieces(lane)]
    assert len(views) == 2 * -(-1000 * 16384 // 2**22)
    assert all(
        view is not None and view.untyped_storage().data_ptr() == cache.data.untyped_storage().data_ptr()
        for view in views
    )
    mixed = Lane(0, 0, 4, 0, (np.arange(16, 16 * 1001)[::-1].copy().reshape(-1, 16)[:, ::-1].reshape(-1),), (True,))
    assert all(piece.view() is None for piece in KVPort(cache).pieces(mixed))


def test_small_layers_share_a_message() -> None:
    cache = KVCache(20, 16, 30, 1, 8)
    lane = Lane(0, 0, 1, 0, (np.arange(16, 16 * 5),), (True,))
    assert len(list(KVPort(cache).pieces(lane))) == 1


def test_a_damaged_message_is_detected() -> None:
    one = Side("one", 4, "NHD", HeadShards.even(3), 1, head_size=2)
    two = Side("two", 4, "NHD", HeadShards.even(3), 2, head_size=2)
    with pytest.raises(HandoffError, match="rank 0 sent bytes with checksum"):
        move(one, two, 0, 37, checked=True, spoil=True)


@pytest.mark.parametrize(
    ("lane", "text"),
    [
        (Lane(0, 2, 2, 0, (np.arange(4, 8),), (False,)), "heads 2 to 4; kv_cache has 3"),
        (Lane(0, 0, 3, 0, (np.arange(0, 4),), (True,)), "slots 0 to 3; those of kv_cache are 4 to 39"),
        (Lane(0, 0, 3, 0, (np.arange(38, 42),), (False,)), "slots 38 to 41"),
        (Lane(0, 0, 3, 0, (np.arange(4, 8), np.arange(4, 8)), (True, True)), "2 layer groups; kv_cache has 1"),
    ],
)
def test_lanes_of_other_tensors_are_refused(lane: Lane, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        list(KVPort(KVCache(10, 4, 2, 3, 2)).pieces(lane))


@pytest.mark.parametrize("size", [0, 2**31, "big", True])
def test_bad_piece_sizes_are_refused(size: Any) -> None:
    with pytest.raises(InvalidArgument, match="piece_bytes"):
        KVPort(KVCache(10, 4, 2, 3, 2), size)


def one_rank(rank: int, rendezvous: str, told: Any) -> None:
    """Ranks 0 and 1 send their heads; rank 2 receives and compares all of them."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=3)
    one = Side("one", 4, "NHD", HeadShards.even(3, 2), 1, head_size=8)
    two = Side("two", 8, "HND", HeadShards.even(3, 1), 2, head_size=8)
    transport = DistributedTransport(timeout=60.0)
    if rank < 2:
        offer = Offer(OfferId("one", 1, 1), np.arange(100, dtype=np.int32), 100, tuple(one.tables))
        lanes = sending_lanes(offer, 3, one.peer, two.peer, rank)
        send_lanes(transport, KVPort(one.caches[rank], 4096), lanes, [2], checked=True)
    else:
        before = [cache.data.clone() for cache in two.caches]
        lanes = receiving_lanes(two.tables, 3, 100, two.peer, one.peer)
        receive_lanes(transport, KVPort(two.caches[0], 4096), lanes, [0, 1], checked=True)
        require_moved(one, two, 3, 100, before)
        told.send("right")
    torch.distributed.barrier()
    os._exit(0)


def test_two_real_ranks_can_send_to_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    heard, told = context.Pipe(duplex=False)
    ranks = [context.Process(target=one_rank, args=(rank, str(tmp_path / "meet"), told)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    told.close()
    try:
        assert heard.poll(60)
        assert heard.recv() == "right"
        for rank in ranks:
            rank.join(60)
        assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join(5)
