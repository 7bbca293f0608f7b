"""The page as an ASGI application: its files, the stream of frames, and details. It is read-only.

    GET /                         the page; its files are next to it
    GET /state                    settings of the page, JSON
    GET /state/stream             server-sent events: past, frame, change, tree
    GET /state/block/17           one block, read between two steps
    GET /state/run/1/1024         states of blocks 1 and following in the latest frame
    GET /state/branch/3           blocks that cache a branch of the tree

Paths are relative to the mount point. Prompts are untrusted text: responses are ASCII JSON, the page inserts them as
text only, and its Content-Security-Policy allows only its own files and no markup from strings.
"""

from __future__ import annotations

import asyncio
import json
import queue
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

from .call_queue import CacheSource
from .details import MAX_RUN, SeenBlock, Texts, block_answer, read_block, read_config, run_answer
from .feed import MIN_SECONDS, PageFeed
from .prompt_log import PromptLog, beginnings_with, hits_answer, read_hits
from .tree import read_branch

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

#: Maximum of open streams.
MAX_READERS = 16
#: Seconds for a reader to receive an event.
_SEND_SECONDS = 10.0
_FILES = Path(__file__).parent / "files"
_FLEET_FILES = Path(__file__).parent / "fleet"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class PageFiles:
    """An ASGI application that serves a page's files by name. It answers GET and HEAD.

    Args:
        first: name of the file for the empty path.
        *folders: folders of files; later ones take precedence.
    """

    def __init__(self, first: str, *folders: Path) -> None:
        self._first = first
        self._files = {path.name: path for folder in folders for path in folder.iterdir() if path.suffix in _TYPES}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        if scope["type"] != "http":
            raise RuntimeError(f"scope['type'] is {scope['type']!r}; the page answers http only")
        is_head = scope["method"] == "HEAD"
        if scope["method"] not in ("GET", "HEAD"):
            await _answer(send, 405, _error("the page is read-only; use GET or HEAD"), is_head)
            return
        found = self._files.get(path_of(scope) or self._first)
        if found is None:
            await _answer(send, 404, _error("the page has no such file"), is_head)
        else:
            await _answer(send, 200, found.read_bytes(), is_head, _TYPES[found.suffix])


def fleet_page() -> PageFiles:
    """Return the page of a fleet, which reads ../fleet."""
    return PageFiles("fleet.html", _FILES, _FLEET_FILES)


def path_of(scope: Scope) -> str:
    """Return the path below the mount point, without a leading slash."""
    path: str = scope["path"].removeprefix(scope.get("root_path", "")).lstrip("/")
    return path


