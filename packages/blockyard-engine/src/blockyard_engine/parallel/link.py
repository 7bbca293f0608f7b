"""The protocol between two processes: control messages over a connection, keys and values over a transport.

    sender                       receiver
    peer ───────────────────────▶            handshake, both ways; either side raises if they are incompatible
         ◀─────────────────────── peer
    offer ──────────────────────▶            a computed prompt and its blocks
         ◀─────────────────────── pull       the first token to send
    data, or stale ─────────────▶            followed by the lanes, then states, over the transport
         ◀─────────────────────── release    fetched or rejected; if this is lost, the offer expires
    bye ────────────────────────▶            no further offers; all earlier ones are released

With one-sided reads (`OneSided`) the sender describes its memory after the handshake. Instead of sending a pull, the
receiver reads, and then asks whether the blocks were held:

         ◀─────────────────────── read       reading is done: was the offer held until now?
    held, or stale ─────────────▶

A connection has `send_bytes`, `recv_bytes` and `poll`, such as `multiprocessing.Pipe()`. The sender checks that it
holds the blocks before it sends "data", and does nothing else until they are sent, so the data is that of the
offer. Needs torch.
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

#: Limit of the messages queued while another one is due.
MAX_QUEUED_MESSAGES = 4096
#: Limit of the messages that one call of `serve` answers, so that a flood of them does not delay a step.
MAX_SERVED_MESSAGES = 256


class _Link:
    """Common part of both sides: tensors of one rank, connection, transport, and queued messages."""

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
                f"peer has {own.shards.num_ranks} ranks; a link serves a side of 1 rank: with several, use send_lanes "
                f"and receive_lanes on each"
            )
        if own.state_bytes and (port.slots is None or port.slots.num_bytes != own.state_bytes):
            found = 0 if port.slots is None else port.slots.num_bytes
            raise InvalidArgument(f"port has state slots of {found} bytes; peer has state_bytes {own.state_bytes}")
        if own.state_bytes and isinstance(transport, OneSided):
            raise InvalidArgument(
                f"transport is a {type(transport).__name__}, which reads only keys and values; states need a transport "
                f"with send and receive"
            )
        self.port = port
        self._own = own
        self._transport = transport
        self._connection = connection
        self._ranks = ranks
        self._checked = checked
        self._timeout = require_number("timeout", timeout)
        self._arrived: deque[Message] = deque()
        #: Whether the other side has sent "bye".
        self.has_ended = False
        #: Whether a transfer failed halfway: the meaning of the next bytes is unknown then.
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
            raise HandoffError("this link failed in the middle of a transfer; make a new one")

    def _send(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise HandoffError(f"the other side is gone: {type(error).__name__}") from error

    def _receive(self, timeout: float) -> Message | None:
        """Return the next message, or None if none arrives in time. A damaged message breaks the link."""
        try:
            if self.has_ended or not self._connection.poll(timeout):
                return None
            message = Message.of(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise HandoffError(f"the other side is gone: {type(error).__name__}") from error
        except InvalidArgument as error:
            self.is_broken = True
            raise HandoffError(f"the other side sent a message that cannot be read: {error}") from error
        if message.kind != "bye":
            return message
        self.has_ended = True
        return None

    def _wait_for(self, *kinds: str) -> Message:
        """Return the next message of these kinds, within the timeout; queue others, up to a limit."""
        deadline = time.monotonic() + self._timeout
        while len(self._arrived) < MAX_QUEUED_MESSAGES:
            message = self._receive(max(0.0, deadline - time.monotonic()))
            if self.has_ended:
                raise HandoffError(f"the other side has closed the link; {' or '.join(kinds)} was due")
            if message is None:
                raise HandoffError(f"{' or '.join(kinds)} was due; it did not arrive in {self._timeout:g} s")
            if message.kind in kinds:
                return message
            self._arrived.append(message)
        raise HandoffError(f"{' or '.join(kinds)} was due; {MAX_QUEUED_MESSAGES} other messages arrived")


class SenderLink(_Link):
    """The sender's end of a link.

    Make both ends at the same time: each waits for the other's handshake. Raises `PeerMismatch`, `HandoffError`.

    Args:
        sender: makes and holds the offers.
        port: the sender's tensors.
        transport: moves keys and values.
        connection: carries the control messages.
        ranks: the receiver's ranks, as the transport numbers them.
        checked: send checksums after the data; both ends must agree.
        timeout: seconds to wait for a message that is due.
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
        """Send an offer to the receiver.

        Raises `HandoffError` if the receiver is gone; `close` then releases all offers to it.
        """
        self._offered.add(offer.id)
        self._send(offer.to_bytes())

    def serve(self, now: float, timeout: float = 0.0) -> int:
        """Answer the receiver's messages, at most 256; return how many there were. Call it in every step.

        Raises `HandoffError` if the receiver is gone; all offers to it are released then.

        Args:
            now: the time.
            timeout: seconds to wait for the first message.
        """
        count = 0
        self._require_whole()
        try:
            while count < MAX_SERVED_MESSAGES and (message := self._receive(0.0 if count else timeout)) is not None:
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
            raise HandoffError(f"the receiver sent {kind!r}; it must send pull, read or release")

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
            kept = require_int("checkpoint_tokens", message.fields.get("kept", 0), 0, offer.checkpoint_tokens)
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
        """Return the requested checkpoint, if it still exists, and the state after all computed tokens."""
        slots = self.port.slots
        if slots is None or not self._own.state_bytes:
            return []
        is_there = kept == offer.checkpoint_tokens > 0
        blocks = self._sender.checkpoint_blocks(offer.id, now) if is_there else np.empty(0, np.int32)
        saved = [slots.saved_state(blocks)] if len(blocks) else []
        return [*saved, slots.state(self._sender.state_slot(offer.id, now))]

    def close(self) -> None:
        """Release all offers of this link, and tell the receiver. A second call does nothing."""
        self._release_all()
        if not self.has_ended:
            self.has_ended = True
            with contextlib.suppress(HandoffError):
                self._send(pack("bye", {}))

    def _release_all(self) -> None:
        while self._offered:
            self._sender.release(self._offered.pop())


