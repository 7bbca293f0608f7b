"""`blockyard generate` with the real model, and its options without torch."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from blockyard.cli.main import main
from blockyard_testing.commands import run_without_torch, sentence

pytest.importorskip("torch")

from blockyard_testing.tiny_models import demo_model_or_skip


@pytest.fixture
def _smollm() -> None:
    demo_model_or_skip()


@pytest.mark.usefixtures("_smollm")
def test_a_chat_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--chat", "What is the capital of France?", "--max-tokens", "12"]) == 0
    printed = capsys.readouterr()
    assert "Paris" in printed.out
    assert printed.out.endswith("\n")


@pytest.mark.usefixtures("_smollm")
def test_a_stop_string_is_held_back(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--chat", "What is the capital of France?", "--max-tokens", "12", "--stop", "Paris"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "capital of France is" in printed
    assert "P" not in printed


def test_several_answers_as_json_equal_single_ones(own_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lines(*prompts: str) -> list[dict[str, object]]:
        capsys.readouterr()  # what making the model printed
        assert (
            main(
                [
                    "generate",
                    *prompts,
                    "--model",
                    str(own_model),
                    "--json",
                    "--max-tokens",
                    "5",
                    "--n",
                    "2",
                    "--temperature",
                    "0.9",
                ]
            )
            == 0
        )
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    both = lines("The sky is", "One and one is")
    assert [(line["prompt"], line["index"]) for line in both] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [line["text"] for line in lines("The sky is")] == [line["text"] for line in both[:2]]
    assert {line["num_tokens"] for line in both} == {5}


def test_a_hybrid_model_in_a_folder_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from blockyard_testing.hybrid_models import hybrid_model
    from blockyard_testing.tiny_models import NUM_TOKENS, byte_tokenizer, reference_tokens

    tokenizer, model = byte_tokenizer(), hybrid_model("qwen3_next", vocab_size=NUM_TOKENS)
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path)
    capsys.readouterr()  # what making the model printed
    prompt = "The sky is blue, and the sea is as well."
    arguments = ["generate", prompt, "--model", str(tmp_path), "--max-tokens", "6", "--json", "--num-blocks", "100"]
    assert main(arguments) == 0
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (expected,) = reference_tokens(model, [tokenizer(prompt)["input_ids"]], 6)
    assert line["text"] == tokenizer.decode(expected)


def test_prompts_come_from_standard_input(
    own_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("The sky is\n\nOne and one is\n"))
    assert main(["generate", "--model", str(own_model), "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out.count("--- prompt") == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a", "--max-tokens", "0"], "max_tokens is 0"),
        (["a", "--temperature", "-1"], "temperature is -1"),
        (["a", "--speculate", "-1"], "--speculate is -1; it must be from 0 to 64"),
        (["a", "--device", "meta"], "on device 'meta', which has no weights"),
        (["a", "--attention-backend", "flash_attention_3"], "it needs tensors on CUDA; these are on cpu"),
        (["a", "--n", "17"], "max_num_seqs, 16"),
        (["a", "--system", "Be kind."], "--system is given without --chat"),
        (["a", "--max-tokens", "100000"], "max_model_len"),
    ],
)
def test_errors_are_one_sentence(
    arguments: list[str], said: str, own_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *arguments, "--model", str(own_model)]) == 2
    assert said in sentence(capsys.readouterr().err)


def test_undecodable_input_gives_one_sentence(
    own_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for errors, said in (
        ("strict", "is not utf-8 (invalid start byte)"),
        ("surrogateescape", "it must be valid Unicode"),
    ):
        source = io.TextIOWrapper(io.BytesIO(b"ab\xff\n"), encoding="utf-8", errors=errors)
        monkeypatch.setattr("sys.stdin", source)
        assert main(["generate", "--model", str(own_model), "--max-tokens", "3"]) == 2
        assert said in sentence(capsys.readouterr().err)


def test_a_missing_prompt_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["generate"]) == 2
    assert "there is no prompt" in sentence(capsys.readouterr().err)


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_help_needs_no_torch(command: str) -> None:
    done = run_without_torch(command, "--help")
    assert done.returncode == 0
    assert "--max-num-seqs" in done.stdout
    assert "--max-tokens" in done.stdout


@pytest.mark.parametrize(("command", "extra"), [("generate", "engine"), ("serve", "serve")])
def test_without_torch_it_says_what_to_install(command: str, extra: str) -> None:
    done = run_without_torch(command)
    assert done.returncode == 2
    assert f"pip install 'blockyard[{extra}]'" in sentence(done.stderr)
