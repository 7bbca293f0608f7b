"""The bytes on the wire: vLLM's golden ones, older forms, what is unknown, and what is hostile."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from blockyard import InvalidArgument
from blockyard.events.following.mirror import Mirror
from blockyard.events.following.stream import Trust
from blockyard.events.wire import AllBlocksCleared, Batch, BlockRemoved, BlockStored, decode_batch, encode_batch

from ..support.seeds import run_seed

#: As vLLM 0.32 encodes it: two blocks of four tokens stored, one removed, all cleared.
GOLDEN = bytes.fromhex(
    "93cb3ff8000000000000938aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf84b146b151d55111cfd43b57df56"
    "b58fb1b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473980102030405060708aa626c6f636b5f73697a6504a76c6f7261"
    "5f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66"
    "756c6c5f617474656e74696f6e84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cfd43b57df56b58fb1a66d65"
    "6469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656400"
)
FIRST, SECOND = 9561501211280363793, 15292913576410714033
STORED = BlockStored([FIRST, SECOND], None, [1, 2, 3, 4, 5, 6, 7, 8], 4, None, "GPU", None, None, 0, "full_attention")


def test_the_bytes_are_vllms() -> None:
    batch = Batch(1.5, [STORED, BlockRemoved([SECOND], "GPU", 0), AllBlocksCleared()], 0)
    assert encode_batch(batch) == GOLDEN
    assert decode_batch(GOLDEN) == batch


def test_arrays_of_older_senders_are_read() -> None:
    events = [["BlockStored", [5], None, [1, 2], 2, None, "GPU"], ["BlockRemoved", [5]], ["AllBlocksCleared"]]
    batch = decode_batch(msgspec.msgpack.encode([2.0, events]))
    assert batch.events == [
        BlockStored([5], None, [1, 2], 2, None, "GPU", None),
        BlockRemoved([5], None),
        AllBlocksCleared(),
    ]


def test_what_is_not_known_is_passed_over() -> None:
    events = [{"type": "BlockMoved", "x": [1]}, {"type": "BlockRemoved", "block_hashes": [5], "medium": None, "new": 1}]
    assert decode_batch(msgspec.msgpack.encode([2.0, events, None, 7, "more"])).events == [BlockRemoved([5], None)]


BAD: dict[str, Any] = {
    "no batch": 7,
    "no events": [1.0],
    "text for events": [1.0, "x"],
    "an event without a type": [1.0, [{"block_hashes": [1]}]],
    "a number as an event": [1.0, [3]],
    "text as hashes": [1.0, [{"type": "BlockRemoved", "block_hashes": "x", "medium": None}]],
    "no tokens": [1.0, [{"type": "BlockStored", "block_hashes": [1], "block_size": 4}]],
    "nested without end": [1.0, [{"type": "BlockStored", "block_hashes": [1], "keys": None}]],
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_message_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="payload is no batch of KV events"):
        decode_batch(msgspec.msgpack.encode(BAD[name]))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        decode_batch(b"\x91" * 100_000)


def stored(**changes: Any) -> bytes:
    event = msgspec.to_builtins(STORED) | changes
    return msgspec.msgpack.encode([1.0, [{"type": "AllBlocksCleared"}, event]])


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 0},
        {"block_size": -4},
        {"block_size": 2**40},
        {"block_size": 3},
        {"token_ids": [1, 2, 3]},
        {"token_ids": [1, 2, 3, 4, 5, 6, 7, -8]},
        {"token_ids": [1, 2, 3, 4, 5, 6, 7, 2**40]},
        {"group_idx": -1},
        {"group_idx": 1000},
        {"keys": [[["span", {"a": 1}]], []]},
        {"keys": [[]]},
        {"keys": [[5], []]},
        {"keys": [[None], []]},
        {"keys": [[["span", [["x"], {"a": 1}]]], []]},
        {"keys": [[[[1], 2], [{}]], []]},
        {"extra_keys": [[msgspec.msgpack.Ext(5, b"x")], None]},
        {"extra_keys": [["a"]]},
        {"extra_keys": [{"a": 1}, None]},
    ],
    ids=" ".join,
)
def test_a_bad_event_makes_a_worker_untrusted_and_hurts_no_other(changes: dict[str, Any]) -> None:
    mirror = Mirror(hash_seed=1)
    for worker in ("good", "bad"):
        mirror.replayed(worker, 5, stored())
        mirror.end_of_replay(worker)
    mirror.replayed("bad", 6, stored())
    mirror.live("bad", 6, stored(**changes))
    assert mirror.trust("bad") is Trust.UNTRUSTED
    assert mirror.trust("good") is Trust.LIVE
    assert mirror.match(range(1, 9))["good"].num_tokens == 8


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize("depth", [10, 300, 490, 700, 900])
@pytest.mark.parametrize("field", ["keys", "extra_keys"])
def test_keys_nested_deep_raise_nothing(field: str, depth: int) -> None:
    mirror = Mirror(hash_seed=1)
    event = msgspec.msgpack.encode(msgspec.to_builtins(STORED))
    key = msgspec.msgpack.encode(field) + b"\x92" + b"\x91" * depth + b"\x01\x90"
    event = bytes([event[0] + 1]) + event[1:] + key
    mirror.replayed("worker", 5, b"\x92\xcb" + bytes(8) + b"\x92\x91\xb0AllBlocksCleared" + event)
    mirror.end_of_replay("worker")


def test_a_kept_message_that_cannot_be_applied_leaves_no_trust() -> None:
    mirror = Mirror(hash_seed=1)
    mirror.live("worker", 6, stored(block_size=0))
    mirror.live("worker", 7, msgspec.msgpack.encode([1.0, []]))
    mirror.replayed("worker", 5, stored())
    mirror.end_of_replay("worker")
    assert mirror.trust("worker") is Trust.UNTRUSTED


def test_an_interrupt_in_the_middle_of_a_message_leaves_no_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = Mirror(hash_seed=1)
    mirror.replayed("worker", 5, stored())
    mirror.end_of_replay("worker")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mirror, "_store", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mirror.live("worker", 6, stored())
    assert mirror.trust("worker") is Trust.UNTRUSTED


def test_block_sizes_that_nobody_has_any_more_take_no_memory() -> None:
    mirror = Mirror(hash_seed=1)
    for size in range(1, 40):
        mirror.replayed("worker", size, stored(block_hashes=[1], token_ids=[1] * size, block_size=size))
        mirror.end_of_replay("worker")
    assert len(mirror._tries) == 1
    assert mirror.match([1] * 39)["worker"].num_tokens == 39


def test_mutated_messages_do_no_harm() -> None:
    draw = random.Random(run_seed())
    mirror = Mirror(hash_seed=1)
    for number in range(3000):
        payload = bytearray(GOLDEN)
        for _ in range(draw.randint(0, 4)):
            payload[draw.randrange(len(payload))] = draw.randrange(256)
        if draw.random() < 0.2:
            del payload[draw.randrange(len(payload)) :]
        mirror.replayed("worker", number, bytes(payload))
        mirror.end_of_replay("worker")
    mirror.replayed("worker", 9000, stored())
    mirror.end_of_replay("worker")
    assert mirror.match(range(1, 9))["worker"].num_tokens == 8
    assert mirror.num_holdings() == 2
