"""`blockyard plan` as people call it: what it prints, for them and for programs, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blockyard import InvalidArgument
from blockyard.amounts import parse_memory
from blockyard.cli.main import main
from blockyard.cli.options import parse_lengths
from blockyard.sizing import known_model, model_names, model_weights

LLAMA = known_model("llama-3.1-8b").config
#: What libraries take besides, in versions that count CUDA graphs.
RECENT = int(0.45 * 2**30)
#: Round amounts, for plans worked out by hand.
ROUND = ("--utilization", "0.9", "--gpu-memory", "80GiB", "--activations", "2GiB")
ROUND_24 = ("--utilization", "0.9", "--gpu-memory", "24GiB", "--activations", "2GiB")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(["plan", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    status, out, err = run(capsys, *arguments, "--json")
    assert (status, err) == (0, "")
    report: dict[str, Any] = json.loads(out)
    return report


def folder_of(path: Path, config: dict[str, Any], **files: int) -> Path:
    """A model's folder with *.safetensors of this many bytes."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    for name, size in files.items():
        with (path / f"{name}.safetensors").open("wb") as file:
            file.truncate(size)  # sparse: takes no room on the disk
    return path


# ---------------------------------------------------------------- amounts


def test_memory_sizes_are_parsed() -> None:
    for text, num_bytes in (
        ("80GiB", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5 gib", 3 * 2**29),
        ("512MiB", 2**29),
        ("3b", 3),
        (".5KB", 500),
        ("1TiB", 2**40),
    ):
        assert parse_memory("--x", text) == num_bytes
    for text in ("80", "80G", "GiB", "-1GiB", "nan", "infGiB", "1e3GiB", "", "٣GiB", "1" * 50 + "GiB"):
        with pytest.raises(InvalidArgument, match="it must be a number and a unit, like 80GiB, 80GB or 512MiB"):
            parse_memory("--x", text)
    with pytest.raises(InvalidArgument, match="--x is '2000TiB'; it must be at most 1024 TiB"):
        parse_memory("--x", "2000TiB")


def test_lengths_are_parsed() -> None:
    assert parse_lengths("--x", "2k, 2Ki,32000,1.5k,2000,1M") == [2000, 2048, 32000, 1500, 1_000_000]
    for text, message in (
        ("2q", "--x has '2q'; a length is a number of tokens"),
        ("2k,", "--x has ''"),
        ("-1", "--x has '-1'"),
        ("0", "--x has '0', which is 0; it must be a whole number from 1"),
        ("0.5", "which is 0.5"),
        ("1000000m", "which is 1e"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            parse_lengths("--x", text)


# ---------------------------------------------------------------- answers


def test_known_model_gives_known_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    report = as_json(capsys, "llama-3.1-8b", "--lengths", "8k", *ROUND)
    # 80 * 0.9 GiB - 8,030,261,248 * 2 - 2 GiB, in blocks of 2 MiB; 28,180 / 500 = 56.
    assert report["memory"]["weight_bytes"] == 16_060_522_496
    assert report["memory"]["usable_bytes"] == 72 * 2**30
    assert report["cache"]["num_blocks"] == 28_181
    assert report["requests"] == [
        {
            "label": "",
            "num_tokens": 8000,
            "num_blocks": 500,
            "concurrent": 56,
            "concurrent_in_all": 56,
            "num_bytes": 500 * 2**21,
            "padding_bytes": 0,
        }
    ]
    assert (report["fits"], report["hits"], report["trace"], report["running"]) == (True, None, None, None)
    assert report["assumptions"][0] == "The weights are 8,030,261,248 parameters."


def test_text_has_the_numbers_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(
        capsys, "llama-3.1-8b", "--trace", "small", *ROUND_24, "--cpu-memory", "4GiB", "--running", 4
    )
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "llama-3.1-8b on 1 GPU: 1 replica of 1 GPU"
    for line in (
        "  90 % of 24 GiB             21.60 GiB",
        "  weights                    14.96 GiB",
        "  left for blocks             4.64 GiB",
        "  a given length                 2,000           125       250.0        19",
        "  trace mean                     1,933           121       242.0        19",
        "  blocks                         2,376  of 16 tokens, 2.000 MiB on each GPU",
        "  tokens                        38,000  128 KiB each on each GPU",  # 2,375 blocks; 32 layers * 2 * 8 * 128 * 2
        "  CPU blocks                     2,048",
        "  held by running requests         581  4 running, plus a fifth for growth",  # 1.2 * 4 * 121 = 580.8
        "  left for cached prefixes       1,794",
        "Block size: 32 tokens",
    ):
        assert line in lines
    assert "in 3,841 blocks" in out  # 1,794 + 2,048 - 1
    assert lines.index("Assumptions:") > lines.index("Block size: 32 tokens")
    assert max(map(len, lines)) <= 110


def test_hits_are_those_of_the_curve(capsys: pytest.CaptureFixture[str]) -> None:
    from blockyard_lab import read_references
    from blockyard_lab.curve import lru_hits
    from blockyard_lab.traces import open_trace

    report = as_json(capsys, "llama-3.1-8b", "--trace", "small", *ROUND_24, "--running", 4)
    hits = lru_hits(read_references(open_trace("small")))
    assert report["hits"]["expected"]["num_blocks"] == report["cache_budget"]["num_blocks"] == 1794
    assert report["hits"]["expected"]["hit_rate"] == hits[1794] / 34_337
    assert report["hits"]["one_more_gib"]["hit_rate"] == hits[1794 + 512] / 34_337
    assert report["hits"]["tenth_more"]["hit_rate"] == hits[1794 + 238] / 34_337
    assert report["hits"]["whole_pool"]["hit_rate"] == hits[2375] / 34_337
    assert report["hits"]["unlimited"] == hits[-1] / 34_337


def test_a_trace_without_contents_still_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.000000,1000,24\n2024-05-10 00:00:01.000000,3000,72\n"
    )
    status, out, _ = run(capsys, "llama-3.1-8b", "--trace", trace)
    assert status == 0
    assert "Hit rate: not known, because the trace does not say what its prompts contain." in out
    # (1024 + 3072) / 2 = 2048 tokens; one arrival a second * 48 tokens * 0.03 s = 1.44.
    report = as_json(capsys, "llama-3.1-8b", "--trace", trace)
    assert [row["num_tokens"] for row in report["requests"]] == [2000, 8000, 32000, 2048, 3072]
    assert (report["running"], report["hits"]) == (2, None)


def test_damaged_trace_lines_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    good = '{"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}\n'
    trace.write_text(good + "{\n" + good)
    status, out, err = run(capsys, "llama-3.1-8b", "--trace", trace)
    assert status == 0
    assert err.startswith("blockyard: 1 x ")
    assert "because all requests arrive at once and --running is not given" in out
    report = json.loads(run(capsys, "llama-3.1-8b", "--trace", trace, "--running", 1, "--json")[1])
    assert (report["hits"]["tokens_a_block"], report["hits"]["expected"]["hit_rate"]) == (512, 0.5)


def test_replicas_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "llama-3.1-70b", "--gpus", 8, "--tensor-parallel", 4, *ROUND)
    assert status == 0
    assert out.startswith("llama-3.1-70b on 8 GPUs: 2 replicas of 4 GPUs\n")
    # 72 - 141,107,412,992 / 4 / 2**30 - 2 = 37.146 GiB of 1.25 MiB: 30,429 blocks, 243 requests of 125.
    assert "  a given length                 2,000           125       156.2       243       486" in out.splitlines()


def test_misfit_names_a_tensor_parallel_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "llama-3.1-70b", *ROUND)
    assert (status, err) == (1, "")
    assert "  missing                    61.42 GiB" in out.splitlines()
    assert "It fits with --tensor-parallel 2." in out.replace("\n", " ")
    assert run(capsys, "llama-3.1-70b", "--tensor-parallel", 2)[0] == 0
    status, out, _ = run(capsys, "llama-3.1-70b", "--activations", "79GiB", "--json")
    assert (status, json.loads(out)["fits"], json.loads(out)["smallest_tensor_parallel"]) == (1, False, None)


