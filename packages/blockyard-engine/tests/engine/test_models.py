"""Which models the engine loads, from where, and its errors for others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from blockyard import InvalidArgument, NeverFits
from blockyard_engine import Engine, ModelError, SamplingParams
from blockyard_engine.gguf import converted_folder, file_digest, is_whole
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.tiny_models import mixed_prompts, reference_tokens, tokens_of, write_gguf

# ---------------------------------------------------------------- models that cannot be served


def from_config(config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
UNFIT = [
    (
        lambda: transformers.LlamaConfig(
            **SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        ),
        "rotary embedding has type 'dynamic'",
    ),
    (
        lambda: transformers.Lfm2Config(**SMALL, layer_types=["conv", "conv"]),
        "Lfm2ForCausalLM has only states and no layer with keys and values",
    ),
    (
        lambda: transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4),
        "BloomForCausalLM takes no position_ids",
    ),
]


@pytest.mark.parametrize(("config", "message"), UNFIT)
def test_a_model_whose_attention_is_not_plain_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Engine(from_config(config()), num_blocks=8)


def test_objects_that_are_not_models_are_refused() -> None:
    for model in (None, "path/to/model", torch.nn.Linear(2, 2)):
        with pytest.raises(InvalidArgument, match=r"model is a \w+; it must be a model of transformers"):
            Engine(model)


def test_a_window_longer_than_any_sequence_is_plain_attention() -> None:
    model = from_config(transformers.MistralConfig(**SMALL, sliding_window=64))
    prompts = [[token % 50 for token in prompt] for prompt in mixed_prompts((9, 40))]
    engine = Engine(model, num_blocks=40, max_model_len=64)
    assert tokens_of(engine.generate(prompts, SamplingParams(max_tokens=8))) == reference_tokens(model, prompts, 8)
    with pytest.raises(NeverFits, match="max_model_len is 64"):
        engine.generate(prompts, SamplingParams(max_tokens=30))


def test_more_context_than_the_model_was_made_for_is_refused(llama: Any) -> None:
    with pytest.raises(ModelError, match="max_model_len is 513; the model supports 512 tokens"):
        Engine(llama, max_model_len=513)


# ---------------------------------------------------------------- folders and files


def test_a_folder_of_safetensors_is_served(llama: Any, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path)
    engine = Engine.from_pretrained(tmp_path, num_blocks=40)
    assert engine.tokenizer is None
    prompts = mixed_prompts((9, 17))
    (first, second) = engine.generate(prompts, SamplingParams(max_tokens=6))
    assert [first.token_ids, second.token_ids] == reference_tokens(llama, prompts, 6)
    assert first.text == ""


def test_bad_folders_are_refused_in_one_sentence(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model folder"):
        Engine.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        Engine.from_pretrained(tmp_path)
    with pytest.raises(ModelError, match="there is no file"):
        Engine.from_pretrained(tmp_path / "nothing.gguf")
    (tmp_path / "rubbish.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ModelError, match=r"rubbish\.gguf could not be read as a GGUF model"):
        Engine.from_pretrained(tmp_path / "rubbish.gguf")
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(ModelError, match="could not be loaded") as caught:
        Engine.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)
    llama.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="could not be loaded") as caught:
        Engine.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_unknown_device_is_refused(llama: Any, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="could not be moved to device 'nowhere'"):
        Engine.from_pretrained(tmp_path, device="nowhere")


def test_a_gguf_file_is_converted_once_and_a_broken_copy_again(tmp_path: Path) -> None:
    source, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    write_gguf(source, seed=1)
    whole = converted_folder(source, cache)
    assert is_whole(whole)
    weights, manifest = whole / "model.safetensors", whole / "blockyard.json"
    digest, made_at = file_digest(weights), manifest.stat().st_mtime_ns
    assert converted_folder(source, cache) == whole
    assert manifest.stat().st_mtime_ns == made_at
    content = bytearray(weights.read_bytes())
    content[10_000] ^= 255
    weights.write_bytes(content)
    assert not is_whole(whole)
    assert converted_folder(source, cache) == whole
    assert is_whole(whole)
    assert json.loads(manifest.read_text())["files"][weights.name] == file_digest(weights) == digest
    write_gguf(source, seed=2)
    other = converted_folder(source, cache)
    assert file_digest(other / weights.name) != digest
    # Nothing half-made stays.
    assert {path.name for path in (cache / "models").iterdir()} == {whole.name, other.name}
    (whole / "config.json").unlink()
    assert not is_whole(whole)


_RANK = """
import sys, torch
from pathlib import Path
from blockyard_engine.gguf import converted_folder
torch.set_num_threads(1)
rendezvous, rank, asks_first, source, cache = sys.argv[1:]
torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=2)
if rank != asks_first:
    torch.distributed.barrier()
print(converted_folder(Path(source), Path(cache)))
if rank == asks_first:
    torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.drawn
@pytest.mark.parametrize("asks_first", ["1", "neither"])
def test_two_ranks_with_an_empty_cache_make_one_whole_folder(tmp_path: Path, asks_first: str) -> None:
    """Transformers lets only the first rank write a model: the other's folder had only a tokenizer."""
    source, cache, rendezvous = tmp_path / "tiny.gguf", tmp_path / "cache", tmp_path / "rendezvous"
    write_gguf(source, seed=4)
    command = [sys.executable, "-c", _RANK, str(rendezvous)]
    rest = [asks_first, str(source), str(cache)]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, rank, *rest], **options) for rank in "01"]
    ends = [rank.communicate(timeout=PATIENCE_SECONDS) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    (folder,) = {Path(out.strip()) for out, _ in ends}
    assert is_whole(folder)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert list((cache / "models").iterdir()) == [folder]


def test_a_folder_without_config_or_weights_is_made_again(tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    write_gguf(source, seed=4)
    folder = converted_folder(source, tmp_path)
    manifest = folder / "blockyard.json"
    for name in ("config.json", "model.safetensors"):
        listed = json.loads(manifest.read_text())
        del listed["files"][name]
        (folder / name).unlink()
        manifest.write_text(json.dumps(listed))
        assert not is_whole(folder)
        assert converted_folder(source, tmp_path) == folder
        assert is_whole(folder)


def test_a_converted_model_equals_the_source(tmp_path: Path) -> None:
    """Its weights, one of them quantized, its vocabulary, and its answers."""
    written = write_gguf(tmp_path / "tiny.gguf", seed=3)
    folder = converted_folder(tmp_path / "tiny.gguf", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    weights = model.state_dict()
    for own, theirs in (
        ("embed_tokens", "token_embd"),
        ("layers.0.self_attn.v_proj", "blk.0.attn_v"),
        ("layers.0.mlp.down_proj", "blk.0.ffn_down"),
    ):
        assert torch.equal(weights[f"model.{own}.weight"], torch.from_numpy(written[f"{theirs}.weight"]))
    prompts = mixed_prompts((5, 20))
    engine = Engine.from_pretrained(folder, num_blocks=20)
    answers = engine.generate(prompts, SamplingParams(max_tokens=4))
    assert [answer.token_ids for answer in answers] == reference_tokens(model, prompts, 4)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    assert words.decode(words("the th\u00e9").input_ids) == "the th\u00e9"
    assert len(words("the").input_ids) == 1
