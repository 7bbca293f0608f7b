"""Connections of clients that send nothing, or read nothing: uvicorn waits for both forever, this does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

#: Of a next request, taken while the one before is still answered. Keeping more would have no bound, and a server that
#: stops reading does not see that the client has gone: a client that sends more is disconnected.
_MAX_EARLY_BYTES = 2**14
_MAX_READ_BYTES = 2**13


class _Patience:
    """A timer that runs from the first `start` to `stop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, give_up: Callable[[], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._give_up = give_up
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to wait, unless the timer runs already."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._give_up)

    def stop(self) -> None:
        """End the wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def impatient_protocol(header_seconds: float, client_seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP/1.1 over h11, with an end to waiting.

    A connection is closed if its next request has not begun after `header_seconds`, and cut if what was sent to it
    has not gone out after `client_seconds`, or if it sends 16 KiB behind a request that is not answered yet.
    """

    class ImpatientProtocol(H11Protocol):
        """One connection."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._for_headers = _Patience(self.loop, header_seconds, self._close_if_idle)
            self._for_reader = _Patience(self.loop, client_seconds, self._cut)

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            # `pause_writing` comes as soon as anything waits to be sent: by default only 64 KiB would tell of a reader
            # that does not read, and what is less would hold its connection forever.
            transport.set_write_buffer_limits(0)
            # asyncio reads this many bytes at once, by default 256 KiB: as chunks of a byte each, seconds of parsing
            # in which no other client is served.
            transport.max_size = _MAX_READ_BYTES  # type: ignore[attr-defined]
            self._for_headers.start()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_busy():
                self._for_headers.stop()
                self._read_on()
            else:
                self._for_headers.start()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._for_reader.start()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._for_reader.stop()

        def connection_lost(self, exc: Exception | None) -> None:
            self._for_headers.stop()
            self._for_reader.stop()
            super().connection_lost(exc)

        def _is_busy(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _read_on(self) -> None:
            # uvicorn stops reading at the first byte too many, and would not notice that the client has gone.
            if self.flow.read_paused and not self.cycle.more_body:
                early, _ = self.conn.trailing_data
                if len(early) > _MAX_EARLY_BYTES:
                    self._cut()
                else:
                    self.flow.resume_reading()

        def _close_if_idle(self) -> None:
            self._for_headers.stop()
            if not self._is_busy():
                self.transport.close()

        def _cut(self) -> None:
            # To close it in order would be to wait for the reader again.
            self.transport.abort()

    return ImpatientProtocol
