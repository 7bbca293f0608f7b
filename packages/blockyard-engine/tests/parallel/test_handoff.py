"""Hand-overs: who holds which blocks, when they can be hit, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blockyard import (
    Admission,
    CacheSalt,
    ConcurrentCall,
    InvalidArgument,
    InvariantError,
    KVCacheManager,
    LayerGroup,
    LoRA,
    OutOfRows,
    SeqStatus,
    SequenceNotReady,
    Span,
    UnknownSequence,
)
from blockyard_engine.parallel import (
    HandoffError,
    HandoffReceiver,
    HandoffSender,
    HeadShards,
    LocalBlocks,
    Offer,
    StaleOffer,
    fetch,
)
from blockyard_testing.cached import cached_tokens

from ..support.handoff_pair import PROMPT, Pair, side


def test_a_prompt_is_handed_over_completely(pair: Pair) -> None:
    offer = pair.offer()
    assert pair.prefill.num_used_blocks == 10
    transfer = pair.receiver.accept(Offer.from_bytes(offer.to_bytes()), 1)
    assert (transfer.start, transfer.stop, transfer.plan.num_tokens) == (0, 37, 37)
    assert cached_tokens(pair.decode, [*PROMPT, 1, 2]) == 0, "nothing is hit before the bytes are there"
    pair.check()
    assert pair.sender.require_held(offer.id, 2) is offer
    seq = pair.receiver.finish(transfer, 2)
    assert pair.sender.release(offer.id)
    assert (pair.decode.num_tokens(seq), pair.decode.num_computed_tokens(seq)) == (38, 37)
    assert pair.decode.num_cached_tokens([*PROMPT, 1, 2]) == 36
    assert pair.decode.reserve([seq], [1]).all_fit
    pair.decode.commit([seq], [1], [8])
    pair.decode.free(seq)
    pair.require_empty()


def test_real_bytes_between_other_block_sizes_and_ranks() -> None:
    pair = Pair({"block_size": 3})
    _, peer = side(shards=HeadShards.even(6, 4))
    pair.sender = HandoffSender(pair.prefill, peer, 10)
    pair.receiver = HandoffReceiver(
        pair.decode, side("decode", config={"block_size": 3}, shards=HeadShards.even(6, 2))[1], 10
    )
    pair.receiver.connect(peer)
    source = [[LocalBlocks(40, 4, count)] for _, count in peer.shards.ranges]
    target = [[LocalBlocks(40, 3, 3)] for _ in range(2)]
    offer = pair.offer()
    slots = [offer.tables[0][t // 4] * 4 + t % 4 for t in range(37)]
    for (first, count), [blocks] in zip(peer.shards.ranges, source, strict=True):
        blocks.data[slots, :, 0] = 10 * np.arange(37)[:, None] + np.arange(first, first + count)
    transfer = pair.receiver.accept(offer, 0)
    fetch(transfer.plan, source, target)
    seq = pair.receiver.finish(transfer, 0)
    places = [pair.decode.block_ids(seq)[t // 3] * 3 + t % 3 for t in range(37)]
    for rank, [blocks] in enumerate(target):
        assert (blocks.data[places, :, 0] == 10 * np.arange(37)[:, None] + np.arange(3 * rank, 3 * rank + 3)).all()


def test_tokens_cached_at_the_receiver_are_not_sent(pair: Pair) -> None:
    first = pair.receiver.accept(pair.offer(), 0)
    seq = pair.receiver.finish(first, 0)
    transfer = pair.receiver.accept(pair.offer(tokens=[*PROMPT[:30], 99, 98]), 0)
    assert (transfer.start, transfer.stop) == (28, 32)
    assert transfer.plan.num_tokens == 4
    assert pair.receiver.abort(transfer)
    whole = pair.receiver.accept(pair.offer(tokens=PROMPT[:36]), 0)
    assert (whole.start, whole.stop, whole.plan.num_runs) == (36, 36, 0)
    other = pair.receiver.finish(whole, 0)
    assert pair.decode.num_computed_tokens(other) == 36
    pair.decode.free([seq, other])


def test_a_prompt_waits_for_a_prefix_that_is_being_loaded(pair: Pair) -> None:
    first, second = pair.offer(), pair.offer()
    transfer = pair.receiver.accept(first, 0)
    used = pair.decode.num_used_blocks
    assert pair.receiver.accept(second, 0) is Admission.LATER
    assert pair.receiver.accept(pair.offer(tokens=PROMPT[:36]), 0) is Admission.LATER, "also with nothing of its own"
    assert pair.decode.num_used_blocks == used
    pair.decode.free(pair.receiver.finish(transfer, 0))
    again = pair.receiver.accept(second, 0)
    assert again.start == 36
    pair.receiver.abort(again)


def test_joiners_of_a_transfer_wait_and_take_over_when_it_is_aborted(pair: Pair) -> None:
    transfer = pair.receiver.accept(pair.offer(), 0)
    joiner = pair.decode.allocate(PROMPT)
    assert pair.decode.reserve([joiner]).status[0] == SeqStatus.WAITS_FOR_PREFIX
    pair.receiver.abort(transfer)
    plan = pair.decode.reserve([joiner])
    assert plan.all_fit
    assert plan.num_scheduled[0] == 37, "half a transfer is a miss"
    pair.decode.free(joiner)


def test_an_offer_expires_after_its_ttl_and_is_then_refused(pair: Pair) -> None:
    offer = pair.offer(now=5)
    assert pair.sender.expire(14.5) == []
    assert pair.sender.expire(15) == [offer.id]
    assert pair.prefill.num_used_blocks == 0
    for now in (15, 16):
        with pytest.raises(StaleOffer, match="offer 1 of 'prefill' was released or has expired"):
            pair.sender.require_held(offer.id, now)
    assert not pair.sender.release(offer.id)


def test_a_check_at_the_end_of_the_ttl_is_too_late(pair: Pair) -> None:
    offer = pair.offer()
    with pytest.raises(StaleOffer):
        pair.sender.require_held(offer.id, 10)
    assert pair.prefill.num_used_blocks == 0


def test_a_renewed_offer_lives_on(pair: Pair) -> None:
    offer = pair.offer()
    pair.sender.renew(offer.id, 8)
    assert pair.sender.expire(17) == []
    assert pair.sender.expire(18) == [offer.id]
    with pytest.raises(StaleOffer):
        pair.sender.renew(offer.id, 18)


def test_a_transfer_expires_after_its_ttl(pair: Pair) -> None:
    transfer = pair.receiver.accept(pair.offer(), 0)
    pair.receiver.renew(transfer, 4)
    assert pair.receiver.expire(13) == []
    assert pair.receiver.expire(14) == [transfer]
    for call in (pair.receiver.finish, pair.receiver.renew):
        with pytest.raises(StaleOffer, match="has ended"):
            call(transfer, 14)
    assert not pair.receiver.abort(transfer)
    assert pair.decode.num_used_blocks == 0
    assert pair.decode.num_cached_tokens([*PROMPT, 1]) == 0


def test_an_offer_ends_only_once(pair: Pair) -> None:
    offer = pair.offer()
    transfer = pair.receiver.accept(offer, 0)
    with pytest.raises(InvalidArgument, match="is already being fetched"):
        pair.receiver.accept(offer, 0)
    seq = pair.receiver.finish(transfer, 0)
    with pytest.raises(StaleOffer):
        pair.receiver.finish(transfer, 0)
    assert not pair.receiver.abort(transfer)
    assert [pair.sender.release(offer.id), pair.sender.release(offer.id)] == [True, False]
    pair.decode.free(seq)
    pair.require_empty()


def test_a_restarted_sender_aborts_its_earlier_transfers(pair: Pair) -> None:
    old = pair.offer()
    transfer = pair.receiver.accept(old, 0)
    cache, peer = side(incarnation=2)
    again = HandoffSender(cache, peer, 10)
    with pytest.raises(StaleOffer, match="incarnation 1 of 'prefill'; it is now 2"):
        again.require_held(old.id, 0)
    assert not again.release(old.id)
    pair.receiver.connect(peer)
    assert pair.receiver.num_transfers == 0, "what was fetched from the one that died is given up"
    with pytest.raises(StaleOffer):
        pair.receiver.finish(transfer, 0)
    with pytest.raises(StaleOffer, match="incarnation 1 of 'prefill'; it is now 2"):
        pair.receiver.accept(old, 0)
    with pytest.raises(StaleOffer, match="has restarted as incarnation 2"):
        pair.receiver.connect(pair.sender.peer)


def test_new_weights_on_either_side_end_a_transfer(pair: Pair) -> None:
    offer = pair.offer()
    transfer = pair.receiver.accept(offer, 0)
    pair.prefill.reset_prefix_cache()
    with pytest.raises(StaleOffer, match="generation 0; the cache was reset and is at 1"):
        pair.sender.require_held(offer.id, 0)
    pair.decode.reset_prefix_cache()
    with pytest.raises(StaleOffer, match="the cache was reset while offer 1 was being fetched"):
        pair.receiver.finish(transfer, 0)
    assert pair.decode.num_used_blocks == 0


def test_a_full_receiver_answers_later() -> None:
    pair = Pair({"num_blocks": 12, "max_num_seqs": 2})
    busy = pair.decode.allocate(list(range(100, 110)))
    assert pair.receiver.accept(pair.offer(), 0) is Admission.LATER
    pair.decode.free(busy)
    rows = [pair.decode.allocate([token]) for token in range(2)]
    assert pair.receiver.accept(pair.offer(), 0) is Admission.LATER
    pair.decode.free(rows)
    assert pair.receiver.accept(pair.offer(tokens=list(range(60))), 0) is Admission.NEVER
    pair.sender.close()
    pair.require_empty()


def test_a_refused_offer_holds_nothing(pair: Pair) -> None:
    seq = pair.prefill.allocate(PROMPT)
    with pytest.raises(SequenceNotReady):
        pair.sender.offer(seq, 0)
    pair.prefill.reserve([seq], 5)
    with pytest.raises(SequenceNotReady):
        pair.sender.offer(seq, 0)
    pair.prefill.commit([seq], 5)
    with pytest.raises(SequenceNotReady, match="has computed 5 tokens"):
        pair.sender.offer(seq, 0)
    pair.prefill.reserve([seq])
    pair.prefill.commit([seq], 32)
    for keys in ((CacheSalt("a"), CacheSalt("b")), 7, ("salt",), (Span("cat", 30, 40),)):
        with pytest.raises(InvalidArgument, match="extra_keys"):
            pair.sender.offer(seq, 0, keys)
    with pytest.raises(InvalidArgument, match="now is 'noon'"):
        pair.sender.offer(seq, "noon")  # type: ignore[arg-type]
    for wrong in (seq + 1, -1):
        with pytest.raises((UnknownSequence, InvalidArgument)):
            pair.sender.offer(wrong, 0)
    others = [pair.prefill.allocate([token]) for token in range(7)]
    with pytest.raises(OutOfRows):
        pair.sender.offer(seq, 0)
    pair.prefill.free([seq, *others])
    pair.require_empty()


def test_a_refused_offer_leaves_reserved_rows_alone() -> None:
    pair = Pair(max_num_seqs=2)
    seq = pair.prefill.allocate([1], num_seqs=2)
    for call in (pair.sender.offer, pair.sender.take_over):
        with pytest.raises(SequenceNotReady, match="offer: no token of sequence"):
            call(seq, 0)
    pair.prefill.reserve([seq])
    pair.prefill.commit([seq], 1, [7])
    for call in (pair.sender.offer, pair.sender.take_over):
        with pytest.raises(InvalidArgument):
            call(seq, 0, (Span("a", 1, 2),))
        with pytest.raises(InvalidArgument):
            call(seq, 0, "a")
    with pytest.raises(OutOfRows):
        pair.prefill.allocate([5])
    (other,) = pair.prefill.fork(seq)
    pair.prefill.free([seq, other])
    pair.require_empty()


def test_a_sequence_that_is_taken_over_takes_no_further_row(pair: Pair) -> None:
    others = [pair.prefill.allocate([token]) for token in range(7)]
    seq = pair.compute()
    offer = pair.sender.take_over(seq, 0)
    for call in (pair.sender.take_over, pair.sender.offer):
        with pytest.raises((SequenceNotReady, OutOfRows)):
            call(seq, 0)
    pair.prefill.free(others)
    transfer = pair.receiver.accept(offer, 0)
    pair.sender.require_held(offer.id, 0)
    pair.decode.free(pair.receiver.finish(transfer, 0))
    assert pair.sender.release(offer.id)
    with pytest.raises(UnknownSequence):
        pair.prefill.free(seq)
    half = pair.prefill.allocate([*PROMPT[:4], *range(50, 90)])
    with pytest.raises(SequenceNotReady, match="4 of 44 tokens are computed"):
        pair.sender.take_over(half, 0)
    pair.prefill.reserve([half])
    with pytest.raises(SequenceNotReady):
        pair.sender.take_over(half, 0)
    pair.prefill.commit([half], 40)
    pair.prefill.reserve([half], 2)
    with pytest.raises(SequenceNotReady, match="2 reserved"):
        pair.sender.take_over(half, 0)
    pair.prefill.free(half)
    pair.require_empty()


def test_a_swapped_sequence_is_not_offered() -> None:
    pair = Pair(num_cpu_blocks=40)
    seq = pair.compute()
    pair.prefill.swap_out([seq])
    with pytest.raises(SequenceNotReady, match="swapped out"):
        pair.sender.offer(seq, 0)
    pair.prefill.free(seq)
    pair.require_empty()


def test_time_never_goes_back(pair: Pair) -> None:
    offer = pair.offer(now=5)
    transfer = pair.receiver.accept(offer, 5)
    calls = [
        lambda: pair.sender.expire(4),
        lambda: pair.sender.require_held(offer.id, 4),
        lambda: pair.receiver.expire(4),
        lambda: pair.receiver.finish(transfer, 4),
        lambda: pair.receiver.accept(offer, float("nan")),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument, match="now is"):
            call()
    assert (pair.sender.num_offers, pair.receiver.num_transfers) == (1, 1)


@pytest.mark.parametrize("lease", [0, -1, float("inf"), float("nan"), "long", True, None])
def test_bad_time_limits_are_refused(lease: Any) -> None:
    cache, peer = side()
    for make in (HandoffSender, HandoffReceiver):
        with pytest.raises(InvalidArgument, match="ttl is"):
            make(cache, peer, lease)


class Inside:
    """A number that calls a function when it is read, in the middle of a call; then it is 1."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def __index__(self) -> int:
        self.act()
        return 1


