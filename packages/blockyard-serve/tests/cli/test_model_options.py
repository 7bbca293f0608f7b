"""From the options of `serve` and `generate` to an engine's."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from blockyard.cli.main import main
from blockyard_engine import Engine
from blockyard_testing.servers import tiny_engine


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the command asks of `from_pretrained`, which gives it a small engine."""
    options: dict[str, Any] = {}

    def from_pretrained(path: Any, **given: Any) -> Engine:
        options.update(given)
        return tiny_engine()

    monkeypatch.setattr(Engine, "from_pretrained", from_pretrained)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return options


def test_memory_and_policy_reach_the_engine(asked: dict[str, Any]) -> None:
    arguments = "--gpu-memory-utilization 0.7 --swap-space 1.5GiB --preemption swap --eviction-policy arc --watermark 0"
    watched = "--retention-blocks 9 --track-misses --residency-sample 10 --history-size 100"
    assert main(["generate", "Hi", "--max-tokens", "1", "--model", ".", *f"{arguments} {watched}".split()]) == 0
    assert asked["gpu_memory_utilization"] == 0.7
    assert asked["swap_space_bytes"] == 3 * 2**29
    assert asked["num_blocks"] is None
    assert asked["cache_options"] == {
        "eviction_policy": "arc",
        "watermark": 0.0,
        "retention_blocks": 9,
        "track_misses": True,
        "residency_sample": 10,
        "history_size": 100,
    }


@pytest.mark.parametrize(("amount", "num_bytes"), [("1048576", 2**20), ("1.5GiB", 3 * 2**29)])
def test_the_pool_can_be_sized_in_bytes(asked: dict[str, Any], amount: str, num_bytes: int) -> None:
    command = ["generate", "Hi", "--max-tokens", "1", "--model", ".", "--kv-cache-memory-bytes", amount]
    assert main(command) == 0
    assert (asked["kv_cache_memory_bytes"], asked["num_blocks"]) == (num_bytes, None)


def test_engine_warnings_are_one_line(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def from_pretrained(*_: Any, **__: Any) -> Engine:
        warnings.warn("the pool is short", RuntimeWarning, stacklevel=2)
        return tiny_engine()

    monkeypatch.setattr(Engine, "from_pretrained", from_pretrained)
    assert main(["generate", "Hi", "--max-tokens", "1", "--model", "."]) == 0
    assert "blockyard: the pool is short\n" in capsys.readouterr().err
    assert asked == {}


def test_options_that_are_not_given_keep_the_engines_defaults(asked: dict[str, Any]) -> None:
    assert main(["generate", "Hi", "--max-tokens", "1", "--model", "."]) == 0
    assert (asked["gpu_memory_utilization"], asked["swap_space_bytes"], asked["num_cpu_blocks"]) == (0.9, 0, 0)
    assert asked["cache_options"] == {"track_misses": False}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--swap-space 4", "--swap-space is '4'; it must be a number and a unit, like 80GiB"),
        ("--swap-space 4GiB --num-cpu-blocks 9", "not allowed with argument --swap-space"),
        ("--num-blocks 90 --kv-cache-memory-bytes 4GiB", "not allowed with argument --num-blocks"),
    ],
)
def test_invalid_memory_size_is_refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["generate", "Hi", *arguments.split()])
    except SystemExit as end:  # argparse's own
        status = int(end.code or 0)
    assert status == 2
    assert re.search(re.escape(message), capsys.readouterr().err)
