"""A server of one's own for a benchmark: `blockyard serve` in a process, on loopback, ended by its id."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_START_SECONDS = 600
_STOP_SECONDS = 120


class ServerProcess:
    """Where it listens, its model's name, and what it says of itself."""

    def __init__(self, address: str, model: str) -> None:
        self.address = address
        self.model = model

    def check(self) -> dict[str, Any]:
        """GET /check."""
        found: dict[str, Any] = json.loads(self._get("/check"))
        return found

    def figures(self) -> dict[str, float]:
        """The samples of GET /metrics without buckets, by name."""
        samples = {}
        for line in self._get("/metrics").decode().splitlines():
            found = re.match(r'([\w:]+)\{engine="0",model_name="[^"]*"\} (\S+)$', line)
            if found:
                samples[found[1]] = float(found[2])
        return samples

    def wait_until_idle(self, seconds: float) -> dict[str, Any]:
        """What GET /check says when nothing runs any more, or when the time is over."""
        until = time.monotonic() + seconds
        answer = self.check()
        while answer.get("has_unfinished") and time.monotonic() < until:
            time.sleep(0.1)
            answer = self.check()
        return answer

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.address + path, timeout=60) as answer:
            content: bytes = answer.read()
        return content


@contextmanager
def server_process(options: Sequence[str]) -> Iterator[ServerProcess]:
    """Start `blockyard serve` with these options for as long as the block lasts."""
    command = [sys.executable, "-m", "blockyard.cli.main", "serve", "--port", "0", "--check-endpoint", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    killer = threading.Timer(_START_SECONDS, process.kill)
    killer.start()
    try:
        assert process.stdout is not None
        found = re.match(r"blockyard serves (.+) at (http://\S+)/v1", process.stdout.readline())
        killer.cancel()
        if found is None:
            raise RuntimeError("the server did not start")
        yield ServerProcess(found[2], found[1])
    finally:
        killer.cancel()
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
