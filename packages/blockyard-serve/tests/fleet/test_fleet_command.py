"""Options that `blockyard fleet serve` refuses before starting Ray, and the end of a fleet whose command was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("zmq")

from blockyard.cli.main import main, parse
from blockyard_serve.fleet.leftovers import processes
from blockyard_testing.patience import PATIENCE_SECONDS, wait_until
from blockyard_testing.tiny_models import tiny_folder


def test_fleet_that_does_not_fit_is_refused_with_the_sum(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    command = [sys.executable, "-m", "blockyard", "fleet", "serve", str(folder), "--kv-cache-memory-bytes", "100TiB"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "--replicas is 2; each takes" in ended.stderr
    assert "in total, and the machine has" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--replicas", "0"], "--replicas is 0; it must be from 1 to 64"),
        (["--replicas", "3", "--max-replicas", "2"], "--max-replicas is 2; it must be from 3 to 64"),
        (["--token-load", "0"], "--token-load is 0.0; it must be above 0"),
        (["--idle-seconds", "-1"], "--idle-seconds is -1.0; it must be above 0"),
        (["--ingresses", "-1"], "--ingresses is -1; it must be from 0 to 64"),
        (["--cost", "robst"], "robst"),
        (["--progress-timeout", "0"], "--progress-timeout is 0.0; it must be above 0"),
        (["--heartbeat-timeout", "nan"], "--heartbeat-timeout is nan"),
        (["--resumes", "-1"], "--resumes is -1; it must be from 0 to 100"),
        (["--prefill-replicas", "2"], "--prefill-replicas is 2; it must be from 0 to 1"),
        (["--prefill-replicas", "1"], "they hand prompts over through a tier with write=through"),
        (["--prefill-replicas", "1", "--max-replicas", "3"], "a fleet that grows cannot have prefilling replicas"),
        (["--prefill-tokens", "0"], "--prefill-tokens is 0"),
        (["--threads", "0"], "--threads is 0; it must be from 1 to 1024"),
        (["--num-blocks", "1"], "num_blocks is 1"),
        (["no/such/folder"], "no/such/folder"),
    ],
)
def test_invalid_options_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "serve", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_labs_fleet_command_still_works() -> None:
    assert parse(["fleet", "A"]).trace == "A"
    assert parse(["fleet"]).trace == "A"
    assert parse(["fleet", "./serve"]).trace == "./serve"
    assert parse(["fleet", "serve", "folder"]).model == "folder"


#: Starts a process that is marked, one that has a file of the folder open and no mark, and says their numbers.
COMMAND = """
import os, subprocess, sys, time
from pathlib import Path
from blockyard_serve.fleet.leftovers import MARK, CleanupProcess
folder, bare = Path(sys.argv[1]), dict(os.environ)
os.environ[MARK] = "of the test"
cleanup = CleanupProcess("of the test", folder)
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
marked = subprocess.Popen(sleep, start_new_session=True)
opener = subprocess.Popen(sleep, env=bare, stdout=open(folder / "log", "w"), start_new_session=True)
print(marked.pid, opener.pid, flush=True)
if sys.argv[2] == "orderly":
    cleanup.close()
else:
    time.sleep(600)
"""


@pytest.mark.parametrize("end", ["orderly", "killed"])
def test_cleanup_ends_every_process(tmp_path: Path, end: str) -> None:
    folder = tmp_path / "ours"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(folder), end], stdout=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None
        started = [psutil.Process(int(number)) for number in command.stdout.readline().split()]
        stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        try:
            if end == "killed":
                wait_until(lambda: len(processes("of the test", str(folder), set())) >= 2)
                os.kill(command.pid, signal.SIGKILL)
            command.wait(PATIENCE_SECONDS)
            wait_until(lambda: not folder.exists())
            wait_until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in started))
            time.sleep(0.2)
            assert stranger.poll() is None
        finally:
            stranger.kill()
            stranger.wait()
