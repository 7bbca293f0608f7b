"""Ray's whole cluster around a fleet, where it takes long: `make interop-ray` (RAY_FLEET is set there)."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

if not os.environ.get("RAY_FLEET"):
    pytest.skip("Ray's cluster runs in `make interop-ray`", allow_module_level=True)

from blockyard_engine import SamplingParams
from blockyard_serve.fleet.leftovers import MARK, end
from blockyard_testing.patience import PATIENCE_SECONDS, wait_until
from blockyard_testing.places import ROOT, SOURCE_PATH
from blockyard_testing.servers import tiny_engine
from blockyard_testing.tiny_models import tiny_folder

from ..support.fleets import RunningFleet, running_fleet


def are_gone(processes: list[psutil.Process]) -> bool:
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


def started_by(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def test_killed_command_leaves_no_process(tmp_path: Path) -> None:
    with running_fleet(tiny_folder(tmp_path), "--num-blocks", "200") as fleet:
        ours, folder = started_by(fleet.process), fleet.folder()
        replicas = [each for each in ours if "ServeReplica" in " ".join(each.cmdline())]
        assert len(replicas) == 2
        begun = threading.Event()

        def stream() -> None:
            answer = fleet.client().completions.create(model="tiny", prompt="x", max_tokens=400, stream=True)
            try:
                for _ in answer:
                    begun.set()
            except Exception:
                begun.set()  # its ingress is dead

        thread = threading.Thread(target=stream)
        thread.start()
        wait_until(begun.is_set)
        os.kill(fleet.process.pid, signal.SIGKILL)
        wait_until(lambda: are_gone(ours))
        wait_until(lambda: not folder.exists())
        thread.join()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("seconds", [3, 9])
def test_fleet_that_is_ended_during_its_start_leaves_no_process(tmp_path: Path, number: int, seconds: int) -> None:
    folder = tiny_folder(tmp_path)
    arguments = ["fleet", "serve", str(folder), "--num-blocks", "200", "--port", "0"]
    with subprocess.Popen([sys.executable, "-m", "blockyard", *arguments], stdout=subprocess.PIPE) as command:
        process = psutil.Process(command.pid)
        wait_until(process.children)
        time.sleep(seconds)  # wherever in its start that is
        ours = started_by(process)
        command.send_signal(number)
        command.wait()
    wait_until(lambda: are_gone(ours))


def test_new_replica_starts_warm_with_a_tier(tmp_path: Path) -> None:
    pytest.importorskip("xxhash")
    kept = tmp_path / "kept"
    options = ["--replicas", "1", "--num-blocks", "200", "--check-endpoint", "--tier", f"file:{kept},bytes=1GiB"]
    with running_fleet(tiny_folder(tmp_path), *options, "--tier-buffer", "64MiB") as fleet:
        fields = {"prompt": "A long beginning. " * 12, "max_tokens": 8, "temperature": 0}
        _, _, first = fleet.post("/v1/completions", **fields)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        num_blocks = first["usage"]["prompt_tokens"] // 16
        wait_until(lambda: sum(path.is_file() for path in (kept / "objects").rglob("*")) >= num_blocks)
        (process,) = fleet.check()["replicas"].values()
        os.kill(process, signal.SIGKILL)
        _, _, second = fleet.post("/v1/completions", **fields)  # it waits for the new one
        assert second["choices"] == first["choices"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16 * (num_blocks - 1)


def test_a_replica_computes_long_prompts_for_the_other(tmp_path: Path) -> None:
    pytest.importorskip("xxhash")
    options = ["--replicas", "2", "--num-blocks", "200", "--check-endpoint", "--tier-buffer", "64MiB"]
    options += ["--tier", f"file:{tmp_path / 'kept'},bytes=1GiB", "--prefill-replicas", "1", "--prefill-tokens", "64"]
    single = tiny_engine()
    with running_fleet(tiny_folder(tmp_path), *options) as fleet:
        for number, text in enumerate(("A long beginning. " * 12, "Another one, " * 14)):
            fields = {"prompt": text, "max_tokens": 8, "temperature": 0}
            _, _, whole = fleet.post("/v1/completions", **fields)
            (expected,) = single.generate([text], SamplingParams(max_tokens=8))
            assert whole["choices"][0]["text"] == expected.text
            state = fleet.get("/fleet")
            assert state["handed_over_requests"] == number + 1
        assert sorted(each["prefill"] for each in state["replicas"]) == [False, True]
        (helper,) = [each["name"] for each in state["replicas"] if each["prefill"]]
        taken = [choice["replica"] for choice in reversed(state["choices"])]
        assert [name == helper for name in taken] == [True, False] * 2
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        fleet.check()


def test_no_port_is_open_to_other_machines(tmp_path: Path) -> None:
    with running_fleet(tiny_folder(tmp_path), "--num-blocks", "200") as fleet:
        found = {}
        for each in started_by(fleet.process):
            for connection in each.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found[connection.laddr] = each.name()
        assert len(found) > 5
        assert {address.ip for address in found} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, found


def test_error_of_a_replica_that_cannot_start_is_shown(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    command = [sys.executable, "-m", "blockyard", "fleet", "serve", str(folder), "--num-blocks", "100"]
    ended = subprocess.run(
        [*command, "--attention-backend", "flash_attention_3"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    refused = "attention_backend is 'flash_attention_3'; it needs tensors on CUDA"
    said = f"blockyard: the replicas did not become ready: {refused}"
    assert ended.stderr.splitlines()[-1].startswith(said)


def engines_of(fleet: RunningFleet) -> list[psutil.Process]:
    return [each for each in fleet.process.children(recursive=True) if "blockyard:engine" in title_of(each)]


def title_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


LONG: dict[str, Any] = {"prompt": "What is a block?", "max_tokens": 400, "temperature": 0.9}


def streamed(fleet: RunningFleet, seed: int, found: dict[int, str]) -> None:
    extra = {"ignore_eos": True}
    stream = fleet.client().completions.create(model="tiny", stream=True, seed=seed, extra_body=extra, **LONG)
    found[seed] = "".join(choice.text for piece in stream for choice in piece.choices)


def test_fleet_scales_with_its_load(tmp_path: Path) -> None:
    options = ["--replicas", "1", "--max-replicas", "2", "--token-load", "0.3", "--idle-seconds", "3"]
    with running_fleet(tiny_folder(tmp_path), *options, "--num-blocks", "100", "--check-endpoint") as fleet:
        assert len(engines_of(fleet)) == 1
        alone: dict[int, str] = {}
        streamed(fleet, 0, alone)
        deadline = time.monotonic() + 3 * PATIENCE_SECONDS
        found: dict[int, str] = {}
        while sum(each["requests"] > 0 for each in fleet.get("/fleet")["replicas"]) < 2:  # the second one serves
            assert time.monotonic() < deadline
            threads = [threading.Thread(target=streamed, args=(fleet, seed, found)) for seed in range(5)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(1)
        # What runs now runs on both, and ends well though one of them is let go meanwhile.
        for thread in threads:
            thread.join()
        assert found[0] == alone[0]
        wait_until(lambda: len(engines_of(fleet)) == 1)
        again: dict[int, str] = {}
        streamed(fleet, 0, again)
        assert again == alone
        assert fleet.get("/fleet")["lost_attempts"] == 0


def test_ingresses_agree_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    options = ["--ingresses", "2", "--num-blocks", "200", "--check-endpoint"]
    with running_fleet(tiny_folder(tmp_path), *options) as fleet:

        def both_know() -> bool:
            answer = fleet.check()
            return bool(answer.get("ok")) and answer["ingresses"] == 2 and answer["booked"] == 0

        found: dict[int, str] = {}
        for seed in (0, 0, 1, 1):
            streamed(fleet, seed, found)
        wait_until(both_know)
        assert fleet.check()["compared"] > 0
        assert sum(each["requests"] for each in fleet.get("/fleet")["claims"].values()) == 4
        assert 'engine="fleet-' in fleet.page()
        assert fleet.call("GET", "/ui/")[0] == 200
        victim = next(each for each in fleet.process.children(recursive=True) if "blockyard:ingress" in title_of(each))
        victim.kill()
        again: dict[int, str] = {}
        streamed(fleet, 0, again)
        assert again[0] == found[0]
        wait_until(both_know)
        ours = started_by(fleet.process)
        fleet.process.terminate()
        assert fleet.wait() == 0
        wait_until(lambda: are_gone(ours))


def test_client_that_leaves_an_ingress_process_frees_its_request(tmp_path: Path) -> None:
    with running_fleet(tiny_folder(tmp_path), "--ingresses", "1", "--num-blocks", "200", "--check-endpoint") as fleet:
        stream = fleet.client().completions.create(model="tiny", stream=True, extra_body={"ignore_eos": True}, **LONG)
        next(iter(stream))
        assert fleet.check()["booked"] == 1
        stream.close()
        wait_until(lambda: fleet.check().get("booked") == 0)


#: Where a head listens that is none of Ray's usual places.
PORT = 26379


@contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """A head of Ray as an operator starts it; yields the environment of commands that are for it."""
    # The path of a socket has at most 107 bytes.
    mark, folder = secrets.token_hex(16), Path(tempfile.mkdtemp(prefix="ray-"))
    environment = {
        **os.environ,
        MARK: mark,
        "PYTHONPATH": SOURCE_PATH,
        "RAY_ADDRESS": f"127.0.0.1:{PORT}",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={PORT}", "--num-cpus=8"]
    ray += ["--node-ip-address=127.0.0.1", f"--temp-dir={folder}", f"--object-store-memory={80 * 2**20}"]
    ray += ["--include-dashboard=true", "--dashboard-port=28265", "--disable-usage-stats"]
    try:
        started = subprocess.run(ray, env=environment, capture_output=True, text=True, check=False)
        assert started.returncode == 0, started.stderr
        yield environment
    finally:
        assert end(mark, str(folder), {os.getpid()}) == []
        shutil.rmtree(folder, ignore_errors=True)


def file_of_the_docs(folder: Path, port: int) -> str:
    """The file that docs/fleet.md shows, with a small model and this machine's loopback."""
    text = (ROOT / "docs" / "fleet.md").read_text()
    (file,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    for shown, here in {
        "/models/my-llama": str(folder),
        "0.0.0.0": "127.0.0.1",
        "8000": str(port),
        "num_blocks: 20000": "num_blocks: 200, threads: 1, check_endpoint: true",
    }.items():
        assert file.count(shown) == 1, shown
        file = file.replace(shown, here)
    return str(file)


@pytest.mark.parametrize("command", ["run", "deploy"])
def test_a_cluster_serves_the_file_of_the_docs(tmp_path: Path, command: str) -> None:
    port = 28000
    file = tmp_path / "fleet.yaml"
    file.write_text(file_of_the_docs(tiny_folder(tmp_path), port))
    with cluster() as environment:
        serve = [sys.executable, "-m", "ray.serve.scripts", command, str(file)]
        if command == "deploy":
            serve += ["--address", "http://127.0.0.1:28265"]
        with subprocess.Popen(serve, env=environment, stdout=subprocess.DEVNULL) as started:
            try:
                # Six processes, of which four load the engine's libraries.
                wait_until(lambda: post(port, {**LONG, "max_tokens": 20}) is not None, 5 * PATIENCE_SECONDS)
                first = post(port, {**LONG, "max_tokens": 20, "seed": 5})
                second = post(port, {**LONG, "max_tokens": 20, "seed": 5})
                assert first is not None
                assert second is not None
                assert first["choices"] == second["choices"]
                wait_until(lambda: (get(port, "/check") or {}).get("ingresses") == 2)
            finally:
                started.terminate()


def post(port: int, fields: dict[str, Any]) -> dict[str, Any] | None:
    return asked(port, "POST", "/v1/completions", json.dumps({"model": "tiny", **fields}))


def get(port: int, path: str) -> dict[str, Any] | None:
    return asked(port, "GET", path, None)


def asked(port: int, method: str, path: str, body: str | None) -> dict[str, Any] | None:
    """The JSON of an answer; None for one that is no 200, or does not come."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        found: dict[str, Any] = json.loads(answer.read())
        return found if answer.status == 200 else None
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()