def in_a_call_of(cache: KVCacheManager, act: Any) -> None:
    cache.pool.free_blocks(cache.pool.get_new_blocks(Inside(act)))


def test_a_nested_call_may_end_an_offer_but_not_begin_one(pair: Pair) -> None:
    offer, seq = pair.offer(), pair.compute([99] * 9)

    def act() -> None:
        assert pair.sender.release(offer.id)
        with pytest.raises(ConcurrentCall):
            pair.sender.offer(seq, 0)

    in_a_call_of(pair.prefill, act)
    assert pair.prefill.num_seqs == 1, "what ended inside the call is free when that has ended"
    pair.prefill.free(seq)
    pair.require_empty()


def test_a_nested_call_may_abort_a_transfer_but_not_begin_one(pair: Pair) -> None:
    first, second = pair.offer(), pair.offer(tokens=[99] * 9)
    transfer = pair.receiver.accept(first, 0)

    def act() -> None:
        with pytest.raises(ConcurrentCall):
            pair.receiver.finish(transfer, 0)
        assert pair.receiver.abort(transfer)
        with pytest.raises(ConcurrentCall):
            pair.receiver.accept(second, 0)

    in_a_call_of(pair.decode, act)
    pair.sender.close()
    pair.require_empty()


def test_extra_keys_are_handed_over(pair: Pair) -> None:
    keys = (CacheSalt("a"), LoRA("b", "c"), Span("cat", 3, 5))
    seq = pair.compute(extra_keys=keys)
    offer = Offer.from_bytes(pair.sender.offer(seq, 0, keys).to_bytes())
    assert offer.extra_keys == keys
    got = pair.receiver.finish(pair.receiver.accept(offer, 0), 0)
    assert pair.decode.num_cached_tokens([*PROMPT, 1]) == 0
    assert pair.decode.num_cached_tokens([*PROMPT, 1], extra_keys=keys) == 36
    pair.decode.free(got)
    pair.prefill.free(seq)


