"""The side that has computed a prompt: it keeps the blocks until they were fetched, or a time limit is over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blockyard import KVCacheManager
from blockyard.errors import (
    InvalidArgument,
    InvariantError,
    SequenceNotReady,
    StaleOffer,
    UnknownSequence,
)
from blockyard.keys import ExtraKey, canonical_keys, require_spans_within, spans_of

from .deadlines import Deadlines, end_sequence
from .offer import Offer, OfferId
from .peer import PeerInfo, require_own_config


@dataclass(slots=True, eq=False)
class _Held:
    """A live offer: the fork that holds its blocks, and the cache's generation when it was made."""

    seq: int
    generation: int
    offer: Offer


class HandoffSender:
    """Offers computed sequences, and keeps their blocks for each offer until it ends.

    cache: whose sequences are offered. peer: what this side says of itself; its groups are the cache's. ttl: how long
    an offer lives if it is not ended, in the unit of every `now`: seconds, or steps. No clock is read.

    An offer holds a fork of the sequence, so the sequence itself may go on or be freed at once. It takes a row of the
    cache (`max_num_seqs`) while it lives, and a state stays in that row's slot. An offer ends once, by `release` or
    after its ttl, and then never comes back: a receiver that asks for it later gets `StaleOffer`, whatever the blocks
    hold by then.

    One-sided reads (RDMA) do not ask before they read. They are right all the same if `require_held` answers
    afterwards: the blocks were held the whole time, so they still hold what was offered. Not safe for use by several
    threads at once.
    """

    def __init__(self, cache: KVCacheManager, peer: PeerInfo, ttl: float) -> None:
        require_own_config(cache, peer)
        self.cache = cache
        self.peer = peer
        self._deadlines = Deadlines(ttl)
        self._held: dict[int, _Held] = {}
        #: The sequences of the offers that live.
        self._seqs: dict[int, int] = {}
        self._last_number = 0

    def offer(self, seq: int, now: float, extra_keys: object = ()) -> Offer:
        """Offer a sequence of which all tokens but possibly the last are computed. O(tokens).

        extra_keys: those that it was allocated under; the receiver allocates under the same ones.
        Raises `SequenceNotReady` for a sequence that is not computed, has reserved tokens, is swapped out, or has a
        state that no step has put in a slot yet; `OutOfRows`, `UnknownSequence`, `InvalidArgument`; then nothing is
        held. After `reset_prefix_cache` (new weights) offer only sequences that were allocated since.
        """
        keys = self._require_offerable(seq, now, extra_keys)
        hold: list[int] = []
        try:
            self._last_number += 1
            hold += self.cache.fork(seq)
            return self._hold(hold[0], keys)
        except BaseException:
            self._forget(self._last_number)
            self.cache.free(hold)
            raise

    def take_over(self, seq: int, now: float, extra_keys: object = ()) -> Offer:
        """`offer`, and the sequence is the sender's from then on: it takes no further row, and ends with the offer.

        Raises as `offer` does, but for `OutOfRows`; then the sequence stays the caller's.
        """
        keys = self._require_offerable(seq, now, extra_keys)
        cache = self.cache
        known, computed = cache.num_tokens(seq), cache.num_computed_tokens(seq)
        if computed < known - 1:
            raise SequenceNotReady(f"take_over: {computed} of {known} tokens are computed; all but the last are needed")
        if seq in self._seqs:
            raise SequenceNotReady("take_over: the sequence is the sender's already")
        cache.truncate(seq, known)  # cuts nothing; it raises while anything of the sequence is in flight
        self._last_number += 1
        try:
            return self._hold(seq, keys)
        except BaseException:
            self._forget(self._last_number)
            raise

    def _require_offerable(self, seq: int, now: float, extra_keys: object) -> tuple[ExtraKey, ...]:
        """Return the keys in their one form; all that an offer of the sequence can be refused for comes here."""
        self._advance(now)
        if not self.cache.num_computed_tokens(seq):
            raise SequenceNotReady("offer: nothing of the sequence is computed")
        keys = canonical_keys(extra_keys)
        require_spans_within(spans_of(keys), int(self.cache.num_tokens(seq)))
        if self.cache.is_swapped_out(seq):
            raise SequenceNotReady("offer: the sequence is swapped out; swap it in first")
        if self.peer.state_bytes:
            self.cache.states.slot(seq)  # it raises where there is no state to be handed over yet
        return keys

    def _hold(self, seq: int, keys: tuple[ExtraKey, ...]) -> Offer:
        """Return an offer of the last number that holds a sequence; the caller undoes what an error leaves of it."""
        offer = self._describe(seq, keys)
        number = offer.id.number
        self._held[number] = _Held(seq, self.cache.generation, offer)
        self._seqs[seq] = number
        self._deadlines.start(number)
        return offer

    def _forget(self, number: int) -> None:
        held = self._held.pop(number, None)
        if held is not None:
            self._seqs.pop(held.seq, None)
        self._deadlines.end(number)

    def _describe(self, seq: int, keys: tuple[ExtraKey, ...]) -> Offer:
        number = OfferId(self.peer.name, self.peer.incarnation, self._last_number)
        computed = int(self.cache.num_computed_tokens(seq))
        tokens = self.cache.token_ids(seq)
        kept = self._kept(tokens[:computed], keys) if self.peer.state_bytes else 0
        return Offer(number, tokens, computed, self._tables(seq, computed), keys, kept)

    def _kept(self, tokens: npt.NDArray[np.int32], keys: tuple[ExtraKey, ...]) -> int:
        """Return behind how many of these tokens, but the last, a kept state stands; 0 for none and with spans."""
        return 0 if spans_of(keys) else int(self.cache.num_cached_tokens(tokens, extra_keys=keys))

    def state_slot(self, offer_id: OfferId, now: float) -> int:
        """Return the slot that has the state behind an offer's computed tokens, until the next plan. O(1).

        Raises as `require_held`, and `InvalidArgument` for a cache without states.
        """
        self.require_held(offer_id, now)
        return int(self.cache.states.slot(self._held[offer_id.number].seq))

    def kept_blocks(self, offer_id: OfferId, now: float) -> npt.NDArray[np.int32]:
        """Return the blocks of the state that an offer's `kept` names, int32 (n,); (0,) if it is gone. O(tokens).

        The offer does not hold them: copy them before the next call. Raises as `state_slot`.
        """
        offer = self.require_held(offer_id, now)
        return self.cache.states.blocks(offer.token_ids[: offer.kept], extra_keys=offer.extra_keys)

    def _tables(self, seq: int, num_computed: int) -> tuple[npt.NDArray[np.int32], ...]:
        """Return the blocks of `num_computed` tokens, of each layer group."""
        return tuple(
            self.cache.block_ids(seq, number)[: -(-num_computed // group.block_size)]
            for number, group in enumerate(self.peer.groups)
        )

    def require_held(self, offer_id: OfferId, now: float) -> Offer:
        """Return the offer, if its blocks have been held since it was made and still are. O(1).

        Ask before bytes are sent, or after they were read. Raises `StaleOffer` for an offer that was released or has
        expired, is of an earlier start, or of weights that `reset_prefix_cache` has dropped since; `InvalidArgument`
        for one that was never made here.
        """
        self._advance(now)
        self._require_mine(offer_id)
        held = self._held.get(offer_id.number)
        if held is None:
            raise StaleOffer(f"offer {offer_id.number} of {self.peer.name!r} was released or has expired")
        if held.generation != self.cache.generation:
            raise StaleOffer(
                f"offer {offer_id.number} of {self.peer.name!r} is of generation {held.generation}; the cache was "
                f"reset and is at {self.cache.generation}"
            )
        return held.offer

    def _require_mine(self, offer_id: OfferId) -> None:
        if not isinstance(offer_id, OfferId):
            raise InvalidArgument(f"offer_id is a {type(offer_id).__name__}; an OfferId is needed")
        if offer_id.sender != self.peer.name:
            raise InvalidArgument(f"the offer is of {offer_id.sender!r}; this is {self.peer.name!r}")
        if offer_id.incarnation != self.peer.incarnation:
            raise StaleOffer(
                f"the offer is of incarnation {offer_id.incarnation} of {self.peer.name!r}; this is "
                f"{self.peer.incarnation}"
            )
        if offer_id.number > self._last_number:
            raise InvalidArgument(f"the offer has number {offer_id.number}; the last one is {self._last_number}")

    def renew(self, offer_id: OfferId, now: float) -> None:
        """Start an offer's time to live again, from now: a sign of life of the receiver. Raises as `require_held`."""
        self.require_held(offer_id, now)
        self._deadlines.start(offer_id.number)

    def release(self, offer_id: OfferId) -> bool:
        """End an offer, because it was fetched or is not wanted any more, and free its blocks; says whether it lived.

        A message that arrives twice, or late, changes nothing: False. Raises `InvalidArgument` for an offer that was
        never made here. O(blocks).
        """
        try:
            self._require_mine(offer_id)
        except StaleOffer:
            return False
        if offer_id.number not in self._held:
            return False
        self._end(offer_id.number)
        return True

    def _end(self, number: int) -> OfferId:
        """Free what an offer holds. An interrupt is raised when that is done."""
        held = self._held[number]
        end_sequence(self.cache, held.seq, lambda: self._forget(number))
        return held.offer.id

    def expire(self, now: float) -> list[OfferId]:
        """End the offers whose time is over, and free their blocks; call it in every step. O(1) where none is."""
        return self._advance(now)

    def _advance(self, now: float) -> list[OfferId]:
        return [self._end(number) for number in self._deadlines.advance(now)]

    @property
    def num_offers(self) -> int:
        """Offers that live."""
        return len(self._held)

    def offers(self) -> list[Offer]:
        """Return the offers that live, oldest first."""
        return [held.offer for held in self._held.values()]

    def close(self) -> None:
        """End all offers and free their blocks. A second call does nothing."""
        for held in list(self._held.values()):
            self.release(held.offer.id)

    def check(self) -> None:
        """Verify that every offer's blocks are held and still those that were offered. O(blocks of all offers).

        Raises `InvariantError`. The cache's own `check` is apart.
        """
        if self._deadlines.keys() != set(self._held):
            raise InvariantError(f"deadlines run for {self._deadlines.keys()}; offers live: {set(self._held)}")
        ref_counts = self.cache.pool.ref_counts()
        for number, held in self._held.items():
            try:
                tables = self._tables(held.seq, held.offer.num_computed)
            except UnknownSequence:
                raise InvariantError(f"offer {number} has lost the sequence that holds its blocks") from None
            for mine, offered in zip(tables, held.offer.tables, strict=True):
                if not np.array_equal(mine, offered) or (ref_counts[mine[mine > 0]] < 1).any():
                    raise InvariantError(f"offer {number} was made of blocks {offered}; it holds {mine}")
