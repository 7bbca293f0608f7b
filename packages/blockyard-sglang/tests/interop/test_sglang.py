"""SGLang's own `RadixCache` beside ours, driven by the same requests: `make interop-sglang`.

Where pages suffice, everything is equal after each step, whatever requests do. Where they are few, SGLang evicts whole
nodes of its tree, so ours is asked for as many tokens as went there. In that world prompts are those of a tree whose
nodes requests do not part, because SGLang's cache refreshes also that part of a node which a request did not match; and
none is aborted, because SGLang's leaves in its old place what is unlocked, where a pool has it used last.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from ..support.small_sglang import HAS_SGLANG

if not HAS_SGLANG:
    pytest.skip("SGLang is not installed here: make interop-sglang", allow_module_level=True)

from sglang.srt.mem_cache.radix_cache import RadixCache

from blockyard_sglang.cache import BlockPoolCache
from blockyard_testing.seeds import run_seed

from ..support.sglang_engine import Engine, new_request

#: Tokens, extra key and salt of the next prompt, given those of the requests that have not ended.
Prompt = Callable[[list[Any]], tuple[list[int], str | None, str | None]]


class Both:
    """One request, in SGLang's cache and in ours."""

    def __init__(self, sides: list[Engine], rid: str, tokens: list[int], *keys: str | None) -> None:
        self.sides = sides
        self.requests = [new_request(rid, tokens, *keys) for _ in sides]

    @property
    def first(self) -> Any:
        return self.requests[0]

    def __call__(self, call: str, *given: Any, **named: Any) -> Any:
        """The same call in both; its answers must be equal."""
        stock, ours = (
            getattr(side, call)(req, *given, **named) for side, req in zip(self.sides, self.requests, strict=True)
        )
        assert stock == ours, (call, self.first.rid)
        return stock

    def append(self, token: int) -> None:
        for req in self.requests:
            req.full_untruncated_fill_ids.append(token)


def make_room(sides: list[Engine], lacking: int) -> None:
    """Ours evicts what SGLang's does: whole nodes, maybe more than was asked for."""
    evicted = sides[0].evict(lacking)
    assert sides[1].evict(evicted) == evicted


def world(draw: random.Random, sides: list[Engine], steps: int, prompt: Prompt, *, may_stop: bool) -> tuple[int, int]:
    """Random requests in both. may_stop: some are aborted or retracted, without being cached. Returns how many tokens
    were hit and how many evicted."""
    page_size = sides[0].page_size
    waiting: list[Both] = []
    running: list[Both] = []
    hits = evicted = 0
    for step in range(steps):
        before = sides[0].sizes()[2]
        choice = draw.random()
        if choice < 0.3 and len(waiting) < 4:
            waiting.append(Both(sides, f"r{step}", *prompt([req.first for req in waiting + running])))
        elif choice < 0.5 and waiting and len(running) < 6:
            req = waiting[0]
            hit = req("match")
            chunk = draw.randint(1, len(req.first.full_untruncated_fill_ids) - hit)
            if req("lacking", chunk) > 0:
                make_room(sides, req("lacking", chunk))
            else:
                hits += hit
                waiting.pop(0)("admit")
                assert req("compute", chunk)
                running.append(req)
        elif choice < 0.85 and running:
            req = draw.choice(running)
            tokens = req.first.full_untruncated_fill_ids
            if req.first.computed == len(tokens):
                req.append(draw.randrange(50))
            elif draw.random() < 0.7:
                req("checkpoint")
            count = draw.randint(1, len(tokens) - req.first.computed)
            make_room(sides, req("lacking", count))
            if not req("compute", count):
                running.remove(req)
                req("release", keep=not may_stop)
                if may_stop:
                    waiting.append(req)
        elif choice < 0.95 and running:
            req = running.pop(draw.randrange(len(running)))
            req("release", keep=not may_stop or draw.random() < 0.6)
        elif choice < 0.97:
            # Which part is evicted is not the same where requests were aborted; all of it is.
            make_room(sides, 10**6 if may_stop else draw.randint(0, 3) * page_size)
        assert sides[0].sizes() == sides[1].sizes(), step
        sides[1].cache.sanity_check()
        evicted += max(0, before - sides[0].sizes()[2])
    for req in running:
        req("release", keep=True)
    assert sides[0].sizes() == sides[1].sizes()
    return hits, evicted


def both_sides(num_pages: int, page_size: int) -> list[Engine]:
    return [Engine(cache, num_pages, page_size) for cache in (RadixCache, BlockPoolCache)]


@pytest.mark.parametrize("number", range(24))
def test_with_enough_pages_results_equal_sglangs(number: int) -> None:
    draw = random.Random(run_seed() + number)
    page_size = (1, 2, 4, 16)[number % 4]
    heads = [[draw.randrange(50) for _ in range(draw.randint(20, 60))] for _ in range(3)]

    def prompt(live: list[Any]) -> tuple[list[int], str | None, str | None]:
        tail = [draw.randrange(3) for _ in range(draw.randint(1, 30))]
        return draw.choice(heads) + tail, draw.choice((None, None, "a")), draw.choice((None, None, "s"))

    hits, _ = world(draw, both_sides(20_000 // page_size, page_size), 400, prompt, may_stop=True)
    assert hits > 0


@pytest.mark.parametrize("number", range(24))
def test_with_few_pages_lru_keeps_the_same_pages_as_sglang(number: int) -> None:
    """Conversations behind one system prompt: a prompt is the one before it, and more. One at a time of each."""
    draw = random.Random(run_seed() + 1000 + number)
    page_size = (1, 2, 4, 16)[number % 4]
    sides = both_sides(480 // page_size, page_size)
    numbers = itertools.count(1000)
    system = [7] * 2 * page_size
    first = Both(sides, "system", system)
    for call, *given in (("match",), ("admit",), ("compute", len(system))):
        first(call, *given)
    first("release", keep=True)
    known: list[list[int]] = []

    def prompt(live: list[Any]) -> tuple[list[int], str | None, str | None]:
        busy = {req.full_untruncated_fill_ids[len(system)] for req in live}
        idle = [text for text in known if text[len(system)] not in busy and len(text) < 150]
        if not idle or draw.random() < 0.1:
            idle = [system + [next(numbers)] * page_size]
        text = draw.choice(idle)
        if text in known:
            known.remove(text)
        known.append(text + [next(numbers)] * page_size * draw.randint(1, 2) + [255])
        return known[-1], None, None

    hits, evicted = world(draw, sides, 500, prompt, may_stop=False)
    assert hits > 0
    assert evicted > 0
