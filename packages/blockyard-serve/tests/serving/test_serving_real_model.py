"""`blockyard serve` as users start it, with the real model and OpenAI's client."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai

from blockyard.cli.main import main
from blockyard_testing.places import child_environment
from blockyard_testing.tiny_models import demo_model_or_skip

MODEL = "SmolLM2-135M-Instruct"
KEY = "a key for tests"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
PATIENCE_SECONDS = 120


class Served:
    """The process, where it listens, and what it wrote."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self.address = address

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0, timeout=PATIENCE_SECONDS)

    def check(self) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.address}/check", headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


def start(*options: str) -> Served:
    """Start the command on a free port and wait until it says where it listens."""
    environment = child_environment(BLOCKYARD_TEST_KEY=KEY)
    process = subprocess.Popen(
        [sys.executable, "-m", "blockyard.cli.main", "serve", "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    killer = threading.Timer(PATIENCE_SECONDS, process.kill)
    killer.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        if found is None:
            process.kill()
            pytest.fail(f"it did not start: {line} {process.communicate()[1]}")
        return Served(process, found[0])
    finally:
        killer.cancel()


def stop(served: Served) -> tuple[int, str]:
    """SIGTERM; the exit status and stderr."""
    served.process.send_signal(signal.SIGTERM)
    try:
        _, errors = served.process.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        served.process.kill()
        raise
    return served.process.returncode, errors


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    demo_model_or_skip()
    started = start("--check-endpoint", "--api-key-env", "BLOCKYARD_TEST_KEY", "--num-blocks", "400")
    yield started
    status, errors = stop(started)
    assert status == 0, errors
    assert KEY not in errors
    assert "Traceback" not in errors


@pytest.fixture(autouse=True)
def _nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "served" in request.fixturenames:
        served: Served = request.getfixturevalue("served")
        for _ in range(500):
            answer = served.check()
            if not answer["has_unfinished"]:
                break
            time.sleep(0.02)
        assert answer["ok"]
        assert answer["num_used_blocks"] == 0


def text_of(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_a_chat_answers_the_question(served: Served) -> None:
    answer = served.client().chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=40)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in answer.choices[0].message.content


def test_a_stream_equals_the_whole_answer(served: Served) -> None:
    wanted = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 40}
    chunks = list(
        served.client().chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True})
    )
    whole = served.client().chat.completions.create(**wanted)
    assert text_of(chunks) == whole.choices[0].message.content
    assert len([chunk for chunk in chunks if chunk.choices]) > 5
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 0


