"""Clients of a server: each streams one answer after another, and now and then leaves in the middle of one.

They speak HTTP by hand: a client library would take more of the processor than is measured.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_ANSWER_SECONDS = 300.0


@dataclass(slots=True)
class Seen:
    """What all clients saw, in seconds. An error is anything that a client did not cause."""

    first_token: list[float] = field(default_factory=list)
    next_token: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    num_answers: int = 0
    num_disconnects: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Work:
    """chats: lists of messages, of which each request takes one. max_tokens: drawn between these two.
    leaving: share of the requests whose client vanishes after a drawn number of pieces."""

    model: str
    chats: list[list[dict[str, str]]]
    max_tokens: tuple[int, int] = (16, 64)
    leaving: float = 0.15
    seed: int = 0


async def run_clients(address: str, work: Work, num_clients: int, seconds: float) -> Seen:
    """Let the clients work for that long; a client in the middle of an answer then reads it to its end."""
    seen, until = Seen(), time.perf_counter() + seconds
    await asyncio.gather(*(_client(address, work, number, until, seen) for number in range(num_clients)))
    return seen


async def _client(address: str, work: Work, number: int, until: float, seen: Seen) -> None:
    rng = random.Random(work.seed * 1_000_003 + number)
    while time.perf_counter() < until:
        max_tokens = rng.randint(*work.max_tokens)
        patience = rng.randint(0, max_tokens) if rng.random() < work.leaving else None
        fields = {
            "model": work.model,
            "messages": rng.choice(work.chats),
            "max_tokens": max_tokens,
            "temperature": 0.7,
            "seed": rng.getrandbits(31),
            "stream": True,
        }
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await _ask(address, fields, patience, seen)
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
            seen.errors.append(f"{type(error).__name__}: {error}")


async def _ask(address: str, fields: dict[str, Any], patience: int | None, seen: Seen) -> None:
    """One request; a client with patience closes its connection after that many pieces."""
    parts = urlsplit(address)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        body = json.dumps(fields).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        started = time.perf_counter()
        writer.write(head.encode() + body)
        await writer.drain()
        if patience == 0:
            seen.num_disconnects += 1
            return
        await _read(reader, started, patience, seen)
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, started: float, patience: int | None, seen: Seen) -> None:
    status = await reader.readline()
    if b" 200 " not in status:
        rest = await reader.read(2000)
        seen.errors.append(f"{status.decode().strip()} {rest.decode(errors='replace')[-200:]}")
        return
    last, num_pieces = started, 0
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            seen.num_answers += 1
            seen.whole.append(time.perf_counter() - started)
            return
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b'data: {"error"'):
            seen.errors.append(line.decode()[:200])
            return
        if b'"delta":{"content"' in line:
            now = time.perf_counter()
            (seen.next_token if num_pieces else seen.first_token).append(now - last)
            last, num_pieces = now, num_pieces + 1
            if num_pieces == patience:
                seen.num_disconnects += 1
                return
    seen.errors.append("the stream ended without [DONE]")
