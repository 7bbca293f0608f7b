"""Two linked sides: engines with real models, late or wrong messages, and a side that disappears."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockyard import Admission, CacheSalt, InvalidArgument, NeverFits
from blockyard.tenants import Tenant
from blockyard_engine import SamplingParams
from blockyard_engine.handoff import DecodeConnector, PrefillConnector
from blockyard_engine.parallel import (
    HandoffError,
    Offer,
    OfferId,
    PeerMismatch,
    StaleOffer,
    Transfer,
)
from blockyard_engine.parallel.link import ReceiverLink, SenderLink
from blockyard_engine.parallel.transport import DistributedTransport
from blockyard_testing import seeds
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.places import ROOT
from blockyard_testing.tiny_models import (
    WINDOWED,
    reference_tokens,
    tiny_model,
    tokens_of,
    write_gguf,
)

from .. import kills
from ..support.handoff_ends import Beside, Ends, load_engine
from ..support.mail import Mail, new_boxes

PROMPTS = [list(range(1, 30)), [*range(1, 25), 90, 91], [7], list(range(60, 125)), list(range(1, 30))]


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.sender.close()
    made.receiver.close()
    made.require_empty()


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "deepseek-v3"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_two_engines_answer_as_one(name: str, temperature: float) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=temperature, seed=5)
    alone = tokens_of(load_engine(name).generate(PROMPTS, sampling))
    if temperature == 0:
        assert alone == reference_tokens(tiny_model(name), PROMPTS, 12)
    ends = Ends(name)
    ends.compute(PROMPTS, sampling)
    results, numbers, starts = {}, [], []
    for offer in ends.receiver.offers(PATIENCE_SECONDS):
        transfer, token = ends.take(offer, sampling)
        numbers.append(token.request_id)
        starts.append(transfer.start)
        report = ends.decode.step(0)  # one decodes while the next is fetched
        results.update({result.request_id: result.token_ids for result in report.finished})
    while ends.decode.engine.has_unfinished:
        results.update({result.request_id: result.token_ids for result in ends.decode.step(0).finished})
    order = sorted(range(len(PROMPTS)), key=lambda number: len(PROMPTS[number]))
    assert sorted(map(len, results.values())) == [12] * len(order)
    assert sorted(results[number] for number in numbers) == sorted(alone)
    assert max(starts) >= 16, "what another prompt brought along is not fetched again"
    ends.sender.serve(0)
    ends.require_empty()


def test_a_request_that_ends_with_its_first_token_is_not_handed_over(ends: Ends) -> None:
    [result] = ends.compute([PROMPTS[0]], SamplingParams(max_tokens=1))
    assert len(result.token_ids) == 1
    assert ends.receiver.offers() == []


def test_a_first_token_may_end_the_request_at_the_decoder(ends: Ends) -> None:
    sampling = SamplingParams(max_tokens=5)
    ends.compute([PROMPTS[0]], sampling)
    [offer] = ends.receiver.offers(PATIENCE_SECONDS)
    _, token = ends.take(offer, SamplingParams(max_tokens=5, stop_token_ids=(int(offer.token_ids[-1]),)))
    assert token.finish_reason is not None
    assert not ends.decode.engine.has_unfinished


def test_an_offer_that_has_ended_is_refused_and_costs_nothing(ends: Ends) -> None:
    sampling = SamplingParams(max_tokens=5)
    ends.compute([PROMPTS[0]], sampling)
    [offer] = ends.receiver.offers(PATIENCE_SECONDS)
    transfer = ends.decode.accept(offer, sampling, 0)
    assert isinstance(transfer, Transfer)
    with Beside(lambda: ends.sender.serve(10, 5.0)), pytest.raises(StaleOffer, match="offer 1 of 'prefill' has ended"):
        ends.receiver.fetch(transfer)
    ends.require_empty()


def test_a_damaged_byte_is_detected_and_not_shared(ends: Ends) -> None:
    sampling = SamplingParams(max_tokens=5)
    ends.compute([PROMPTS[0]], sampling)
    [offer] = ends.receiver.offers(PATIENCE_SECONDS)
    transfer = ends.decode.accept(offer, sampling, 0)
    assert isinstance(transfer, Transfer)
    ends.mail.spoil = True
    with Beside(lambda: ends.sender.serve(0, 5.0)), pytest.raises(HandoffError, match="checksum"):
        ends.receiver.fetch(transfer)
    assert ends.decode.engine.cache.num_used_blocks == 0
    assert ends.decode.engine.cache.num_cached_tokens([*PROMPTS[0], 1]) == 0


def test_a_receiver_that_disappears_frees_the_senders_offers(ends: Ends) -> None:
    ends.compute(PROMPTS, SamplingParams(max_tokens=5))
    assert ends.prefill.sender.num_offers == len(PROMPTS)
    ends.connections[1].close()
    with pytest.raises(HandoffError, match="is gone"):
        ends.sender.serve(0)
    ends.require_empty()
    with pytest.raises(HandoffError, match="failed in the middle"):
        ends.sender.serve(0)


def test_a_sender_that_disappears_aborts_its_transfers(ends: Ends) -> None:
    sampling = SamplingParams(max_tokens=5)
    ends.compute(PROMPTS[3:], sampling)
    first, second = ends.receiver.offers(PATIENCE_SECONDS)
    fetched, waiting = (ends.decode.accept(offer, sampling, 0) for offer in (first, second))
    assert isinstance(fetched, Transfer)
    assert isinstance(waiting, Transfer)
    ends.connections[0].close()
    with pytest.raises(HandoffError, match="is gone"):
        ends.receiver.fetch(fetched)
    with pytest.raises(HandoffError, match="is gone"):
        ends.receiver.offers()
    assert ends.decode.receiver.num_transfers == 0
    assert ends.decode.engine.cache.num_used_blocks == 0
    ends.sender._release_all()


def test_a_silent_sender_raises_after_the_timeout() -> None:
    ends = Ends()
    ends.receiver._timeout = 0.1  # both have met: nothing in this test is slow but the sender
    sampling = SamplingParams(max_tokens=5)
    ends.compute([PROMPTS[0]], sampling)
    [offer] = ends.receiver.offers(PATIENCE_SECONDS)
    transfer = ends.decode.accept(offer, sampling, 0)
    assert isinstance(transfer, Transfer)
    with pytest.raises(HandoffError, match=r"data or stale was due; it did not arrive in 0\.1 s"):
        ends.receiver.fetch(transfer)
    again = ends.decode.accept(offer, sampling, 0)
    assert isinstance(again, Transfer)
    with pytest.raises(HandoffError, match="failed in the middle of a transfer"):
        ends.receiver.fetch(again)
    ends.sender._release_all()
    ends.require_empty()


def test_a_message_that_is_not_an_offer_is_raised_once(ends: Ends) -> None:
    ends.connections[0].send_bytes(OfferId("prefill", 1, 1).to_bytes("release"))
    ends.compute([PROMPTS[0]], SamplingParams(max_tokens=5))
    with pytest.raises(InvalidArgument, match="message is a 'release'"):
        ends.receiver.offers(PATIENCE_SECONDS)
    assert len(ends.receiver.offers(PATIENCE_SECONDS)) == 1


def test_offers_before_an_invalid_message_are_not_lost(ends: Ends) -> None:
    ends.compute([PROMPTS[0]], SamplingParams(max_tokens=5))
    ends.connections[0].send_bytes(OfferId("prefill", 1, 1).to_bytes("release"))
    ends.compute([PROMPTS[1]], SamplingParams(max_tokens=5))
    with pytest.raises(InvalidArgument, match="message is a 'release'"):
        ends.receiver.offers(PATIENCE_SECONDS)
    assert len(ends.receiver.offers()) == 2


def test_late_answers_are_ignored(ends: Ends) -> None:
    for kind in ("stale", "held"):
        ends.connections[0].send_bytes(OfferId("prefill", 1, 1).to_bytes(kind))
    ends.compute([PROMPTS[0]], SamplingParams(max_tokens=5))
    assert len(ends.receiver.offers(PATIENCE_SECONDS)) == 1


def test_a_sender_that_never_sends_the_due_message_raises() -> None:
    ends = Ends()
    ends.receiver._timeout = 0.3
    sampling = SamplingParams(max_tokens=5)
    ends.compute([PROMPTS[0]], sampling)
    [offer] = ends.receiver.offers(PATIENCE_SECONDS)
    transfer = ends.decode.accept(offer, sampling, 0)
    assert isinstance(transfer, Transfer)
    is_over = threading.Event()

    def talk() -> None:
        while not is_over.wait(0.01):
            ends.connections[0].send_bytes(offer.to_bytes())

    talking = threading.Thread(target=talk)
    talking.start()
    try:
        with pytest.raises(HandoffError, match="it did not arrive in"):
            ends.receiver.fetch(transfer)
    finally:
        is_over.set()
        talking.join()
    ends.sender._release_all()
    ends.require_empty()


class Talker:
    """A connection on which messages arrive faster than anyone reads them."""

    def __init__(self, message: bytes, most: int) -> None:
        self.message = message
        self.left = most

    def poll(self, timeout: float = 0.0, /) -> bool:
        del timeout
        return self.left > 0

    def recv_bytes(self) -> bytes:
        self.left -= 1
        return self.message

    def send_bytes(self, message: bytes, /) -> None:
        del message


def test_a_flood_of_requests_delays_no_step(ends: Ends) -> None:
    ends.compute([PROMPTS[0]], SamplingParams(max_tokens=5))
    [offer] = ends.receiver.offers(PATIENCE_SECONDS)
    ends.sender._connection = Talker(offer.id.to_bytes("release"), 1000)
    assert [ends.sender.serve(0) for _ in range(5)] == [256, 256, 256, 232, 0]


def test_offers_that_expire_are_forgotten_by_the_link(ends: Ends) -> None:
    for now in range(0, 400, 10):
        ends.compute([PROMPTS[2]], SamplingParams(max_tokens=5), now)
        ends.sender.serve(now)
    assert len(ends.sender._offered) < 20


def test_a_closed_link_is_reported_to_the_other_side(ends: Ends) -> None:
    sampling = SamplingParams(max_tokens=5)
    ends.compute([PROMPTS[0]], sampling)
    ends.sender.close()
    assert ends.prefill.sender.num_offers == 0
    [offer] = ends.receiver.offers(PATIENCE_SECONDS)
    assert ends.receiver.has_ended
    transfer = ends.decode.accept(offer, sampling, 0)
    assert isinstance(transfer, Transfer)
    with pytest.raises(HandoffError, match="the other side has closed the link"):
        ends.receiver.fetch(transfer)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (b"junk of some length", HandoffError),
        (OfferId("prefill", 1, 77).to_bytes("release"), InvalidArgument),
        (OfferId("prefill", 1, 77).to_bytes("pull"), InvalidArgument),
        (OfferId("other", 1, 1).to_bytes("pull"), InvalidArgument),
        (OfferId("prefill", 1, 1).to_bytes("pull"), InvalidArgument),
        (OfferId("prefill", 1, 1).to_bytes("offer"), HandoffError),
    ],
)
def test_unexpected_messages_are_refused(ends: Ends, message: bytes, error: type[Exception]) -> None:
    ends.compute([PROMPTS[0]], SamplingParams(max_tokens=5))
    ends.connections[1].send_bytes(message)
    with pytest.raises(error):
        ends.sender.serve(0, 5.0)
    ends.prefill.sender.check()


def test_sides_that_differ_are_refused_on_both() -> None:
    boxes, ends = new_boxes(), Pipe()
    one = PrefillConnector(load_engine("llama-gqa"), "prefill", 1, 10)
    two = DecodeConnector(load_engine("llama-mha"), "decode", 1, 10)
    texts = []

    def make_sender() -> None:
        with pytest.raises(PeerMismatch) as caught:
            SenderLink(one.sender, one.port, Mail(boxes, 0), ends[0], [1])
        texts.append(str(caught.value))

    with Beside(make_sender), pytest.raises(PeerMismatch, match="num_kv_heads is 6 here, 2 at the peer"):
        ReceiverLink(two.receiver, two.port, Mail(boxes, 1), ends[1], [0])
    assert "num_kv_heads is 2 here, 6 at the peer" in texts[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [({"n": 2}, "n is 2"), ({"logprobs": 1}, "logprobs is 1"), ({"max_tokens": 10**6}, "tokens")],
)
def test_requests_with_n_or_logprobs_are_refused(ends: Ends, options: dict[str, Any], text: str) -> None:
    ends.compute([PROMPTS[0]], SamplingParams(max_tokens=5))
    [offer] = ends.receiver.offers(PATIENCE_SECONDS)
    with pytest.raises(Exception, match=text):
        ends.decode.accept(offer, SamplingParams(**options), 0)
    if "max_tokens" not in options:
        with pytest.raises(InvalidArgument, match=text):
            ends.prefill.add_request(PROMPTS[0], SamplingParams(**options))
    with pytest.raises(InvalidArgument, match="sampling is a str"):
        ends.decode.accept(offer, "greedy", 0)  # type: ignore[arg-type]


def test_a_handed_over_prompt_counts_for_its_tenant() -> None:
    tenants = (Tenant("acme", min_blocks=20), Tenant("small", max_held=4))
    ends = Ends(cache_options={"tenants": tenants})
    sampling = SamplingParams(max_tokens=5)
    for name in ("acme", "small", "nobody's"):
        ends.prefill.add_request(PROMPTS[0], sampling, extra_keys=(CacheSalt(name),))
    with pytest.raises(InvalidArgument, match="tenant is 'acme'; none of the 1 tenants has that name"):
        ends.prefill.add_request(PROMPTS[0], sampling, tenant="acme")  # there is one on the other side alone
    ends.compute([], sampling)
    held = {}
    for offer in ends.receiver.offers(PATIENCE_SECONDS):
        (salt,) = offer.extra_keys
        if salt == CacheSalt("small"):  # 34 tokens are 5 blocks of 8
            with pytest.raises(NeverFits, match="the cache can give tenant 'small' 4 "):
                ends.decode.accept(offer, sampling, 0)
            continue
        ends.take(offer, sampling)
        held[salt] = {use.name: use.num_held for use in ends.decode.engine.cache.stats().tenants if use.num_held}
    assert held == {CacheSalt("acme"): {"acme": 4}, CacheSalt("nobody's"): {"acme": 4, "*": 4}}
    while ends.decode.engine.has_unfinished:
        ends.decode.step(0)
    uses = {use.name: (use.num_held, use.num_idle > 0) for use in ends.decode.engine.cache.stats().tenants}
    assert uses == {"*": (0, True), "acme": (0, True), "small": (0, False)}
    ends.sender.close()
    ends.receiver.close()


def test_a_prompt_that_needs_no_step_after_its_hand_over_is_published(ends: Ends) -> None:
    ends.compute([PROMPTS[0]], SamplingParams(max_tokens=5))
    [offer] = ends.receiver.offers(PATIENCE_SECONDS)
    cache, published = ends.decode.engine.cache, []
    cache.pool.on_events = lambda: published.append(cache.num_cached_tokens(PROMPTS[0]))
    ends.take(offer, SamplingParams(max_tokens=1))
    assert not ends.decode.engine.has_unfinished
    assert published[-1:] == [cache.num_cached_tokens(PROMPTS[0])] != [0]


def test_a_tenants_name_is_its_salt_on_the_other_side() -> None:
    connector = PrefillConnector(load_engine(cache_options={"tenants": (Tenant("acme"),)}), "prefill", 1, 10)
    connector.add_request(PROMPTS[0], SamplingParams(max_tokens=5), extra_keys=(CacheSalt("x"),), tenant="acme")
    ((computed,), _) = connector.step(0)
    assert computed.offer.extra_keys == (CacheSalt("acme\x1fx"),)


def test_offers_with_tokens_outside_the_vocabulary_are_refused(ends: Ends) -> None:
    ends.compute([PROMPTS[0]], SamplingParams(max_tokens=5))
    [offer] = ends.receiver.offers(PATIENCE_SECONDS)
    tokens = offer.token_ids.copy()
    tokens[0] = 100_000
    strange = Offer(offer.id, tokens, offer.num_computed, offer.tables)
    with pytest.raises(InvalidArgument, match="has token 100000; the vocabulary has 131"):
        ends.decode.accept(strange, None, 0)
    whole = Offer(offer.id, tokens[:-1], offer.num_computed, offer.tables)
    with pytest.raises(InvalidArgument, match="all but the last must be computed"):
        ends.decode.accept(whole, None, 0)


def test_engines_wait_for_transfers_in_progress() -> None:
    """Offers hold all blocks, and a request has joined a transfer: steps do nothing until a ttl is over."""
    ends = Ends(num_blocks=14)
    sampling = SamplingParams(max_tokens=5)
    prefill, decode = ends.prefill, ends.decode
    ends.compute([np.arange(60).tolist() for _ in range(3)], sampling)
    assert prefill.sender.num_offers == 3
    offer = ends.receiver.offers(PATIENCE_SECONDS)[0]
    transfer = decode.accept(offer, sampling, 0)
    assert isinstance(transfer, Transfer)
    assert decode.accept(ends.prefill.sender.offers()[1], sampling, 0) is Admission.LATER
    number = decode.engine.add_request(np.arange(60).tolist(), sampling)
    assert decode.step(9).num_tokens == 0
    reports = [decode.step(10)]
    assert decode.receiver.num_transfers == 0
    while decode.engine.has_unfinished:
        reports.append(decode.step(10))
    [result] = [each for report in reports for each in report.finished]
    assert (result.request_id, result.token_ids) == (
        number,
        reference_tokens(tiny_model("llama-gqa"), [list(range(60))], 5)[0],
    )
    prefill.step(10)
    ends.require_empty()


def test_a_full_prefiller_continues_once_an_offer_has_expired() -> None:
    connector = PrefillConnector(load_engine(num_blocks=20), "prefill", 1, ttl=5)
    for start in (0, 50):
        connector.add_request(list(range(start, start + 50)), SamplingParams(max_tokens=3))
    computed = [each for now in range(4) for each in connector.step(now)[0]]
    assert len(computed) == 1
    assert connector.engine.num_waiting == 1
    computed += [each for now in range(4, 9) for each in connector.step(now)[0]]
    assert len(computed) == 2
    connector.step(20)
    assert connector.engine.cache.leak_report() == []
    connector.engine.cache.check()


def test_prompts_longer_than_a_window_are_refused_by_name() -> None:
    assert "gemma3" in WINDOWED
    ends = Ends("gemma3")
    sampling = SamplingParams(max_tokens=5)
    ends.compute([PROMPTS[0]], sampling)
    [offer] = ends.receiver.offers(PATIENCE_SECONDS)
    with pytest.raises(HandoffError, match="has left a sliding window"):
        ends.decode.accept(offer, sampling, 0)
    assert ends.decode.engine.cache.leak_report() == []


@pytest.mark.parametrize("timeout", [0, -1, "soon", float("nan")])
def test_bad_timeouts_are_refused(timeout: Any) -> None:
    with pytest.raises(InvalidArgument, match="timeout"):
        DistributedTransport(timeout=timeout)


def test_killed_processes_leave_nothing_wrong() -> None:
    counts = kills.run(4, seeds.run_seed())
    seeds.lines.append(f"kills of real processes: {dict(counts)}")
    assert counts["ended: HandoffError"] == 4


@pytest.mark.drawn
def test_the_example_answers_as_one_engine(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    write_gguf(model, seed=5)
    example = ROOT / "examples" / "prefill_decode.py"
    prompt = "The capital of France is the seat of the government"
    command = [sys.executable, str(example), "--check", "--max-tokens", "9", "--model", str(model), prompt]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "as one engine answers: True" in done.stdout, done.stdout + done.stderr
    assert "prefill: 0 blocks in use" in done.stdout
    assert "decode: 0 blocks in use" in done.stdout
