"""Connections of clients that send nothing: uvicorn waits for a request's headers for ever, this does not."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


def protocol_with_header_limit(header_seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP/1.1 over h11, closing a connection whose next request has not begun after `header_seconds`."""

    class ImpatientProtocol(H11Protocol):
        """One connection."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._patience: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait_for_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_busy():
                self._stop_waiting()
            elif self._patience is None:
                self._wait_for_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _is_busy(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _wait_for_headers(self) -> None:
            self._patience = self.loop.call_later(header_seconds, self._give_up)

        def _stop_waiting(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

        def _give_up(self) -> None:
            self._patience = None
            if not self._is_busy():
                self.transport.close()

    return ImpatientProtocol
