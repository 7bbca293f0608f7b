"""Text in pieces: joined it is complete, and no piece has half a character or a part of a stop string."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import tokenizers
import transformers

from blockyard import InvalidArgument
from blockyard_engine import Engine, FinishReason, SamplingParams, StepReport
from blockyard_engine.decoding.text import GeneratedText, IncrementalDetokenizer, StopStrings
from blockyard_testing.tiny_models import mixed_prompts, tiny_model

TEXTS = ["Hello, wörld!", "日本語のテキスト", "emoji 👩‍👩‍👧 and 🏳️‍🌈.", "naïve  café\n\ttabs", "a" * 30, "Ω≈ç√∫µ≤≥÷"]


def byte_tokenizer(*special: str) -> Any:
    """A tokenizer whose tokens are bytes: the hardest case, since most characters of these texts are several tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    fast.add_special_tokens({"additional_special_tokens": list(special)})
    return fast


def fallback_tokenizer() -> Any:
    """A tokenizer as Llama's: words marked with their space, and bytes for the rest."""
    words = ["▁", "▁Hello", "▁world", "o", "w", "rld", ",", "!", "▁and", "é", "ï"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + number for number, word in enumerate(words)}
    model = tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


def pieces_of(tokenizer: Any, token_ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*[detokenizer.push(token_id) for token_id in token_ids], detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_has_half_a_character(text: str) -> None:
    tokenizer = byte_tokenizer()
    token_ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(token_ids) == len(text.encode())
    pieces = pieces_of(tokenizer, token_ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    # Nothing is held longer than it must: after the last byte of each character it is there.
    given, num_bytes = "", 0
    for piece in pieces[:-1]:
        given, num_bytes = given + piece, num_bytes + 1
        assert given == text.encode()[:num_bytes].decode(errors="ignore")


def test_words_keep_their_spaces_and_bytes_their_characters() -> None:
    tokenizer = fallback_tokenizer()
    ids = [257, 262, 258, 263, 264, 256, *"é日🙂".encode(), 257, 265, *"日".encode()]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == "Hello, world! and é日🙂 Helloé日"
    assert not any("\ufffd" in piece for piece in pieces)


def test_undecodable_tokens_are_shown_eventually() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("ok", add_special_tokens=False).input_ids + [tokenizer("é").input_ids[0]] * 40
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    gaps = "".join("x" if piece else " " for piece in pieces[:-1]).split("x")
    assert max(len(gap) for gap in gaps) <= 9


def test_pieces_of_random_tokens_join_to_the_tokenizers_text() -> None:
    chooser = random.Random(4)
    tokenizer = byte_tokenizer("<end>", "<turn>")
    for _ in range(200):
        ids = [chooser.randrange(len(tokenizer)) for _ in range(chooser.randrange(1, 40))]
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("stops", [("END",), ("aab", "ab"), ("\n\n", "\nUser:"), ("ééé",), ("x", "xyz")])
def test_a_stop_string_split_over_tokens_is_found_and_never_shown(stops: tuple[str, ...]) -> None:
    chooser = random.Random(9)
    letters = "".join(stops) + "a\nE"
    num_found = 0
    for _ in range(400):
        text = "".join(chooser.choice(letters) for _ in range(chooser.randrange(30)))
        searcher = StopStrings(stops)
        given, place = "", 0
        while place < len(text):
            step = chooser.randrange(1, 5)
            given += searcher.push(text[place : place + step])
            place += step
            if not searcher.is_found:
                rest = text[len(given) : place]  # what is held back could begin a stop string, and all else is given
                assert rest == "" or any(stop.startswith(rest) for stop in stops)
        first = min([text.find(stop) for stop in stops if stop in text], default=-1)
        num_found += first >= 0
        assert searcher.is_found is (first >= 0)
        assert given + searcher.finish() == (text if first < 0 else text[:first])
    assert 0 < num_found < 400


def test_without_a_tokenizer_there_is_no_text() -> None:
    text = GeneratedText(None, ())
    assert (text.push(3), text.finish(), text.text, text.is_stopped) == ("", "", "", False)


# ---------------------------------------------------------------- in the engine


@pytest.fixture(scope="module")
def talking() -> tuple[Any, Any]:
    """A model with random weights whose tokens are bytes."""
    tokenizer = byte_tokenizer("<end>")
    return tiny_model("llama-gqa", vocab_size=len(tokenizer)), tokenizer


def test_streamed_text_is_the_completions_text(talking: tuple[Any, Any]) -> None:
    model, tokenizer = talking
    engine = Engine(model, tokenizer, num_blocks=80)
    reports: list[StepReport] = []
    params = SamplingParams(max_tokens=30, n=2, temperature=1.0)
    results = engine.generate(["Hello", "日本"], params, on_step=reports.append)
    for result in results:
        for completion in result.completions:
            mine = [
                token
                for report in reports
                for token in report.new_tokens
                if (token.request_id, token.index) == (result.request_id, completion.index)
            ]
            assert [token.token_id for token in mine] == completion.token_ids
            assert "".join(token.text for token in mine) == completion.text
            assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)


def test_a_completion_ends_before_its_stop_string(talking: tuple[Any, Any]) -> None:
    model, tokenizer = talking
    engine = Engine(model, tokenizer, num_blocks=80)
    (whole,) = engine.generate(["Hello"], SamplingParams(max_tokens=60, temperature=1.0, seed=2))
    readable = [place for place, letter in enumerate(whole.text[:-1]) if letter != "\ufffd" != whole.text[place + 1]]
    place = readable[len(readable) // 2]
    stop = whole.text[place : place + 2]
    reports: list[StepReport] = []
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=2, stop=(stop, "never there"))
    (cut,) = engine.generate(["Hello"], params, on_step=reports.append)
    assert cut.finish_reason is FinishReason.STOP
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < 60
    assert "".join(token.text for report in reports for token in report.new_tokens) == cut.text
    assert engine.cache.num_used_blocks == 0


def test_stop_strings_need_a_tokenizer() -> None:
    engine = Engine(tiny_model("llama-gqa"), num_blocks=20)
    with pytest.raises(InvalidArgument, match=r"stop of prompt is \('x',\), but the engine has no tokenizer"):
        engine.add_request(mixed_prompts((5,))[0], SamplingParams(stop="x"))