class LivePage:
    """The page of one cache.

    Args:
        source: the cache.
        name: name of the model, shown in the header.
        texts: decodes tokens, in any thread; None without a tokenizer.
        shows_text: whether to show tokens and prompts; otherwise only the map and statistics.
        chat_path: path of chat completions relative to the page; None for no chat box.
        guard: raises for a request that may not read the state; files are public.
        is_ending: returns whether streams should end, because the server is stopping.

    Attributes:
        prompts: log of answered prompts, filled by the host.
        feed: feed of frames.
    """

    def __init__(
        self,
        source: CacheSource,
        name: str = "",
        texts: Texts | None = None,
        shows_text: bool = True,
        chat_path: str | None = None,
        guard: Callable[[Scope], None] | None = None,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self.prompts = PromptLog()
        self.feed = PageFeed(source, self.prompts, texts if shows_text else None, shows_text, is_ending)
        self._source = source
        self._texts = texts
        self._shows_text = shows_text
        self._guard = guard
        self._hello = {"model": name, "shows_text": shows_text, "chat": chat_path, "seconds": MIN_SECONDS}
        self._num_streams = 0
        self._files = PageFiles("index.html", _FILES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_of(scope)
        if scope.get("method") in ("GET", "HEAD") and (path == "state" or path.startswith("state/")):
            await self._state(path, scope, receive, send, scope["method"] == "HEAD")
        else:
            await self._files(scope, receive, send)

    async def _state(self, path: str, scope: Scope, receive: Receive, send: Send, is_head: bool) -> None:
        # Only the page itself and typed addresses: pages of other origins must not read prompts.
        if dict(scope["headers"]).get(b"sec-fetch-site", b"none") not in (b"same-origin", b"none"):
            await _answer(send, 403, _error("the state may only be read by the page, not by other origins"), is_head)
            return
        if self._guard is not None:
            self._guard(scope)
        if path == "state/stream" and not is_head:
            await self._stream(receive, send)
            return
        try:
            status, content = await self._answer_of(path.split("/")[1:])
        except queue.Full:
            status, content = 503, {"error": "too many calls wait for the cache; try again"}
        await _answer(send, status, json.dumps(content, separators=(",", ":")).encode("ascii"), is_head)

    async def _answer_of(self, parts: list[str]) -> tuple[int, object]:
        kind, numbers = (parts[0] if parts else ""), parts[1:]
        if not all(each.isascii() and each.isdecimal() and len(each) <= 9 for each in numbers):
            return 404, {"error": "the path's numbers must have at most nine digits"}
        known: dict[tuple[str, int], Callable[..., Awaitable[dict[str, Any] | None]]] = {
            ("", 0): self._first,
            ("block", 1): self._block,
            ("run", 2): self._run,
            ("branch", 1): self._branch,
        }
        answer = known.get((kind, len(numbers)))
        if answer is None:
            return 404, {"error": "there is no such path below state"}
        found = await answer(*map(int, numbers))
        return (200, found) if found is not None else (404, {"error": f"there is no {kind} with this number"})

    async def _first(self) -> dict[str, Any]:
        return {**self._hello, **await asyncio.wrap_future(self._source.call(read_config))}

    async def _block(self, block_id: int) -> dict[str, Any] | None:
        seen = await asyncio.wrap_future(self._source.call(partial(read_block, block_id)))
        if seen is None:
            return None
        answer = await block_answer(seen, self._texts, self._shows_text)
        return answer | {"hits": await self._hits(seen) if self._shows_text else None}

    async def _hits(self, seen: SeenBlock) -> dict[str, Any] | None:
        """Return which of the latest prompts hit a block; None if it is not cached, or not `SeenBlock.is_plain`."""
        if not (seen.is_plain and seen.block.is_cached):
            return None
        prompts, tokens = self.prompts.latest(), seen.block.token_ids
        begun = await asyncio.to_thread(beginnings_with, prompts, tokens, len(tokens))
        ask = self._source.call(partial(read_hits, seen.block.block_id, begun))
        return hits_answer(await asyncio.wrap_future(ask), len(prompts))

    async def _run(self, first: int, count: int) -> dict[str, Any] | None:
        frame = self.feed.latest
        if frame is None or not (1 <= first <= len(frame.states) and 1 <= count <= MAX_RUN):
            return None
        return run_answer(frame, self.feed.ref_counts, first, count)

    async def _branch(self, number: int) -> dict[str, Any] | None:
        if number >= len(self.feed.branches):
            return None
        blocks = await asyncio.wrap_future(self._source.call(partial(read_branch, self.feed.branches[number])))
        return {"blocks": blocks}

    async def _stream(self, receive: Receive, send: Send) -> None:
        if self._num_streams >= MAX_READERS:
            await _answer(send, 503, _error(f"{MAX_READERS} pages are open already, the limit"), False)
            return
        self._num_streams += 1  # before anything is awaited: many may be requested at once
        leaving = asyncio.ensure_future(_disconnected(receive))
        sending = asyncio.ensure_future(self._send_events(send))
        try:
            await asyncio.wait({leaving, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._num_streams -= 1
            for task in (leaving, sending):
                task.cancel()
            await asyncio.gather(leaving, sending, return_exceptions=True)

    async def _send_events(self, send: Send) -> None:
        await send(_start(200, "text/event-stream"))
        events = self.feed.events()
        try:
            async for piece in events:
                async with asyncio.timeout(_SEND_SECONDS):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"event: over\ndata: null\n\n", "more_body": False})
        finally:
            await events.aclose()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, kind: str, length: int | None = None) -> Message:
    headers = [(name.encode(), value.encode()) for name, value in {**_HEADERS, "content-type": kind}.items()]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    return {"type": "http.response.start", "status": status, "headers": headers}


async def _answer(send: Send, status: int, body: bytes, is_head: bool, kind: str = "application/json") -> None:
    await send(_start(status, kind, len(body)))
    await send({"type": "http.response.body", "body": b"" if is_head else body})


def _error(message: str) -> bytes:
    return json.dumps({"error": message}).encode("ascii")