def test_a_length_that_does_not_fit_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "llama-3.1-8b", "--gpu-memory", "24GiB", "--lengths", "2k,100k")
    assert status == 0
    assert (
        "  a given length               100,000         6,250    12,500.0         0  does not fit" in out.splitlines()
    )


def test_windows_are_in_the_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "gpt-oss-20b", *ROUND_24, "--lengths", "32k")
    # 21.6 GiB - 14,438,087,808 - 2 GiB in blocks of 384 KiB: 16,803. 32,000 / 16 and 9 of the window: 8 times 2,009.
    lines = out.splitlines()
    assert status == 0
    assert "  a given length                32,000         2,009       753.4         8" in lines
    # 16,802 * 8, and 24 layers * 2 * 8 * 64 * 2
    assert "  tokens                       134,416  48 KiB each on each GPU if every layer keeps all of them" in lines
    assert any(line == "  - The weights are 20,914,757,184 parameters, quantized (mxfp4): 12.82 GiB." for line in lines)


def test_defaults_are_cudas_memory_and_the_steps_activations(capsys: pytest.CaptureFixture[str]) -> None:
    report = as_json(capsys, "llama-3.1-8b")
    assert report["memory"]["total_bytes"] == int(79.19 * 2**30)  # an H100
    # 8,192 tokens of 4,096 * 2 bytes and 1,024 * 128,256 logits of 2 + 12.9 bytes; 0.25 GiB, and 102 CUDA graphs.
    sampling = 8192 * 4096 * 2 + 1024 * 128_256 * 149 // 10
    assert report["memory"]["activation_bytes"] == sampling + 2**28 + RECENT + 102 * 32 * 2**18
    assert report["memory"]["utilization"] == 0.92
    assert any("a step of 8,192 tokens that samples for 1,024 sequences" in line for line in report["assumptions"])
    # vLLM excepts the A100 by name, and a GB10's memory is the CPU's too.
    for gpu in ("a100-80gb", "gb10"):
        report = as_json(capsys, "llama-3.1-8b", "--gpu", gpu)
        assert any("a step of 2,048 tokens that samples for 256 sequences" in line for line in report["assumptions"])
    report = as_json(capsys, "llama-3.1-8b", "--gpu", "RTX 4090", "--no-cuda-graphs")
    # 2,048 tokens of (3 * 14,336 + 4.25 * 4,096) * 2 bytes are less than sampling for 256 sequences.
    assert report["memory"]["activation_bytes"] == 2048 * 4096 * 2 + 256 * 128_256 * 149 // 10 + 2**28
    report = as_json(capsys, "llama-3.1-8b", "--gpu", "l4", "--max-num-batched-tokens", 20_000, "--max-num-seqs", 1)
    assert report["memory"]["activation_bytes"] == 20_000 * 2 * (3 * 14_336 + 17_408) + 2**28 + RECENT + 3 * 32 * 2**18


