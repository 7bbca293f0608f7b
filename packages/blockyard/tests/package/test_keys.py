"""Extra keys: what they accept, their one order, and which block a span reaches."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blockyard import BlockPool, CacheConfig, CacheSalt, InvalidArgument, KVCacheManager, LoRA, Span
from blockyard.keys import (
    MAX_POSITION,
    MAX_SPANS,
    block_spans,
    canonical_keys,
    request_keys,
    require_spans_within,
    spans_by_block,
    spans_of,
)

CAT, DOG = Span("cat", 4, 6), Span("dog", 20, 3)
MEW = Span("mew", 6, 2, "audio")


# ---------------------------------------------------------------- a span by itself


def test_a_span() -> None:
    span = Span("cat", 4, 6)
    assert (span.kind, span.end) == ("image", 10)
    assert span == CAT
    assert hash(span) == hash(CAT)
    assert span != Span("cat", 4, 6, "video")
    assert pickle.loads(pickle.dumps(span)) == span


def test_positions_become_plain_integers() -> None:
    span = Span("cat", np.int64(4), np.uint8(6))  # type: ignore[arg-type]
    assert [type(value) for value in (span.start, span.length)] == [int, int]
    assert span == CAT


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda text: CacheSalt(text), "value"),
        (lambda text: LoRA(text), "name"),
        (lambda text: LoRA("poet", text), "path"),
        (lambda text: Span(text, 0, 4), "content"),
        (lambda text: Span("cat", 0, 4, text), "kind"),
    ],
)
def test_text_that_has_no_encoding(make: Callable[[str], Any], name: str) -> None:
    """It would be in messages to consumers, and in names of blocks: nothing could write it."""
    with pytest.raises(InvalidArgument, match=rf"{name} holds '\\ud800' at position 2; it must be valid Unicode"):
        make("ab\ud800")


@pytest.mark.parametrize("value", [-1, MAX_POSITION, 2**70, 1.0, True, None, "1"])
def test_bad_starts(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"start is .* 0 to {MAX_POSITION - 1}"):
        Span("cat", value, 1)


@pytest.mark.parametrize("value", [0, -1, MAX_POSITION + 1, 1.0, True, None, "1"])
def test_bad_lengths(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"length is .* 1 to {MAX_POSITION}"):
        Span("cat", 0, value)


@pytest.mark.parametrize("value", ["", None, 1, b"cat", ["cat"]])
def test_bad_texts(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="content is"):
        Span(value, 0, 1)
    with pytest.raises(InvalidArgument, match="kind is"):
        Span("cat", 0, 1, value)


@pytest.mark.parametrize("value", [None, 1, b"/p"])
def test_bad_paths(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="path is"):
        LoRA("a", value)


# ---------------------------------------------------------------- keys together


def test_one_order_for_all_orders() -> None:
    keys = (CacheSalt("a"), LoRA("a"), CAT, MEW, DOG)
    for shuffled in itertools.permutations(keys):
        assert canonical_keys(shuffled) == keys
        assert canonical_keys(list(shuffled)) == keys


def test_spans_that_begin_together_have_one_order_too() -> None:
    spans = [Span("a", 3, 2, "video"), Span("b", 3, 2), Span("a", 3, 4), Span("a", 3, 2)]
    orders = {canonical_keys(shuffled) for shuffled in itertools.permutations(spans)}
    assert len(orders) == 1
    assert set(orders.pop()) == set(spans)


def test_the_split() -> None:
    keys = canonical_keys([DOG, LoRA("a", "/p"), CAT, CacheSalt("s")])
    assert request_keys(keys) == (CacheSalt("s"), LoRA("a", "/p"))
    assert spans_of(keys) == (CAT, DOG)
    assert request_keys(()) == spans_of(()) == ()


@pytest.mark.parametrize(
    "keys",
    [
        (LoRA("a"), LoRA("b")),
        (LoRA("a"), LoRA("a", "/p")),
        (LoRA("a"), CAT, LoRA("a")),
        (CacheSalt("a"), CacheSalt("b")),
        (CAT, DOG, Span("cat", 4, 6)),
    ],
)
def test_repeated_keys(keys: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidArgument, match=r"extra_keys holds .* (twice|at most one of a kind)"):
        canonical_keys(keys)


@pytest.mark.parametrize(
    "keys", [None, "a", 1, CAT, {CAT}, iter([CAT]), (CAT, "dog"), (("cat", 1, 2),), (None,), ("",)]
)
def test_what_is_no_key(keys: Any) -> None:
    with pytest.raises(InvalidArgument, match="extra_keys"):
        canonical_keys(keys)


def test_a_subclass_is_no_key() -> None:
    class Louder(LoRA):
        pass

    with pytest.raises(InvalidArgument, match="extra_keys holds"):
        canonical_keys((LoRA("a"), Louder("b")))


def test_the_number_of_spans_has_a_limit() -> None:
    spans = [Span("cat", start, 1) for start in range(MAX_SPANS + 1)]
    assert len(canonical_keys([*spans[1:], LoRA("a")])) == MAX_SPANS + 1
    with pytest.raises(InvalidArgument, match=f"{MAX_SPANS + 1} spans; the limit is {MAX_SPANS}"):
        canonical_keys(spans)


def test_spans_end_within_the_prompt() -> None:
    require_spans_within((), 0)
    require_spans_within((CAT, DOG), 23)
    with pytest.raises(InvalidArgument, match=r"extra_keys holds Span\(content='dog'.*position 23.*22 tokens"):
        require_spans_within((CAT, DOG), 22)


# ---------------------------------------------------------------- blocks


def test_what_the_blocks_see() -> None:
    spans = spans_of(canonical_keys((DOG, MEW, CAT)))
    assert [block_spans(spans, block, 8) for block in range(4)] == [
        (("image", "cat", 4, 6), ("audio", "mew", 6, 2)),
        (("image", "cat", -4, 6),),
        (("image", "dog", 4, 3),),
        (),
    ]


def test_borders_belong_to_one_block() -> None:
    spans = (Span("a", 4, 4),)
    assert [block for block in range(5) if block_spans(spans, block, 4)] == [1]
    assert [block for block in range(9) if block_spans((Span("a", 3, 6),), block, 4)] == [0, 1, 2]
    assert [block for block in range(9) if block_spans((Span("a", 3, 2),), block, 1)] == [3, 4]


@pytest.mark.parametrize("seed", range(30))
def test_all_blocks_at_once_see_the_same(seed: int) -> None:
    """Against positions: a block sees a span exactly when one of its positions is one of the span's."""
    chooser = random.Random(seed)
    size, num_blocks = chooser.randint(1, 9), chooser.randint(0, 12)
    chosen = {Span(chooser.choice("ab"), chooser.randrange(60), chooser.randint(1, 25)) for _ in range(6)}
    spans = spans_of(canonical_keys(list(chosen)))
    seen = spans_by_block(spans, size, num_blocks)
    assert set(seen) <= set(range(num_blocks))
    for block in range(num_blocks):
        positions = set(range(block * size, (block + 1) * size))
        touching = [span for span in spans if positions & set(range(span.start, span.start + span.length))]
        expected = tuple((s.kind, s.content, s.start - block * size, s.length) for s in touching)
        assert block_spans(spans, block, size) == seen.get(block, ()) == expected


