"""A publisher that begins anew is another one, whatever its clock says."""

from __future__ import annotations

import functools

import pytest

from blockyard.events import Mirror, Trust
from blockyard.events.publishing.feed import Feed
from blockyard.events.tables.content_table import ContentTable

from .published import PROMPT, compute, make_cache, tokens_of


def bring_up_to_date(mirror: Mirror, feed: Feed) -> None:
    for _ in range(5):
        start = mirror.replay_from("worker")
        if start is None:
            return
        for message in feed.replay(start):
            mirror.receive_replayed("worker", *message)
        mirror.end_replay("worker")


@pytest.mark.parametrize("from_clock", [True, False])
@pytest.mark.parametrize("num_messages", [1, 2, 3])
def test_a_restart_while_the_clock_stands_still_is_noticed(from_clock: bool, num_messages: int) -> None:
    """The messages of both lives are equal byte for byte, but for their numbers or epochs."""
    mirror = Mirror(hash_seed=1)
    cache = make_cache()
    first = Feed(ContentTable(cache.config), from_clock, 100, None, lambda: 1000.0)
    mirror.receive_live("worker", *first.heartbeat())
    bring_up_to_date(mirror, first)
    compute(cache, PROMPT)
    message = first.make_message(cache.take_events())
    assert message is not None
    mirror.receive_live("worker", *message)
    assert (mirror.trust("worker"), tokens_of(mirror)) == (Trust.LIVE, 12)
    second = Feed(ContentTable(cache.config), from_clock, 100, None, lambda: 1000.0)
    for _ in range(num_messages):
        mirror.receive_live("worker", *second.heartbeat())
    bring_up_to_date(mirror, second)
    assert (mirror.trust("worker"), tokens_of(mirror)) == (Trust.LIVE, 0)


def test_numbers_from_the_clock_go_forwards_and_fit_in_63_bits() -> None:
    numbers = []
    for step in range(50):
        feed = Feed(ContentTable(make_cache().config), True, 100, None, functools.partial(float, 1.7e9 + 0.002 * step))
        numbers += [feed.heartbeat()[0] for _ in range(3)]
    assert numbers == sorted(numbers)
    assert numbers[-1] < 2**63
