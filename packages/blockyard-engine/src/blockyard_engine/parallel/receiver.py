"""The receiving side of a hand-over: allocates blocks for offers and shares them once they are filled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blockyard import KVCacheManager, StateHints, StepPlan
from blockyard.answers import Admission, SeqStatus
from blockyard.arguments import require_int, require_str, shown
from blockyard.errors import (
    InvalidArgument,
    InvariantError,
    PeerMismatch,
    StaleOffer,
    UnknownSequence,
)

from .deadlines import Deadlines, end_sequence, ensure_freed
from .offer import Offer, OfferId
from .peer import PeerInfo, head_runs, require_compatible, require_own_config
from .runs import TransferPlan, token_runs


@dataclass(slots=True, eq=False)
class Transfer:
    """An offer that is being fetched. `HandoffReceiver.finish` or `abort` ends it.

    Attributes:
        offer: the offer.
        seq: the sequence that receives it; the receiver owns it until `finish` returns it.
        start: first token to fetch; earlier ones were in the cache.
        stop: end of the tokens to fetch.
        plan: where each token's data goes.
        generation: the cache's generation when the transfer started.
        slot: slot for the state after `stop` tokens; -1 for none.
        saves: checkpoints to write, in order: (tokens before it, blocks). All but the last may be the sender's
            checkpoint (`Offer.checkpoint_tokens`), which is fetched through the slot.
    """

    number: int
    offer: Offer
    seq: int
    start: int
    stop: int
    plan: TransferPlan
    generation: int
    slot: int = -1
    saves: tuple[tuple[int, npt.NDArray[np.int32]], ...] = ()

    @property
    def checkpoint_tokens(self) -> int:
        """Tokens before the sender's checkpoint, if this transfer fetches that too; 0 if not."""
        return (
            self.offer.checkpoint_tokens
            if any(position == self.offer.checkpoint_tokens for position, _ in self.saves)
            else 0
        )


