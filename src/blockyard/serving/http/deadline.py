"""When a client's request must have its answer: counted from its arrival, whatever it then waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..errors import timed_out


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