# ---------------------------------------------------------------- what hits what


def hit_tokens(cached: tuple[Any, ...], asked: tuple[Any, ...]) -> int:
    """Tokens that a prompt of two blocks finds, when the same tokens were cached with other keys."""
    pool = BlockPool(num_blocks=8, block_size=4)
    tokens = list(range(8))
    pool.cache_full_blocks(pool.get_new_blocks(2), tokens, extra_keys=cached)
    return pool.num_cached_tokens(tokens, extra_keys=asked)


def test_an_adapter_of_another_path_is_another_adapter() -> None:
    old, new = LoRA("a", "/weights/1"), LoRA("a", "/weights/2")
    assert hit_tokens((old,), (old,)) == hit_tokens((old,), (LoRA("a", "/weights/1"),)) == 8
    assert hit_tokens((old,), (new,)) == hit_tokens((old,), (LoRA("a"),)) == hit_tokens((LoRA("a"),), (old,)) == 0


def test_another_path_does_not_hit_a_sequence_either() -> None:
    cache = KVCacheManager(CacheConfig(num_blocks=8, block_size=4, max_model_len=16, watermark=0.0))
    for path, hit in (("/1", 0), ("/2", 0), ("/1", 4)):
        seq = cache.allocate([1, 2, 3, 4, 5], extra_keys=(LoRA("a", path),))
        assert cache.num_computed_tokens(seq) == hit
        cache.reserve([seq], [5 - hit])
        cache.commit([seq], [5 - hit])
        cache.free(seq)
    cache.check()


def test_another_image_never_hits_the_block_it_stands_in() -> None:
    cat, dog = Span("cat", 1, 2), Span("dog", 1, 2)
    assert hit_tokens((cat,), (cat,)) == hit_tokens((cat,), (Span("cat", 1, 2),)) == 8
    for other in (dog, Span("cat", 2, 2), Span("cat", 1, 1), Span("cat", 1, 2, "video")):
        assert hit_tokens((cat,), (other,)) == 0
    assert hit_tokens((cat,), ()) == hit_tokens((), (cat,)) == 0
