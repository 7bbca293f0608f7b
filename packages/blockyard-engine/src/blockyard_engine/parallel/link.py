"""The conversation between two processes: control messages over one connection, keys and values over a transport.

    sender                       receiver
    peer ───────────────────────▶            the handshake, both ways; a side that cannot serve the other raises
         ◀─────────────────────── peer
    offer ──────────────────────▶            these tokens are computed
         ◀─────────────────────── pull       from which token on
    data, or stale ─────────────▶            and then the lanes, and states behind them, by the transport
         ◀─────────────────────── release    fetched, or not wanted; if it is lost, its ttl ends it
    bye ────────────────────────▶            no more offers, and none that still lives

Where the receiver reads the sender's memory itself (`OneSided`), the sender says where that is after the handshake, and
instead of a pull the receiver reads, and then asks:

         ◀─────────────────────── read       all has been read: was it held until now?
    held, or stale ─────────────▶

A connection is anything with `send_bytes`, `recv_bytes` and `poll`, such as `multiprocessing.Pipe()` gives. The message
"data" comes after the sender has made sure that it still holds the blocks, and it does nothing else until they are
sent; so what arrives is what was offered. Needs torch.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque

import numpy as np
import torch

from blockyard.arguments import require_int, require_number
from blockyard.errors import HandoffError, InvalidArgument, PeerMismatch, StaleOffer
from blockyard.wire import Connection, Message, pack

from .offer import Offer, OfferId, id_from
from .one_sided import OneSided
from .peer import PeerInfo, require_compatible, require_same_memory
from .receiver import HandoffReceiver, Transfer
from .runs import receiving_lanes, sending_lanes
from .sender import HandoffSender
from .tensors import KVPort
from .transport import DistributedTransport, Transport, receive_lanes, receive_state, send_lanes, send_state

__all__ = ["DistributedTransport", "OneSided", "ReceiverLink", "SenderLink", "Transport"]

#: Messages that are kept while another one is due.
MOST_ARRIVED = 4096
#: Messages that one call of `serve` answers: a receiver that asks without end holds up no step.
MOST_SERVED = 256


class _Link:
    """What both sides have: one rank's tensors, the way to the other side, and what arrived and was not asked for."""

    def __init__(
        self,
        own: PeerInfo,
        port: KVPort,
        transport: Transport | OneSided,
        connection: Connection,
        ranks: list[int],
        checked: bool = False,
        timeout: float = 30.0,
    ) -> None:
        if own.shards.num_ranks != 1:
            raise InvalidArgument(
                f"peer has {own.shards.num_ranks} ranks; a link serves a side of one: send lanes on each of several"
            )
        if own.state_bytes and (port.slots is None or port.slots.num_bytes != own.state_bytes):
            found = 0 if port.slots is None else port.slots.num_bytes
            raise InvalidArgument(f"port has slots of {found} bytes; a state of the peer has {own.state_bytes}")
        if own.state_bytes and isinstance(transport, OneSided):
            raise InvalidArgument(
                f"transport is a {type(transport).__name__}, which reads keys and values alone; states need one that "
                f"sends and receives"
            )
        self.port = port
        self._own = own
        self._transport = transport
        self._connection = connection
        self._ranks = ranks
        self._checked = checked
        self._timeout = require_number("timeout", timeout)
        self._arrived: deque[Message] = deque()
        #: Whether the other side has said that nothing more will come.
        self.has_ended = False
        #: Whether it broke in the middle of something: then it is unknown what the next bytes would belong to.
        self.is_broken = False
        self.peer = self._handshake()

    def _handshake(self) -> PeerInfo:
        self._send(self._own.to_bytes())
        theirs = PeerInfo.from_bytes(self._wait_for("peer"))
        require = require_same_memory if isinstance(self._transport, OneSided) else require_compatible
        require(self._own, theirs)
        if theirs.shards.num_ranks != len(self._ranks):
            raise PeerMismatch(f"ranks has {len(self._ranks)} entries; {theirs.name!r} has {theirs.shards.num_ranks}")
        return theirs

    def _require_whole(self) -> None:
        if self.is_broken:
            raise HandoffError("this link broke in the middle of a transfer; make another one")

    def _send(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise HandoffError(f"the other side has gone: {type(error).__name__}") from error

    def _receive(self, timeout: float) -> Message | None:
        """Return the next message, if one comes in time. One that was damaged breaks the link."""
        try:
            if self.has_ended or not self._connection.poll(timeout):
                return None
            message = Message.of(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise HandoffError(f"the other side has gone: {type(error).__name__}") from error
        except InvalidArgument as error:
            self.is_broken = True
            raise HandoffError(f"what the other side sent cannot be read: {error}") from error
        if message.kind != "bye":
            return message
        self.has_ended = True
        return None

    def _wait_for(self, *kinds: str) -> Message:
        """Return the next message of these kinds, within the timeout; others are kept for later, a bounded number."""
        deadline = time.monotonic() + self._timeout
        while len(self._arrived) < MOST_ARRIVED:
            message = self._receive(max(0.0, deadline - time.monotonic()))
            if self.has_ended:
                raise HandoffError(f"the other side has ended; {' or '.join(kinds)} was due")
            if message is None:
                raise HandoffError(f"{' or '.join(kinds)} was due; it did not come in {self._timeout:g} s")
            if message.kind in kinds:
                return message
            self._arrived.append(message)
        raise HandoffError(f"{' or '.join(kinds)} was due; {MOST_ARRIVED} other messages came")


class SenderLink(_Link):
    """The sender's end. port: its tensors. ranks: the receiver's ranks as the transport numbers them.

    checked: send checksums behind the bytes; both ends must say the same. timeout: seconds that the other side may be
    silent in the middle of something. Both ends must be made at the same time: each waits for the other's handshake.
    Raises `PeerMismatch`, `HandoffError`.
    """

    def __init__(
        self,
        sender: HandoffSender,
        port: KVPort,
        transport: Transport | OneSided,
        connection: Connection,
        ranks: list[int],
        checked: bool = False,
        timeout: float = 30.0,
    ) -> None:
        super().__init__(sender.peer, port, transport, connection, ranks, checked, timeout)
        if isinstance(transport, OneSided):
            self._send(transport.describe())
        self._sender = sender
        self._offered: set[OfferId] = set()

    def offer(self, offer: Offer) -> None:
        """Tell the receiver of an offer. Raises `HandoffError` if it has gone; `close` then ends all offers to it."""
        self._offered.add(offer.id)
        self._send(offer.to_bytes())

    def serve(self, now: float, timeout: float = 0.0) -> int:
        """Do what the receiver asks for; returns how many messages came, at most 256. Call it in every step.

        timeout: seconds to wait for the first. Raises `HandoffError` if the receiver has gone: all that was offered to
        it is released then.
        """
        count = 0
        self._require_whole()
        try:
            while count < MOST_SERVED and (message := self._receive(0.0 if count else timeout)) is not None:
                self._handle(message, now)
                count += 1
        except HandoffError:
            self.is_broken = True
            self._release_all()
            raise
        if len(self._offered) > 2 * self._sender.num_offers + 16:  # most of them have ended by themselves
            self._offered &= {offer.id for offer in self._sender.offers()}
        return count

    def _handle(self, message: Message, now: float) -> None:
        kind = message.kind
        if kind == "release":
            offer_id = OfferId.from_bytes("release", message)
            self._offered.discard(offer_id)
            self._sender.release(offer_id)
        elif kind == "pull" and not isinstance(self._transport, OneSided):
            self._answer(message, self._transport, now)
        elif kind == "read":
            self._confirm(OfferId.from_bytes("read", message), now)
        else:
            raise HandoffError(f"the receiver sent a {kind!r}; a pull, read or release is expected")

    def _confirm(self, offer_id: OfferId, now: float) -> None:
        try:
            self._sender.require_held(offer_id, now)
        except StaleOffer:
            self._send(offer_id.to_bytes("stale"))
        else:
            self._send(offer_id.to_bytes("held"))

    def _answer(self, message: Message, transport: Transport, now: float) -> None:
        offer_id = id_from(message.fields)
        try:
            offer = self._sender.require_held(offer_id, now)
            start = require_int("start", message.fields.get("start"), 0, offer.num_computed)
            kept = require_int("kept", message.fields.get("kept", 0), 0, offer.kept)
            lanes = sending_lanes(offer, start, self._own, self.peer)
            states = self._states(offer, kept, now) if start < offer.num_computed else []
        except StaleOffer:
            self._send(offer_id.to_bytes("stale"))
            return
        self._send(pack("data", {"id": list(offer_id), "kept": kept if len(states) > 1 else 0}))
        send_lanes(transport, self.port, lanes, self._ranks, self._checked)
        for state in states:
            send_state(transport, self.port, state, self._ranks[0], self._checked)

    def _states(self, offer: Offer, kept: int, now: float) -> list[torch.Tensor]:
        """Return the kept state that is asked for, if it is still there, and the one behind all computed tokens."""
        slots = self.port.slots
        if slots is None or not self._own.state_bytes:
            return []
        is_there = kept == offer.kept > 0
        blocks = self._sender.kept_blocks(offer.id, now) if is_there else np.empty(0, np.int32)
        return [*([slots.kept(blocks)] if len(blocks) else []), slots.state(self._sender.state_slot(offer.id, now))]

    def close(self) -> None:
        """Release all that was offered through this link, and say so. A second call does nothing."""
        self._release_all()
        if not self.has_ended:
            self.has_ended = True
            with contextlib.suppress(HandoffError):
                self._send(pack("bye", {}))

    def _release_all(self) -> None:
        while self._offered:
            self._sender.release(self._offered.pop())


class ReceiverLink(_Link):
    """The receiver's end; as `SenderLink`."""

    def __init__(
        self,
        receiver: HandoffReceiver,
        port: KVPort,
        transport: Transport | OneSided,
        connection: Connection,
        ranks: list[int],
        checked: bool = False,
        timeout: float = 30.0,
    ) -> None:
        super().__init__(receiver.peer, port, transport, connection, ranks, checked, timeout)
        if isinstance(transport, OneSided):
            transport.connect(self._wait_for("memory"))
        self._receiver = receiver
        #: Offers that were read and not returned yet: one behind them could not be read.
        self._found: list[Offer] = []
        receiver.connect(self.peer)

    def offers(self, timeout: float = 0.0) -> list[Offer]:
        """Return the offers that have come since the last call. timeout: seconds to wait for the first.

        Raises `HandoffError` if the sender has gone: its transfers are aborted then; `InvalidArgument` for a message
        that is no offer, and the next call returns the others.
        """
        try:
            while len(self._arrived) < MOST_ARRIVED:
                message = self._receive(0.0 if self._arrived else timeout)
                if message is None:
                    break
                self._arrived.append(message)
        except HandoffError:
            if not self._arrived:
                self.close()
                raise
        while self._arrived:
            message = self._arrived.popleft()
            # A late answer to what was given up says nothing any more.
            if message.kind not in ("held", "stale"):
                self._found.append(Offer.from_bytes(message))
        found, self._found = self._found, []
        return found

    def fetch(self, transfer: Transfer) -> None:
        """Have a transfer's keys and values sent, into its blocks; `HandoffReceiver.finish` comes next. O(bytes).

        Raises `StaleOffer` if the sender holds the offer no longer, `HandoffError` if it has gone, is silent or a
        checksum is wrong; the transfer is aborted then. After any but `StaleOffer` the link is broken for good.
        """
        self._receiver.require_live(transfer)
        try:
            self._require_whole()
            self._pull(transfer)
        except BaseException as error:
            self.is_broken = self.is_broken or not isinstance(error, StaleOffer)
            self._receiver.abort(transfer)
            raise

    def _pull(self, transfer: Transfer) -> None:
        offer_id = transfer.offer.id
        if isinstance(self._transport, OneSided):
            self._transport.read(transfer.plan)
            self._send(offer_id.to_bytes("read"))
            self._hear(offer_id, "held")
            return
        self._send(pack("pull", {"id": list(offer_id), "start": transfer.start, "kept": transfer.kept}))
        answer = self._hear(offer_id, "data")
        if transfer.kept and answer.fields.get("kept") != transfer.kept:
            self._receiver.drop_kept(transfer)
        self._receive_data(transfer, self._transport)

    def _hear(self, offer_id: OfferId, good: str) -> Message:
        """Read and return the sender's answer about an offer, which is `good` or stale."""
        answer = self._wait_for(good, "stale")
        if id_from(answer.fields) != offer_id:
            raise HandoffError(f"offer {offer_id.number} was asked for; the sender answers for another one")
        if answer.kind == "stale":
            raise StaleOffer(f"offer {offer_id.number} of {offer_id.sender!r} has ended")
        return answer

    def _receive_data(self, transfer: Transfer, transport: Transport) -> None:
        cache = self._receiver.cache
        tables = [cache.block_ids(transfer.seq, number) for number in range(len(self._own.groups))]
        lanes = receiving_lanes(tables, transfer.start, transfer.stop, self._own, self.peer)
        receive_lanes(transport, self.port, lanes, self._ranks, self._checked)
        slots = self.port.slots
        if slots is None or transfer.slot < 0:
            return
        for boundary in dict.fromkeys((transfer.kept or transfer.stop, transfer.stop)):
            receive_state(transport, self.port, slots.state(transfer.slot), self._ranks[0], self._checked)
            saved = [blocks for place, blocks in transfer.saves if place == boundary]
            slots.save(np.full(len(saved), transfer.slot, np.int32), np.array(saved, np.int32))

    def release(self, offer_id: OfferId) -> None:
        """Tell the sender that an offer was fetched, or is not wanted: its blocks are free before its time is over.

        Raises `HandoffError` if it has gone.
        """
        self._send(offer_id.to_bytes("release"))

    def close(self) -> None:
        """Abort all transfers from this sender, and take no more. A second call does nothing."""
        self._receiver.disconnect(self.peer.name)