def test_buffers_between_gpus_are_those_of_their_links(capsys: pytest.CaptureFixture[str]) -> None:
    for gpu, libraries in (("h100", "2.55"), ("l40s", "0.80")):
        report = as_json(capsys, "llama-3.1-8b", "--gpu", gpu, "--tensor-parallel", 2)
        assert any(f"libraries {libraries}" in line for line in report["assumptions"])


def test_quantized_weights_are_counted_from_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    config = {**known_model("qwen3-30b-a3b").config, "quantization_config": fp8}
    report = as_json(capsys, folder_of(tmp_path / "fp8", config), "--gpu", "h100")
    assert report["memory"]["weight_bytes"] / 2**30 == pytest.approx(29.03, abs=0.01)
    unknown = folder_of(tmp_path / "new", {**config, "quantization_config": {"quant_method": "new"}})
    status, _, err = run(capsys, unknown)
    assert status == 2
    assert "--weights is missing" in err
    assert "quantization_config.quant_method is 'new'" in err
    assert as_json(capsys, unknown, "--weights", "20GiB")["memory"]["weight_bytes"] == 20 * 2**30
    index = {"metadata": {"total_size": 3 * 2**30}}
    (unknown / "model.safetensors.index.json").write_text(json.dumps(index))
    assert as_json(capsys, unknown)["memory"]["weight_bytes"] == 3 * 2**30


def test_cache_dtype_follows_scales_in_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantization = {"quant_algo": "NVFP4", "ignore": ["lm_head"], "kv_cache_quant_algo": "FP8"}
    folder = folder_of(tmp_path / "nvfp4", {**LLAMA, "quantization_config": quantization})
    report = as_json(capsys, folder)
    assert report["cache"]["dtype"] == "fp8"
    assert any("The cache has fp8, for which the weights' file has scales" in line for line in report["assumptions"])
    assert as_json(capsys, folder, "--cache-dtype", "bfloat16")["cache"]["dtype"] == "bfloat16"


def test_encoders_and_drafts_are_counted_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    model = ("qwen3.6-27b", "--gpu", "rtx-pro-6000", "--max-num-seqs", "16")
    whole, text = as_json(capsys, *model), as_json(capsys, *model, "--text-only")
    drafts = as_json(capsys, *model, "--mtp")
    assert whole["memory"]["weight_bytes"] - text["memory"]["weight_bytes"] == 2 * 460_730_096
    assert whole["memory"]["activation_bytes"] > text["memory"]["activation_bytes"]
    assert drafts["memory"]["weight_bytes"] - whole["memory"]["weight_bytes"] == 2 * 424_699_392
    assert drafts["cache"]["bytes_per_token"] == whole["cache"]["bytes_per_token"] * 17 // 16
    status, _, err = run(capsys, "llama-3.1-8b", "--mtp")
    assert status == 2
    assert "--mtp was given, but the model's config has no layers for multi-token prediction" in err


