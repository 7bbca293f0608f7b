"""Generates on several ranks until it is ended: `python -m blockyard_testing.rank_loop SIZE SHAPE [FOLDER]`.

It writes "ready" and then the number of each step. A lost rank ends it with status 2 and one line on stderr. With a
folder it has a tier there, from which it loads each round's prompts, and requires the tokens of the model alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from .places import child_environment


def main() -> int:
    from blockyard.errors import RankError
    from blockyard_engine import Engine, SamplingParams, StepReport

    from .tiny_models import mixed_prompts, reference_tokens, tiny_model, tokens_of

    steps, prompts, sampling = 0, mixed_prompts((5, 17, 33)), SamplingParams(max_tokens=50, ignore_eos=True)

    def count(_: StepReport) -> None:
        nonlocal steps
        steps += 1
        print(steps, flush=True)

    try:
        model, size = tiny_model(sys.argv[2]), int(sys.argv[1])
        if len(sys.argv) == 3:
            engine = Engine(model, num_blocks=60, tensor_parallel=size)
            print("ready", flush=True)
            while True:
                engine.generate(prompts, sampling, on_step=count)
        from blockyard_tiers import FileTier

        expected = reference_tokens(model, prompts, 50)
        engine = Engine(model, num_blocks=60, block_size=4, tensor_parallel=size, tiers=[FileTier(sys.argv[3], 2**30)])
        print("ready", flush=True)
        while True:
            assert tokens_of(engine.generate(prompts, sampling, on_step=count)) == expected
            engine.cache.reset_prefix_cache()
    except RankError as error:
        print(f"blockyard: {error}", file=sys.stderr)
        return 2


class RankLoop:
    """The program, started by a test."""

    def __init__(self, size: int, shape: str = "llama-gqa", *folder: str) -> None:
        self.size = size
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "blockyard_testing.rank_loop", str(size), shape, *folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=None,
            env=child_environment(OMP_NUM_THREADS="1"),
        )
        self.lines: list[str] = []
        self._errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((self.process.stdout, self.lines), (self.process.stderr, self._errors))
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream: object, lines: list[str]) -> None:
        for line in stream:  # type: ignore[attr-defined]
            lines.append(line.rstrip("\n"))

    def wait_for_steps(self, number: int, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while len(self.lines) <= number:
            assert self.process.poll() is None, self._errors
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def wait_for_ranks(self, seconds: float = 120) -> list[int]:
        """The processes of the other ranks, once all are started."""
        deadline = time.monotonic() + seconds
        while len(found := children(self.process.pid)) < self.size - 1:
            assert self.process.poll() is None, self._errors
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return found

    def end_of(self, pids: list[int], seconds: float = 40) -> tuple[int, list[str]]:
        """Exit status and stderr, once the program and these processes are gone; kills what is not, and fails."""
        deadline = time.monotonic() + seconds
        while (left := [pid for pid in [self.process.pid, *pids] if is_alive(pid)]) and time.monotonic() < deadline:
            self.process.poll()
            time.sleep(0.01)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"still alive after {seconds} s: {left}; {self._errors}"
        for reader in self._readers:
            reader.join(10)
        return self.process.wait(), [line for line in self._errors if "StaleBuildWarning" not in line]


def children(pid: int) -> list[int]:
    """Processes that a process started, in order."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    """Whether a process runs: a zombie, which only waits to be asked for its status, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
