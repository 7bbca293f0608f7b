"""The sending side of a hand-over: holds a computed prompt's blocks until they are fetched or the offer expires."""

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
    """Offers computed sequences, and holds their blocks until each offer ends.

    An offer holds a fork of the sequence, so the sequence may continue or be freed at once. The fork takes a row of the
    cache (`max_num_seqs`), and keeps a state in that row's slot. An offer ends once, by `release` or after its ttl;
    later requests for it get `StaleOffer`, whatever the blocks hold by then. No clock is read.

    One-sided reads (RDMA) do not ask before they read. They are valid if `require_held` succeeds afterwards: then the
    blocks were held the whole time. Not thread-safe.

    Args:
        cache: cache of the sequences.
        peer: description of this side, with the cache's groups.
        ttl: time to live of an offer, in the unit of `now`: seconds, or steps.
    """

    def __init__(self, cache: KVCacheManager, peer: PeerInfo, ttl: float) -> None:
        require_own_config(cache, peer)
        self.cache = cache
        self.peer = peer
        self._deadlines = Deadlines(ttl)
        self._held: dict[int, _Held] = {}
        #: Numbers of the live offers by their sequences.
        self._seqs: dict[int, int] = {}
        self._last_number = 0

    def offer(self, seq: int, now: float, extra_keys: object = ()) -> Offer:
        """Offer a sequence whose tokens, but possibly the last, are computed. O(tokens).

        `extra_keys` are those of its allocation; the receiver allocates under the same ones. After `reset_prefix_cache`
        (new weights), offer only sequences that were allocated since.

        Raises `SequenceNotReady` for a sequence that is not computed, has reserved tokens, is swapped out, or has a
        state that no step has put in a slot yet; also `OutOfRows`, `UnknownSequence`, `InvalidArgument`. Nothing is
        held then.
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
        """Offer a sequence and take ownership of it, so that no further row is needed; it ends with the offer.

        Takes the arguments of `offer`. Raises as `offer`, except `OutOfRows`; the sequence stays the caller's then.
        """
        keys = self._require_offerable(seq, now, extra_keys)
        cache = self.cache
        known, computed = cache.num_tokens(seq), cache.num_computed_tokens(seq)
        if computed < known - 1:
            raise SequenceNotReady(f"take_over: {computed} of {known} tokens are computed; all but the last are needed")
        if seq in self._seqs:
            raise SequenceNotReady(f"take_over: sequence {seq} already belongs to an offer")
        cache.truncate(seq, known)  # cuts nothing, but raises if any of its tokens are in flight
        self._last_number += 1
        try:
            return self._hold(seq, keys)
        except BaseException:
            self._forget(self._last_number)
            raise

    def _require_offerable(self, seq: int, now: float, extra_keys: object) -> tuple[ExtraKey, ...]:
        """Return the canonical keys. Makes all checks of an offer."""
        self._advance(now)
        if not self.cache.num_computed_tokens(seq):
            raise SequenceNotReady(f"offer: no token of sequence {seq} is computed; commit its prompt first")
        keys = canonical_keys(extra_keys)
        require_spans_within(spans_of(keys), int(self.cache.num_tokens(seq)))
        if self.cache.is_swapped_out(seq):
            raise SequenceNotReady(f"offer: sequence {seq} is swapped out; swap it in first")
        if self.peer.state_bytes:
            self.cache.states.slot(seq)  # raises if there is no state to hand over yet
        return keys

    def _hold(self, seq: int, keys: tuple[ExtraKey, ...]) -> Offer:
        """Return an offer that holds a sequence; after an error the caller cleans up."""
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
        checkpoint_tokens = 0
        if self.peer.state_bytes and not spans_of(keys):
            checkpoint_tokens = int(self.cache.num_cached_tokens(tokens[:computed], extra_keys=keys))
        return Offer(number, tokens, computed, self._tables(seq, computed), keys, checkpoint_tokens)

    def state_slot(self, offer_id: OfferId, now: float) -> int:
        """Return the slot with the state after an offer's computed tokens, valid until the next plan. O(1).

        Raises as `require_held`, and `InvalidArgument` for a cache without states.
        """
        self.require_held(offer_id, now)
        return int(self.cache.states.slot(self._held[offer_id.number].seq))

    def checkpoint_blocks(self, offer_id: OfferId, now: float) -> npt.NDArray[np.int32]:
        """Return the blocks of an offer's checkpoint, int32 (n,); (0,) if it is gone. O(tokens).

        The offer does not hold them: copy them before the next call of the cache. Raises as `state_slot`.
        """
        offer = self.require_held(offer_id, now)
        return self.cache.states.blocks(offer.token_ids[: offer.checkpoint_tokens], extra_keys=offer.extra_keys)

    def _tables(self, seq: int, num_computed: int) -> tuple[npt.NDArray[np.int32], ...]:
        return tuple(
            self.cache.block_ids(seq, number)[: -(-num_computed // group.block_size)]
            for number, group in enumerate(self.peer.groups)
        )

    def require_held(self, offer_id: OfferId, now: float) -> Offer:
        """Return the offer if its blocks have been held since it was made and still are. O(1).

        Call it before bytes are sent, or after they were read. Raises `StaleOffer` for an offer that was released or
        has expired, is of an earlier start, or of weights that `reset_prefix_cache` has dropped; `InvalidArgument` for
        one that was never made here.
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
            raise InvalidArgument(f"offer_id is a {type(offer_id).__name__}; it must be an OfferId")
        if offer_id.sender != self.peer.name:
            raise InvalidArgument(f"offer_id is from {offer_id.sender!r}; this sender is {self.peer.name!r}")
        if offer_id.incarnation != self.peer.incarnation:
            raise StaleOffer(
                f"offer_id is from incarnation {offer_id.incarnation} of {self.peer.name!r}; it is now "
                f"{self.peer.incarnation}"
            )
        if offer_id.number > self._last_number:
            raise InvalidArgument(f"offer_id has number {offer_id.number}; the last offer has {self._last_number}")

    def renew(self, offer_id: OfferId, now: float) -> None:
        """Restart an offer's time to live, for example when the receiver reports progress. Raises as `require_held`."""
        self.require_held(offer_id, now)
        self._deadlines.start(offer_id.number)

    def release(self, offer_id: OfferId) -> bool:
        """End an offer and free its blocks; return whether it was live. O(blocks).

        Repeated or late calls change nothing and return False. Raises `InvalidArgument` for an offer that was never
        made here.
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
        """Free the blocks of an offer. An interrupt is raised after that."""
        held = self._held[number]
        end_sequence(self.cache, held.seq, lambda: self._forget(number))
        return held.offer.id

    def expire(self, now: float) -> list[OfferId]:
        """End the expired offers and return their ids; call it in every step. O(1) if there are none."""
        return self._advance(now)

    def _advance(self, now: float) -> list[OfferId]:
        return [self._end(number) for number in self._deadlines.advance(now)]

    @property
    def num_offers(self) -> int:
        """Number of live offers."""
        return len(self._held)

    def offers(self) -> list[Offer]:
        """Return the live offers, oldest first."""
        return [held.offer for held in self._held.values()]

    def close(self) -> None:
        """End all offers and free their blocks. A second call does nothing."""
        for held in list(self._held.values()):
            self.release(held.offer.id)

    def check(self) -> None:
        """Verify that every offer's blocks are held and are those that were offered. O(blocks of all offers).

        Raises `InvariantError`. It does not include the cache's own `check`.
        """
        if self._deadlines.keys() != set(self._held):
            raise InvariantError(f"deadlines run for {self._deadlines.keys()}; live offers are {set(self._held)}")
        ref_counts = self.cache.pool.ref_counts()
        for number, held in self._held.items():
            try:
                tables = self._tables(held.seq, held.offer.num_computed)
            except UnknownSequence:
                raise InvariantError(f"offer {number} has no sequence to hold its blocks") from None
            for mine, offered in zip(tables, held.offer.tables, strict=True):
                if not np.array_equal(mine, offered) or (ref_counts[mine[mine > 0]] < 1).any():
                    raise InvariantError(f"offer {number} has blocks {offered}; its sequence holds {mine}")