def test_three_completions_of_one_prompt_differ(served: Served) -> None:
    answer = served.client().chat.completions.create(
        model=MODEL, messages=QUESTION, n=3, temperature=1.2, seed=2, max_tokens=16
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_log_probabilities_are_reported(served: Served) -> None:
    answer = served.client().chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=6, logprobs=True, top_logprobs=4
    )
    found = answer.choices[0].logprobs.content
    assert "".join(token.token for token in found) == answer.choices[0].message.content
    for token in found:
        values = [other.logprob for other in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert token.logprob == values[0]


def test_a_stop_string_ends_the_answer(served: Served) -> None:
    answer = served.client().chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=40, stop=["Paris"]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert "Paris" not in answer.choices[0].message.content
    assert "capital" in answer.choices[0].message.content


def test_a_shared_prefix_is_cached(served: Served) -> None:
    system = {"role": "system", "content": "You answer questions about trains. " * 20}

    def cached(question: str) -> int:
        messages = [system, {"role": "user", "content": question}]
        answer = served.client().chat.completions.create(model=MODEL, messages=messages, max_tokens=2)
        return int(answer.usage.prompt_tokens_details.cached_tokens)

    assert cached("When does the first one leave?") == 0
    assert cached("Where is the last one?") > 100


def test_tenants_with_different_salts_share_nothing(served: Served) -> None:
    system = {"role": "system", "content": "You answer questions about ferries. " * 20}

    def cached(salt: str | None) -> int:
        answer = served.client().chat.completions.create(
            model=MODEL,
            messages=[system, *QUESTION],
            max_tokens=2,
            extra_body={} if salt is None else {"cache_salt": salt},
        )
        assert answer.usage.prompt_tokens > 120
        return int(answer.usage.prompt_tokens_details.cached_tokens)

    salts = ["tenant 1", "tenant 2", None]
    assert [cached(salt) for salt in salts] == [0, 0, 0]
    assert min(cached(salt) for salt in salts) > 100


def test_errors_reach_openais_client(served: Served) -> None:
    client = served.client()
    with pytest.raises(openai.NotFoundError, match="another"):
        client.chat.completions.create(model="another", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="word " * 9000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert caught.value.param == "tools"
    with pytest.raises(openai.AuthenticationError):
        served.client("a wrong key").models.list()


def test_a_cancelled_stream_frees_its_blocks(served: Served) -> None:
    messages = [{"role": "user", "content": "Write a long story about a mountain railway."}]
    stream = served.client().chat.completions.create(model=MODEL, messages=messages, max_tokens=2000, stream=True)
    pieces = [next(stream) for _ in range(4)]
    assert served.check()["num_used_blocks"] > 0
    stream.close()
    assert len(pieces) == 4  # the fixture sees its blocks come back


def test_sigterm_lets_a_stream_end() -> None:
    demo_model_or_skip()
    started = start("--num-blocks", "100", "--status-seconds", "0")
    client = started.client()
    stream = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=60, stream=True)
    first = text_of([next(stream), next(stream)])
    started.process.send_signal(signal.SIGTERM)
    rest = list(stream)
    assert "Paris" in first + text_of(rest)
    assert rest[-1].choices[0].finish_reason == "stop"
    _, errors = started.process.communicate(timeout=PATIENCE_SECONDS)
    assert started.process.returncode == 0
    loading, what, memory, page, *stop = errors.splitlines()
    assert loading == "blockyard: loading the model"
    assert what.startswith(f"blockyard: {MODEL}, float32 on cpu, attention by sdpa; 100 blocks of 16 tokens")
    assert memory == "blockyard: memory of cpu, GiB: weights 0.50, keys and values 0.07"
    assert page == f"blockyard: page with its blocks at {started.address}/ui/"
    # Nothing more where the answer had ended when the signal came.
    assert stop in ([], ["blockyard: stopping: 1 request may run for 30 s; Ctrl-C ends them now"])


# ---------------------------------------------------------------- the command's own errors


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "blockyard.cli.main", *options],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env=child_environment(**environment),
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
        (["--api-key-file", "/no/such/file"], "/no/such/file"),
        (["--max-body-bytes", "1"], "max_body_bytes"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--port", "70000"], "port is 70000"),
        (["--host", "no such host"], "host is 'no such host'"),
        (["--cors-origin", "http://a", "--cors-origin", "b/"], "cors_origins holds 'b/'"),
        (["--host", "192.0.2.1"], "host is '192.0.2.1' and port is 0"),
    ],
)
def test_command_errors_are_one_sentence(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process: the next test starts one, which takes seconds to import torch."""
    assert main(["serve", "--port", "0", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.startswith("blockyard: ")
    assert printed.err.count("\n") == 1


def test_port_in_use_is_reported_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "--port", str(port), "--model", "/no/such/folder")
    said = f"blockyard: host is '127.0.0.1' and port is {port}; cannot listen there: Address already in use\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_a_server_for_every_web_page_warns_without_a_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BLOCKYARD_TEST_KEY", KEY)
    for options, warns in (
        (["--cors-origin", "*"], True),
        (["--cors-origin", "*", "--api-key-env", "BLOCKYARD_TEST_KEY"], False),
        (["--cors-origin", "http://localhost:3000"], False),
    ):
        assert main(["serve", "--port", "0", "--model", "/no/such/folder", *options]) == 2
        assert ("every web page may use the server" in capsys.readouterr().err) is warns


def test_empty_key_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text("\n")
    assert main(["serve", "--api-key-file", str(tmp_path / "key")]) == 2
    assert "printable" in capsys.readouterr().err
