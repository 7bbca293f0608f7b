"""The engine has the tokens of transformers' `generate`, however it batches, caches, chunks or preempts."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from blockyard import InvalidArgument, NeverFits
from blockyard_engine import Engine, FinishReason, ModelError, SamplingParams, StepReport
from blockyard_engine.attention import backends
from blockyard_engine.attention.sdpa import SdpaBackend
from blockyard_engine.model import load_model
from blockyard_engine.prompt_encoding import encode_prompt
from blockyard_testing.places import ROOT
from blockyard_testing.tiny_models import (
    SHAPES,
    VOCAB_SIZE,
    demo_model_or_skip,
    mixed_prompts,
    reference_tokens,
    tiny_model,
    tokens_of,
)

LENGTHS = (1, 2, 15, 16, 17, 33, 5, 48, 64, 3, 31, 40)


@pytest.fixture(scope="module")
def smollm() -> Any:
    """SmolLM2-135M-Instruct and its tokenizer: real weights, real text."""
    return load_model(demo_model_or_skip())


def require_empty(engine: Engine) -> None:
    engine.cache.check()
    assert engine.cache.running() == {}
    assert engine.cache.num_used_blocks == 0
    assert engine.cache.num_free_blocks == engine.cache.config.num_blocks - 1
    assert not engine.has_unfinished


# ---------------------------------------------------------------- the same tokens as generate


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_attention_agrees_with_generate(shape: str, caching: bool) -> None:
    model = tiny_model(shape)
    prompts = mixed_prompts(LENGTHS, shared=20)
    expected = reference_tokens(model, prompts, 12)
    engine = Engine(model, num_blocks=80, max_num_seqs=5, max_num_batched_tokens=64, enable_prefix_caching=caching)
    results = engine.generate(prompts, SamplingParams(max_tokens=12))
    assert tokens_of(results) == expected
    assert sum(result.num_cached_tokens for result in results) == (16 * 6 if caching else 0)
    assert all(result.finish_reason is FinishReason.LENGTH for result in results)
    require_empty(engine)


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("budget", [4, 7, 50])
def test_small_budgets_cut_prompts_into_chunks(llama: Any, budget: int, block_size: int) -> None:
    prompts = mixed_prompts(LENGTHS, shared=12)
    largest = 0

    def watch(step: StepReport) -> None:
        nonlocal largest
        largest = max(largest, step.num_tokens)

    engine = Engine(
        llama,
        num_blocks=2 + 600 // block_size,
        block_size=block_size,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
    )
    results = engine.generate(prompts, SamplingParams(max_tokens=6), on_step=watch)
    assert tokens_of(results) == reference_tokens(llama, prompts, 6)
    assert largest <= budget
    require_empty(engine)


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("num_blocks", [10, 14, 20])
def test_a_tiny_pool_preempts_and_the_tokens_stay_the_same(llama: Any, num_blocks: int, caching: bool) -> None:
    prompts = mixed_prompts((9, 14, 5, 20, 11, 3), shared=4)
    engine = Engine(
        llama,
        num_blocks=num_blocks,
        block_size=8,
        max_num_seqs=6,
        max_num_batched_tokens=32,
        enable_prefix_caching=caching,
    )
    num_preempted = 0

    def watch(step: StepReport) -> None:
        nonlocal num_preempted
        num_preempted += step.num_preempted
        engine.cache.check()

    results = engine.generate(prompts, SamplingParams(max_tokens=40), on_step=watch)
    assert tokens_of(results) == reference_tokens(llama, prompts, 40)
    assert sum(result.num_preemptions for result in results) == num_preempted > 0
    assert results[0].num_preemptions == 0  # the oldest is never preempted for a younger one
    require_empty(engine)


def test_a_second_call_finds_prompts_and_answers_of_the_first(llama: Any) -> None:
    engine = Engine(llama, num_blocks=64, block_size=8)
    (prompt,) = mixed_prompts((30,))
    first = engine.generate([prompt], SamplingParams(max_tokens=20))[0]
    assert first.num_cached_tokens == 0
    again = engine.generate([prompt], SamplingParams(max_tokens=20))[0]
    assert again.num_cached_tokens == 24
    assert again.token_ids == first.token_ids
    longer = engine.generate([prompt + first.token_ids], SamplingParams(max_tokens=5))[0]
    # 50 tokens, of which the last was chosen but never computed: 48 stand in full computed blocks.
    assert longer.num_cached_tokens == 48
    assert longer.token_ids == reference_tokens(llama, [prompt + first.token_ids], 5)[0]


def test_requests_of_one_step_share_what_is_computed_in_it(llama: Any) -> None:
    engine = Engine(llama, num_blocks=64, block_size=8, max_num_batched_tokens=256)
    prompts = mixed_prompts((40, 40, 40, 33), shared=32)
    reports: list[StepReport] = []
    results = engine.generate(prompts, SamplingParams(max_tokens=3), on_step=reports.append)
    assert [result.num_cached_tokens for result in results] == [0, 32, 32, 32]
    assert (reports[0].num_seqs, reports[0].num_tokens) == (4, 40 + 8 + 8 + 1)
    assert tokens_of(results) == reference_tokens(llama, prompts, 3)


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no-cache"])
def test_smollm_answers_a_mixed_batch_as_generate_does(smollm: Any, caching: bool) -> None:
    model, tokenizer = smollm
    rules = "You are the guide of a small museum of clocks. The museum opens at ten and closes at five. "
    chats = [
        [{"role": "system", "content": rules * repeats}, {"role": "user", "content": question}]
        for repeats, question in ((1, "When do you open?"), (3, "When do you close?"), (3, "May I take photographs?"))
    ]
    prompts: list[Any] = [*chats, "The capital of France is", "1, 2, 3, 4,", "def add(a, b):\n    "]
    engine = Engine(
        model,
        tokenizer,
        num_blocks=80,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        enable_prefix_caching=caching,
    )
    results = engine.generate(prompts, SamplingParams(max_tokens=8))
    encoded = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    encoded += [tokenizer(text).input_ids for text in prompts[3:]]
    assert tokens_of(results) == reference_tokens(model, encoded, 8)
    assert [result.num_prompt_tokens for result in results] == [len(tokens) for tokens in encoded]
    assert (sum(result.num_cached_tokens for result in results) > 0) is caching
    assert "Paris" in results[3].text
    require_empty(engine)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs(dtype: Any) -> None:
    """Tokens are not compared: in half precision not even transformers' padded batch equals its single runs."""
    engine = Engine(tiny_model("llama-gqa").to(dtype), num_blocks=40, max_num_seqs=3, max_num_batched_tokens=20)
    assert engine.kv_cache.dtype is dtype
    results = engine.generate(mixed_prompts((5, 40, 17)), SamplingParams(max_tokens=8))
    assert [len(result.token_ids) for result in results] == [8, 8, 8]
    require_empty(engine)


