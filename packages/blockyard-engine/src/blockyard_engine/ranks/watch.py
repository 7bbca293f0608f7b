"""Rank 0's watch over the other ranks: their messages, and the reason when one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from blockyard.errors import HandoffError, InvalidArgument, RankError
from blockyard.wire import ConnectionLost, Message, pack

from .peers import Peer

T = TypeVar("T")

#: Seconds that a rank may take to answer a ping.
_ANSWER_SECONDS = 5.0
#: Seconds to wait for the cause of a failed collective.
_CAUSE_SECONDS = 2.0
_BLAME_SECONDS = 10.0
_END_SECONDS = 5.0


class PeerWatch:
    """Reads the ranks' messages, in a thread each. If one ends or fails, all are ended, and `failure` says why."""

    def __init__(self, peers: list[Peer]) -> None:
        self.peers = peers
        self.failure: str | None = None
        self._callbacks: list[Callable[[str], None]] = []
        self._condition = threading.Condition()
        self._inbox: dict[tuple[int, str], Message] = {}
        #: Ranks that have answered the last ping, and those that have ended.
        self._answered: set[int] = set()
        self._ended: set[int] = set()
        self._causes: list[tuple[bool, str]] = []
        self._is_over = False
        self._have_ended = threading.Event()
        for peer in peers:
            threading.Thread(target=self._read, args=(peer,), name=f"blockyard-rank-{peer.rank}", daemon=True).start()

    def await_all(self, kind: str) -> list[Message]:
        """Wait for a message of this kind from each rank and return them in order.

        Raises `RankError` if a rank ends.
        """
        keys = [(peer.rank, kind) for peer in self.peers]
        with self._condition:
            self._condition.wait_for(lambda: self.failure is not None or all(key in self._inbox for key in keys))
            self.require_all()
            return [self._inbox.pop(key) for key in keys]

    def has_received(self, kind: str, number: int) -> bool:
        """Return whether each rank has sent a message of this kind with this number or a later one. O(ranks)."""
        with self._condition:
            said = [self._inbox.get((peer.rank, kind)) for peer in self.peers]
        return all(message is not None and message.number >= number for message in said)

    def run_unless_lost(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, which may wait for other ranks forever. Raises as it, and `RankError`.

        It runs in its own thread, which is abandoned if a rank ends.
        """
        found: Future[T] = Future()

        def run() -> None:
            try:
                found.set_result(call())
            except BaseException as error:
                found.set_exception(error)
            with self._condition:
                self._condition.notify_all()

        threading.Thread(target=run, name="blockyard-ranks-meet", daemon=True).start()
        with self._condition:
            self._condition.wait_for(lambda: self.failure is not None or found.done())
            self.require_all()
        return found.result()

    def require_all(self) -> None:
        """Raise `RankError` if a rank has ended."""
        if self.failure is not None:
            raise RankError(self.failure)

    def send_all(self, message: bytes) -> None:
        """Send a message to every rank. Raises `RankError` if one has ended."""
        self.require_all()
        for peer in self.peers:
            try:
                peer.connection.send_bytes(message)
            except ConnectionLost as error:
                raise self.failure_after(error) from error

    def failure_after(self, error: BaseException) -> RankError:
        """Return the error to raise when a rank seems to be gone. Waits a moment for the cause."""
        unresponsive = self._unresponsive_ranks()
        with self._condition:
            self._condition.wait_for(lambda: self.failure is not None, 0 if unresponsive else _BLAME_SECONDS)
        self.fail(_unresponsive(unresponsive) or str(error))
        return RankError(self.failure)

    def ping(self) -> str | None:
        """Ask every rank for a sign of life; return why no step is possible now, or None if all answer."""
        unresponsive = self._unresponsive_ranks()
        with self._condition:  # if a rank has ended, the reason will follow
            self._condition.wait_for(lambda: self.failure is not None or not self._ended, _BLAME_SECONDS)
        return self.failure or _unresponsive(unresponsive) or None

    def _unresponsive_ranks(self) -> list[Peer]:
        """Ping all ranks; return those that neither answer in time nor have ended."""
        with self._condition:
            self._answered.clear()
        for peer in self.peers:
            _try_send(peer, pack("ping"))
        with self._condition:

            def missing() -> list[Peer]:
                return [peer for peer in self.peers if peer.rank not in self._answered | self._ended]

            self._condition.wait_for(lambda: self.failure is not None or not missing(), _ANSWER_SECONDS)
            return [] if self.failure is not None else missing()

    def on_failure(self, call: Callable[[str], None]) -> None:
        """Call `call` with the reason, in a thread of the watch, when a rank ends; at once if one has ended."""
        with self._condition:
            if self.failure is None:
                self._callbacks.append(call)
                return
        call(self.failure)

    def fail(self, why: str) -> None:
        """End all ranks because of a failure on rank 0. Does nothing if they have ended."""
        with self._condition:
            if self._is_over:
                self.failure = self.failure or why
                return
            self._is_over = True
            self.failure = why
            self._condition.notify_all()
        self._end_all()

    def close(self) -> None:
        """End all ranks; they finish pending messages. After a failure, wait until they have ended."""
        with self._condition:
            was_over, self._is_over = self._is_over, True
            self.failure = self.failure or "the engine is closed"
        if was_over:
            self._have_ended.wait(2 * _END_SECONDS)
        else:
            self._end_peers("")

    def _read(self, peer: Peer) -> None:
        try:
            while self._take(peer, Message.of(peer.connection.recv_bytes())):
                pass
        except ConnectionLost:
            self._mark_ended(peer)
            if not self._is_over:
                self._add_cause(peer.how_it_ended(), False)
        except (InvalidArgument, HandoffError) as error:
            self._mark_ended(peer)
            self._add_cause(f"rank {peer.rank} sent a message that cannot be read: {error}", False)

    def _take(self, peer: Peer, message: Message) -> bool:
        """Handle a message of a rank; return whether more may follow."""
        if message.kind == "failed":
            self._mark_ended(peer)
            why = message.fields.get("why", "failed without a reason")
            self._add_cause(f"rank {peer.rank} {why}", bool(message.fields.get("is_consequence")))
            return False
        with self._condition:
            if message.kind == "pong":
                self._answered.add(peer.rank)
            else:
                self._inbox[peer.rank, message.kind] = message
            self._condition.notify_all()
        return True

    def _mark_ended(self, peer: Peer) -> None:
        with self._condition:
            self._ended.add(peer.rank)
            self._condition.notify_all()

    def _add_cause(self, why: str, is_consequence: bool) -> None:
        """Record why a rank failed. After the first cause, wait a moment for a more precise one, then end all ranks."""
        with self._condition:
            self._causes.append((is_consequence, why))
            self._condition.notify_all()
            if len(self._causes) > 1 or self._is_over:
                return
            self._condition.wait_for(lambda: not min(self._causes)[0], _CAUSE_SECONDS)
            has_cause = not min(self._causes)[0]
        unresponsive = [] if has_cause else self._unresponsive_ranks()
        with self._condition:
            if self.failure is not None:
                return
            self._is_over = True
            cause = next(text for kind, text in self._causes if kind == min(self._causes)[0])
            self.failure = _unresponsive(unresponsive) or cause
            self._condition.notify_all()
        self._end_all()

    def _end_all(self) -> None:
        for call in self._callbacks:
            call(self.failure or "")
        self._end_peers(self.failure or "")

    def _end_peers(self, why: str) -> None:
        for peer in self.peers:
            _try_send(peer, pack("close", {"why": why}))
        for peer in self.peers:
            peer.end(_END_SECONDS)
        self._have_ended.set()


def _try_send(peer: Peer, message: bytes) -> None:
    """Send a short message if the rank can take it: a stopped rank must not delay the others."""
    with suppress(ConnectionLost):
        if peer.connection.takes():
            peer.connection.send_bytes(message)


def _unresponsive(peers: list[Peer]) -> str:
    names = " and ".join(peer.name for peer in peers)
    does, is_ = ("does", "it is") if len(peers) == 1 else ("do", "they are")
    return f"{names} {does} not answer: {is_} stopped or cut off" if peers else ""
