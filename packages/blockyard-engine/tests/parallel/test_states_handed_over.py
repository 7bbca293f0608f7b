"""Hand-overs of hybrid models: the state is handed over too, and the answers are those of one engine."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard_engine import SamplingParams
from blockyard_engine.parallel import HandoffError, Offer, PeerMismatch, StaleOffer, Transfer
from blockyard_testing.hybrid_models import HYBRIDS, hybrid_model
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.tiny_models import mixed_prompts, reference_tokens, tokens_of

from ..support.handoff_ends import Beside, Ends, load_engine

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, temperature=0.9, seed=5, ignore_eos=True)


def prompts_of() -> list[list[int]]:
    """Return prompts, two of which end at a checkpoint position of both sides; three share a prefix."""
    first, other = mixed_prompts((75, 40))
    return [first, first[:41] + other[:20], first[:64], other, first[:62] + other[:3], other[:7]]


def run(ends: Ends, prompts: list[list[int]], sampling: SamplingParams) -> tuple[list[list[int]], list[Transfer]]:
    """Hand all over, each while earlier ones decode; return the answers in the order of the prompts."""
    numbers, transfers, results = [], [], {}
    for prompt in prompts:
        ends.compute([prompt], sampling)
        [offer] = ends.receiver.offers(PATIENCE_SECONDS)
        transfer, token = ends.take(offer, sampling)
        numbers.append(token.request_id)
        transfers.append(transfer)
        results |= {each.request_id: each.token_ids for each in ends.decode.step(0).finished}
    while ends.decode.engine.has_unfinished:
        results |= {each.request_id: each.token_ids for each in ends.decode.step(0).finished}
    ends.sender.serve(0)
    ends.require_empty()
    return [results[number] for number in numbers], transfers


@pytest.mark.parametrize("name", HYBRIDS)
def test_two_engines_answer_as_one(name: str) -> None:
    prompts = prompts_of()
    expected = reference_tokens(hybrid_model(name), prompts, 12)
    ends = Ends(name, block_size=4)
    answers, transfers = run(ends, prompts, GREEDY)
    assert answers == expected
    assert all(transfer.slot >= 0 for transfer in transfers)
    # Kept states came along: the same prompts hit them, asked here and handed over again.
    hits = [each.num_cached_tokens for each in ends.decode.engine.generate(prompts, GREEDY)]
    assert hits == [72, 60, 60, 36, 64, 4]
    again, transfers = run(ends, prompts, GREEDY)
    assert again == expected
    assert [transfer.start for transfer in transfers] == [72, 60, 64, 40, 64, 4]
    drawn = tokens_of(load_engine(name).generate(prompts, DRAWN))
    assert run(Ends(name), prompts, DRAWN)[0] == drawn  # blocks of twice as many tokens


def warm(ends: Ends) -> None:
    """Let the decoding engine cache 60 tokens of the first prompt, without a state after them."""
    first, other = mixed_prompts((75, 40))
    ends.decode.engine.generate([first[:62] + other[:10]], GREEDY)
    assert ends.decode.engine.cache.num_cached_tokens(first) == 0


def arrived(ends: Ends) -> list[int]:
    """Record the bytes of later messages, without checksums."""
    received, sizes = ends.mail.receive, []

    def counted(message: Any, rank: int) -> Any:
        if len(message) > 1:
            sizes.append(message.numel() * message.element_size())
        return received(message, rank)

    ends.mail.receive = counted  # type: ignore[method-assign]
    return sizes


@pytest.mark.parametrize("name", ["falcon_h1", "lfm2", "qwen3_next"])
def test_keys_and_values_cached_without_a_state_are_not_sent_again(name: str) -> None:
    ends = Ends(name, block_size=4)
    warm(ends)
    engine, first = ends.decode.engine, prompts_of()[0]
    assert engine.state_slots is not None
    token_bytes, state_bytes = engine.kv_cache.bytes_per_block // 4, engine.state_slots.num_bytes
    sizes = arrived(ends)
    # What the sender has kept at 60 is kept here too, before the tokens that are fetched.
    for prompt, start, kept in ((first[:61], 60, 60), (first[:61], 60, 0), (first, 60, 72), (first, 72, 0)):
        sizes.clear()
        answers, [transfer] = run(ends, [prompt], GREEDY)
        assert answers == reference_tokens(hybrid_model(name), [prompt], 12)
        assert (transfer.start, transfer.checkpoint_tokens) == (start, kept)
        assert sum(sizes) == (len(prompt) - start) * token_bytes + (2 if kept else 1) * state_bytes
    hits = [each.num_cached_tokens for each in engine.generate([first[:61], first], GREEDY)]
    assert hits == [60, 72]


def begin(ends: Ends, prompt: list[int]) -> tuple[Offer, Transfer]:
    ends.compute([prompt], GREEDY)
    [offer] = ends.receiver.offers(PATIENCE_SECONDS)
    transfer = ends.decode.accept(offer, GREEDY, 0)
    assert isinstance(transfer, Transfer)
    return offer, transfer


def require_answers(ends: Ends, name: str, prompts: list[list[int]]) -> None:
    """Compare the decoding engine's answers with `generate`, cold or from its checkpoints."""
    answers = tokens_of(ends.decode.engine.generate(prompts, GREEDY))
    assert answers == reference_tokens(hybrid_model(name), prompts, 12)
    ends.require_empty()


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("place", range(3))
def test_a_damaged_byte_of_a_state_is_detected_and_not_shared(place: int, is_warm: bool) -> None:
    """A byte of keys and values, of the checkpoint, or of the final state."""
    ends, prompt = Ends("falcon_h1"), prompts_of()[0]
    if is_warm:
        warm(ends)
    _, transfer = begin(ends, prompt)
    assert transfer.start == 56 * is_warm  # blocks of 8
    assert (transfer.checkpoint_tokens, [position for position, _ in transfer.saves]) == (72, [72])
    received = ends.mail.receive
    lengths: list[int] = []

    def counted(message: Any, rank: int) -> Any:
        lengths.append(len(message))
        # Each of the three is one message and its checksum.
        ends.mail.spoil = len(lengths) == 1 + 2 * place
        return received(message, rank)

    ends.mail.receive = counted  # type: ignore[method-assign]
    with Beside(lambda: ends.sender.serve(0, PATIENCE_SECONDS)), pytest.raises(HandoffError, match="checksum"):
        ends.receiver.fetch(transfer)
    assert len(lengths) == 2 + 2 * place
    engine = ends.decode.engine
    assert (engine.cache.num_used_blocks, engine.cache.num_cached_tokens(prompt)) == (0, 0)
    ends.sender._release_all()
    require_answers(ends, "falcon_h1", [prompt])


