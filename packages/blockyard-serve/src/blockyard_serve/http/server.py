"""uvicorn around the application: where it listens, and how it stops.

On SIGTERM, SIGINT or SIGHUP no connection and no request is taken any more, those that run go on for `drain_seconds`,
and what is left then ends with an error of its own before the process does. A second SIGINT does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from blockyard_engine import Engine

from ..errors import unavailable
from ..limits import ServerLimits
from .access import KnownHosts, known_hosts
from .app import create_app
from .body import OneLength
from .listening import cannot_listen, open_sockets
from .request_log import RequestLog, log_config

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


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


#: Seconds for the last errors to reach their clients, behind the drain.
_FAREWELL_SECONDS = 5
#: Connections that wait to be accepted. Each costs the loop milliseconds while the engine computes, and the last waits
#: for all of them: who finds no place tries again after a second, also one who fills the queue on purpose.
_MAX_UNACCEPTED = 128
#: Seconds that clients have to take the error when a second signal cuts them.
_CUT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """host: loopback unless told otherwise. port: 0 for any free one. api_key: None for none; it is shown nowhere.

    access_log: whether each request is a line of the log (on stderr). has_check: whether GET /check is there.
    cors_origins: of web pages that may use it from a browser, as "http://localhost:3000"; "*" for all.
    status_seconds: of work between two lines of the log that say how it goes; 0 for none.
    tenant_metrics: tenants that GET /metrics shows by name, at most 100; 0 for none. tracer: of OpenTelemetry,
    gets spans of every request; None for none.
    allowed_hosts: names under which requests may come, besides those of loopback and `host`; "*" for all. Without them
    it is all, but on loopback without a key none besides.
    ui: what the page under /ui shows: "text", "map" (no prompts) or "off". tenant_keys: the API key of each tenant that
    has one, by its name (docs/tenants.md); shown nowhere.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    limits: ServerLimits = field(default_factory=ServerLimits)
    access_log: bool = False
    has_check: bool = False
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    status_seconds: float = 10.0
    tenant_metrics: int = 0
    tracer: Tracer | None = None
    ui: str = "text"
    tenant_keys: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def has_key(self) -> bool:
        """Say whether requests need a key."""
        return self.api_key is not None or bool(self.tenant_keys)


def guarded(app: ASGIApp, options: ServerOptions) -> ASGIApp:
    """Return the application with its log of requests, and closed to names of hosts that are not its own."""
    hosts = known_hosts(options.host, options.allowed_hosts, options.has_key)
    return RequestLog(OneLength(KnownHosts(app, hosts)))


class AppServer(uvicorn.Server):
    """Serves an application of `app_of` until a signal ends it. `run()` blocks.

    on_listening: called once, with the address, when clients can connect.
    """

    def __init__(self, app: FastAPI, options: ServerOptions, on_listening: Callable[[str], None] | None = None) -> None:
        self.app = app
        self._options = options
        self._on_listening = on_listening
        self._loop: asyncio.AbstractEventLoop | None = None
        limits = options.limits
        config = uvicorn.Config(
            guarded(self.app, options),
            http=impatient_protocol(limits.header_seconds, limits.client_seconds),
            loop="asyncio",  # of uvloop's connections it cannot be set how much they read at once
            ws="none",
            lifespan="on",
            log_level="warning" if not options.access_log else "info",
            log_config=log_config(options.access_log),
            access_log=False,  # `RequestLog` has more to say
            server_header=False,
            proxy_headers=False,
            limit_concurrency=limits.max_connections,
            backlog=_MAX_UNACCEPTED,
            timeout_graceful_shutdown=int(limits.drain_seconds) + _FAREWELL_SECONDS,
        )
        super().__init__(config)

    @property
    def address(self) -> str:
        """Return where clients connect, once it listens."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal ends it. sockets: bound to where it should listen; opened for the options' host and port
        if None.

        Raises `InvalidArgument`, naming both, where it cannot listen.
        """
        super().run(sockets or open_sockets(self._options.host, self._options.port))

    def stop(self, why: str) -> None:
        """Stop as on a signal, from any thread. why: what clients that still come are told."""
        self.app.state.runner.refuse(why)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        self._loop = asyncio.get_running_loop()
        try:
            await super().startup(sockets)
        except OSError as error:  # another server had the same address, and was ready before this one
            await self.lifespan.shutdown()
            raise cannot_listen(self._options.host, self._options.port, error) from None
        if self.started and self._on_listening is not None:
            self._on_listening(self.address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, let the others end within the limit, and end what is left."""
        runner = self.app.state.runner
        if runner.refusal is None:
            runner.refuse("the server is stopping")
        self._say_what_ends()
        end = asyncio.get_running_loop().call_later(
            self._options.limits.drain_seconds, runner.end_all, unavailable("the server is stopping", _FAREWELL_SECONDS)
        )
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop in order at the first signal; a second Ctrl-C ends what still runs, and the order stays."""
        if self.should_exit and sig == signal.SIGINT and self._loop is not None:
            self._loop.call_soon_threadsafe(self._cut)
        else:
            super().handle_exit(sig, frame)

    def _say_what_ends(self) -> None:
        """Say on stderr how long the stop may take, if requests run."""
        page = getattr(self.app.state, "live_page", None)
        number = len(self.server_state.tasks) - (0 if page is None else page.feed.num_readers)
        if number > 0:
            words = f"{number} request{'s end' if number > 1 else ' ends'}"
            seconds = f"{self._options.limits.drain_seconds:g} s"
            print(f"blockyard: stopping: {words} within {seconds}; Ctrl-C again cuts them", file=sys.stderr, flush=True)

    def _cut(self) -> None:
        """End every request with an error, and soon after every connection."""
        assert self._loop is not None
        runner = self.app.state.runner
        runner.refuse("the server is stopping")
        runner.end_all(unavailable("the server is stopping", _FAREWELL_SECONDS))
        self.app.state.stop_seconds = min(self.app.state.stop_seconds, _FAREWELL_SECONDS)
        self._loop.call_later(_CUT_SECONDS, self._abort_connections)

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does as uvicorn's, but a signal that has ended the server in order does not kill the process afterwards."""
        with super().capture_signals(), self._capture_hangup():
            try:
                yield
            finally:
                self._captured_signals.clear()

    @contextlib.contextmanager
    def _capture_hangup(self) -> Iterator[None]:
        """A terminal that closes ends the server in order too, unless nohup has it ignored."""
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
    """Serves an engine until a signal ends it. `run()` blocks; the engine is the server's own from now on.

    on_listening: called once, with the address, when clients can connect.
    """

    def __init__(
        self, engine: Engine, options: ServerOptions, on_listening: Callable[[str], None] | None = None
    ) -> None:
        app = create_app(
            engine,
            options.model_name,
            options.limits,
            options.api_key,
            options.has_check,
            options.cors_origins,
            options.status_seconds,
            options.tenant_metrics,
            options.tracer,
            options.ui,
            options.tenant_keys,
        )
        super().__init__(app, options, on_listening)