def test_layer_groups_of_full_attention_are_handed_over() -> None:
    pair = Pair({"groups": (LayerGroup(2), LayerGroup(4))}, groups=(LayerGroup(4), LayerGroup(8)))
    transfer = pair.receiver.accept(pair.offer(), 0)
    assert [runs.num_tokens for runs in transfer.plan.groups] == [37, 37]
    pair.decode.free(pair.receiver.finish(transfer, 0))
    assert pair.decode.num_cached_tokens([*PROMPT, 1]) == 36


def test_a_prompt_longer_than_a_window_is_refused_by_name() -> None:
    groups = {"groups": (LayerGroup(4, sliding_window=8),)}
    pair = Pair(groups, **groups)
    short = pair.receiver.accept(pair.offer(tokens=PROMPT[:7]), 0)
    pair.decode.free(pair.receiver.finish(short, 0))
    offer = pair.offer()
    with pytest.raises(HandoffError, match="has left a sliding window"):
        pair.receiver.accept(offer, 0)
    pair.sender.close()
    pair.require_empty()


def test_a_cache_with_several_steps_in_flight_receives_nothing() -> None:
    """A transfer would be the oldest step in flight and block all later ones."""
    cache, peer = side("decode", config={"max_steps_in_flight": 2})
    with pytest.raises(InvalidArgument, match="max_steps_in_flight 2; a receiver's cache must have 1"):
        HandoffReceiver(cache, peer, 10)