@pytest.mark.parametrize("is_warm", [False, True])
def test_an_aborted_transfer_leaves_nothing(is_warm: bool) -> None:
    ends, prompt = Ends("qwen3_next"), prompts_of()[0]
    if is_warm:
        warm(ends)
    _, transfer = begin(ends, prompt)
    engine = ends.decode.engine
    number = engine.add_request(prompt, GREEDY)  # it cannot join what has no state yet
    assert ends.decode.step(0).num_tokens > 0
    slots = engine.state_slots
    assert slots is not None
    slots.state(transfer.slot).fill_(0xFF)  # half of what was to come
    ends.decode.receiver.abort(transfer)
    with pytest.raises(StaleOffer):
        ends.receiver.fetch(transfer)
    results = [result for _ in range(60) for result in ends.decode.step(0).finished]
    assert [result.request_id for result in results] == [number]
    assert [result.token_ids for result in results] == reference_tokens(hybrid_model("qwen3_next"), [prompt], 12)
    ends.sender._release_all()
    ends.require_empty()


def test_a_checkpoint_evicted_before_the_request_is_not_fetched() -> None:
    ends, prompt = Ends("jamba"), prompts_of()[0]
    offer, transfer = begin(ends, prompt)
    assert transfer.checkpoint_tokens == offer.checkpoint_tokens == 72
    cache = ends.prefill.engine.cache
    blocks = cache.states.blocks(prompt[:72])
    held = []
    while len(cache.states.blocks(prompt[:72])):
        held.append(cache.pool.get_new_blocks(1))
    assert {int(lease[0]) for lease in held} & set(blocks.tolist())
    ends.fetch(transfer)
    assert (transfer.checkpoint_tokens, transfer.saves) == (0, ())
    for lease in held:
        cache.pool.free_blocks(lease)
    results = [result.token_ids for _ in range(20) for result in ends.decode.step(0).finished]
    assert results == reference_tokens(hybrid_model("jamba"), [prompt], 12)
    assert len(ends.decode.engine.cache.states.blocks(prompt[:72])) == 0
    ends.sender.serve(0)
    require_answers(ends, "jamba", [prompt])


def test_a_side_that_disappears_leaves_nothing_held() -> None:
    ends, prompt = Ends("falcon_h1"), prompts_of()[0]
    _, transfer = begin(ends, prompt)
    ends.connections[0].close()
    with pytest.raises(HandoffError, match="is gone"):
        ends.receiver.fetch(transfer)
    ends.sender._release_all()
    require_answers(ends, "falcon_h1", [prompt])

    ends = Ends("falcon_h1")
    begin(ends, prompt)
    ends.connections[1].close()
    with pytest.raises(HandoffError, match="is gone"):
        ends.sender.serve(0)
    ends.prefill.engine.cache.check()
    assert ends.prefill.engine.cache.leak_report() == []


def test_models_with_other_states_are_refused_by_the_tensor() -> None:
    with pytest.raises(PeerMismatch, match=r"state_bytes is \d+ here, \d+ at the peer"):
        Ends("qwen3_next", changes={"linear_value_head_dim": 16})
    # As many bytes, of other layers.
    with pytest.raises(PeerMismatch, match=r"state_tensors\[1\] is 'float32 \[8, 8, 8\]' here, '.*' at the peer"):
        Ends("falcon_h1", changes={"mamba_n_heads": 8, "mamba_d_head": 8})


@pytest.mark.parametrize("way", ["recompute", "swap"])
@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_restored_tokens_are_equal_despite_preemption_and_swaps(name: str, way: str) -> None:
    """Both sides lack blocks: sequences are preempted before and after their hand-over."""
    prompts = mixed_prompts((30, 33, 26, 29, 35), shared=8)
    options: dict[str, Any] = {"num_cpu_blocks": 60} if way == "swap" else {}
    ends = Ends(name, block_size=4, num_blocks=52, preemption=way, **options)
    numbers, results, waiting = {}, {}, []
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    for prompt in prompts:
        ends.compute([prompt], sampling)
        waiting += ends.receiver.offers(PATIENCE_SECONDS)
    for _ in range(600):
        if waiting:
            transfer = ends.decode.accept(waiting[0], sampling, 0)
            if isinstance(transfer, Transfer):
                numbers[ends.fetch(transfer).request_id] = waiting.pop(0).token_ids[:-1].tolist()
        results |= {each.request_id: each.token_ids for each in ends.decode.step(0).finished}
        ends.decode.engine.cache.check()
        if not waiting and not ends.decode.engine.has_unfinished:
            break
    assert ends.decode.engine.num_preemptions > 0
    expected = reference_tokens(hybrid_model(name), list(numbers.values()), 24)
    assert [results[number] for number in numbers] == expected
    ends.sender.serve(0)
    ends.require_empty()
