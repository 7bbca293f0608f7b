"""`blockyard serve --tier file:FOLDER`, killed and started again: earlier prompts hit, with the same text."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from blockyard.cli.main import main
from blockyard_testing.browser import CHROMIUM, browser
from blockyard_testing.patience import PATIENCE_SECONDS, wait_until
from blockyard_testing.places import child_environment
from blockyard_testing.servers import MODEL, running_server, tiny_engine
from blockyard_testing.tiny_models import demo_model_or_skip
from blockyard_tiers import FileTier

PROMPT = "The station master closes the gate at nine. " * 30


class Served:
    """A process that serves the demo model."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, prompt: str = PROMPT) -> tuple[str, int]:
        """The answer's text, and how many of the prompt's tokens the cache had."""
        body = {"model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.address}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            found: dict[str, Any] = json.load(answer)
        return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

    def figure(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=PATIENCE_SECONDS) as answer:
            page = answer.read().decode()
        return sum(float(value) for value in re.findall(rf"^{name}\{{.*\}} (\S+)$", page, re.MULTILINE))


@contextmanager
def served(*options: str) -> Iterator[Served]:
    """Start the command, and kill it at the end: no hook of it runs."""
    command = [sys.executable, "-m", "blockyard.cli.main", "serve", "--port", "0", "--ui", "off", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=child_environment()
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield Served(line.split()[-1].removesuffix("/v1"))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize(
    ("ranks", "others"),
    [
        ((), ("--dtype", "bfloat16")),
        pytest.param(("--tensor-parallel", "2"), ("--tensor-parallel", "1"), marks=pytest.mark.drawn),
    ],
)
def test_after_kill_9_a_new_process_is_warm(ranks: tuple[str, ...], others: tuple[str, ...], tmp_path: Path) -> None:
    demo_model_or_skip()
    tier = ("--tier", f"file:{tmp_path},bytes=1GiB")
    with served(*tier, *ranks) as first:
        text, cached = first.ask()
        assert cached == 0
        wait_until(lambda: first.figure("blockyard:tier_objects") >= 15)
    with served(*tier, *ranks) as again:
        assert again.ask() == (text, 16 * int(again.figure("blockyard:tier_hit_tokens_total") // 16))
        assert again.figure("blockyard:tier_hit_tokens_total") >= 15 * 16
    with served(*tier, *others) as other:
        assert other.ask()[1] == 0


def test_metrics_are_exported_for_each_tier(tmp_path: Path) -> None:
    prompt = "a tier below the pool " * 3
    for hit in (0, 64):
        engine = tiny_engine(40, tiers=[FileTier(tmp_path, 2**30)])
        with running_server(engine) as running:
            running.client().completions.create(model=MODEL, prompt=prompt, max_tokens=2, temperature=0)
            page = running.call("GET", "/metrics")[2].decode()
            assert re.findall(r"^blockyard:tier_hit_tokens_total\{.*\} (\S+)$", page, re.MULTILINE) == [f"{hit:.1f}"]
            assert running.figures()["blockyard:tier_waiting_requests"] == 0
        engine.close()


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")
def test_the_page_has_a_line_for_each_tier(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    engine = tiny_engine(40, tiers=[FileTier(tmp_path, 2**30)])
    with running_server(engine) as running, browser(tmp_path_factory.mktemp("browser")) as page:
        running.client().completions.create(model=MODEL, prompt="a tier " * 9, max_tokens=2, temperature=0)
        wait_until(lambda: engine.offload is not None and engine.offload.uses[0].tier.stats().num_objects)
        page.open(f"{running.address}/ui/")
        page.wait("document.querySelector('#tier-lines li') !== null")
        line: str = page.evaluate("document.querySelector('#tier-lines').textContent")
        assert line.startswith(f"file:{tmp_path}: 0 prompt tokens loaded; ")
        assert line.endswith("; healthy")
        assert page.evaluate("document.querySelector('#tiers').hidden") is False
    engine.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tier", "disk:/x"], "--tier is 'disk:/x'; it must begin with file:"),
        (["--tier", "file:/x,write=late"], "--tier's write is 'late'; it must be one of through, selective, "),
        (["--tier", "file:"], "a folder must follow file:"),
        (["--tier", "file:/x,size=3"], "size is not an option of a file tier"),
        (["--tier", "file:/x", "--tier-buffer", "much"], "--tier-buffer is 'much'"),
    ],
)
def test_wrong_option_is_reported_before_the_model_is_loaded(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", "/no/such/folder", *options]) != 0
    assert words in capsys.readouterr().err
