"""The handshake: compatible sides, and invalid messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blockyard import InvalidArgument, LayerGroup, StateSpec
from blockyard.wire.message import VERSION
from blockyard_engine.parallel import (
    HandoffError,
    HandoffReceiver,
    HandoffSender,
    HeadShards,
    Offer,
    OfferId,
    PeerInfo,
    PeerMismatch,
)

from ..support.handoff_pair import Pair, side

STATES = {"groups": (LayerGroup(4, token_bytes=8), StateSpec(state_bytes=100, checkpoint_every=4))}


def test_sides_whose_states_differ_are_refused_with_both_values() -> None:
    cache, peer = side(config=STATES, state_tensors=("float32 [5]", "int8 [80]"))
    receiver = HandoffReceiver(cache, peer, 10, lambda plan: None)
    receiver.connect(PeerInfo.from_bytes(peer.to_bytes()))
    for fields, text in (
        ({}, "state_bytes is 100 here, 0 at the peer"),
        ({"config": STATES}, "the number of state_tensors is 2 here, 0 at the peer"),
        (
            {"config": STATES, "state_tensors": ("float32 [5]", "int8 [8, 10]")},
            r"state_tensors\[1\] is 'int8 \[80\]' here, 'int8 \[8, 10\]' at the peer",
        ),
    ):
        with pytest.raises(PeerMismatch, match=text):
            receiver.connect(side(**fields)[1])


def test_a_side_with_states_has_one_rank() -> None:
    cache, peer = side(config=STATES)
    with pytest.raises(InvalidArgument, match="on_plan is None; give a function that moves blocks"):
        HandoffReceiver(cache, peer, ttl=30)
    with pytest.raises(InvalidArgument, match="peer has state_bytes 0; it must be that of the cache, 100"):
        HandoffSender(cache, side()[1], ttl=30)
    for fields, text in (
        ({"config": STATES, "shards": HeadShards.even(2, 2)}, "shards has 2 ranks; a side with states must have 1"),
        ({"state_tensors": ("float32 [5]",)}, "state_bytes is 0; it must be the bytes of the 1 state_tensors"),
        ({"config": STATES, "state_tensors": 5}, "state_tensors is 5; it must be a tuple"),
        ({"config": STATES, "state_tensors": (5,)}, "a tensor of state_tensors is 5"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            side(**fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"dtype": "bfloat16"}, "dtype is 'float32' here, 'bfloat16' at the peer"),
        ({"num_layers": 3}, "num_layers is 2 here, 3 at the peer"),
        ({"head_size": 8}, "head_size is 4 here, 8 at the peer"),
        ({"value_size": 8}, "value_size is 4 here, 8 at the peer"),
        ({"shards": HeadShards.even(4)}, "num_kv_heads is 2 here, 4 at the peer"),
        ({"config": {"groups": (LayerGroup(4, 8),)}}, "sliding_window of group 0 is 0 here, 8 at the peer"),
        (
            {"config": {"groups": (LayerGroup(4), LayerGroup(4))}},
            r"layer_groups is \(\(0, 1\),\) here, \(\(0,\), \(1,\)\) at the peer",
        ),
    ],
)
def test_sides_that_differ_are_refused_with_both_values(pair: Pair, fields: dict[str, Any], text: str) -> None:
    other = PeerInfo.from_bytes(side(**fields)[1].to_bytes())
    with pytest.raises(PeerMismatch, match=text):
        pair.receiver.connect(other)
    assert pair.receiver.accept(pair.offer(), 0), "the sender that was known still is"


def test_block_sizes_layouts_and_shards_may_differ(pair: Pair) -> None:
    pair.receiver.connect(side("third", config={"block_size": 16}, layout="HND", shards=HeadShards.even(2, 2))[1])


def test_another_version_is_refused_with_both() -> None:
    message = bytearray(side()[1].to_bytes())
    message[4] = 9
    with pytest.raises(PeerMismatch, match=f"protocol version is 9 at the peer, {VERSION} here"):
        PeerInfo.from_bytes(bytes(message))


def test_offers_of_unknown_senders_are_refused(pair: Pair) -> None:
    offer = pair.offer()
    stranger = Offer(OfferId("nobody", 1, 1), offer.token_ids, offer.num_computed, offer.tables)
    with pytest.raises(PeerMismatch, match="which is not connected"):
        pair.receiver.accept(stranger, 0)
    twice = Offer(offer.id, offer.token_ids, offer.num_computed, offer.tables * 2)
    with pytest.raises(PeerMismatch, match="2 tables; 'prefill' has 1 groups"):
        pair.receiver.accept(twice, 0)
    short = Offer(offer.id, offer.token_ids, offer.num_computed, (offer.tables[0][:3],))
    with pytest.raises(HandoffError, match="token 36 is not in one of them"):
        pair.receiver.accept(short, 0)
    assert pair.decode.num_used_blocks == 0
    for number, text in ((OfferId("prefill", 1, 99), "has number 99; the last offer has 1"), ((1, 2), "is a tuple")):
        with pytest.raises(InvalidArgument, match=text):
            pair.sender.require_held(number, 0)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="offer_id is from 'other'"):
        pair.sender.release(OfferId("other", 1, 1))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"id": (1, 2, 3)}, "id is"),
        ({"token_ids": [1, 2]}, "token_ids is"),
        ({"token_ids": np.array([[1]], np.int32)}, "token_ids is"),
        ({"token_ids": np.array([-1, 2], np.int32)}, "token_ids has -1"),
        ({"token_ids": np.array([], np.int32)}, "the tokens of an offer is 0"),
        ({"num_computed": 0}, "num_computed is 0"),
        ({"num_computed": 3}, "num_computed is 3"),
        ({"tables": []}, "tables is"),
        ({"tables": ()}, "the layer groups of an offer is 0"),
        ({"tables": (np.array([1.0]),)}, "a table is"),
        ({"extra_keys": 5}, "extra_keys is 5"),
        ({"checkpoint_tokens": 2}, "checkpoint_tokens is 2; it must be from 0 to 1"),
        ({"checkpoint_tokens": -1}, "checkpoint_tokens is -1"),
    ],
)
def test_invalid_offers_are_refused(fields: dict[str, Any], text: str) -> None:
    tokens, table = np.array([1, 2], np.int32), np.array([1], np.int32)
    whole = {"id": OfferId("a", 1, 1), "token_ids": tokens, "num_computed": 2, "tables": (table,), "extra_keys": ()}
    Offer(**whole)
    with pytest.raises(InvalidArgument, match=text):
        Offer(**{**whole, **fields})


def test_bytes_that_are_not_a_message_are_refused() -> None:
    pair = Pair()
    offer = pair.offer().to_bytes()
    refused = (InvalidArgument, PeerMismatch)
    for end in range(0, len(offer), 3):
        with pytest.raises(refused):
            Offer.from_bytes(offer[:end])
    for place in range(len(offer)):
        for value in (0, 255, offer[place] ^ 1, ord("]"), ord("-")):
            changed = bytearray(offer)
            changed[place] = value
            try:
                Offer.from_bytes(bytes(changed))
            except refused:
                continue
    peer = pair.sender.peer.to_bytes()
    for place in range(12, len(peer)):
        for value in (0, 255, ord("]"), ord("-"), ord("9"), ord('"')):
            changed = bytearray(peer)
            changed[place] = value
            try:
                PeerInfo.from_bytes(bytes(changed))
            except refused:
                continue
    for junk in (None, 5, "text", b"", b"BYHO", memoryview(b"x" * 100), peer):
        with pytest.raises(refused):
            Offer.from_bytes(junk)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": ""}, "name is ''"),
        ({"incarnation": -1}, "incarnation is -1"),
        ({"layout": "DNH"}, "layout is 'DNH'"),
        ({"shards": 2}, "shards is 2"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"layer_groups": ((0,),)}, "layer_groups is"),
        ({"layer_groups": 3}, "layer_groups is 3"),
    ],
)
def test_bad_peer_descriptions_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        side(**{"name": "prefill", **fields})


def test_sides_of_another_cache_are_refused() -> None:
    cache, _ = side()
    _, other = side(config={"block_size": 8})
    for make in (HandoffSender, HandoffReceiver):
        with pytest.raises(InvalidArgument, match="peer has groups"):
            make(cache, other, 1)
        with pytest.raises(InvalidArgument, match="cache is"):
            make(None, other, 1)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="peer is"):
            make(cache, "prefill", 1)  # type: ignore[arg-type]
