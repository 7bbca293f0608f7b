"""The bytes on the wire: vLLM's golden ones, older forms, what is unknown, and what is hostile."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from librt.vecs import vec
from mypy_extensions import i64

from blockyard import CacheConfig, InvalidArgument, LoRA
from blockyard.core.tokens import pack_tokens
from blockyard.events import wire
from blockyard.events.following.mirror import Mirror
from blockyard.events.following.stream import Trust
from blockyard.events.tables.event_writer import EventWriter, NumberWriter, WordList
from blockyard.events.tables.packed_numbers import read_names, read_tokens
from blockyard.events.tables.table_checks import check_trie
from blockyard.events.wire import (
    MOST_KEY_ITEMS,
    NO_KEYS,
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    decode_batch,
    encode_batch,
    pack_keys,
    pack_list,
    read_keys,
)
from blockyard_testing.interrupter import Interrupter
from blockyard_testing.seeds import run_seed

#: As vLLM 0.32 encodes it: two blocks of four tokens stored, one removed, all cleared.
GOLDEN = bytes.fromhex(
    "9"
    "3"
    "c"
    "b"
    "3ff8000000000000938aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf84b146b151d55111cfd43b57df56"
    "b"
    "5"
    "8"
    "f"
    "b1b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473980102030405060708aa626c6f636b5f73697a6504a76c6f7261"
    "5"
    "f"
    "6"
    "9"
    "64c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66"
    "7"
    "5"
    "6"
    "c"
    "6c5f617474656e74696f6e84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cfd43b57df56b58fb1a66d65"
    "6469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656400"
)
FIRST, SECOND = 9561501211280363793, 15292913576410714033
FIELDS = {
    "type": "BlockStored",
    "block_hashes": [FIRST, SECOND],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
    "block_size": 4,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}


def packed(items: list[Any]) -> msgspec.Raw:
    return pack_list(msgspec.msgpack.encode(items))


STORED = BlockStored(
    packed([FIRST, SECOND]), None, packed([*range(1, 9)]), 4, None, "GPU", None, NO_KEYS, 0, "full_attention"
)


def test_the_bytes_are_vllms() -> None:
    batch = Batch(1.5, [STORED, BlockRemoved(packed([SECOND]), "GPU", 0), AllBlocksCleared()], 0)
    assert encode_batch(batch) == GOLDEN
    assert decode_batch(GOLDEN) == batch


def test_lists_of_numbers_are_written_and_read_as_msgpack_does() -> None:
    draw = random.Random(run_seed())
    words, writer = WordList(), NumberWriter()
    for length in (0, 1, 15, 16, 17, 300, 70_000, 9, 500):
        bits = draw.choice([16, 32, 62])
        numbers = [draw.randrange(2 ** draw.randint(1, bits)) for _ in range(length)]
        words.clear()
        for number in numbers:
            words.add(number)
        writer.write(words.view(), words.bits)
        ours = writer.part(0, length)
        assert msgspec.msgpack.decode(ours) == list(read_names(ours)) == numbers
        names = [
            draw.choice([number, -number, 2**63 + number, number.to_bytes(draw.choice([8, 32]), "big")])
            for number in numbers
        ]
        values = [int.from_bytes(name[-8:], "big") if isinstance(name, bytes) else name for name in names]
        assert list(read_names(msgspec.msgpack.encode(names))) == [(value + 2**63) % 2**64 - 2**63 for value in values]


@pytest.mark.parametrize("block_size", [1, 3, 5, 16])
def test_tokens_are_encoded_and_decoded_like_msgpack(block_size: int) -> None:
    draw = np.random.default_rng(run_seed())
    writer = NumberWriter()
    for limit in (100, 2**31, 256, 65536, 65537, 2**31, 65536, 70_000):
        for num_blocks in (1, 7, 37):
            tokens = draw.integers(0, limit, num_blocks * block_size, dtype=np.int32)
            if limit == 70_000:  # a few wide ones
                tokens[draw.random(len(tokens)) < 0.9] = 5
            tokens[-1] = limit - 1
            writer.write(tokens, int(np.bitwise_or.reduce(tokens)))
            ours = writer.part(0, len(tokens))
            assert msgspec.msgpack.decode(ours) == tokens.tolist()
            assert len(ours) == msgpack_head(len(tokens)) + len(tokens) * (3 if limit <= 65536 else 5)
            for form in (ours, msgspec.msgpack.encode(tokens.tolist())):
                assert list(read_tokens(form, block_size).words) == list(pack_tokens(tokens, block_size).words)
            first, last = sorted(draw.integers(0, len(tokens) + 1, 2).tolist())
            assert msgspec.msgpack.decode(writer.part(first, last)) == tokens[first:last].tolist()


def msgpack_head(count: int) -> int:
    return 1 if count < 16 else 3 if count < 65536 else 5


def test_words_are_added_one_by_one_and_in_runs() -> None:
    draw = random.Random(run_seed())
    words, expected = WordList(), []
    source = vec[i64](draw.randrange(2**62) for _ in range(300))
    for _ in range(200):
        start = draw.randrange(300)
        size = draw.randint(0, 300 - start)
        if draw.random() < 0.5:
            words.add_run(source, start, size)
            expected += source[start : start + size]
        else:
            words.add(source[start])
            expected.append(source[start])
        assert words.view().tolist() == expected
        assert words.bits == np.bitwise_or.reduce(np.array(expected, dtype=np.int64))


@pytest.mark.parametrize("block_size", [3, 4])
def test_chains_that_are_written_together_are_the_events_that_happened(block_size: int) -> None:
    """Hundreds of short chains and some of more blocks than an event has, with numbers of all widths, in order."""
    draw = random.Random(run_seed())
    writer = EventWriter(CacheConfig(num_blocks=4, block_size=block_size))
    expected: list[Any] = []
    events = []
    for _ in range(3):
        for _ in range(300):
            length = draw.choice([1] * 50 + [2, 30, 511, 512])
            names = [draw.randrange(1, 2 ** draw.choice([8, 20, 62])) for _ in range(length)]
            if draw.random() < 0.3:
                expected.append([*expected.pop(), *names] if expected and type(expected[-1]) is list else names)
                for name in names:
                    writer.add_removed(name, 0)
                continue
            before = draw.randrange(2**62, 2**63)  # of a block that was not stored last
            tokens = np.array(
                [draw.randrange(2 ** draw.choice([7, 16, 31])) for _ in range(length * block_size)], dtype=np.int32
            )
            expected.append((names, before, tokens.tolist()))
            words = pack_tokens(tokens, block_size).words
            for place, name in enumerate(names):
                writer.add_stored(name, before, 0, (), ())
                writer.add_tokens(words, place * ((block_size + 1) // 2))
                before = name
            if draw.random() < 0.1:
                events += writer.take()
        writer.clear()
        expected.append(None)
    for event, told in zip(events + writer.finish(), expected, strict=True):
        if isinstance(event, BlockStored):
            lists = msgspec.msgpack.decode(event.block_hashes), msgspec.msgpack.decode(event.token_ids)
            assert (lists[0], event.parent_block_hash, lists[1]) == told
        else:
            assert (msgspec.msgpack.decode(event.block_hashes) if isinstance(event, BlockRemoved) else None) == told


def test_numbers_of_mixed_widths_are_read_as_they_stand() -> None:
    """Runs of one width of any length behind one another, with tags of other widths among their bytes."""
    draw = random.Random(run_seed())
    widths = {0: (b"", 128), 1: (b"\xcc", 256), 2: (b"\xcd", 2**16), 4: (b"\xce", 2**31), 8: (b"\xcf", 2**31)}
    for _ in range(400):
        expected: list[int] = []
        content = b""
        for _ in range(draw.randint(1, 30)):
            width = draw.choice((2, 4) * 6 + (0, 1, 8))
            tag, limit = widths[width]
            for _ in range(draw.choice((1, 3, 7, 8, 9, 16, 24))):
                number = draw.choice((draw.randrange(limit), 0xCD, 0xCE, 0xCDCE, 0x4ECDCECD, limit - 1)) % limit
                expected.append(number)
                content += tag + number.to_bytes(max(width, 1), "big")
        head = b"\xdd" + len(expected).to_bytes(4, "big")
        assert list(read_tokens(head + content, 1).words) == expected


@pytest.mark.parametrize("place", [0, 1, 99])
def test_lists_that_look_alike_and_hold_something_else_are_read_one_by_one(place: int) -> None:
    numbers = bytearray(b"\xdc\x00\x64" + b"\xce\x00\x01\x00\x02" * 100)
    for tag, expected in ((0xCA, None), (0xD2, 65538), (0xCF, None)):
        changed = bytes(numbers[: 3 + 5 * place]) + bytes([tag]) + bytes(numbers[4 + 5 * place :])
        if expected is None:
            with pytest.raises(InvalidArgument):
                read_tokens(changed + bytes(4), 4)
        else:
            assert list(read_names(changed)) == [expected] * 100
    beyond = bytes(numbers[: 3 + 5 * place]) + b"\xce\xff\xff\xff\xff" + bytes(numbers[8 + 5 * place :])
    with pytest.raises(InvalidArgument, match="invalid token"):
        read_tokens(beyond, 4)


def test_arrays_of_older_senders_are_read() -> None:
    events = [["BlockStored", [5], None, [1, 2], 2, None, "GPU"], ["BlockRemoved", [5]], ["AllBlocksCleared"]]
    batch = decode_batch(msgspec.msgpack.encode([2.0, events]))
    assert batch.events == [
        BlockStored(packed([5]), None, packed([1, 2]), 2, None, "GPU", None),
        BlockRemoved(packed([5]), None),
        AllBlocksCleared(),
    ]


def test_unknown_fields_and_events_are_ignored() -> None:
    events = [{"type": "BlockMoved", "x": [1]}, {"type": "BlockRemoved", "block_hashes": [5], "medium": None, "new": 1}]
    assert decode_batch(msgspec.msgpack.encode([2.0, events, None, 7, "more"])).events == [
        BlockRemoved(packed([5]), None)
    ]


BAD: dict[str, Any] = {
    "no batch": 7,
    "no events": [1.0],
    "text for events": [1.0, "x"],
    "an event without a type": [1.0, [{"block_hashes": [1]}]],
    "a number as an event": [1.0, [3]],
    "no tokens": [1.0, [{"type": "BlockStored", "block_hashes": [1], "block_size": 4}]],
    "nested without end": [1.0, [{"type": "BlockStored", "block_hashes": [1], "keys": None}]],
}


@pytest.mark.parametrize("name", BAD)
def test_bytes_that_are_not_a_message_are_rejected(name: str) -> None:
    with pytest.raises(InvalidArgument, match="payload is not a batch of KV events"):
        decode_batch(msgspec.msgpack.encode(BAD[name]))


def test_a_flood_of_tiny_events_is_refused_before_it_is_read() -> None:
    flood = b"\x93\xcb" + bytes(8) + b"\xdd\x04\x00\x00\x00" + b"\xc0" * 2**26 + b"\xc0"
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument, match="payload has 67,108,864 events of older forms; the limit is 131,072"):
            decode_batch(flood)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(flood)
    finally:
        tracemalloc.stop()
    few = b"\x93\xcb" + bytes(8) + b"\xdc\x00\x02" + b"\x91\xa1x" * 2 + b"\xc0"
    assert decode_batch(few).events == []


@pytest.mark.parametrize("field", ["keys", "extra_keys"])
def test_keys_of_very_many_items_are_refused_before_they_are_read(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MOST_KEY_ITEMS", 2**14)
    num_items = 2**20
    flood = b"\x92\xdd" + num_items.to_bytes(4, "big") + b"\x90" * num_items + b"\xc0"
    event = msgspec.msgpack.encode(FIELDS)
    event = bytes([event[0] + 1]) + event[1:] + msgspec.msgpack.encode(field) + flood
    payload = b"\x92\xcb" + bytes(8) + b"\x92\x81\xa4type\xb0AllBlocksCleared" + event
    mirror = Mirror(hash_seed=1)
    tracemalloc.start()
    try:
        mirror.receive_replayed("worker", 5, payload)
        mirror.end_replay("worker")
        assert tracemalloc.get_traced_memory()[1] < 4 * len(payload)
    finally:
        tracemalloc.stop()
    assert mirror.trust("worker") is Trust.UNTRUSTED
    with pytest.raises(InvalidArgument, match=f"{field} of one event holds more than 16,384 lists and items"):
        read_keys(field, msgspec.Raw(flood))


def test_long_keys_are_read_where_they_are_few() -> None:
    rows: list[list[Any]] = [["x" * MOST_KEY_ITEMS, b"y" * 70_000, 2**40, 1.5, None, True, {"a": [1]}, "z"], []]
    assert read_keys("keys", pack_keys(rows)) == rows
    most = [[0] * (MOST_KEY_ITEMS - 2 * len(rows)), ["y" * 40]]
    assert read_keys("keys", pack_keys(most)) == most
    with pytest.raises(InvalidArgument):
        read_keys("keys", pack_keys([[0, *most[0]], most[1]]))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        decode_batch(b"\x91" * 100_000)


def stored(**changes: Any) -> bytes:
    event = FIELDS | changes
    return msgspec.msgpack.encode([1.0, [{"type": "AllBlocksCleared"}, event]])


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 0},
        {"block_size": -4},
        {"block_size": 2**40},
        {"block_size": 3},
        {"token_ids": [1, 2, 3]},
        {"token_ids": "x"},
        {"token_ids": [1, 2, 3, 4, 5, 6, 7, "x"]},
        {"token_ids": [1, 2, 3, 4, 5, 6, 7, 8.0]},
        {"block_hashes": "xy"},
        {"block_hashes": [1, "x"]},
        {"block_hashes": [1, None]},
        {"block_hashes": [1, [2]]},
        {"block_hashes": {"a": 1, "b": 2}},
        {"token_ids": [1, 2, 3, 4, 5, 6, 7, -8]},
        {"token_ids": [1, 2, 3, 4, 5, 6, 7, 2**40]},
        {"group_idx": -1},
        {"group_idx": 1000},
        {"kv_cache_spec_sliding_window": -4},
        {"kv_cache_spec_sliding_window": 10**18},
        {"num_groups": 0},
        {"num_groups": -3},
        {"num_groups": 65},
        {"num_groups": 10**18},
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
        mirror.receive_replayed(worker, 5, stored())
        mirror.end_replay(worker)
    mirror.receive_replayed("bad", 6, stored())
    mirror.receive_live("bad", 6, stored(**changes))
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
    event = msgspec.msgpack.encode(FIELDS)
    key = msgspec.msgpack.encode(field) + b"\x92" + b"\x91" * depth + b"\x01\x90"
    event = bytes([event[0] + 1]) + event[1:] + key
    mirror.receive_replayed("worker", 5, b"\x92\xcb" + bytes(8) + b"\x92\x91\xb0AllBlocksCleared" + event)
    mirror.end_replay("worker")


def test_a_kept_message_that_cannot_be_applied_leaves_no_trust() -> None:
    mirror = Mirror(hash_seed=1)
    mirror.receive_live("worker", 6, stored(block_size=0))
    mirror.receive_live("worker", 7, msgspec.msgpack.encode([1.0, []]))
    mirror.receive_replayed("worker", 5, stored())
    mirror.end_replay("worker")
    assert mirror.trust("worker") is Trust.UNTRUSTED


def test_an_interrupt_in_the_middle_of_a_message_leaves_no_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = Mirror(hash_seed=1)
    mirror.receive_replayed("worker", 5, stored())
    mirror.end_replay("worker")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mirror, "_store", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mirror.receive_live("worker", 6, stored())
    assert mirror.trust("worker") is Trust.UNTRUSTED


def test_block_sizes_that_nobody_has_any_more_take_no_memory() -> None:
    mirror = Mirror(hash_seed=1)
    for size in range(1, 40):
        mirror.receive_replayed("worker", size, stored(block_hashes=[1], token_ids=[1] * size, block_size=size))
        mirror.end_replay("worker")
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
        mirror.receive_replayed("worker", number, bytes(payload))
        mirror.end_replay("worker")
    mirror.receive_replayed("worker", 9000, stored())
    mirror.end_replay("worker")
    assert mirror.match(range(1, 9))["worker"].num_tokens == 8
    assert mirror.num_holdings() == 2


def test_an_adapter_that_has_only_a_number_is_none_of_the_base_model() -> None:
    mirror = Mirror(hash_seed=1)
    mirror.receive_replayed("worker", 5, stored(lora_id=7))
    mirror.end_replay("worker")
    assert mirror.match([*range(1, 9)]) == {}
    assert mirror.match([*range(1, 9)], [LoRA("7", "")])["worker"].num_tokens == 8


def test_messages_that_wait_take_the_memory_of_their_bytes() -> None:
    mirror = Mirror(hash_seed=1)
    deep = stored(keys=[[["span", *([i] for i in range(2000))]], []])
    mirror.receive_live("worker", 6, deep)
    mirror.receive_live("worker", 7, msgspec.msgpack.encode([1.0, []]))
    kept = mirror._workers["worker"].order._ahead
    assert [message.batch.events for message in kept.values()] == [[], []]
    mirror.receive_replayed("worker", 5, stored())
    mirror.end_replay("worker")
    assert mirror.trust("worker") is Trust.LIVE


def test_names_that_are_given_again_and_again_leave_no_roots() -> None:
    """A sender that never removes, and gives one name to blocks under ever new keys."""
    mirror = Mirror(hash_seed=1)
    mirror.receive_replayed("worker", 0, stored())
    mirror.end_replay("worker")
    for number in range(1, 2000):
        mirror.receive_live("worker", number, again(number))
        assert mirror.trust("worker") is Trust.LIVE
    (trie,) = mirror._tries.values()
    assert len(trie.index.roots) <= 2 * trie.capacity + 2


def again(number: int) -> bytes:
    event = FIELDS | {"lora_name": str(number), "extra_keys": [[str(number)], [str(number)]]}
    return msgspec.msgpack.encode([1.0, [event]])


@pytest.mark.parametrize("token_ids", [None, "x", 5, [[1]], [1.5], [-1]])
def test_prompt_with_other_values_is_refused(token_ids: Any) -> None:
    mirror = Mirror(hash_seed=1)
    mirror.receive_replayed("worker", 5, stored())
    mirror.end_replay("worker")
    with pytest.raises(InvalidArgument, match="token_ids"):
        mirror.match(token_ids)
    with pytest.raises(InvalidArgument, match="token_ids"):
        mirror.match(token_ids, [LoRA("7", "")])


@pytest.mark.parametrize("line", range(12))
def test_two_workers_never_share_what_one_was_given(line: int) -> None:
    """Interrupted at any line while a worker is forgotten, the others have what they had, and no more."""
    mirror = Mirror(hash_seed=1)
    for worker in ("a", "b"):
        mirror.receive_replayed(worker, 5, stored())
        mirror.end_replay(worker)
    Interrupter("mirror.py", line + 1).run(lambda: mirror.forget("a"))
    mirror.forget("a")
    for number, worker in enumerate(("c", "d")):
        tokens = [*range(100 * number, 100 * number + 8)]
        mirror.receive_replayed(worker, 5, stored(token_ids=tokens))
        mirror.end_replay(worker)
    assert {name: match.num_tokens for name, match in mirror.match([*range(1, 9)]).items()} == {"b": 8}
    assert set(mirror.match([*range(8)])) == {"c"}
    assert set(mirror.match([*range(100, 108)])) == {"d"}


def test_questions_make_no_worker() -> None:
    mirror = Mirror(hash_seed=1)
    for number in range(1000):
        assert mirror.trust(str(number)) is Trust.UNTRUSTED
        assert mirror.replay_from(str(number)) == 0
        mirror.end_replay(str(number))
        mirror.forget(str(number))
    assert mirror._workers == {}


def test_a_worker_that_takes_little_and_is_cleared_looks_at_little() -> None:
    """What others hold is not looked at: the names that a holder took are known while they are few."""
    mirror = Mirror(hash_seed=1)
    mirror.receive_replayed("b", 5, stored())
    mirror.end_replay("b")
    for number in range(200):
        mirror.receive_replayed("a", number, stored(token_ids=[number] * 8))
        mirror.end_replay("a")
    (trie,) = mirror._tries.values()
    assert [recent.num_names for recent in trie._recent] == [2, 2]
    many = [*range(5000)]
    mirror.receive_replayed("a", 300, stored(block_hashes=many, token_ids=many, block_size=1))
    mirror.end_replay("a")
    mirror.receive_replayed("a", 301, stored(token_ids=[7] * 8))
    mirror.end_replay("a")
    assert mirror.match([7] * 8)["a"].num_tokens == 8
    for trie in mirror._tries.values():
        check_trie(trie)
    assert len(mirror._tries) == 1
