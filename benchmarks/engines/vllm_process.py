"""vLLM, in a process and an environment of its own, which waits between its rounds."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from .contestant import Answer, Contestant
from .work import Size, Work

WORKER = Path(__file__).with_name("vllm_worker.py")
#: Two GiB of keys and values, no second process for the engine's core, no word but errors, and no network.
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_CLOSE_SECONDS = 60


class LeftOut(Exception):
    """A contestant that cannot take part, and why."""


class VLLM(Contestant):
    """Started once; raises `LeftOut` if it does not come up, as where it is not installed."""

    name = "vLLM"

    def __init__(self, python: str, folder: Path, dtype: str, size: Size) -> None:
        # -P: the worker's own folder is no place to import from.
        max_len = size.num_prompt_tokens + size.num_new
        command = [python, "-P", str(WORKER), str(folder), dtype, str(size.num_requests), str(max_len)]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env={**os.environ, **SETTINGS},
            )
        except OSError as error:
            raise LeftOut(str(error))
        self.version = str(self._read()["version"])

    def answer(self, work: Work) -> Answer:
        assert self._process.stdin is not None
        print(json.dumps({"prompts": work.prompts, "num_new": work.num_new}), file=self._process.stdin, flush=True)
        return Answer(**self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> dict[str, Any]:
        """The next line that is ours; other lines are vLLM's."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        self._process.wait()
        raise LeftOut(self._last_words())

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        said = [line for line in lines if "Error" in line]
        return (said or lines)[-1] if lines else f"it ended with status {self._process.returncode}"
