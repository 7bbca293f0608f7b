"""`blockyard fleet serve` for tests: a process of its own with a tiny model, on loopback, ended by who started it."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import psutil

from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.places import child_environment

MODEL = "tiny"


class RunningFleet:
    """A fleet that runs, and what tests ask of it."""

    def __init__(self, command: subprocess.Popen[str], address: str) -> None:
        self.command = command
        self.process = psutil.Process(command.pid)
        self.address = address
        parts = urlsplit(address)
        self._host, self._port = str(parts.hostname), int(parts.port or 0)

    def client(self) -> openai.OpenAI:
        """OpenAI's own client, which does not try again by itself."""
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=PATIENCE_SECONDS)

    def call(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """One request by hand: status, headers in lower case, body."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=PATIENCE_SECONDS)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def post(self, path: str, **fields: Any) -> tuple[int, dict[str, str], dict[str, Any]]:
        """POST fields as JSON; status, headers and the JSON that comes back."""
        status, headers, body = self.call("POST", path, json.dumps({"model": MODEL, **fields}).encode())
        return status, headers, json.loads(body)

    def get(self, path: str) -> dict[str, Any]:
        """The JSON of a path."""
        found: dict[str, Any] = json.loads(self.call("GET", path)[2])
        return found

    def check(self) -> dict[str, Any]:
        """What GET /check says, whatever it says."""
        return self.get("/check")

    def page(self) -> str:
        """What GET /metrics says."""
        return self.call("GET", "/metrics")[2].decode()

    def folder(self) -> Path:
        """Where Ray keeps its files: one of the arguments of the process that clears away."""
        arguments = next(
            each.cmdline() for each in self.process.children() if "leftovers.py" in " ".join(each.cmdline())
        )
        return Path(arguments[-2])

    def wait(self) -> int:
        """Wait for the command's end; its status."""
        return self.command.wait(PATIENCE_SECONDS)


@contextmanager
def running_fleet(folder: Path, *options: str) -> Iterator[RunningFleet]:
    """Start the command with two replicas of a thread each; end it with SIGTERM, if the test did not."""
    arguments = ["fleet", "serve", str(folder), "--port", "0", "--threads", "1", *options]
    environment = child_environment()
    with subprocess.Popen(
        [sys.executable, "-m", "blockyard", *arguments], stdout=subprocess.PIPE, text=True, env=environment
    ) as command:
        try:
            assert command.stdout is not None
            line = command.stdout.readline()
            assert " at http" in line, line
            yield RunningFleet(command, line.split()[-1].removesuffix("/v1"))
        finally:
            command.terminate()
            try:
                command.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    command.kill()