@pytest.mark.parametrize("options", [{"num_cpu_blocks": 20}, {"partial_hits": True}])
def test_plans_that_move_blocks_are_carried_out(options: dict[str, Any]) -> None:
    cache, peer = side("decode", config=options)
    with pytest.raises(InvalidArgument, match="on_plan is None"):
        HandoffReceiver(cache, peer, 10)
    seen: list[Any] = []
    pair = Pair()
    pair.decode = cache
    pair.receiver = HandoffReceiver(
        cache, peer, 10, lambda plan: seen.append((plan.copies.tolist(), plan.swap_ins.tolist()))
    )
    pair.receiver.connect(pair.sender.peer)
    kept = pair.receiver.finish(pair.receiver.accept(pair.offer(), 0), 0)
    transfer = pair.receiver.accept(pair.offer(tokens=[*PROMPT[:30], 50, 51]), 0)
    assert transfer.start == (30 if "partial_hits" in options else 28)
    assert len(seen) == 2
    assert bool(seen[1][0]) == ("partial_hits" in options)
    pair.decode.free([kept, pair.receiver.finish(transfer, 0)])
    pair.sender.close()
    pair.require_empty()


def test_a_plan_that_cannot_be_carried_out_leaves_nothing_behind() -> None:
    def broken(plan: object) -> None:
        raise RuntimeError("the device is gone")

    pair = Pair()
    pair.receiver = HandoffReceiver(pair.decode, side("decode")[1], 10, broken)
    pair.receiver.connect(pair.sender.peer)
    offer = pair.offer()
    with pytest.raises(RuntimeError, match="the device is gone"):
        pair.receiver.accept(offer, 0)
    pair.sender.close()
    pair.require_empty()


# ---------------------------------------------------------------- checks that can fail


def test_check_detects_broken_invariants(pair: Pair) -> None:
    offer = pair.offer()
    transfer = pair.receiver.accept(offer, 0)
    [held] = pair.prefill.running()
    pair.prefill.free(held)
    with pytest.raises(InvariantError, match="has no sequence to hold"):
        pair.sender.check()
    pair.decode.free(transfer.seq)
    with pytest.raises(InvariantError, match="has no sequence"):
        pair.receiver.check()
    for ends in (lambda: pair.sender.release(offer.id), lambda: pair.receiver.abort(transfer)):
        with pytest.raises(UnknownSequence):
            ends()
    pair.require_empty()
