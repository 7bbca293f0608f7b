"""One client's request from its jobs to its end. When its client leaves or its deadline passes, its blocks are freed.

The deadline counts from the request's arrival, whatever the request waits for.
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
    """Deadline of a request, made when it arrives.

    Args:
        seconds: time until the deadline.

    Attributes:
        arrived_at: time of arrival, in seconds of `time.perf_counter`.
    """

    def __init__(self, seconds: float) -> None:
        self.arrived_at = time.perf_counter()
        self._seconds = seconds
        self._at = asyncio.get_running_loop().time() + seconds

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Run a block of code until the deadline; then raise `ApiError` (504)."""
        try:
            async with asyncio.timeout_at(self._at):
                yield
        except TimeoutError:
            raise timed_out(f"the answer was not complete after {self._seconds:g} seconds") from None


WorkT = TypeVar("WorkT")


class ClientGone(Exception):
    """The client has left: nothing waits for the response."""


class Run:
    """The submitted jobs of one request. A context manager that cancels unfinished jobs on exit.

    Attributes:
        finished: results so far, by position of the prompt.
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
        """Yield lists of (position of the prompt, event) until every job has its result.

        Raises `ApiError`: the error of the first job that fails, or 504 at the deadline.
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
        """Return the result of each job. Raises `ApiError` like `events`."""
        async for _ in self.events():
            pass
        return [self.finished[position] for position in range(len(self.jobs))]

    async def results_for(self, request: Request) -> list[GenerationResult]:
        """Return the result of each job. Raises `ApiError` like `events`, and `ClientGone` if the client leaves."""
        return await while_connected(self.results(), request.receive)

    async def _take(self, mailbox: Mailbox) -> list[tuple[int, NewToken | GenerationResult | ApiError]]:
        async with self._deadline.hold():
            return await mailbox.take()


async def while_connected(work: Coroutine[Any, Any, WorkT], receive: Receive) -> WorkT:
    """Return the result of `work`. If the client disconnects first, cancel it and raise `ClientGone`."""
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
