"""Random damage to the messages of a hand-over; all damaged messages must be refused.

    python -m tests.damage --messages 250000 --seed 7

Offers, handshakes, ids of offers and plans are flipped, cut, extended, spliced and mixed up. Each is read as its
receiver reads it; the program fails if one is accepted whose bytes are not those of a message that was sent.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from blockyard import CacheConfig, CacheSalt, KVCacheManager, LayerGroup, LoRA, Span, StateSpec
from blockyard.steps import PlanReceiver, PlanSender
from blockyard_engine.parallel import HeadShards, Offer, OfferId, PeerInfo
from blockyard_testing.damaged_bytes import DAMAGES, REFUSED
from blockyard_testing.seeds import run_seed

CONFIG = CacheConfig(num_blocks=40, block_size=4, max_num_seqs=8, max_model_len=64)
HYBRID = CacheConfig(40, groups=(LayerGroup(4, token_bytes=64), StateSpec(state_bytes=512, checkpoint_every=4)))


def offers(draw: random.Random) -> bytes:
    """Return an offer of a prompt of random length, with or without extra keys."""
    count = draw.randrange(2, 40)
    tokens = np.array(draw.choices(range(1000), k=count), np.int32)
    table = np.array(draw.sample(range(1, 40), -(-count // 4)), np.int32)
    keys = draw.choice([(), (CacheSalt("tenant"),), (LoRA("a", "path"), Span("image", 0, min(3, count), "image"))])
    offer_id, computed = OfferId("prefill", 1, draw.randrange(1, 99)), count - draw.randrange(2)
    return Offer(offer_id, tokens, computed, (table,), keys, draw.randrange(computed)).to_bytes()


def handshakes(draw: random.Random) -> bytes:
    """Return a handshake."""
    shards = HeadShards.even(4, draw.choice((1, 2, 4)))
    model = {"dtype": "float32", "num_layers": 2, "head_size": 64, "shards": shards}
    has_states = shards.num_ranks == 1
    if has_states:
        model["state_tensors"] = ("float32 [8, 16]",)
    config = HYBRID if has_states else CONFIG
    return PeerInfo.of(config, f"prefill-{draw.randrange(9)}", draw.randrange(99), **model).to_bytes()


def releases(draw: random.Random) -> bytes:
    """Return a message about an offer."""
    return OfferId("prefill", draw.randrange(9), draw.randrange(1, 99)).to_bytes("release")


def plans(draw: random.Random) -> bytes:
    """Return the first plan of a chain."""
    cache = KVCacheManager(CONFIG)
    seqs = [cache.allocate(draw.choices(range(99), k=draw.randrange(1, 30))) for _ in range(draw.randrange(1, 4))]
    return PlanSender(CONFIG).to_bytes(cache.reserve(seqs))


#: Who makes a message, and who reads it.
KINDS: list[tuple[Callable[[random.Random], bytes], Callable[[bytes], Any]]] = [
    (offers, Offer.from_bytes),
    (handshakes, PeerInfo.from_bytes),
    (releases, lambda data: OfferId.from_bytes("release", data)),
    (plans, lambda data: PlanReceiver(CONFIG).from_bytes(data)),
]


def run(num_messages: int, seed: int) -> Counter[str]:
    """Damage this many messages; count the refusals. Raises `AssertionError` for one that is accepted."""
    draw = random.Random(seed)
    counts: Counter[str] = Counter()
    sent = [[make(draw) for _ in range(8)] for make, _ in KINDS]
    while sum(counts.values()) < num_messages:
        number = draw.randrange(len(KINDS))
        make, read = KINDS[number]
        data = draw.choice(sent[number])
        other = draw.choice(draw.choice(sent))
        damage = draw.choice(DAMAGES)
        changed = damage(draw, data, other)
        if changed in (data, other):
            continue
        try:
            taken = read(changed)
        except REFUSED:
            counts[f"{make.__name__} {damage.__name__}"] += 1
        else:
            raise AssertionError(f"{damage.__name__} of {make.__name__} was believed: {taken}, {changed!r}")
        if not sum(counts.values()) % 1000:
            sent[number][draw.randrange(8)] = make(draw)
    return counts


def main() -> None:
    """Damage many messages; the first line of the output has the seed."""
    parser = argparse.ArgumentParser(prog="tests.damage", description=main.__doc__)
    parser.add_argument("--messages", type=int, default=250_000)
    parser.add_argument("--seed", type=int, default=run_seed())
    options = parser.parse_args()
    print("seed", options.seed)
    began = time.monotonic()
    for what, count in sorted(run(options.messages, options.seed).items()):
        print(f"{count:8,}  {what}")
    print(f"none of {options.messages:,} was believed, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