def test_a_load_that_is_too_large_says_how_many_gpus_hold_it(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "llama-3.1-8b", *ROUND_24, "--lengths", "8k", "--running", "20", "--gpus", "2")[1]
    # 2,344 blocks a replica; 20 requests of 500 and a fifth more are 12,000 on each of two: 24,000 / 2,343 = 11.
    assert "the pool is too small for this load; 11 GPUs (11 replicas) are enough" in out


def test_every_known_model_has_its_weights(capsys: pytest.CaptureFixture[str]) -> None:
    for name in model_names():
        status, out, err = run(capsys, name, "--tensor-parallel", 1, "--json")
        assert (status in (0, 1), err) == (True, "")
        assert json.loads(out)["memory"]["weight_bytes"] > 0


def test_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--list-models") == (0, "\n".join(model_names()) + "\n", "")


# ---------------------------------------------------------------- models of one's own, and types


def test_weights_are_those_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path / "mine", LLAMA, **{"model-1": 5 * 2**30, "model-2": 2**30, "consolidated": 6 * 2**30})
    for model in (folder, folder / "config.json"):
        report = as_json(capsys, model)
        assert report["memory"]["weight_bytes"] == 6 * 2**30  # not twice
    assert (
        as_json(capsys, folder, "--dtype", "float16")["memory"]["weight_bytes"] == 6 * 2**30
    )  # as wide as the config's
    assert as_json(capsys, folder)["model"] == "mine"
    assert as_json(capsys, folder, "--weights", "1GiB")["memory"]["weight_bytes"] == 2**30


def test_weights_are_counted_from_a_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path / "mine", LLAMA)
    report = as_json(capsys, folder)
    assert report["memory"]["weight_bytes"] == 2 * 8_030_261_248
    assert report["assumptions"][0] == "The weights are 8,030,261,248 parameters."
    assert as_json(capsys, folder, "--dtype", "fp8")["memory"]["weight_bytes"] == 8_030_261_248
    narrow = {key: value for key, value in LLAMA.items() if key not in ("vocab_size", "intermediate_size")}
    report = as_json(capsys, folder_of(tmp_path / "narrow", narrow), "--weights", "1GiB")
    assert any("a guess, since the model's widths are not known" in line for line in report["assumptions"])