# ---------------------------------------------------------------- how a request ends


def test_an_end_token_ends_a_request_as_in_generate(llama: Any) -> None:
    prompts = mixed_prompts((9, 17, 4))
    free = reference_tokens(llama, prompts, 20)
    end = free[0][4]
    model = tiny_model("llama-gqa", eos_token_id=end)
    expected = reference_tokens(model, prompts, 20)
    engine = Engine(model, num_blocks=40)
    results = engine.generate(prompts, SamplingParams(max_tokens=20))
    assert tokens_of(results) == expected
    assert len(expected[0]) <= 5
    assert expected[0][-1] == end
    reasons = [FinishReason.STOP if tokens[-1] == end else FinishReason.LENGTH for tokens in expected]
    assert [result.finish_reason for result in results] == reasons
    ignoring = engine.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    assert tokens_of(ignoring) == free
    require_empty(engine)


def test_stop_tokens_count_even_when_end_tokens_do_not(llama: Any) -> None:
    prompts = mixed_prompts((9,))
    (free,) = reference_tokens(llama, prompts, 20)
    stop = free[7]
    (result,) = Engine(llama, num_blocks=40).generate(
        prompts, SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    )
    assert result.token_ids == free[: free.index(stop) + 1]
    assert result.finish_reason is FinishReason.STOP


