"""The load benchmark in short, against a tiny model: many streams at once, random disconnects, nothing leaks."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

from benchmarks.serving.__main__ import percentiles
from benchmarks.serving.client import Work, run_clients

from blockyard_serve import ServerLimits
from blockyard_serve.jobs.prompt_encoder import PromptEncoder
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.servers import MODEL, running_server, tiny_engine
from blockyard_testing.tiny_models import NUM_TOKENS, byte_tokenizer

CHATS = [[{"role": "system", "content": "page " * 10}, {"role": "user", "content": "go " * each}] for each in range(8)]


@pytest.mark.parametrize("num_blocks", [200, 20], ids=["roomy", "tight"])
def test_many_clients_of_which_some_vanish(num_blocks: int) -> None:
    engine = tiny_engine(num_blocks=num_blocks, max_num_seqs=8)
    work = Work(MODEL, CHATS, max_tokens=(4, 40), leaving=0.3)
    with running_server(engine, ServerLimits(max_waiting=200)) as running:
        seen = asyncio.run(run_clients(running.address, work, num_clients=24, seconds=2))
        running.require_idle()
        figures = running.figures()
    assert seen.errors == []
    assert seen.num_answers > 0
    assert seen.num_disconnects > 0
    assert len(seen.whole) == seen.num_answers
    assert figures["blockyard:requests_failed_total"] == 0
    assert figures["vllm:prefix_cache_hits_total"] > 0
    assert num_blocks == 200 or figures["vllm:num_preemptions_total"] > 0


def test_a_client_reports_what_it_did_not_cause() -> None:
    work = Work("another model", CHATS, leaving=0.0)
    with running_server(tiny_engine()) as running:
        seen = asyncio.run(run_clients(running.address, work, num_clients=1, seconds=1.0))
    assert seen.num_answers == 0
    assert all("404" in error for error in seen.errors)
    assert seen.errors


def test_percentiles_are_in_milliseconds() -> None:
    assert percentiles([each / 1000 for each in range(101)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([]) == {}


def test_a_short_prompt_does_not_wait_for_the_long_ones_of_others() -> None:
    """One client's megabytes of text, which take the tokenizer seconds each, stand behind everybody else's words."""

    async def order() -> list[int]:
        encoder, answered, goes_on = PromptEncoder(byte_tokenizer(), NUM_TOKENS), list[int](), threading.Event()

        async def encode(prompt: Any, size: int) -> None:
            await encoder.encode("prompt", prompt)
            answered.append(size)

        tasks = [asyncio.ensure_future(encoder.call(lambda _: goes_on.wait(PATIENCE_SECONDS)))]
        for size in (5000, 4000, 3, 1000, 2, 1):
            tasks.append(asyncio.ensure_future(encode("x" * size, size)))
        tasks.append(asyncio.ensure_future(encode([{"role": "user", "content": "y" * 4500}], 4500)))
        tasks.append(asyncio.ensure_future(encode([65] * 2000, 2000)))
        await asyncio.sleep(0)
        tasks[2].cancel()
        goes_on.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        encoder.close()
        return answered

    assert asyncio.run(order()) == [1, 2, 3, 1000, 2000, 4500, 5000]


def test_what_waits_for_the_tokenizer_is_cancelled_when_it_ends() -> None:
    async def end() -> list[object]:
        encoder, goes_on = PromptEncoder(byte_tokenizer(), NUM_TOKENS), threading.Event()
        tasks = [asyncio.ensure_future(encoder.call(lambda _: goes_on.wait(PATIENCE_SECONDS)))]
        tasks += [asyncio.ensure_future(encoder.encode("prompt", "x")) for _ in range(3)]
        await asyncio.sleep(0.05)
        encoder.close()
        goes_on.set()
        return [type(each) for each in await asyncio.gather(*tasks, return_exceptions=True)]

    assert asyncio.run(end()) == [bool, *[asyncio.CancelledError] * 3]