def test_dtypes_of_weights_and_cache_are_independent(capsys: pytest.CaptureFixture[str]) -> None:
    def bytes_of(*options: str) -> tuple[int, int]:
        report = as_json(capsys, *options)
        return report["memory"]["weight_bytes"], report["cache"]["bytes_per_token"]

    parameters, token = 8_030_261_248, 131_072
    assert bytes_of("llama-3.1-8b") == (2 * parameters, token)
    assert bytes_of("llama-3.1-8b", "--dtype", "fp8") == (parameters, token)
    assert bytes_of("llama-3.1-8b", "--cache-dtype", "fp8") == (2 * parameters, token // 2)
    assert bytes_of("smollm2-135m", "--dtype", "float32") == (4 * 134_515_008, 2 * 23_040)
    assert bytes_of("gpt-oss-20b") == (14_438_087_808, 49_152)
    assert bytes_of("gpt-oss-20b", "--dtype", "bfloat16") == (2 * 20_914_757_184, 49_152)
    # Blocks of FP8; what latent attention does not divide is whole on each rank.
    deepseek = as_json(capsys, "deepseek-v3", "--tensor-parallel", 16)["memory"]["weight_bytes"]
    assert deepseek == model_weights(known_model("deepseek-v3").config, tensor_parallel_size=16).rank_bytes
    assert deepseek > 671_026_419_200 / 16


# ---------------------------------------------------------------- what is refused


BAD = [
    (
        ("lama-3.1-8b",),
        "model is 'lama-3.1-8b'; it must be a model's folder, a config.json, or a known name; similar names:",
    ),
    ((), "MODEL is missing"),
    (("llama-3.1-8b", "--gpu", "h1000"), "gpu is 'h1000'; it must be one of h100, "),
    (("llama-3.1-8b", "--max-num-batched-tokens", "0"), "max_num_batched_tokens is 0; it must be from 1"),
    (("llama-3.1-8b", "--gpus", "0"), "--gpus is 0; it must be at least 1"),
    (("llama-3.1-8b", "--tensor-parallel", "0"), "--tensor-parallel is 0; it must be at least 1"),
    (("llama-3.1-8b", "--gpus", "6", "--tensor-parallel", "4"), "--gpus is 6; it must be a multiple"),
    (("llama-3.1-8b", "--tensor-parallel", "3"), "tensor_parallel_size is 3; it must divide num_kv_heads, 8"),
    (("llama-3.1-8b", "--gpu-memory", "80"), "--gpu-memory is '80'; it must be a number and a unit"),
    (("llama-3.1-8b", "--gpu-memory", "0GiB"), "gpu_memory_gib is 0.0; it must be above 0"),
    (("llama-3.1-8b", "--weights", "much"), "--weights is 'much'"),
    (("llama-3.1-8b", "--utilization", "nan"), "gpu_memory_utilization is nan; it must be finite"),
    (("llama-3.1-8b", "--utilization", "90"), "gpu_memory_utilization is 90.0; it must be above 0 and at most 1"),
    (("llama-3.1-8b", "--dtype", "int3"), "--dtype is 'int3'; it must be one of"),
    (("llama-3.1-8b", "--cache-dtype", "int3"), "dtype is 'int3'; it must be one of"),
    (("llama-3.1-8b", "--block-size", "0"), "block_size is 0; it must be from 1"),
    (("llama-3.1-8b", "--max-num-seqs", "0"), "max_num_seqs is 0"),
    (("llama-3.1-8b", "--seconds-per-token", "inf"), "seconds_per_token is inf"),
    (("llama-3.1-8b", "--running", "-1"), "running is -1"),
    (("llama-3.1-8b", "--policy", "best"), "'best'; it must be one of"),
    (("llama-3.1-8b", "--trace", "nowhere.jsonl"), "nowhere.jsonl"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_errors_are_one_sentence(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("blockyard: ")
    assert err.count("\n") == 1
    assert message in err


def test_incomplete_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = folder_of(tmp_path / "bare", known_model("jamba-v0.1").config)
    fields = folder_of(tmp_path / "fields", {"model_type": "llama", "torch_dtype": "bfloat16"}, model=1)
    typed = folder_of(tmp_path / "typed", LLAMA, model=1)
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ((bare,), "has no *.safetensors, and model_type is 'jamba'; to count parameters it must be one of"),
        ((fields,), "num_hidden_layers is missing"),
        ((typed, "--dtype", "fp8"), "--dtype is 'fp8', but the *.safetensors"),
        ((tmp_path / "empty",), "config.json could not be read"),
    ):
        status, out, err = run(capsys, *arguments)
        assert (status, out) == (2, "")
        assert message in err


def test_plan_with_tiers_prints_a_row_per_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How many GiB for which hit rate: five sizes by themselves, hits that grow with them, below the bound."""
    asked = ("llama-3.1-8b", *ROUND_24, "--running", 32, "--trace", "chat:requests=80,seed=2", "--jobs", 1)
    page = tmp_path / "plan.html"
    found = as_json(capsys, *asked, "--tier", "auto,speed=50GB", "-o", page)["tiers"]
    rates = [(row["num_pool_tokens"] + row["tiers"][0]["num_hit_tokens"]) / row["num_prompt_tokens"] for row in found]
    assert len(found) >= 3
    assert [row["tier_bytes"] for row in found] == sorted(row["tier_bytes"] for row in found)
    assert rates[0] < rates[-1] <= found[-1]["optimum"]
    assert "With tiers below the pool" in page.read_text()
    status, out, _ = run(capsys, *asked, "--tier", "1GiB/2GiB,write=selective")
    assert status == 0
    assert out.index("GiB a day 1") < out.index("Assumptions:")


def test_tiers_need_a_trace_and_a_model_without_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "llama-3.1-8b", "--seconds-per-prompt-token", "1")
    assert (status, "was given without --tier" in err) == (2, True)
    status, _, err = run(capsys, "llama-3.1-8b", "--tier", "auto")
    assert (status, "--tier was given without --trace" in err) == (2, True)
    status, _, err = run(
        capsys, "qwen3-next-80b", "--gpus", 4, "--tensor-parallel", 4, "--trace", "small", "--tier", "1TiB"
    )
    assert (status, "keeps states" in err) == (2, True)
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    status, _, err = run(capsys, "llama-3.1-8b", "--trace", lengths, "--tier", "auto", "--quiet")
    assert (status, "the trace has no contents" in err) == (2, True)