# ---------------------------------------------------------------- when something breaks


class Broken(RuntimeError):
    """The error that tests raise inside a model."""


def break_at_call(model: Any, layer: int, call: int) -> Any:
    """Let one layer raise at its n-th call, after earlier layers have written their keys and values."""
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Broken("the model broke")

    return model.model.layers[layer].register_forward_pre_hook(hook)


@pytest.mark.parametrize("call", [1, 2, 3, 6, 9])
def test_a_model_that_raises_leaves_the_cache_whole(llama: Any, call: int) -> None:
    prompts = mixed_prompts((40, 41, 9, 64, 17, 50), shared=32)
    expected = reference_tokens(llama, prompts, 8)
    engine = Engine(llama, num_blocks=60, block_size=8, max_num_seqs=4, max_num_batched_tokens=48)
    hook = break_at_call(llama, 2, call)
    try:
        with pytest.raises(Broken):
            engine.generate(prompts, SamplingParams(max_tokens=8))
    finally:
        hook.remove()
    require_empty(engine)
    # What the broken step had half written is never hit: the same engine gives the right tokens.
    assert tokens_of(engine.generate(prompts, SamplingParams(max_tokens=8))) == expected
    require_empty(engine)


def test_a_callback_that_raises_leaves_the_cache_consistent(llama: Any) -> None:
    engine = Engine(llama, num_blocks=60)

    def interrupt(step: StepReport) -> None:
        if step.num_waiting == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(mixed_prompts((20, 30)), on_step=interrupt)
    require_empty(engine)


def test_logits_that_are_not_finite_are_refused() -> None:
    model = tiny_model("llama-gqa")
    engine = Engine(model, num_blocks=60)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="not finite"):
        engine.generate(mixed_prompts((20,)))
    require_empty(engine)


def test_between_steps_the_model_computes_as_before(llama: Any) -> None:
    prompts = mixed_prompts((10, 20))
    expected = reference_tokens(llama, prompts, 5)
    engine = Engine(llama, num_blocks=60)
    before = llama.config._attn_implementation
    engine.add_request(prompts[0], SamplingParams(max_tokens=5))
    engine.step()
    assert llama.config._attn_implementation == before
    assert reference_tokens(llama, prompts, 5) == expected
    hook = break_at_call(llama, 1, 1)
    with pytest.raises(Broken):
        engine.step()
    hook.remove()
    assert llama.config._attn_implementation == before


# ---------------------------------------------------------------- step by step


def test_requests_can_be_added_and_aborted_between_steps(llama: Any) -> None:
    prompts = mixed_prompts((10, 20, 30))
    expected = reference_tokens(llama, prompts, 6)
    engine = Engine(llama, num_blocks=60, max_num_seqs=2)
    first = engine.add_request(prompts[0], SamplingParams(max_tokens=6))
    engine.step()
    dropped = engine.add_request(prompts[1], SamplingParams(max_tokens=6))
    last = engine.add_request(prompts[2], SamplingParams(max_tokens=6))
    engine.step()
    engine.abort_request(dropped)
    streamed: dict[int, list[int]] = {first: [], last: []}
    finished = {}
    while engine.has_unfinished:
        report = engine.step()
        for token in report.new_tokens:
            streamed[token.request_id].append(token.token_id)
        finished.update((result.request_id, result) for result in report.finished)
    assert finished[first].token_ids == expected[0]
    assert finished[last].token_ids == streamed[last] == expected[2]
    assert streamed[first] == expected[0][2:]
    assert dropped not in finished
    for request_id in (dropped, 99):
        with pytest.raises(InvalidArgument, match=f"request_id is {request_id}; no request with this id"):
            engine.abort_request(request_id)
    waiting = [engine.add_request(prompt) for prompt in prompts]
    with pytest.raises(InvalidArgument, match="3 requests of add_request are unfinished"):
        engine.generate(prompts)
    for request_id in waiting:
        engine.abort_request(request_id)
    report = engine.step()
    assert (report.num_tokens, report.num_seqs, report.new_tokens) == (0, 0, [])
    require_empty(engine)


