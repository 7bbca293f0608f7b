"""Names that mean two blocks: hashes under keys that everybody knows can be made to meet, and a mirror stays right."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from blockyard import CacheConfig, KVCacheManager, ObserveConfig
from blockyard.events import Mirror
from blockyard.events.following.stream import Trust
from blockyard.events.publishing.feed import Feed
from blockyard.events.tables.content_table import ContentTable
from blockyard.events.tables.table_checks import check_trie
from blockyard_testing import seeds

from .published import compute

#: Blocks of one name after any others that are equal: what their tokens differ by is a short vector of a lattice (LLL),
#: found in a second.
ONE = [1000, 7] * 8
OTHER = [919, 7, 1083, 7, 1037, 7, 1036, 7, 1042, 7, 1012, 7, 948, 7, 1019, 7]
#: A first block whose hash is 0, the name of no block.
NOTHING = [1009, 7, 1009, 7, 1073, 7, 1006, 7, 1005, 7, 972, 7, 909, 7, 1086, 7]


class Followed:
    """A cache, what it publishes under names of contents, and a mirror that hears all of it."""

    def __init__(self) -> None:
        self.cache = KVCacheManager(
            CacheConfig(50, 16, observe=ObserveConfig(enable_kv_cache_events=True), hash_seed=1)
        )
        self.table = ContentTable(self.cache.config, by_content=True)
        self.feed = Feed(self.table, True, 100, None, lambda: 1.0)
        self.mirror = Mirror(hash_seed=1)
        self.mirror.receive_live("worker", *self.feed.heartbeat())
        self.catch_up()

    def catch_up(self) -> None:
        """Have all of it again, in a snapshot."""
        for message in self.feed.replay(0):
            self.mirror.receive_replayed("worker", *message)
        self.mirror.end_replay("worker")

    def compute(self, tokens: list[int]) -> None:
        compute(self.cache, [*tokens, 1])
        message = self.feed.make_message(self.cache.take_events())
        if message is not None:
            self.mirror.receive_live("worker", *message)

    def match(self, tokens: list[int]) -> tuple[int, int]:
        """What the mirror says, and what the cache has."""
        assert self.mirror.trust("worker") is Trust.LIVE
        found = self.mirror.match([*tokens, 1]).get("worker")
        return 0 if found is None else found.num_tokens, self.cache.num_cached_tokens([*tokens, 1])


@pytest.mark.parametrize("first", [ONE, OTHER])
@pytest.mark.parametrize("is_in_snapshot", [False, True])
def test_a_client_who_makes_two_blocks_of_one_name_deceives_no_mirror(first: list[int], is_in_snapshot: bool) -> None:
    second = OTHER if first is ONE else ONE
    followed = Followed()
    after = [list(range(start, start + 16)) for start in (2000, 3000, 4000)]
    followed.compute([*first, *after[0]])
    followed.compute(second)
    followed.compute([*first, *after[0], *after[1]])
    followed.compute([*first, *after[2]])
    names = [int(followed.table.rows.published_name[row]) for row in range(1, 7)]
    assert len(names) > len(set(names)), "the names do not meet any more: look for others"
    if is_in_snapshot:
        followed.mirror.forget("worker")
        followed.catch_up()
    for chain in (first, second):
        for rest in ([], after[0], after[2], [*after[0], *after[1]]):
            said, had = followed.match([*chain, *rest])
            assert said <= had, (chain, rest)
    check_trie(followed.mirror._tries[16])


def test_a_block_that_hashes_to_no_name_has_one() -> None:
    followed = Followed()
    after = list(range(2000, 2016))
    followed.compute([*NOTHING, *after])
    assert 1 in [int(followed.table.rows.published_name[row]) for row in range(1, 4)], "its hash is not 0 any more"
    assert followed.match([*NOTHING, *after]) == (32, 32)
    assert followed.match(after) == (0, 0)


@pytest.mark.parametrize("num_names", [1, 3, 12])
def test_a_publisher_with_few_names_is_never_believed_too_much(num_names: int) -> None:
    """Blocks of two tokens come and go in the order of any cache, under hashes of a few bits."""
    rng = random.Random(seeds.run_seed() + num_names)
    for _ in range(seeds.draws(180, 20)):
        run_few_names(rng, num_names)


def run_few_names(rng: random.Random, num_names: int) -> None:
    mirror, held = Mirror(hash_seed=1), set[tuple[int, ...]]()
    say(mirror, 0, {"type": "AllBlocksCleared"})
    names: dict[tuple[int, ...], int] = {(): 0}
    for number in range(1, 60):
        if rng.random() < 0.02:
            held.clear()
            say(mirror, number, {"type": "AllBlocksCleared"})
        elif rng.random() < 0.6 or not held:
            chain = (*rng.choice([(), *held]), *rng.choice([(1, 1), (2, 2), (3, 3)]))
            names.setdefault(chain, rng.randrange(1, num_names + 1))
            held.add(chain)
            say(mirror, number, stored(chain, names))
        else:
            chain = rng.choice(sorted(held))
            gone = [each for each in held if each[: len(chain)] == chain]
            held.difference_update(gone)
            say(mirror, number, {"type": "BlockRemoved", "block_hashes": [names[each] for each in gone]})
        for trie in mirror._tries.values():
            check_trie(trie)
        for _ in range(3):
            prompt = [token for _ in range(4) for token in 2 * [rng.randint(1, 3)]]
            found = mirror.match(prompt).get("worker")
            had = next((end for end in range(8, 0, -2) if tuple(prompt[:end]) in held), 0)
            assert found is None or found.num_tokens <= had, (prompt, held)


def stored(chain: tuple[int, ...], names: dict[tuple[int, ...], int]) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [names[chain]],
        "parent_block_hash": names[chain[:-2]] or None,
        "token_ids": chain[-2:],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def say(mirror: Mirror, number: int, event: dict[str, Any]) -> None:
    event.setdefault("medium", "GPU")
    (mirror.receive_live if number else mirror.receive_replayed)(
        "worker", number, msgspec.msgpack.encode([float(number), [event]])
    )
    mirror.end_replay("worker")
    assert mirror.trust("worker") is Trust.LIVE
