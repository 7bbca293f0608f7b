"""Spans: an image in place of text is hit by the same image at the same place, and by nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import BlockPool, CacheSalt, InvalidArgument, LayerGroup, LoRA, Span

from ..support.checked import Checked
from ..support.snapshot import refused, snapshot

#: Every block has the same tokens, as placeholders of images have: only the spans tell one from another.
SAME = [7] * 16
CONFIGS: list[dict[str, Any]] = [{}, {"num_cpu_blocks": 20}, {"groups": (LayerGroup(4), LayerGroup(8, 9))}]


@pytest.fixture(params=CONFIGS, ids=["plain", "cpu", "groups"])
def cache(request: pytest.FixtureRequest) -> Checked:
    return Checked(80, max_num_seqs=30, **request.param)


def run(cache: Checked, tokens: list[int], *keys: Any) -> int:
    seq: int = cache.allocate(tokens, extra_keys=keys)
    cache.compute(seq)
    return seq


def hit(cache: Checked, tokens: list[int], *keys: Any) -> int:
    """Tokens that a prompt hits; it is gone again before it computes anything."""
    seq = cache.allocate(tokens, extra_keys=keys)
    found: int = cache.num_computed_tokens(seq)
    cache.free(seq)
    return found


def block_size(cache: Checked) -> int:
    return cache.config.hit_alignment


def test_the_same_image_at_the_same_place_hits(cache: Checked) -> None:
    run(cache, SAME, Span("cat", 5, 6))
    assert hit(cache, [*SAME, 7], Span("cat", 5, 6)) == 16
    assert hit(cache, SAME, Span("cat", 5, 6)) == 16 - block_size(cache)


@pytest.mark.parametrize(
    "other",
    [
        (),
        (Span("dog", 5, 6),),
        (Span("cat", 5, 5),),
        (Span("cat", 5, 7),),
        (Span("cat", 4, 6),),
        (Span("cat", 6, 6),),
        (Span("cat", 5, 6, "sound"),),
        (Span("cat", 5, 6), Span("dog", 5, 1)),
        (Span("cat", 5, 3), Span("cat", 8, 3)),
        (Span("cat", 5, 6), LoRA("cat")),
        (Span("cat", 5, 6), CacheSalt("cat")),
    ],
)
def test_anything_else_misses_from_the_first_block_it_differs_in(cache: Checked, other: tuple[Any, ...]) -> None:
    """The block of text before the image is shared, if no adapter or salt sets the whole prompt apart."""
    run(cache, SAME, Span("cat", 5, 6))
    apart = any(not isinstance(key, Span) for key in other)
    shared = 0 if apart else 4 // block_size(cache) * block_size(cache)
    assert hit(cache, [*SAME, 7], *other) == shared


def test_text_before_an_image_is_shared_and_text_behind_it_is_not(cache: Checked) -> None:
    """Text after an image attends to it, so blocks after another image differ even if their tokens are equal."""
    cat = run(cache, SAME, Span("cat", 8, 4))
    dog = run(cache, SAME, Span("dog", 8, 4))
    rows = [(cache.row(seq)[:4]) for seq in (cat, dog)]
    assert rows[0][:2] == rows[1][:2]
    assert not set(rows[0][2:]) & set(rows[1][2:])
    assert hit(cache, [*SAME, 7], Span("cat", 8, 4)) == 16
    assert hit(cache, [*SAME, 7], Span("dog", 8, 4)) == 16


def test_an_image_that_ends_behind_the_prompt_is_refused() -> None:
    cache = Checked()
    before = snapshot(cache.cache)
    for start, length in ((0, 5), (4, 1), (3, 2), (2**26, 1), (0, 2**27)):
        with pytest.raises(InvalidArgument, match="extra_keys"):
            cache.allocate([7] * 4, extra_keys=(Span("cat", start, length),))
        assert snapshot(cache.cache) == before
    cache.allocate([7] * 4, extra_keys=(Span("cat", 0, 4),))


def test_a_block_under_an_image_that_fills_up_while_decoding(cache: Checked) -> None:
    """The image ends at token 6 of 8; two decoded tokens fill the block, which then answers prompts that have both."""
    size = block_size(cache)
    seq = run(cache, [7] * 6, Span("cat", 5, 1))
    for _ in range(2 + size):
        cache.append([seq], [9])
        cache.compute_some(seq, 1)
    text = [*[7] * 6, 9, 9]
    assert hit(cache, [*text, 3], Span("cat", 5, 1)) == 8
    assert hit(cache, [*text, 3], Span("dog", 5, 1)) == 4 // size * size
    assert hit(cache, [*text, 3]) == 4 // size * size


def test_a_long_image_over_many_blocks(cache: Checked) -> None:
    """One image over eight blocks; each knows how far into the image it begins."""
    tokens = [7] * 40
    run(cache, tokens, Span("cat", 2, 34))
    assert hit(cache, [*tokens, 1], Span("cat", 2, 34)) == 40
    assert hit(cache, [7] * 32, Span("cat", 2, 30)) == 0
    assert hit(cache, [7, 7, 7, 7, *tokens], Span("cat", 6, 34)) == 0


def test_two_images_tell_at_the_second_one(cache: Checked) -> None:
    run(cache, SAME, Span("cat", 1, 2), Span("dog", 13, 2))
    assert hit(cache, [*SAME, 7], Span("dog", 13, 2), Span("cat", 1, 2)) == 16
    size = block_size(cache)
    assert hit(cache, [*SAME, 7], Span("cat", 1, 2), Span("cow", 13, 2)) == 12 // size * size
    assert hit(cache, [*SAME, 7], Span("cow", 1, 2), Span("dog", 13, 2)) == 0


def test_overlapping_spans_are_all_compared(cache: Checked) -> None:
    """A video and its sound, one within the other."""
    video, sound = Span("v", 2, 10, "video"), Span("s", 4, 4, "sound")
    run(cache, SAME, video, sound)
    assert hit(cache, [*SAME, 7], sound, video) == 16
    assert hit(cache, [*SAME, 7], video) == (4 if block_size(cache) == 4 else 0)
    assert hit(cache, [*SAME, 7], sound) == 0


def test_a_fork_inside_an_image_publishes_under_it(cache: Checked) -> None:
    """Fork after eleven tokens of an image over 5 to 10: the child fills the third block, under the same image."""
    seq = run(cache, [7] * 11, Span("cat", 5, 6))
    (child,) = cache.fork(seq)
    cache.free(seq)
    for _ in range(1 + 4):
        cache.append([child], [9])
        cache.compute_some(child, 1)
    tokens = [*[7] * 11, *[9] * 5]
    assert cache.tokens(child) == tokens
    assert hit(cache, [*tokens, 3], Span("cat", 5, 6)) == 16
    assert hit(cache, [*tokens, 3]) == 4 // block_size(cache) * block_size(cache)


@pytest.mark.parametrize("cut", [6, 7, 8, 9, 10, 12])
def test_what_follows_a_cut_inside_an_image_is_text(cut: int) -> None:
    """Cut to `cut` tokens, then decoded on with the placeholder's token: those tokens are text, not the image's rest.

    All blocks that the image's own run left are evicted first, so whatever is hit at the end was made after the cut.
    """
    cache = Checked(12)
    image = Span("cat", 5, 9)
    seq = run(cache, SAME, image)
    cache.truncate(seq, cut)
    (whole,) = cache.fork(seq)
    cache.free(whole)
    cache.pool.free_blocks(cache.pool.get_new_blocks(cache.num_free_blocks))
    while cache.num_computed_tokens(seq) < 16:
        cache.append([seq], [7])
        cache.compute_some(seq, 1)
    assert cache.tokens(seq) == SAME
    # What the image's run published before the cut is still right; nothing behind it is.
    assert hit(cache, [*SAME, 7], image) == cut // 4 * 4
    # Nor is it any prompt's: a shorter image of the same content is another image.
    shorter = Span("cat", 5, cut - 5)
    assert hit(cache, [*SAME, 7], shorter) == 4
    assert hit(cache, [*SAME, 7]) == 4
    (child,) = cache.fork(seq)
    cache.free([seq, child])
    assert hit(cache, [*SAME, 7], image) == cut // 4 * 4


def test_a_cut_before_or_behind_an_image_leaves_it_alone() -> None:
    """After the image, decoded tokens follow the whole image. Before it, the sequence is plain text again."""
    cache = Checked(30)
    image = Span("cat", 5, 2)
    seq = run(cache, SAME, image)
    (early,) = cache.fork(seq)
    cache.truncate(seq, 7)
    cache.truncate(early, 5)
    for each, token in ((seq, 8), (early, 9)):
        for _ in range(9):
            cache.append([each], [token])
            cache.compute_some(each, 1)
    assert hit(cache, [*SAME[:7], *[8] * 9, 1], image) == 16
    assert hit(cache, [*SAME[:5], *[9] * 9, 1]) == 12
    assert hit(cache, [*SAME[:5], *[9] * 9, 1], image) == 4


def test_a_cut_twice_inside_one_image() -> None:
    cache = Checked(30)
    seq = run(cache, SAME, Span("cat", 1, 15))
    for cut in (11, 10, 6):
        cache.truncate(seq, cut)
    for _ in range(10):
        cache.append([seq], [7])
        cache.compute_some(seq, 1)
    cache.check()
    row = cache.row(seq)
    other = cache.allocate([*SAME, 7], extra_keys=(Span("cat", 1, 15),))
    assert cache.row(other)[0] == row[0]
    assert not set(cache.row(other)[1:]) & set(row[1:])


def test_images_survive_swapping() -> None:
    cache = Checked(30, num_cpu_blocks=20)
    seq = run(cache, [7] * 6, Span("cat", 5, 1))
    cache.swap_out(seq)
    cache.append([seq], [9])
    cache.swap_in(seq)
    for _ in range(3):
        cache.compute(seq, [9])
    assert hit(cache, [*[7] * 6, 9, 9, 3], Span("cat", 5, 1)) == 8
    assert hit(cache, [*[7] * 6, 9, 9, 3], Span("dog", 5, 1)) == 4


def test_a_batch_with_one_image() -> None:
    """The keys of a batch hold for each of its prompts, so a span that one of them is too short for refuses all."""
    cache = Checked(20)
    first, second = cache.allocate_batch([[*SAME, 1], [*SAME, 2]], extra_keys=(Span("cat", 5, 6),))
    assert cache.row(first)[:4] == cache.row(second)[:4]
    with refused(cache.cache, InvalidArgument, match="ends at position 11"):
        cache.allocate_batch([SAME, [7] * 10], extra_keys=(Span("cat", 5, 6),))


def test_images_in_a_pool_used_alone() -> None:
    pool = BlockPool(20, 4)
    lease = pool.get_new_blocks(4)
    pool.cache_full_blocks(lease, SAME, extra_keys=(Span("cat", 5, 6),))
    assert pool.num_cached_tokens(SAME, extra_keys=(Span("cat", 5, 6),)) == 16
    assert pool.num_cached_tokens(SAME, extra_keys=(Span("dog", 5, 6),)) == 4
    assert pool.num_cached_tokens(SAME) == 4
    assert list(pool.get_cached_blocks(SAME, extra_keys=(Span("cat", 5, 6),))) == list(lease)
    pool.check()