def test_the_first_backend_that_fits_computes_attention(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(SdpaBackend):
        """Backend for float32 that counts steps. The trial of a new engine's model uses "sdpa" by name."""

        name = "counting"
        num_steps = 0

        @classmethod
        def refusal(cls, kv_cache: Any) -> str | None:
            return None if kv_cache.dtype is torch.float32 else "it needs float32"

        def begin(self, shape: Any) -> Any:
            Counting.num_steps += 1
            return super().begin(shape)

    monkeypatch.setattr(backends, "BACKENDS", (Counting, SdpaBackend))
    prompts = mixed_prompts((10, 20))
    results = Engine(llama, num_blocks=60).generate(prompts, SamplingParams(max_tokens=5))
    assert tokens_of(results) == reference_tokens(llama, prompts, 5)
    assert Counting.num_steps == 5
    Engine(tiny_model("llama-gqa").to(torch.bfloat16), num_blocks=60).generate(prompts, SamplingParams(max_tokens=5))
    assert Counting.num_steps == 5


def test_no_prompts_give_no_results(llama: Any) -> None:
    assert Engine(llama, num_blocks=8).generate([]) == []


# ---------------------------------------------------------------- bad input


def test_requests_that_can_never_fit_are_refused_at_once_with_the_numbers(llama: Any) -> None:
    engine = Engine(llama, num_blocks=11, block_size=8, max_num_seqs=4)
    (good, long) = mixed_prompts((10, 70))
    with pytest.raises(
        NeverFits, match=r"prompt 1 has 70 tokens and may generate 20: 12 blocks of 8; .* 10 \(num_blocks is 11"
    ):
        engine.generate([good, long], SamplingParams(max_tokens=20))
    require_empty(engine)
    assert engine.cache.stats().num_prompt_tokens == 0  # not even the good one was begun
    with pytest.raises(
        NeverFits, match="prompt has 10 tokens and may generate 503: 513 together; max_model_len is 512"
    ):
        engine.add_request(good, SamplingParams(max_tokens=503))
    # The last token chosen is never computed: 70 + 11 tokens need slots for 80, which is all there is.
    (result,) = engine.generate([long], SamplingParams(max_tokens=11))
    assert result.token_ids == reference_tokens(llama, [long], 11)[0]
    with pytest.raises(NeverFits):
        engine.generate([long], SamplingParams(max_tokens=12))


BAD_PROMPTS = [
    ([[]], "prompt 0 has no tokens; it must have at least 1"),
    ([[1] * 9, np.empty(0, np.int64)], "prompt 1 has no tokens"),
    ([[1, VOCAB_SIZE]], "prompt 0 holds 131 at position 1; it must be from 0 to 130"),
    ([[1, -1]], "prompt 0 holds -1"),
    ([[1.5]], "prompt 0 has dtype float64; it must hold integers"),
    ([[[1, 2]]], r"prompt 0 has shape \(1, 2\)"),
    ([{"role": "user", "content": "hi"}], "prompt 0 is a dict; it must be a string"),
    (["hello"], "prompt 0 is text, but the engine has no tokenizer"),
    ([[{"role": "user"}]], "prompt 0 is text, but the engine has no tokenizer"),
    ([None], "prompt 0 is a NoneType"),
    ("hello", "prompts is a str; it must be a list of prompts"),
    (7, "prompts is a int"),
]


@pytest.mark.parametrize(("prompts", "message"), BAD_PROMPTS)
def test_bad_prompts_are_named_and_nothing_is_begun(llama: Any, prompts: Any, message: str) -> None:
    engine = Engine(llama, num_blocks=20)
    with pytest.raises(InvalidArgument, match=message):
        engine.generate(prompts)
    require_empty(engine)


def test_text_that_is_not_unicode_is_refused_by_name(smollm: Any) -> None:
    """A shell's bytes that are not UTF-8, as Python reads them; a tokenizer would raise a TypeError."""
    engine = Engine(*smollm, num_blocks=80)
    with pytest.raises(InvalidArgument, match=r"prompt 1 holds '\\udcff' at position 2; it must be valid Unicode"):
        engine.generate(["a", "ab\udcff"])
    with pytest.raises(InvalidArgument, match=r"prompt 0, message 1 holds '\\ud800' at position 0"):
        engine.generate([[{"role": "system", "content": "hi"}, {"role": "user", "content": "\ud800"}]])
    require_empty(engine)


def test_bad_chats_and_sampling_lists_are_named(smollm: Any) -> None:
    engine = Engine(*smollm, num_blocks=80)
    with pytest.raises(InvalidArgument, match=r"prompt 0, message 1, is .* it must have 'role' and 'content'"):
        engine.generate([[{"role": "user", "content": "hi"}, {"role": "user"}]])
    with pytest.raises(InvalidArgument, match="sampling has 1 entries; there are 2 prompts"):
        engine.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(InvalidArgument, match="sampling of prompt 0 is a dict; it must be SamplingParams"):
        engine.generate(["a"], [{"max_tokens": 3}])
    with pytest.raises(InvalidArgument, match="sampling of prompt is a dict"):
        engine.add_request([1, 2], {})


BAD_ENGINES = [
    ({"num_blocks": 1}, "num_blocks is 1"),
    ({"block_size": 0}, "block_size is 0"),
    ({"num_blocks": 8, "block_size": 5000}, "block_size is 5000"),
    ({"max_num_seqs": 0}, "max_num_seqs is 0"),
    ({"max_num_batched_tokens": 15}, "max_num_batched_tokens is 15; it must be at least max_num_seqs, 16"),
    ({"max_num_batched_tokens": 64.0}, r"max_num_batched_tokens is 64\.0; it must be an integer"),
    ({"max_model_len": 0}, "max_model_len is 0"),
    ({"enable_prefix_caching": "yes"}, "enable_prefix_caching is 'yes'"),
]


@pytest.mark.parametrize(("options", "message"), BAD_ENGINES)
def test_errors_name_the_invalid_size_of_an_engine(llama: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Engine(llama, **options)


def test_without_num_blocks_the_pool_takes_a_gibibyte(llama: Any) -> None:
    engine = Engine(llama)
    assert 2**30 - engine.kv_cache.bytes_per_block < engine.kv_cache.num_bytes <= 2**30


def test_snippets_of_the_docs_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "engine.md").read_text()
    requests, wiring, ranks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(requests, names)
    assert names["engine"].cache.num_used_blocks == 0
    assert len(names["beams"]) == 3
    exec(wiring, names)
    assert names["cache"].num_used_blocks == 0
    assert names["keys"].shape == (2, 48, 4, 8)
    capsys.readouterr()
    exec(ranks, names)
    said = re.findall(r"print\(.*\)  # (.*)", ranks)
    assert capsys.readouterr().out.splitlines() == said


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ range(10**9) }}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ raise_exception('no' * 999) }}", "TemplateError: nono"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ 'a' * 2**21 }}", r"makes 2,097,152 characters from messages of 6; the limit is 1,048,588"),
    ],
)
def test_a_chat_template_that_fails_or_makes_too_much_is_named(smollm: Any, template: str, said: str) -> None:
    tokenizer = copy.deepcopy(smollm[1])
    tokenizer.chat_template = template
    with pytest.raises(InvalidArgument, match=f"^messages: the model's chat template .*{said}") as caught:
        encode_prompt("messages", [{"role": "user", "content": "hi"}], tokenizer, len(tokenizer))
    assert len(str(caught.value)) < 300
