"""uvicorn around the application: connection timeouts and shutdown.

On SIGTERM, SIGINT or SIGHUP the server refuses new connections and requests. Running requests may continue for
`drain_seconds`; then they end with an error, and the process exits. A second SIGINT ends them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from blockyard_engine import Engine

from ..errors import unavailable
from .access import KnownHosts, known_hosts
from .app import create_app
from .body import OneLength
from .listening import cannot_listen, open_sockets
from .request_log import RequestLog, log_config
from .server_options import ServerOptions

#: Bytes of a next request that are accepted before the current one is answered. A server that stops reading does not
#: notice that the client left, and one that buffers without a limit runs out of memory: more than this disconnects.
_MAX_EARLY_BYTES = 2**14
_MAX_READ_BYTES = 2**13


class _Timer:
    """A timer that calls `give_up` if `stop` does not come within `seconds` of the first `start`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, give_up: Callable[[], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._give_up = give_up
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._give_up)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def protocol_with_timeouts(header_seconds: float, client_seconds: float) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP/1.1 protocol (h11) with timeouts.

    A connection is closed if its next request does not begin within `header_seconds`. It is aborted if a response is
    not received within `client_seconds`, or if more than 16 KiB arrive after a request that is not answered yet.
    """

    class TimedProtocol(H11Protocol):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)

            def close_if_idle() -> None:
                self._for_headers.stop()
                if not self._is_busy():
                    self.transport.close()

            self._for_headers = _Timer(self.loop, header_seconds, close_if_idle)
            self._for_reader = _Timer(self.loop, client_seconds, self._cut)

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            # `pause_writing` is then called as soon as anything waits to be sent. By default it takes 64 KiB, and a
            # client that does not read a shorter response would hold its connection forever.
            transport.set_write_buffer_limits(0)
            # Bytes that asyncio reads at once. The default of 256 KiB may be chunks of one byte each, which take
            # seconds to parse while no other client is served.
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
            # uvicorn stops reading at the first byte of a next request, and would not notice that the client left.
            if self.flow.read_paused and not self.cycle.more_body:
                early, _ = self.conn.trailing_data
                if len(early) > _MAX_EARLY_BYTES:
                    self._cut()
                else:
                    self.flow.resume_reading()

        def _cut(self) -> None:
            self.transport.abort()  # `close` would wait for the reader again

    return TimedProtocol


#: Seconds for the last errors to reach their clients, after the drain.
_FAREWELL_SECONDS = 5
#: Connections that wait to be accepted. Accepting one takes milliseconds while the engine computes, so a longer queue
#: would delay the last one too much; clients that find it full retry after a second.
_MAX_UNACCEPTED = 128
#: Seconds for clients to receive the error after a second signal.
_CUT_SECONDS = 1.0


def wrap_app(app: ASGIApp, options: ServerOptions) -> ASGIApp:
    """Return the application with the middleware for request log, body lengths and host names."""
    hosts = known_hosts(options.host, options.allowed_hosts, options.has_key)
    return RequestLog(OneLength(KnownHosts(app, hosts)))


class AppServer(uvicorn.Server):
    """Serves an application of `make_app` until a signal ends it.

    Args:
        on_listening: called once with the address when clients can connect.
    """

    def __init__(self, app: FastAPI, options: ServerOptions, on_listening: Callable[[str], None] | None = None) -> None:
        self.app = app
        self._options = options
        self._on_listening = on_listening
        self._loop: asyncio.AbstractEventLoop | None = None
        limits = options.limits
        config = uvicorn.Config(
            wrap_app(self.app, options),
            http=protocol_with_timeouts(limits.header_seconds, limits.client_seconds),
            loop="asyncio",  # uvloop does not let us limit the bytes that are read at once
            ws="none",
            lifespan="on",
            log_level="warning" if not options.access_log else "info",
            log_config=log_config(options.access_log),
            access_log=False,  # `RequestLog` writes it
            server_header=False,
            proxy_headers=False,
            limit_concurrency=limits.max_connections,
            backlog=_MAX_UNACCEPTED,
            timeout_graceful_shutdown=int(limits.drain_seconds) + _FAREWELL_SECONDS,
        )
        super().__init__(config)

    @property
    def address(self) -> str:
        """URL of the server, once it listens."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal ends it. Raises `InvalidArgument` if the server cannot listen there.

        Args:
            sockets: bound sockets; None opens them for the options' host and port.
        """
        super().run(sockets or open_sockets(self._options.host, self._options.port))

    def stop(self, why: str) -> None:
        """Stop as on a signal; callable from any thread. `why` is the reason that new requests get."""
        self.app.state.runner.refuse(why)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await super().startup(sockets)
        except OSError as error:  # another server was faster to listen on the same address
            await self.lifespan.shutdown()
            raise cannot_listen(self._options.host, self._options.port, error) from None
        if self.started and self._on_listening is not None:
            self._on_listening(self.address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, wait for running ones up to the limit, and end the rest."""
        runner = self.app.state.runner
        if runner.refusal is None:
            runner.refuse("the server is stopping")
        self._report_running()
        end = asyncio.get_running_loop().call_later(
            self._options.limits.drain_seconds, runner.end_all, unavailable("the server is stopping", _FAREWELL_SECONDS)
        )
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down on the first signal; end running requests on a second Ctrl-C."""
        if self.should_exit and sig == signal.SIGINT and self._loop is not None:
            self._loop.call_soon_threadsafe(self._cut)
        else:
            super().handle_exit(sig, frame)

    def _report_running(self) -> None:
        page = getattr(self.app.state, "live_page", None)
        number = len(self.server_state.tasks) - (0 if page is None else page.feed.num_readers)
        if number > 0:
            seconds = self._options.limits.drain_seconds
            message = f"stopping: {number} request{'s' * (number > 1)} may run for {seconds:g} s; Ctrl-C ends them now"
            print(f"blockyard: {message}", file=sys.stderr, flush=True)

    def _cut(self) -> None:
        assert self._loop is not None
        runner = self.app.state.runner
        runner.refuse("the server is stopping")
        runner.end_all(unavailable("the server is stopping", _FAREWELL_SECONDS))
        self.app.state.stop_seconds = min(self.app.state.stop_seconds, _FAREWELL_SECONDS)

        def abort() -> None:
            for connection in list(self.server_state.connections):
                connection.transport.abort()

        self._loop.call_later(_CUT_SECONDS, abort)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals as uvicorn does, but do not kill the process after an orderly shutdown."""
        with super().capture_signals(), self._capture_hangup():
            try:
                yield
            finally:
                self._captured_signals.clear()

    @contextlib.contextmanager
    def _capture_hangup(self) -> Iterator[None]:
        """Shut down in order when the terminal closes, unless nohup has SIGHUP ignored."""
        hangup = getattr(signal, "SIGHUP", None)
        is_ours = threading.current_thread() is threading.main_thread()
        if hangup is None or not is_ours or signal.getsignal(hangup) is not signal.SIG_DFL:
            yield
            return
        signal.signal(hangup, self.handle_exit)
        try:
            yield
        finally:
            signal.signal(hangup, signal.SIG_DFL)


class Server(AppServer):
    """Serves an engine until a signal ends it. `run()` blocks.

    Args:
        engine: the engine; it belongs to the server from now on.
        options: options of the server.
        on_listening: called once with the address when clients can connect.
    """

    def __init__(
        self, engine: Engine, options: ServerOptions, on_listening: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(create_app(engine, options), options, on_listening)
