"""Wrong options are reported before torch is imported, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from blockyard.config import CACHE_FIELDS, CACHE_OPTIONS, COMMAND_OPTIONS
from blockyard_testing.places import child_environment

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("zmq")

#: Options of both `serve` and `generate`, and a piece of what is said of each.
OF_BOTH = {
    "--num-blocks 1": "num_blocks is 1; it must be from 2",
    "--kv-cache-memory-bytes 0": "kv_cache_memory_bytes is 0; it must be from 1",
    "--kv-cache-memory-bytes 4Gi": "--kv-cache-memory-bytes is '4Gi'; it must be a number and a unit",
    "--block-size 0": "block_size is 0",
    "--max-num-seqs 0": "max_num_seqs is 0",
    "--max-model-len 0": "max_model_len is 0",
    "--watermark 3": "watermark is 3.0; it must be a number from 0 to below 1",
    "--eviction-policy nope": "eviction_policy is 'nope'; it must be one of arc",
    "--retention-blocks -1": "retention_blocks is -1",
    "--history-size -1": "history_size is -1",
    "--residency-sample -1": "residency_sample is -1",
    "--num-cpu-blocks 1": "num_cpu_blocks is 1; it must be from 2",
    "--swap-space 4": "--swap-space is '4'; it must be a number and a unit",
    "--preemption swap": "preemption is 'swap' and num_cpu_blocks is 0",
    "--speculate 99999": "--speculate is 99999",
    "--max-num-batched-tokens 0": "max_num_batched_tokens is 0",
    "--admission room --admission-lane 0.5": "admission_lane is 0.5; it must be 1 or more",
    "--max-num-batched-tokens 2": "it must be at least max_num_seqs",
    "--gpu-memory-utilization 7": "gpu_memory_utilization is 7.0",
    "--attention-backend nope": "attention_backend is 'nope'; it must be one of auto, flash_attention_3",
    "--tensor-parallel 0": "tensor_parallel is 0",
    "--context-parallel -1": "context_parallel is -1",
    "--model /nowhere": "there is no model folder /nowhere",
    "--model /nowhere.gguf": "there is no file /nowhere.gguf",
}
OF_SERVE = {
    "--port 99999": "port is 99999",
    "--max-tokens 0": "max_tokens is 0",
    "--max-waiting -1": "max_waiting is -1",
    "--drain-seconds -1": "drain_seconds is -1.0; it must be above 0",
    "--status-seconds -1": "status_seconds is -1",
    "--tenant-metrics -1": "tenant_metrics is -1",
    "--tenant acme,min=nope": "min of tenant 'acme' is 'nope'; it must be a number of blocks, or of percent",
    "--num-blocks 100 --tenant a,min=60% --tenant b,min=60%": "guarantees (min_blocks) of 116 blocks together",
    "--admission room --tenant acme": "admission is 'room' and cache_options has tenants",
    "--tenant acme,key-env=NOT_THERE": "key-env is NOT_THERE; this environment variable is not set",
    "--cors-origin nope": "nope",
    "--api-key-env NOT_THERE": "this environment variable is not set",
    "--api-key-file /nowhere": "/nowhere",
    "--kv-events nope": "--kv-events is 'nope'",
    "--otlp-traces-endpoint nope": "nope",
}
OF_GENERATE = {
    "--max-tokens 0": "max_tokens is 0",
    "--temperature -1": "temperature is -1",
    "--top-p 2": "top_p is 2",
    "--n 0": "n is 0",
    "--seed -1": "seed is -1",
    "--system x": "--system is given without --chat",
}
OF_DEMO = {
    "--requests 0": "--requests is 0",
    "--num-blocks 1": "num_blocks is 1",
    "--block-size 0": "block_size is 0",
    "--max-num-seqs 0": "max_num_seqs is 0",
    "--max-num-batched-tokens 1": "it must be at least max_num_seqs",
    "--max-new-tokens 0": "max_tokens is 0",
    "--model /nowhere": "there is no model folder /nowhere",
}
SAID = {f"serve {option}": said for option, said in {**OF_BOTH, **OF_SERVE}.items()}
SAID |= {f"generate Hi {option}": said for option, said in {**OF_BOTH, **OF_GENERATE}.items()}
SAID |= {f"demo {option}": said for option, said in OF_DEMO.items()}
#: Runs each line of standard input, and prints of each its status, what was said, and whether torch was imported.
RUN = """
import contextlib, io, json, sys
from blockyard.cli.main import main
for line in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = main(line.split())
    print(json.dumps([status, said.getvalue(), "torch" in sys.modules]))
"""


def test_wrong_options_are_reported_before_torch_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(list(SAID)),
        capture_output=True,
        text=True,
        env=child_environment(),
        timeout=120,
        check=False,
    )
    found = dict(zip(SAID, map(json.loads, done.stdout.splitlines()), strict=True)) if done.stdout else {}
    assert found, done.stderr
    for line, (status, said, has_torch) in found.items():
        assert status == 2, line
        assert said.startswith("blockyard: "), line
        assert said.count("\n") == 1, said
        assert SAID[line] in said, line
        assert not has_torch, line


def test_help_lists_every_attention_backend(capsys: pytest.CaptureFixture[str]) -> None:
    from blockyard.cli.main import parse
    from blockyard_engine.attention.backends import AUTO, BACKENDS
    from blockyard_engine.engine_options import BACKEND_NAMES

    assert (AUTO, *(backend.name for backend in BACKENDS)) == BACKEND_NAMES
    with pytest.raises(SystemExit):
        parse(["serve", "--help"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in BACKEND_NAMES)


def test_options_of_the_cache_are_fields_of_its_config() -> None:
    """The field has the help, the limits, and the commands that may set it."""
    assert set(COMMAND_OPTIONS) < set(CACHE_OPTIONS) < set(CACHE_FIELDS)
    assert all(field.metadata["help"] for field in CACHE_FIELDS.values())
