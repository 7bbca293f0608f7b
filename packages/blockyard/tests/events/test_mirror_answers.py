"""What a mirror answers about many workers, against sets of prefixes; its tables, against dicts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from blockyard.errors import InvalidArgument
from blockyard.events import Match, Mirror, Trust
from blockyard.events.following.matches import Matches
from blockyard.events.tables.content_rows import IdPages
from blockyard.events.tables.table_checks import check_trie
from blockyard.events.wire import (
    NO_KEYS,
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Event,
    encode_batch,
    pack_list,
)
from blockyard_testing.seeds import run_seed

BLOCK_SIZE = 2


def packed(items: Sequence[int]) -> msgspec.Raw:
    return pack_list(msgspec.msgpack.encode(list(items)))


class Talker:
    """A worker that says what it has: chains of blocks, each with a name of its own."""

    def __init__(self, mirror: Mirror, name: str, block_size: int = BLOCK_SIZE) -> None:
        self.mirror, self.name, self.number, self.block_size = mirror, name, 0, block_size
        #: From the tokens of a chain to the name of its last block, and where it lies.
        self.names: dict[tuple[int, ...], int] = {}
        self.media: dict[tuple[int, ...], str] = {}
        self.say([AllBlocksCleared()])

    def say(self, events: list[Event]) -> None:
        payload = encode_batch(Batch(float(self.number), events, 0))
        if self.number == 0:
            self.mirror.receive_replayed(self.name, 0, payload)
            self.mirror.end_replay(self.name)
        else:
            self.mirror.receive_live(self.name, self.number, payload)
        self.number += 1

    def store(self, tokens: tuple[int, ...], medium: str) -> None:
        """The blocks of a prompt that it has not."""
        known = 0
        while tokens[: known + self.block_size] in self.names and known < len(tokens):
            known += self.block_size
        new = [tokens[: end + self.block_size] for end in range(known, len(tokens), self.block_size)]
        if not new:
            return
        before = self.names.get(tokens[:known])
        for chain in new:
            self.names[chain] = len(self.names) + 1000 * self.number + 1
            self.media[chain] = medium
        names = packed([self.names[chain] for chain in new])
        rest = packed(tokens[known:])
        self.say([BlockStored(names, before, rest, self.block_size, None, medium, None)])

    def drop_last(self, draw: random.Random) -> None:
        """A block that none of its own follows."""
        ends = [chain for chain in self.names if not any(other[: len(chain)] == chain != other for other in self.names)]
        if ends:
            chain = draw.choice(ends)
            self.say([BlockRemoved(packed([self.names.pop(chain)]), self.media.pop(chain))])

    def has(self, tokens: tuple[int, ...]) -> tuple[int, int]:
        """Leading tokens that it has anywhere, and on the GPU."""
        anywhere = on_gpu = 0
        while tokens[: anywhere + self.block_size] in self.names and anywhere + self.block_size <= len(tokens):
            anywhere += self.block_size
            if on_gpu == anywhere - self.block_size and self.media[tokens[:anywhere]] == "GPU":
                on_gpu = anywhere
        return anywhere, on_gpu


@pytest.mark.parametrize("num_workers", [1, 63, 64, 65, 130])
def test_an_answer_is_what_each_worker_said(num_workers: int) -> None:
    draw = random.Random(run_seed() + num_workers)
    mirror = Mirror()
    talkers = [Talker(mirror, f"worker-{number}") for number in range(num_workers)]
    prompts = [tuple(draw.randrange(2) for _ in range(BLOCK_SIZE * draw.randint(1, 70))) for _ in range(12)]
    prompts += [prompts[0][: BLOCK_SIZE * 3] + prompt for prompt in prompts[:6]]
    for _ in range(4 * num_workers):
        talker = draw.choice(talkers)
        prompt = draw.choice(prompts)
        talker.store(prompt[: BLOCK_SIZE * draw.randint(1, len(prompt) // BLOCK_SIZE)], draw.choice(["GPU", "CPU"]))
        if draw.random() < 0.3:
            talker.drop_last(draw)
    for prompt in prompts:
        expected = {one.name: Match(*one.has(prompt), Trust.LIVE) for one in talkers if one.has(prompt)[0]}
        found = mirror.match(prompt)
        assert found == expected
        assert len(found) == len(expected)
        assert found.workers == tuple(one.name for one in talkers)
        assert found.num_tokens.tolist() == [one.has(prompt)[0] for one in talkers]
        assert found.num_gpu_tokens.tolist() == [one.has(prompt)[1] for one in talkers]
    for trie in mirror._tries.values():
        check_trie(trie)


def forms(prompt: list[int]) -> list[Any]:
    """A prompt as callers give it: only one of these lies in memory as packed words do."""
    array = np.array(prompt, dtype=np.int32)
    spread = np.zeros(2 * len(prompt), dtype=np.int32)
    spread[::2] = prompt
    return [prompt, tuple(prompt), array, array.astype(np.int64), array.astype(">i4"), spread[::2], array[::-1][::-1]]


@pytest.mark.parametrize("block_size", [2, 3, 16])
def test_long_prompts_in_any_form_that_leave_one_another_anywhere(block_size: int) -> None:
    draw = random.Random(run_seed() + block_size)
    mirror = Mirror()
    talkers = [Talker(mirror, f"worker-{number}", block_size) for number in range(3)]
    prompts = [[draw.randrange(9) for _ in range(draw.randint(300, 2500))]]
    for _ in range(8):
        shared = draw.choice(prompts)
        shared = shared[: draw.randrange(len(shared))]
        prompts.append(shared + [draw.randrange(9) for _ in range(draw.randint(1, 900))])
    for number in range(30):
        talker, prompt = draw.choice(talkers), draw.choice(prompts)
        talker.store(tuple(prompt[: draw.randint(1, len(prompt)) // block_size * block_size]), "GPU")
        if number % 10 == 9:  # nodes that are free are taken again
            talker.names.clear()
            talker.say([AllBlocksCleared()])
    for prompt in prompts:
        asked = prompt[: draw.randint(1, len(prompt))] + [draw.randrange(9) for _ in range(draw.randrange(40))]
        expected = {one.name: one.has(tuple(asked)) for one in talkers if one.has(tuple(asked))[0]}
        for form in forms(asked):
            found = mirror.match(form)
            assert {name: one[:2] for name, one in found.items()} == expected
    for trie in mirror._tries.values():
        check_trie(trie)


@pytest.mark.parametrize("known", [0, 16, 1600])
@pytest.mark.parametrize("length", [257, 1600, 1610, 3200])
def test_a_token_out_of_range_is_refused_behind_what_is_known(known: int, length: int) -> None:
    mirror = Mirror()
    prompt = [number % 7 for number in range(length)]
    Talker(mirror, "one", 16).store(tuple(prompt[:known]), "GPU")
    for wrong in (0, known, length - 1):
        if wrong < length:
            asked = np.array(prompt, dtype=np.int32)
            asked[wrong] = -5
            with pytest.raises(InvalidArgument, match=rf"token_ids\[{wrong}\] is -5"):
                mirror.match(asked)
    assert mirror.match(np.array(prompt, dtype=np.int32)) == mirror.match(prompt)


def has_window(held: list[bool], size: int, window: int, length: int) -> bool:
    """Whether a layer group has all blocks that a prompt of `length` tokens needs to go on."""
    return all(held[max(length - window + 1, 0) // size : length // size]) and length // size <= len(held)


@pytest.mark.parametrize("most_groups", [1, 3, 64])
def test_windows_of_any_number_of_groups(most_groups: int) -> None:
    draw = random.Random(run_seed() + most_groups)
    for _ in range(60):
        num_groups = draw.randint(1, most_groups)
        sizes = [draw.choice((2, 2, 4, 8)) for _ in range(num_groups)]
        windows = [draw.choice((0, 2, 5, 9, 40, 1000)) for _ in range(num_groups)]
        tokens = list(range(8 * draw.randint(1, 12)))
        held = [[draw.random() < draw.choice((0.5, 0.95, 1.0)) for _ in range(len(tokens) // size)] for size in sizes]
        events: list[Event] = [AllBlocksCleared()]
        for group, (size, window) in enumerate(zip(sizes, windows, strict=True)):
            names = packed([1 + place for place in range(len(tokens) // size)])
            kind, slides = ("sliding_window", window) if window else ("full_attention", None)
            events.append(
                BlockStored(
                    names,
                    None,
                    packed(tokens),
                    size,
                    None,
                    "GPU",
                    None,
                    NO_KEYS,
                    group,
                    kind,
                    slides,
                    NO_KEYS,
                    num_groups,
                )
            )
            gone = [1 + place for place, has in enumerate(held[group]) if not has]
            events.append(BlockRemoved(packed(gone), "GPU", group))
        mirror = Mirror(hash_seed=1)
        mirror.receive_replayed("one", 0, encode_batch(Batch(0.0, events, 0)))
        mirror.end_replay("one")
        fitting = [
            length
            for length in range(0, len(tokens) + 1, math.lcm(*sizes))
            if all(
                has_window(held[group], sizes[group], windows[group] or 10**6, length) for group in range(num_groups)
            )
        ]
        found = mirror.match(tokens).get("one")
        assert (0 if found is None else found.num_tokens) == fitting[-1]


def test_an_answer_stays_what_it_was() -> None:
    mirror = Mirror()
    one, other = Talker(mirror, "one"), Talker(mirror, "other")
    one.store((1, 2, 3, 4), "GPU")
    before = mirror.match([1, 2, 3, 4])
    one.say([AllBlocksCleared()])
    other.store((1, 2), "GPU")
    mirror.receive_live("one", 1000, b"nothing that can be read")
    assert before == {"one": Match(4, 4, Trust.LIVE)}
    assert mirror.match([1, 2, 3, 4]) == {"other": Match(2, 2, Trust.LIVE)}
    mirror.forget("other")
    assert mirror.match([1, 2, 3, 4]) == {}
    assert before.workers == ("one", "other")
    assert before["one"].trust is Trust.LIVE


def test_an_answer_reads_like_a_dict_and_cannot_be_written() -> None:
    mirror = Mirror()
    assert not mirror.match([1, 2])
    Talker(mirror, "one").store((1, 2), "CPU")
    Talker(mirror, "empty")
    found = mirror.match([1, 2])
    assert isinstance(found, Matches)
    assert repr(found) == "Matches({'one': Match(num_tokens=2, num_gpu_tokens=0, trust=<Trust.LIVE: 'live'>)})"
    assert "empty" not in found
    assert found.get("empty") is None
    for unknown in ("empty", "nobody"):
        with pytest.raises(KeyError, match=unknown):
            found[unknown]
    with pytest.raises(ValueError, match="read-only"):
        found.num_tokens[0] = 7


def test_trust_of_an_answer_follows_every_message() -> None:
    mirror = Mirror()
    talker = Talker(mirror, "one")
    talker.store((1, 2), "GPU")
    assert mirror.match([1, 2])["one"].trust is Trust.LIVE
    talker.number += 1
    talker.say([])
    assert mirror.match([1, 2])["one"].trust is Trust.CATCHING_UP
    mirror.receive_replayed("one", 2, encode_batch(Batch(2.0, [], 0)))
    mirror.end_replay("one")
    assert mirror.match([1, 2])["one"].trust is Trust.LIVE
    mirror.receive_live("one", 4, b"nothing that can be read")
    assert mirror.match([1, 2])["one"].trust is Trust.UNTRUSTED


def test_pages_of_ids_are_a_dict() -> None:
    draw = random.Random(run_seed())
    pages, expected = IdPages(0), dict[int, int]()
    names = [draw.randrange(400) + 2**40 * draw.randrange(2) for _ in range(300)]
    for row in range(1, 4000):
        name = draw.choice(names)
        if name in expected and draw.random() < 0.6:
            pages.remove(name)
            del expected[name]
        elif name not in expected:
            pages.put(name, row)
            expected[name] = row
        asked = draw.choice(names)
        assert pages.find(asked) == expected.get(asked, 0)
    for name in list(expected):
        pages.remove(name)
    assert [pages.find(name) for name in names] == [0] * len(names)
    assert pages.num_bytes() < 20_000
