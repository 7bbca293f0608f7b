"""One client's request from its jobs to its end, within the time limit; a client that leaves early frees its blocks.

The time is counted from the request's arrival, whatever it then waits for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from blockyard_engine import GenerationResult, NewToken

from ..errors import ApiError, timed_out
from ..jobs.job import Job, JobRunner, Mailbox


class Deadline:
    """Made when a request arrives. arrived_at: seconds of `time.perf_counter`, by which latencies are counted."""

    def __init__(self, seconds: float) -> None:
        self.arrived_at = time.perf_counter()
        self._seconds = seconds
        self._at = asyncio.get_running_loop().time() + seconds

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Work that ends at the deadline, with 504 (`ApiError`)."""
        try:
            async with asyncio.timeout_at(self._at):
                yield
        except TimeoutError:
            raise timed_out(f"the answer was not complete after {self._seconds:g} seconds") from None


WorkT = TypeVar("WorkT")


class ClientGone(Exception):
    """The client has left, and nothing waits for the answer any more."""


class Run:
    """The jobs of one request, submitted; a context manager that cancels what is unfinished when it is left.

    finished: the result of each prompt that came to its end so far, by position.
    """

    def __init__(self, runner: JobRunner, jobs: list[Job], deadline: Deadline) -> None:
        runner.submit(jobs)
        self.jobs = jobs
        self.finished: dict[int, GenerationResult] = {}
        self._runner = runner
        self._deadline = deadline

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._runner.cancel(self.jobs)

    async def events(self) -> AsyncGenerator[list[tuple[int, NewToken | GenerationResult]], None]:
        """Yield what happens, as lists of (position of the prompt, event), until every job has its result.

        Raises `ApiError` for the first job that ends with one, and 504 when the time is over.
        """
        mailbox, num_left = self.jobs[0].mailbox, len(self.jobs)
        while num_left:
            happened: list[tuple[int, NewToken | GenerationResult]] = []
            for position, event in await self._take(mailbox):
                if isinstance(event, ApiError):
                    raise event
                happened.append((position, event))
                if isinstance(event, GenerationResult):
                    self.finished[position] = event
                    num_left -= 1
            yield happened

    async def results(self) -> list[GenerationResult]:
        """Return the result of each job. Raises as `events` does."""
        async for _ in self.events():
            pass
        return [self.finished[position] for position in range(len(self.jobs))]

    async def results_for(self, request: Request) -> list[GenerationResult]:
        """The same, but raises `ClientGone` as soon as the client has closed its connection."""
        return await while_connected(self.results(), request.receive)

    async def _take(self, mailbox: Mailbox) -> list[tuple[int, NewToken | GenerationResult | ApiError]]:
        async with self._deadline.hold():
            return await mailbox.take()


async def while_connected(work: Coroutine[Any, Any, WorkT], receive: Receive) -> WorkT:
    """The result of `work`, unless the client disconnects before: then `work` is cancelled and `ClientGone` raised."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientGone
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
