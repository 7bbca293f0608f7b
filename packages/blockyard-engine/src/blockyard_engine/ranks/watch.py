"""Rank 0's watch over the others: what they say, and the one sentence that says why they are lost."""

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

#: How long a rank may take to say that it is there.
_ANSWER_SECONDS = 5.0
#: How long the cause of a broken sum may come behind its consequences.
_CAUSE_SECONDS = 2.0
_BLAME_SECONDS = 10.0
_END_SECONDS = 5.0


class PeerWatch:
    """Reads what the ranks say, in a thread each. One that ends, or fails, ends all: `lost` then says why."""

    def __init__(self, peers: list[Peer]) -> None:
        self.peers = peers
        self.lost: str | None = None
        self._told: list[Callable[[str], None]] = []
        self._condition = threading.Condition()
        self._inbox: dict[tuple[int, str], Message] = {}
        #: The ranks that have answered since they were last asked, and those that have said their last.
        self._answered: set[int] = set()
        self._ended: set[int] = set()
        self._causes: list[tuple[bool, str]] = []
        self._is_over = False
        self._are_gone = threading.Event()
        for peer in peers:
            threading.Thread(target=self._read, args=(peer,), name=f"blockyard-rank-{peer.rank}", daemon=True).start()

    def await_all(self, kind: str) -> list[Message]:
        """A message of this kind from each rank, in order. Raises `RankError` if one is lost, and waits for it else."""
        keys = [(peer.rank, kind) for peer in self.peers]
        with self._condition:
            self._condition.wait_for(lambda: self.lost is not None or all(key in self._inbox for key in keys))
            self.require_all()
            return [self._inbox.pop(key) for key in keys]

    def have_said(self, kind: str, number: int) -> bool:
        """Return whether each rank has said this with that number, of numbers that grow, or a later one. O(ranks)."""
        with self._condition:
            said = [self._inbox.get((peer.rank, kind)) for peer in self.peers]
        return all(message is not None and message.number >= number for message in said)

    def unless_lost(self, call: Callable[[], T]) -> T:
        """Return what `call` does, which waits for other ranks where nothing can end it. Raises as it, and `RankError`.

        It runs in a thread of its own: where a rank is lost, that one is left behind until it gives up by itself.
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
            self._condition.wait_for(lambda: self.lost is not None or found.done())
            self.require_all()
        return found.result()

    def require_all(self) -> None:
        """Raise `RankError` if the ranks are lost."""
        if self.lost is not None:
            raise RankError(self.lost)

    def send_all(self, message: bytes) -> None:
        """Send a message to every rank. Raises `RankError` if one is lost."""
        self.require_all()
        for peer in self.peers:
            try:
                peer.connection.send_bytes(message)
            except ConnectionLost as error:
                raise self.blame(error) from error

    def blame(self, error: BaseException) -> RankError:
        """Return the error to raise where a rank seems to be gone: with the cause, for which it waits a moment."""
        silent = self._silent_ranks()
        with self._condition:
            self._condition.wait_for(lambda: self.lost is not None, 0 if silent else _BLAME_SECONDS)
        self.lose(_silence(silent) or str(error))
        return RankError(self.lost)

    def silence(self) -> str | None:
        """Why no step can be made now: ranks are lost, or do not answer within seconds. None while all are there."""
        silent = self._silent_ranks()
        with self._condition:  # of one that has ended it will be known why
            self._condition.wait_for(lambda: self.lost is not None or not self._ended, _BLAME_SECONDS)
        return self.lost or _silence(silent) or None

    def _silent_ranks(self) -> list[Peer]:
        """Ask all ranks whether they are there: those that neither answer in time nor have ended."""
        with self._condition:
            self._answered.clear()
        for peer in self.peers:
            _say(peer, pack("ping"))
        with self._condition:

            def missing() -> list[Peer]:
                return [peer for peer in self.peers if peer.rank not in self._answered | self._ended]

            self._condition.wait_for(lambda: self.lost is not None or not missing(), _ANSWER_SECONDS)
            return [] if self.lost is not None else missing()

    def tell(self, call: Callable[[str], None]) -> None:
        """Have `call` told the sentence, in a thread of the watch, when ranks are lost; at once if they are."""
        with self._condition:
            if self.lost is None:
                self._told.append(call)
                return
        call(self.lost)

    def lose(self, why: str) -> None:
        """End all ranks, because of something here. Does nothing if they are lost."""
        with self._condition:
            if self._is_over:
                self.lost = self.lost or why
                return
            self._is_over = True
            self.lost = why
            self._condition.notify_all()
        self._end_all()

    def close(self) -> None:
        """End all ranks in order; they finish what was sent. If they are lost, wait until they are gone."""
        with self._condition:
            was_over, self._is_over = self._is_over, True
            self.lost = self.lost or "the engine was closed, and its ranks have ended"
        if was_over:
            self._are_gone.wait(2 * _END_SECONDS)
        else:
            self._end_peers("")

    def _read(self, peer: Peer) -> None:
        try:
            while self._take(peer, Message.of(peer.connection.recv_bytes())):
                pass
        except ConnectionLost:
            self._say_last(peer)
            if not self._is_over:
                self._note(peer.how_it_ended(), False)
        except (InvalidArgument, HandoffError) as error:
            self._say_last(peer)
            self._note(f"rank {peer.rank} said what cannot be read: {error}", False)

    def _take(self, peer: Peer, message: Message) -> bool:
        """Take in what a rank says; whether it may say more."""
        if message.kind == "failed":
            self._say_last(peer)
            why = message.fields.get("why", "failed, and did not say why")
            self._note(f"rank {peer.rank} {why}", bool(message.fields.get("is_consequence")))
            return False
        with self._condition:
            if message.kind == "pong":
                self._answered.add(peer.rank)
            else:
                self._inbox[peer.rank, message.kind] = message
            self._condition.notify_all()
        return True

    def _say_last(self, peer: Peer) -> None:
        with self._condition:
            self._ended.add(peer.rank)
            self._condition.notify_all()

    def _note(self, why: str, is_consequence: bool) -> None:
        """Take in a reason; the first one waits for a better one, and then all are ended."""
        with self._condition:
            self._causes.append((is_consequence, why))
            self._condition.notify_all()
            if len(self._causes) > 1 or self._is_over:
                return
            self._condition.wait_for(lambda: not min(self._causes)[0], _CAUSE_SECONDS)
            is_told = not min(self._causes)[0]
        silent = [] if is_told else self._silent_ranks()
        with self._condition:
            if self.lost is not None:
                return
            self._is_over = True
            cause = next(text for kind, text in self._causes if kind == min(self._causes)[0])
            self.lost = _silence(silent) or cause
            self._condition.notify_all()
        self._end_all()

    def _end_all(self) -> None:
        for call in self._told:
            call(self.lost or "")
        self._end_peers(self.lost or "")

    def _end_peers(self, why: str) -> None:
        for peer in self.peers:
            _say(peer, pack("close", {"why": why}))
        for peer in self.peers:
            peer.end(_END_SECONDS)
        self._are_gone.set()


def _say(peer: Peer, message: bytes) -> None:
    """Send a short message, unless a rank has ended or takes none: a stopped one does not hold up the others."""
    with suppress(ConnectionLost):
        if peer.connection.takes():
            peer.connection.send_bytes(message)


def _silence(peers: list[Peer]) -> str:
    """Return a sentence about ranks that do not answer, empty for none."""
    names = " and ".join(peer.name for peer in peers)
    does, is_ = ("does", "it is") if len(peers) == 1 else ("do", "they are")
    return f"{names} {does} not answer any more: {is_} stopped, or cut off" if peers else ""
