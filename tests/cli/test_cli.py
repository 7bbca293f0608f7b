"""The `blockyard` command: what it prints, and that its errors are one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import blockyard
from blockyard.cli.main import main
from blockyard.cli.parsing import parse
from blockyard_testing.commands import run_without_torch, sentence

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


# ---------------------------------------------------------------- without the engine's extra


def test_version_says_which_build_runs() -> None:
    done = run_without_torch("--version")
    assert done.returncode == 0
    assert done.stdout.startswith(f"blockyard {blockyard.__version__} (")
    assert ("compiled by mypyc" in done.stdout) is blockyard.compiled()


@pytest.mark.parametrize("words", [["fleet", "srve"], ["fleet", "sreve", "--model", "x"]])
def test_misspelt_second_word_names_the_command_that_was_meant(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert f"'fleet {words[1]}' is not a command; did you mean fleet serve?" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    Path(words[1]).touch()
    assert parse(words[:2]).trace == words[1], "a trace file of this name is replayed"


def test_help_reads_without_torch() -> None:
    done = run_without_torch("--help")
    assert done.returncode == 0
    assert "demo" in done.stdout
    done = run_without_torch("demo", "--help")
    assert done.returncode == 0
    for option in (
        "--model",
        "--json",
        "--no-prefix-cache",
        "--requests",
        "--max-new-tokens",
        "--num-blocks",
        "--seed",
    ):
        assert option in done.stdout


def test_without_torch_the_demo_says_what_to_install() -> None:
    done = run_without_torch("demo")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "pip install 'blockyard[engine]'" in sentence(done.stderr)


@pytest.mark.parametrize(
    ("arguments", "usage", "words"),
    [
        (("serve", "--prot", "8000"), "blockyard serve", "--prot 8000; did you mean --port?"),
        (("serve", "--access_log"), "blockyard serve", "--access_log; did you mean --access-log?"),
        (("serve", "--api-keyfile=x"), "blockyard serve", "--api-keyfile=x; did you mean --api-key-file?"),
        (("demo", "--zzz"), "blockyard demo", "unrecognized arguments: --zzz\n"),
        (("generate", "--temprature", "1", "Hello"), "blockyard generate", "did you mean --temperature?"),
        (("curve", "a.jsonl", "--polices", "lru"), "blockyard curve", "did you mean --policies?"),
    ],
)
def test_a_misspelt_option_shows_the_commands_own_usage(arguments: tuple[str, ...], usage: str, words: str) -> None:
    done = run_without_torch(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"usage: {usage} [-h]")
    assert words in done.stderr


def test_no_command_shows_the_usage() -> None:
    done = run_without_torch()
    assert done.returncode == 2
    assert done.stderr.startswith("usage: blockyard")


# ---------------------------------------------------------------- the demo on the real model


@pytest.fixture
def _smollm() -> None:
    from blockyard_testing.tiny_models import demo_model_or_skip

    demo_model_or_skip()


@pytest.mark.usefixtures("_smollm")
def test_demo_reports_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "--json", "--verify", "--requests", "4", "--max-new-tokens", "4", "--max-num-seqs", "3"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["compiled"] is blockyard.compiled()
    assert report["model"] == "SmolLM2-135M-Instruct.Q4_1"
    assert report["num_requests"] == len(report["results"]) == 4
    assert report["cached_share"] == report["num_cached_tokens"] / report["num_prompt_tokens"] >= 0.6
    assert report["verified_same_tokens"] is True
    assert report["num_leaked_blocks"] == 0
    # Three at once share the handbook's blocks; each has its question and answer in a few of its own.
    longest = max(result["num_prompt_tokens"] for result in report["results"]) + 4
    assert report["peak_used_blocks"] < 2 * longest / 16
    assert report["contiguous_blocks"] == 3 * 8192 // 16
    assert report["bytes_per_block"] == 16 * 45 * 1024
    assert 0 < report["wasted_share"] < 0.2
    assert all(len(result["token_ids"]) <= 4 for result in report["results"])
    assert report["results"][0]["question"].startswith("What time does the first train")


def test_demo_reports_for_people(own_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["demo", "--model", str(own_model), "--requests", "2", "--max-new-tokens", "4", "--answers", "1"]
    assert main([*options, "--no-prefix-cache"]) == 0
    out = capsys.readouterr().out
    assert out.count("?\n") == 1
    for piece in (
        f"Blockyard {blockyard.__version__}",
        own_model.name,
        "prompt tokens",
        "taken from the cache",
        "0.0%: not computed again",
        "contiguous reservation",
        "internal waste",
        "new tokens a second",
        "held and cached",
        "0 blocks leaked: all 255 are free again",
    ):
        assert piece in out


# ---------------------------------------------------------------- a model of one's own


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    capsys.readouterr()  # what was printed before is not the command's
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_demo_serves_ones_own_model(own_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("demo", "--model", own_model, "--json", "--verify", "--requests", "32", "--max-new-tokens", "20")
    status, out, _ = run(capsys, *options, "--temperature", "1.0", "--seed", "7")
    report = json.loads(out)
    assert status == 0
    assert report["model"] == own_model.name
    assert report["num_new_tokens"] == 32 * 20
    assert report["verified_same_tokens"] is True
    assert report["cached_share"] >= 0.6
    again = json.loads(run(capsys, *options, "--temperature", "1.0", "--seed", "7", "--max-num-seqs", "5")[1])
    assert [one["token_ids"] for one in again["results"]] == [one["token_ids"] for one in report["results"]]


def test_a_small_pool_preempts_and_still_leaks_nothing(own_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("demo", "--model", own_model, "--json", "--requests", "12", "--max-new-tokens", "40")
    large = json.loads(run(capsys, *options)[1])
    # Room for two prompts, which then both grow by 40 tokens.
    prompt_blocks = -(-max(one["num_prompt_tokens"] for one in large["results"]) // 16)
    status, out, _ = run(capsys, *options, "--num-blocks", 1 + 2 * prompt_blocks, "--no-prefix-cache")
    small = json.loads(out)
    assert status == small["num_leaked_blocks"] == 0
    assert small["num_preemptions"] > 0
    assert [one["token_ids"] for one in small["results"]] == [one["token_ids"] for one in large["results"]]


BAD_OPTIONS = [
    (("--num-blocks", "1"), "num_blocks is 1; it must be from 2"),
    (("--num-blocks", "12"), "the cache can give one sequence 11"),
    (("--block-size", "0"), "block_size is 0"),
    (("--requests", "0"), "--requests is 0; it must be from 1"),
    (("--answers", "-1"), "--answers is -1"),
    (("--max-new-tokens", "0"), "max_tokens is 0"),
    (("--max-num-seqs", "0"), "max_num_seqs is 0"),
    (("--max-num-batched-tokens", "3"), "max_num_batched_tokens is 3; it must be at least max_num_seqs, 12"),
    (("--temperature", "-1"), r"temperature is -1.0"),
    (("--device", "nowhere"), "device 'nowhere'"),
    (("--max-new-tokens", "2000"), "max_model_len is 1024"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_sizes_are_one_sentence(
    own_model: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "demo", "--model", own_model, *options)
    assert (status, out) == (2, "")
    assert message in sentence(err)


def test_bad_folders_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, message in (
        (tmp_path / "nowhere", "there is no model folder"),
        (tmp_path, "has no config.json"),
        (tmp_path / "nothing.gguf", "there is no file"),
    ):
        status, out, err = run(capsys, "demo", "--model", path)
        assert (status, out) == (2, "")
        assert message in sentence(err)


def test_a_model_without_a_tokenizer_cannot_be_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from blockyard_testing.tiny_models import tiny_model

    tiny_model("llama-gqa").save_pretrained(tmp_path)
    status, _, err = run(capsys, "demo", "--model", tmp_path)
    assert status == 2
    assert "has no tokenizer; the demo needs one" in sentence(err)
