"""The side that goes on with a prompt: it takes blocks, lets them be filled, and shares them once they are."""

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

from .deadlines import Deadlines, end_sequence, free_at_last
from .offer import Offer, OfferId
from .peer import PeerInfo, head_runs, require_compatible, require_own_config
from .runs import TransferPlan, token_runs


@dataclass(slots=True, eq=False)
class Transfer:
    """An offer on its way in. `HandoffReceiver.finish` or `abort` ends it.

    offer: what is fetched. seq: the sequence that takes it; the receiver's until `finish` returns it. start, stop: the
    tokens to fetch: those before `start` were in the cache. plan: where each goes.

    slot: where the state behind `stop` tokens is to be put; -1 if none is fetched. saves: which states are to be kept
    besides, (behind how many tokens, blocks) each, in order; all but the last may be one that the sender has kept
    (`Offer.kept`), which is brought through the slot.
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
    def kept(self) -> int:
        """Return behind how many tokens a state that the sender has kept is wanted too; 0 for none."""
        return self.offer.kept if any(boundary == self.offer.kept for boundary, _ in self.saves) else 0


class HandoffReceiver:
    """Takes offers in: blocks first, then bytes, then, when all are there and right, the sequence.

    cache: that takes the sequences, with `max_steps_in_flight` 1. peer: what this side says of itself. ttl: how long
    a transfer may take, in the unit of every `now`. on_plan: called with each `StepPlan` that is made here, to carry
    out its copies and swaps at once (`KVCache.move_blocks`), and those of states (`StateSlots.move`); needed with a CPU
    pool, partial hits or states, which make such plans.

    A transfer's blocks are reserved and not committed: no prompt can hit them before `finish`. Equal prompts may join
    them meanwhile, as they join blocks that are being computed: they wait, and if the transfer is aborted one of them
    computes the prompt. Half a transfer is therefore a miss and nothing else. Not safe for use by several threads.
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
                "on_plan is None; a cache with a CPU pool, partial hits or states makes plans that move blocks"
            )
        if config.max_steps_in_flight > 1:
            raise InvalidArgument(
                f"cache has max_steps_in_flight {config.max_steps_in_flight}; a receiver's cache must have 1, because "
                f"a transfer would be a step in flight until it ends"
            )
        self.cache = cache
        self.peer = peer
        self._on_plan = on_plan
        self._deadlines = Deadlines(ttl)
        self._live: dict[int, Transfer] = {}
        self._by_offer: dict[OfferId, int] = {}
        self._peers: dict[str, PeerInfo] = {}
        self._last_number = 0

    # Whom it takes offers from.

    def connect(self, peer: PeerInfo) -> None:
        """Take offers of this sender from now on. Of an earlier start of it all transfers are aborted.

        Raises `PeerMismatch` where its keys and values are of no use here, `StaleOffer` for a message of an earlier
        start than the one that is known.
        """
        if not isinstance(peer, PeerInfo):
            raise InvalidArgument(f"peer is {shown(peer)}; it must be a PeerInfo")
        require_compatible(self.peer, peer)
        known = self._peers.get(peer.name)
        if known is not None and peer.incarnation < known.incarnation:
            raise StaleOffer(
                f"incarnation is {peer.incarnation}; {peer.name!r} has started again as {known.incarnation}"
            )
        if known is not None and peer.incarnation > known.incarnation:
            self.disconnect(peer.name)
        self._peers[peer.name] = peer

    def disconnect(self, name: str) -> list[Transfer]:
        """Take no more offers of a sender, because it has gone; its transfers are aborted and returned."""
        self._peers.pop(require_str("name", name), None)
        ended = [transfer for transfer in self._live.values() if transfer.offer.id.sender == name]
        for transfer in ended:
            self.abort(transfer)
        return ended

    # One transfer.

    def accept(self, offer: Offer, now: float, holder: str = "") -> Transfer | Admission:
        """Take blocks for an offer; what of it the cache has already is held and not fetched. O(tokens).

        Returns the transfer, or `Admission.LATER` or NEVER as `try_allocate` does; then nothing is held. LATER also
        where another sequence is computing or fetching the same beginning: it can be hit soon.
        Raises `StaleOffer` or `PeerMismatch` for an offer of a sender that is not connected, `HandoffError` where the
        sender has lost blocks that are needed, `InvalidArgument` for an offer that is being fetched already.
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
                free_at_last(self.cache, answer)
            raise

    def _peer_of(self, offer: Offer) -> PeerInfo:
        if not isinstance(offer, Offer):
            raise InvalidArgument(f"offer is {shown(offer)}; it must be an Offer")
        peer = self._peers.get(offer.id.sender)
        if peer is None:
            raise PeerMismatch(f"the offer is of {offer.id.sender!r}; no such sender is connected")
        if offer.id.incarnation != peer.incarnation:
            raise StaleOffer(
                f"the offer is of incarnation {offer.id.incarnation} of {peer.name!r}, not {peer.incarnation}"
            )
        if len(offer.tables) != len(peer.groups):
            raise PeerMismatch(f"the offer has {len(offer.tables)} tables; {peer.name!r} has {len(peer.groups)} groups")
        if offer.id in self._by_offer:
            raise InvalidArgument(f"offer {offer.id.number} of {peer.name!r} is being fetched already")
        return peer

    def _begin(self, offer: Offer, peer: PeerInfo, seq: int) -> Transfer | None:
        """Take slots for what is to be fetched; None if they cannot be had now."""
        start = int(self.cache.num_computed_tokens(seq))
        has_state = bool(self.peer.state_bytes) and start < offer.num_computed
        if has_state and self._wants_kept(offer, start):
            self.cache.states.skip(seq, offer.num_computed, checkpoint=offer.kept)
        # With nothing to fetch, a token is reserved all the same: it tells whether the beginning is there or in work.
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
            boundaries = step.states.save_boundaries.tolist()
            transfer.saves = tuple(zip(boundaries, step.states.save_blocks.copy(), strict=True))
        self._live[number] = transfer
        self._by_offer[offer.id] = number
        self._deadlines.start(number)
        return transfer

    def _wants_kept(self, offer: Offer, start: int) -> bool:
        """Return whether the state that the sender has kept can be kept here, and is not, nor one at the hit's end."""
        if offer.kept == 0 or offer.kept % self.cache.config.hit_alignment:
            return False
        if offer.kept > start:
            return True
        tokens, keys = offer.token_ids, offer.extra_keys
        return not any(len(self.cache.states.blocks(tokens[:place], extra_keys=keys)) for place in (offer.kept, start))

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
        """All bytes are there and the sender has said that they are right: share them. O(blocks).

        next_token: a token to append, -1 for none. Returns the sequence, from now on the caller's to free. Raises
        `StaleOffer` if the transfer has ended meanwhile, or the cache was reset since it began, and then it is aborted,
        as it is by an interrupt (Ctrl-C).
        """
        self._advance(now)
        self.require_live(transfer)
        token = require_int("next_token", next_token, -1, 2**31 - 1)
        if transfer.generation != self.cache.generation:
            self.abort(transfer)
            raise StaleOffer(f"the cache was reset while offer {transfer.offer.id.number} was fetched")
        try:
            self.cache.commit([transfer.seq], [transfer.stop - transfer.start], [token])
            self._forget(transfer.number, transfer.offer.id)
            return transfer.seq
        except Exception:
            raise  # the commit was refused, and nothing has changed
        except BaseException:
            self._forget(transfer.number, transfer.offer.id)
            free_at_last(self.cache, transfer.seq)
            raise

    def drop_kept(self, transfer: Transfer) -> None:
        """The sender does not have the state that `kept` names any more: no state of this transfer is kept. O(saves).

        Raises `StaleOffer` if the transfer has ended.
        """
        self.require_live(transfer)
        if transfer.kept:
            self.cache.states.drop_checkpoints(transfer.seq)
            transfer.saves = ()

    def require_live(self, transfer: Transfer) -> None:
        """Raise `StaleOffer` unless the transfer goes on: then bytes that arrive must not be written. O(1)."""
        if not isinstance(transfer, Transfer):
            raise InvalidArgument(f"transfer is {shown(transfer)}; it must be a Transfer")
        if self._live.get(transfer.number) is not transfer:
            raise StaleOffer(f"the transfer of offer {transfer.offer.id.number} has ended; its blocks are not its own")

    def renew(self, transfer: Transfer, now: float) -> None:
        """Start a transfer's time to live again, from now. Raises `StaleOffer` if it has ended."""
        self._advance(now)
        self.require_live(transfer)
        self._deadlines.start(transfer.number)

    def abort(self, transfer: Transfer) -> bool:
        """Give a transfer up, and free its blocks; says whether it lived. O(blocks).

        Nothing may write into its blocks any more: end what the transport still does first.
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
        """Abort the transfers whose time is over; call it in every step. O(1) where none is."""
        return self._advance(now)

    def _advance(self, now: float) -> list[Transfer]:
        ended = [self._live[number] for number in self._deadlines.advance(now)]
        for transfer in ended:
            self.abort(transfer)
        return ended

    @property
    def num_transfers(self) -> int:
        """Transfers that go on."""
        return len(self._live)

    def transfers(self) -> list[Transfer]:
        """Return the transfers that go on, oldest first."""
        return list(self._live.values())

    def close(self) -> None:
        """Abort all transfers. A second call does nothing."""
        for transfer in list(self._live.values()):
            self.abort(transfer)

    def check(self) -> None:
        """Verify that every transfer has its sequence, and that nothing of it is computed yet. O(transfers).

        Raises `InvariantError`. The cache's own `check` is apart.
        """
        if self._deadlines.keys() != set(self._live) or set(self._by_offer.values()) != set(self._live):
            raise InvariantError(f"deadlines run for {self._deadlines.keys()}; transfers go on: {set(self._live)}")
        for transfer in self._live.values():
            try:
                computed = int(self.cache.num_computed_tokens(transfer.seq))
            except UnknownSequence:
                raise InvariantError(f"transfer {transfer.number} has lost its sequence") from None
            if computed != transfer.start:
                raise InvariantError(f"transfer {transfer.number} began at {transfer.start}; {computed} are computed")
