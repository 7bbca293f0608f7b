"""Ray's whole cluster around a fleet, where it takes long: `make interop-ray` (RAY_FLEET is set there)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

if not os.environ.get("RAY_FLEET"):
    pytest.skip("Ray's cluster runs in `make interop-ray`", allow_module_level=True)

from ..support.fleets import running_fleet, tiny_folder
from ..support.patience import wait_until


def are_gone(processes: list[psutil.Process]) -> bool:
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


def started_by(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def test_a_command_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
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
def test_one_that_ends_while_it_starts_leaves_nothing(tmp_path: Path, number: int, seconds: int) -> None:
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


def test_a_new_replica_begins_warm_where_a_tier_is_named(tmp_path: Path) -> None:
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


def test_no_port_is_open_to_other_machines(tmp_path: Path) -> None:
    with running_fleet(tiny_folder(tmp_path), "--num-blocks", "200") as fleet:
        found = {}
        for each in started_by(fleet.process):
            for connection in each.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found[connection.laddr] = each.name()
        assert len(found) > 5
        assert {address.ip for address in found} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, found


def test_what_the_replicas_say_where_they_cannot_be_made(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    command = [sys.executable, "-m", "blockyard", "fleet", "serve", str(folder), "--num-blocks", "100"]
    ended = subprocess.run([*command, "--attention-backend", "flashinfer"], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    said = "blockyard: the replicas did not become ready: attention_backend is 'flashinfer'; it needs tensors on CUDA"
    assert ended.stderr.splitlines()[-1].startswith(said)