class HandoffReceiver:
    """Fetches offers: first allocates blocks, then lets them be filled, then returns the sequence.

    A transfer's blocks are reserved but not committed, so no prompt can hit them before `finish`. Equal prompts may
    join and wait for them, as for blocks that are being computed; if the transfer is aborted, one of them computes the
    prompt. So half a transfer is a miss. Not thread-safe.

    Args:
        cache: cache for the sequences, with `max_steps_in_flight` 1.
        peer: description of this side.
        ttl: time that a transfer may take, in the unit of `now`.
        on_plan: called with each `StepPlan` made here, to carry out its copies and swaps at once
            (`KVCache.move_blocks`) and those of states (`StateSlots.move`). Required with a CPU pool, partial hits or
            states.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        peer: PeerInfo,
        ttl: float,
        on_plan: Callable[[StepPlan], None] | None = None,
    ) -> None:
        require_own_config(cache, peer)
        config = cache.config
        if on_plan is None and (config.cpu.num_blocks or config.partial_hits or config.has_states):
            raise InvalidArgument(
                "on_plan is None; give a function that moves blocks: plans of a cache with a CPU pool, partial hits or "
                "states have moves"
            )
        if config.max_steps_in_flight > 1:
            raise InvalidArgument(
                f"cache has max_steps_in_flight {config.max_steps_in_flight}; a receiver's cache must have 1, because "
                f"each transfer would count as a step in flight"
            )
        self.cache = cache
        self.peer = peer
        self._on_plan = on_plan
        self._deadlines = Deadlines(ttl)
        self._live: dict[int, Transfer] = {}
        self._by_offer: dict[OfferId, int] = {}
        self._peers: dict[str, PeerInfo] = {}
        self._last_number = 0

    # Senders.

    def connect(self, peer: PeerInfo) -> None:
        """Accept offers of this sender. If it has restarted, abort all transfers of its earlier start.

        Raises `PeerMismatch` if its keys and values cannot be used here, and `StaleOffer` for a message of an earlier
        start than the known one.
        """
        if not isinstance(peer, PeerInfo):
            raise InvalidArgument(f"peer is {shown(peer)}; it must be a PeerInfo")
        require_compatible(self.peer, peer)
        known = self._peers.get(peer.name)
        if known is not None and peer.incarnation < known.incarnation:
            raise StaleOffer(
                f"incarnation is {peer.incarnation}; {peer.name!r} has restarted as incarnation {known.incarnation}"
            )
        if known is not None and peer.incarnation > known.incarnation:
            self.disconnect(peer.name)
        self._peers[peer.name] = peer

    def disconnect(self, name: str) -> list[Transfer]:
        """Forget a sender that is gone; abort its transfers and return them."""
        self._peers.pop(require_str("name", name), None)
        ended = [transfer for transfer in self._live.values() if transfer.offer.id.sender == name]
        for transfer in ended:
            self.abort(transfer)
        return ended

    # One transfer.

    def accept(self, offer: Offer, now: float, holder: str = "") -> Transfer | Admission:
        """Allocate blocks for an offer; tokens that are already cached here are held, not fetched. O(tokens).

        Returns the transfer, or LATER or NEVER as `try_allocate` does; nothing is held then. LATER also while another
        sequence computes or fetches the same prefix, because it can be hit soon.

        Raises `StaleOffer` or `PeerMismatch` for an offer of a sender that is not connected, `HandoffError` if the
        sender no longer has blocks that are needed, and `InvalidArgument` for an offer that is being fetched already.

        Args:
            offer: the offer.
            now: the time.
            holder: name of the sequence's holder.
        """
        self._advance(now)
        peer = self._peer_of(offer)
        answer: int | Admission = Admission.LATER
        self._last_number += 1
        try:
            states = StateHints(external_state_tokens=offer.num_computed) if self.peer.state_bytes else None
            answer = self.cache.try_allocate(offer.token_ids, holder=holder, extra_keys=offer.extra_keys, states=states)
            if isinstance(answer, Admission):
                return answer
            transfer = self._begin(offer, peer, answer)
            if transfer is not None:
                return transfer
            self.cache.free(answer)
            return Admission.LATER
        except BaseException:
            self._forget(self._last_number, offer.id)
            if not isinstance(answer, Admission):
                ensure_freed(self.cache, answer)
            raise

    def _peer_of(self, offer: Offer) -> PeerInfo:
        if not isinstance(offer, Offer):
            raise InvalidArgument(f"offer is {shown(offer)}; it must be an Offer")
        peer = self._peers.get(offer.id.sender)
        if peer is None:
            raise PeerMismatch(f"offer is from {offer.id.sender!r}, which is not connected; call connect first")
        if offer.id.incarnation != peer.incarnation:
            raise StaleOffer(
                f"offer is from incarnation {offer.id.incarnation} of {peer.name!r}; it is now {peer.incarnation}"
            )
        if len(offer.tables) != len(peer.groups):
            raise PeerMismatch(f"offer has {len(offer.tables)} tables; {peer.name!r} has {len(peer.groups)} groups")
        if offer.id in self._by_offer:
            raise InvalidArgument(f"offer {offer.id.number} of {peer.name!r} is already being fetched")
        return peer

    def _begin(self, offer: Offer, peer: PeerInfo, seq: int) -> Transfer | None:
        """Reserve slots for the tokens to fetch; return None if that is not possible now."""
        start = int(self.cache.num_computed_tokens(seq))
        has_state = bool(self.peer.state_bytes) and start < offer.num_computed
        if has_state and self._wants_checkpoint(offer, start):
            self.cache.states.skip(seq, offer.num_computed, checkpoint=offer.checkpoint_tokens)
        # Even with nothing to fetch, reserve a token to learn whether the prefix is still being computed.
        count = max(offer.num_computed - start, 1)
        step = self.cache.reserve([seq], [count])
        status = int(step.status[0])
        if self._on_plan is not None:
            self._on_plan(step)
        if status != SeqStatus.SCHEDULED:
            return None
        plan = self._plan(offer, peer, seq, start)
        number = self._last_number
        transfer = Transfer(number, offer, seq, start, offer.num_computed, plan, self.cache.generation)
        if has_state:
            transfer.slot = int(step.rows[0])
            positions = step.states.save_positions.tolist()
            transfer.saves = tuple(zip(positions, step.states.save_blocks.copy(), strict=True))
        self._live[number] = transfer
        self._by_offer[offer.id] = number
        self._deadlines.start(number)
        return transfer

    def _wants_checkpoint(self, offer: Offer, start: int) -> bool:
        """Return whether to fetch the sender's checkpoint: it is usable here, and no checkpoint here replaces it."""
        if offer.checkpoint_tokens == 0 or offer.checkpoint_tokens % self.cache.config.hit_alignment:
            return False
        if offer.checkpoint_tokens > start:
            return True
        tokens, keys = offer.token_ids, offer.extra_keys
        positions = (offer.checkpoint_tokens, start)
        return not any(len(self.cache.states.blocks(tokens[:position], extra_keys=keys)) for position in positions)

    def _plan(self, offer: Offer, peer: PeerInfo, seq: int, start: int) -> TransferPlan:
        groups = [
            token_runs(
                table, theirs.block_size, self.cache.block_ids(seq, number), ours.block_size, start, offer.num_computed
            )
            for number, (table, theirs, ours) in enumerate(
                zip(offer.tables, peer.groups, self.peer.groups, strict=True)
            )
        ]
        return TransferPlan(tuple(groups), head_runs(peer.shards, self.peer.shards))

    def finish(self, transfer: Transfer, now: float, next_token: int = -1) -> int:
        """Commit a transfer after all bytes have arrived and the sender has confirmed them. O(blocks).

        Returns the sequence, which the caller must free. Raises `StaleOffer` if the transfer has ended, or if the cache
        was reset since it started; the transfer is aborted then, as after an interrupt (Ctrl-C).

        Args:
            transfer: the transfer.
            now: the time.
            next_token: a token to append, -1 for none.
        """
        self._advance(now)
        self.require_live(transfer)
        token = require_int("next_token", next_token, -1, 2**31 - 1)
        if transfer.generation != self.cache.generation:
            self.abort(transfer)
            raise StaleOffer(f"the cache was reset while offer {transfer.offer.id.number} was being fetched")
        try:
            self.cache.commit([transfer.seq], [transfer.stop - transfer.start], [token])
            self._forget(transfer.number, transfer.offer.id)
            return transfer.seq
        except Exception:
            raise  # commit has changed nothing
        except BaseException:
            self._forget(transfer.number, transfer.offer.id)
            ensure_freed(self.cache, transfer.seq)
            raise

    def drop_checkpoint(self, transfer: Transfer) -> None:
        """Write no checkpoints for this transfer, because the sender's is gone. O(saves).

        Raises `StaleOffer` if the transfer has ended.
        """
        self.require_live(transfer)
        if transfer.checkpoint_tokens:
            self.cache.states.drop_checkpoints(transfer.seq)
            transfer.saves = ()

    def require_live(self, transfer: Transfer) -> None:
        """Raise `StaleOffer` if the transfer has ended: bytes that arrive must not be written then. O(1)."""
        if not isinstance(transfer, Transfer):
            raise InvalidArgument(f"transfer is {shown(transfer)}; it must be a Transfer")
        if self._live.get(transfer.number) is not transfer:
            raise StaleOffer(f"the transfer of offer {transfer.offer.id.number} has ended; its blocks may be in use")

    def renew(self, transfer: Transfer, now: float) -> None:
        """Restart a transfer's time to live. Raises `StaleOffer` if it has ended."""
        self._advance(now)
        self.require_live(transfer)
        self._deadlines.start(transfer.number)

    def abort(self, transfer: Transfer) -> bool:
        """Abort a transfer and free its blocks; return whether it was live. O(blocks).

        Stop the transport's writes to its blocks first.
        """
        if not isinstance(transfer, Transfer):
            raise InvalidArgument(f"transfer is {shown(transfer)}; it must be a Transfer")
        if self._live.get(transfer.number) is not transfer:
            return False
        end_sequence(self.cache, transfer.seq, lambda: self._forget(transfer.number, transfer.offer.id))
        return True

    def _forget(self, number: int, offer_id: OfferId) -> None:
        if self._by_offer.get(offer_id) == number:
            self._by_offer.pop(offer_id, None)
        self._live.pop(number, None)
        self._deadlines.end(number)

    def expire(self, now: float) -> list[Transfer]:
        """Abort and return the expired transfers; call it in every step. O(1) if there are none."""
        return self._advance(now)

    def _advance(self, now: float) -> list[Transfer]:
        ended = [self._live[number] for number in self._deadlines.advance(now)]
        for transfer in ended:
            self.abort(transfer)
        return ended

    @property
    def num_transfers(self) -> int:
        """Number of live transfers."""
        return len(self._live)

    def transfers(self) -> list[Transfer]:
        """Return the live transfers, oldest first."""
        return list(self._live.values())

    def close(self) -> None:
        """Abort all transfers. A second call does nothing."""
        for transfer in list(self._live.values()):
            self.abort(transfer)

    def check(self) -> None:
        """Verify that every transfer has its sequence, with only its hit computed. O(transfers).

        Raises `InvariantError`. It does not include the cache's own `check`.
        """
        if self._deadlines.keys() != set(self._live) or set(self._by_offer.values()) != set(self._live):
            raise InvariantError(f"deadlines run for {self._deadlines.keys()}; live transfers are {set(self._live)}")
        for transfer in self._live.values():
            try:
                computed = int(self.cache.num_computed_tokens(transfer.seq))
            except UnknownSequence:
                raise InvariantError(f"transfer {transfer.number} has no sequence") from None
            if computed != transfer.start:
                raise InvariantError(
                    f"transfer {transfer.number} starts at token {transfer.start}; {computed} tokens are computed"
                )
