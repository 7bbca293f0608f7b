"""Frames on the wire: put together again from their changes, for slow readers, and at a bounded rate."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from blockyard import CacheConfig, KVCacheManager
from blockyard_serve.live import CallQueue, EngineStatus, LivePage
from blockyard_serve.live import feed as feeds
from blockyard_serve.live import live_page as pages
from blockyard_serve.live.call_queue import AnswerT
from blockyard_serve.live.feed import MIN_SECONDS, PageFeed, seconds_between
from blockyard_serve.live.frames import Frame
from blockyard_serve.live.prompt_log import MAX_PROMPTS, MAX_TOKENS, PromptLog
from blockyard_serve.live.snapshot import take_snapshot
from blockyard_testing.live_caches import KINDS, at_work, live_cache
from blockyard_testing.seeds import run_seed


class Reader:
    """Keeps the state of a page, put together from frames and changes as the wire format says."""

    def __init__(self) -> None:
        self.number = 0
        self.maps: dict[str, bytearray | None] = {}
        self.rows: dict[int, dict[str, Any]] = {}

    def take(self, sent: bytes) -> None:
        for part in sent.decode("ascii").split("\n\n"):
            name, _, data = part.partition("\ndata: ")
            if name in ("event: frame", "event: change"):
                told = json.loads(data)
                (self._whole if name.endswith("frame") else self._change)(told)
                self.number = told["n"]

    def _whole(self, told: dict[str, Any]) -> None:
        kept = {key: told[key] and bytearray(base64.b64decode(told[key]["cells"])) for key in ("map", "cpu")}
        self.maps, self.rows = kept, {row["id"]: row for row in told["rows"]}
        self.width = told["map"]["width"]

    def _change(self, told: dict[str, Any]) -> None:
        assert told["after"] == self.number
        for key, runs in (("map", told["changed"]), ("cpu", told["cpu_changed"])):
            for start, text in runs:
                piece, kept = base64.b64decode(text), self.maps[key]
                assert kept is not None
                kept[start * self.width : start * self.width + len(piece)] = piece
        for row in told["rows"]:
            before = self.rows.get(row["id"], {})
            more = row.pop("more", [])
            row["path"] = row["path"] if "path" in row else [*before["path"], *more]
            self.rows[row["id"]] = before | row
        for handle in told["gone"]:
            del self.rows[handle]

    def require(self, frame: Frame) -> None:
        """Raise unless it has exactly this frame."""
        assert self.number == frame.number
        assert bytes(self.maps["map"] or b"") == frame.cells.content
        assert bytes(self.maps["cpu"] or b"") == (frame.cpu_cells.content if frame.cpu_cells else b"")
        assert {key: row["path"] for key, row in self.rows.items()} == {k: list(r.path) for k, r in frame.rows.items()}
        counts = {key: (row["tokens"], row["computed"], row["blocks"]) for key, row in self.rows.items()}
        assert counts == {k: (r.num_tokens, r.num_computed, r.num_blocks) for k, r in frame.rows.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_changes_add_up_to_the_whole_frame(kind: str) -> None:
    cache, reader = live_cache(kind), Reader()
    before: Frame | None = None
    for number, _ in enumerate(at_work(cache, run_seed() + 3, 150), 1):
        frame = Frame.of(take_snapshot(cache, EngineStatus(step=number)), number)
        reader.take(frame.whole() if before is None else frame.since(before))
        reader.require(frame)
        before = frame


def test_a_large_map_sends_only_changed_cells() -> None:
    cache = KVCacheManager(CacheConfig(num_blocks=50_000, block_size=4, max_num_seqs=8, max_model_len=4096))
    reader, before = Reader(), Frame.of(take_snapshot(cache, EngineStatus()), 1)
    reader.take(before.whole())
    for number, first in enumerate(range(0, 20_000, 4000), 2):
        seq = cache.allocate(list(range(first, first + 4000)))
        cache.commit([seq], cache.reserve([seq]).num_scheduled)
        frame = Frame.of(take_snapshot(cache, EngineStatus()), number)
        sent = frame.since(before)
        reader.take(sent)
        reader.require(frame)
        assert len(sent) < len(frame.whole()) / 3
        before = frame


def test_a_pool_of_another_size_is_sent_whole() -> None:
    cache, reader = live_cache("plain"), Reader()
    before = Frame.of(take_snapshot(cache, EngineStatus()), 1)
    cache.resize(80)
    frame = Frame.of(take_snapshot(cache, EngineStatus()), 2)
    reader.take(frame.since(before))
    reader.require(frame)
    assert frame.cells.num_blocks == 79


# ---------------------------------------------------------------- the feed


class Answers:
    """A source that answers at once, and lets the cache take a step each time."""

    def __init__(self, cache: KVCacheManager) -> None:
        self.cache = cache
        self.steps = at_work(cache, run_seed(), 10_000)
        self.num_asked = 0

    def call(self, function: Callable[[KVCacheManager, EngineStatus], AnswerT]) -> Future[AnswerT]:
        answer: Future[AnswerT] = Future()
        next(self.steps)
        self.num_asked += 1
        answer.set_result(function(self.cache, EngineStatus(step=self.num_asked)))
        return answer


def test_slow_reader_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """One takes every event, the other stops after its first frame: it then gets the latest, whole."""
    monkeypatch.setattr(feeds, "seconds_between", lambda copying, making: 0.001)

    async def watch() -> None:
        feed = PageFeed(Answers(live_cache("plain")), PromptLog())
        quick, slow = feed.events(), feed.events()
        reader, late = Reader(), Reader()
        while not late.number:
            late.take(await anext(slow))
        seen = late.number
        while reader.number < seen + 30:
            reader.take(await anext(quick))
        assert feed.num_readers == 2
        sent = await anext(slow)
        assert sent.startswith(b"event: frame\n"), "whole: it has missed what lies between"
        late.take(sent)
        assert late.number >= reader.number
        await quick.aclose()
        await slow.aclose()
        assert feed.num_readers == 0

    asyncio.run(asyncio.wait_for(watch(), 60))


def test_a_reader_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second piece is never taken: the stream ends by itself, and the cache was asked on and on meanwhile."""
    monkeypatch.setattr(feeds, "seconds_between", lambda copying, making: 0.001)
    monkeypatch.setattr(pages, "_SEND_SECONDS", 1.0)

    async def watch() -> None:
        source = Answers(live_cache("plain"))
        page, sent = LivePage(source), []

        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == 3:
                await asyncio.Event().wait()

        scope = {"type": "http", "method": "GET", "path": "/state/stream", "headers": []}
        await page(scope, receive, send)
        assert len(sent) == 3
        assert page.feed.num_readers == 0
        assert source.num_asked > 2

    asyncio.run(asyncio.wait_for(watch(), 60))