class ReceiverLink(_Link):
    """The receiver's end of a link.

    Make both ends at the same time: each waits for the other's handshake. Raises `PeerMismatch`, `HandoffError`.

    Args:
        receiver: takes the offers.
        port: the receiver's tensors.
        transport: moves keys and values.
        connection: carries the control messages.
        ranks: the sender's ranks, as the transport numbers them.
        checked: expect checksums after the data; both ends must agree.
        timeout: seconds to wait for a message that is due.
    """

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
        #: Offers that were read but not returned yet, because a later one was invalid.
        self._found: list[Offer] = []
        receiver.connect(self.peer)

    def offers(self, timeout: float = 0.0) -> list[Offer]:
        """Return the offers that have arrived since the last call.

        Raises `HandoffError` if the sender is gone; its transfers are aborted then. Raises `InvalidArgument` for an
        invalid offer; the next call returns the others.

        Args:
            timeout: seconds to wait for the first offer.
        """
        try:
            while len(self._arrived) < MAX_QUEUED_MESSAGES:
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
            # Ignore late answers about aborted transfers.
            if message.kind not in ("held", "stale"):
                self._found.append(Offer.from_bytes(message))
        found, self._found = self._found, []
        return found

    def fetch(self, transfer: Transfer) -> None:
        """Fetch a transfer's keys and values into its blocks; then call `HandoffReceiver.finish`. O(bytes).

        After an error the transfer is aborted. Raises `StaleOffer` if the sender no longer holds the offer, and
        `HandoffError` if it is gone or silent or a checksum is wrong; after any error but `StaleOffer` the link is
        unusable.
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
            self._await_answer(offer_id, "held")
            return
        self._send(pack("pull", {"id": list(offer_id), "start": transfer.start, "kept": transfer.checkpoint_tokens}))
        answer = self._await_answer(offer_id, "data")
        if transfer.checkpoint_tokens and answer.fields.get("kept") != transfer.checkpoint_tokens:
            self._receiver.drop_checkpoint(transfer)
        self._receive_data(transfer, self._transport)

    def _await_answer(self, offer_id: OfferId, good: str) -> Message:
        """Return the sender's answer about an offer. Raises `StaleOffer` if it is not `good`."""
        answer = self._wait_for(good, "stale")
        if id_from(answer.fields) != offer_id:
            raise HandoffError(f"offer {offer_id.number} was requested; the sender answered for another one")
        if answer.kind == "stale":
            raise StaleOffer(f"offer {offer_id.number} of {offer_id.sender!r} has ended; wait for a new one")
        return answer

    def _receive_data(self, transfer: Transfer, transport: Transport) -> None:
        cache = self._receiver.cache
        tables = [cache.block_ids(transfer.seq, number) for number in range(len(self._own.groups))]
        lanes = receiving_lanes(tables, transfer.start, transfer.stop, self._own, self.peer)
        receive_lanes(transport, self.port, lanes, self._ranks, self._checked)
        slots = self.port.slots
        if slots is None or transfer.slot < 0:
            return
        for checkpoint in dict.fromkeys((transfer.checkpoint_tokens or transfer.stop, transfer.stop)):
            receive_state(transport, self.port, slots.state(transfer.slot), self._ranks[0], self._checked)
            saved = [blocks for position, blocks in transfer.saves if position == checkpoint]
            slots.save(np.full(len(saved), transfer.slot, np.int32), np.array(saved, np.int32))

    def release(self, offer_id: OfferId) -> None:
        """Tell the sender that an offer was fetched or is not wanted, so that it frees the blocks before they expire.

        Raises `HandoffError` if the sender is gone.
        """
        self._send(offer_id.to_bytes("release"))

    def close(self) -> None:
        """Abort all transfers from this sender, and accept no others. A second call does nothing."""
        self._receiver.disconnect(self.peer.name)