def test_cache_is_not_read_while_nobody_watches() -> None:
    async def watch() -> None:
        source = Answers(live_cache("plain"))
        feed = PageFeed(source, PromptLog())
        assert source.num_asked == 0
        events = feed.events()
        await anext(events)
        while feed.latest is None:
            await anext(events)
        await events.aclose()
        asked = source.num_asked
        await asyncio.sleep(3 * MIN_SECONDS)
        assert source.num_asked == asked

    asyncio.run(asyncio.wait_for(watch(), 60))


def test_unwatched_time_is_a_gap() -> None:
    """The chart's points end with the last moment that was seen, and the first one afterwards says that it is that."""

    def moments(sent: list[bytes]) -> list[dict[str, Any]]:
        parts = [part.partition("\ndata: ") for part in b"".join(sent).decode("ascii").split("\n\n")]
        return [json.loads(data) for name, _, data in parts if name in ("event: frame", "event: change")]

    async def watch(feed: PageFeed, num_frames: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        events, sent = feed.events(), []
        past = json.loads((await anext(events)).partition(b"data: ")[2])
        while len(moments(sent)) < num_frames:
            sent.append(await anext(events))
        await events.aclose()
        return past, moments(sent)

    async def watch_twice() -> None:
        source = Answers(live_cache("plain"))
        feed = PageFeed(source, PromptLog())
        past, first = await watch(feed, 3)
        assert past == []
        for _ in range(20):
            next(source.steps)
        past, second = await watch(feed, 3)
        assert [past[0]["at"], past[-1]["at"]] == [first[0]["at"], first[-1]["at"]]
        assert [each["gap"] for each in first] == [False] * 3
        assert second[0]["n"] == first[-1]["n"]  # what was seen last, until there is news
        assert [each["gap"] for each in second] == [False, True, False]
        past, _ = await watch(feed, 1)
        assert [point["at"] for point in past if point["gap"]] == [second[1]["at"]]

    asyncio.run(asyncio.wait_for(watch_twice(), 60))


def test_a_source_that_ends_ends_the_stream() -> None:
    class Ended:
        def call(self, function: Callable[[KVCacheManager, EngineStatus], AnswerT]) -> Future[AnswerT]:
            answer: Future[AnswerT] = Future()
            answer.set_exception(RuntimeError("the thread has ended"))
            return answer

    async def watch() -> list[bytes]:
        return [sent async for sent in PageFeed(Ended(), PromptLog()).events()]

    assert b"event: past" in b"".join(asyncio.run(asyncio.wait_for(watch(), 60)))


def test_the_rate_is_bounded_by_time_and_by_share() -> None:
    assert seconds_between(0.0, 0.0) == 0.1
    assert seconds_between(0.0005, 0.0) == 0.1
    assert seconds_between(0.005, 0.0) == 1.0, "half a hundredth of the cache's thread"
    assert seconds_between(0.0, 0.05) == 0.5, "a tenth of a processor besides"


def test_queued_calls_run_in_the_thread_that_runs_the_queue() -> None:
    cache = live_cache("plain")
    calls = CallQueue(cache)
    answer = calls.call(lambda found, around: (found is cache, around.step))
    assert not answer.done()
    assert calls.run(EngineStatus(step=7)) == 1
    assert answer.result() == (True, 7)
    assert calls.run() == 0
    refused = [calls.call(lambda found, around: None) for _ in range(257)][-1]
    assert refused.exception() is not None, "what waits is bounded"
    failing = CallQueue(cache)
    bad = failing.call(lambda found, around: 1 // 0)
    failing.run()
    assert isinstance(bad.exception(), ZeroDivisionError)


# ---------------------------------------------------------------- the latest prompts


def test_the_log_of_prompts_is_bounded() -> None:
    log = PromptLog()
    for number in range(MAX_PROMPTS + 10):
        log.note([number] * (MAX_TOKENS + 5), 0)
    latest = log.latest()
    assert len(latest) == MAX_PROMPTS
    assert latest[0].tokens[0] == 10
    assert {len(prompt.tokens) for prompt in latest} == {MAX_TOKENS}
    assert latest[0].num_tokens == MAX_TOKENS + 5


def test_simultaneous_streams_are_counted_before_they_start() -> None:
    async def statuses() -> list[int]:
        page, left, found = LivePage(CallQueue(live_cache("plain"))), asyncio.Event(), list[int]()

        async def receive() -> dict[str, Any]:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                found.append(message["status"])

        scope = {"type": "http", "method": "GET", "path": "/state/stream", "headers": []}
        streams = [asyncio.ensure_future(page(dict(scope), receive, send)) for _ in range(pages.MAX_READERS + 9)]
        while len(found) < len(streams):
            await asyncio.sleep(0)
        left.set()
        await asyncio.gather(*streams)
        return found

    found = asyncio.run(statuses())
    assert (found.count(200), found.count(503)) == (pages.MAX_READERS, 9)


def test_full_call_queue_does_not_end_the_page() -> None:
    """During one long step more blocks are asked about than may wait: the stream goes on, the rest get 503."""
    calls = CallQueue(live_cache("plain"))
    page = LivePage(calls)

    async def answered(path: str, stop: asyncio.Event) -> list[Any]:
        found: list[Any] = []

        async def receive() -> dict[str, Any]:
            await stop.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            found.append(message.get("status") or message["body"])

        await page({"type": "http", "method": "GET", "path": path, "headers": []}, receive, send)
        return found

    async def ask_too_much() -> tuple[list[Any], list[list[Any]]]:
        stop = asyncio.Event()
        stream = asyncio.ensure_future(answered("/state/stream", stop))
        asked = [asyncio.ensure_future(answered("/state/block/3", stop)) for _ in range(300)]
        await asyncio.sleep(3 * MIN_SECONDS)  # the stream asks too, and is refused
        while not (page.feed.latest and all(each.done() for each in asked)):
            calls.run()
            await asyncio.sleep(0.01)
        stop.set()
        return await stream, await asyncio.gather(*asked)

    stream, asked = asyncio.run(ask_too_much())
    assert {status for status, _ in asked} == {200, 503}
    assert any(b"event: frame" in each for each in stream[1:])
    assert not any(b"event: over" in each for each in stream[1:])
