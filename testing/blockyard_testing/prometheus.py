"""A real Prometheus for a test, where Debian's is installed: on loopback, ended by the test that started it."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

_PATIENCE_SECONDS = 60


class Prometheus:
    """One that runs."""

    def __init__(self, port: int) -> None:
        self._port = port

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now. It is a valid one."""
        status, answer = self.get(f"/api/v1/query?query={quote(expression)}")
        assert status == 200, (expression, answer)
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def wait_for(self, expression: str) -> None:
        """Wait until an expression has a sample."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self.query(expression):
            assert time.monotonic() < deadline, expression
            time.sleep(0.2)

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON of a path; 0 while it does not listen."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_PATIENCE_SECONDS)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
            return answer.status, json.loads(body) if body[:1] == b"{" else body.decode()
        except OSError:
            return 0, None
        finally:
            connection.close()


@contextmanager
def scraping(addresses: list[str], rules: Path, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes addresses ("host:port") four times a second, and evaluates rules."""
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 250ms, evaluation_interval: 1s}}\n"
        f"rule_files: ['{rules}']\n"
        f"scrape_configs: [{{job_name: blockyard, static_configs: [{{targets: {addresses}}}]}}]\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        prometheus, deadline = Prometheus(port), time.monotonic() + _PATIENCE_SECONDS
        while prometheus.get("/-/ready")[0] != 200:
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        yield prometheus
    finally:
        process.terminate()
        process.wait(_PATIENCE_SECONDS)


def is_installed() -> bool:
    """Whether `prometheus` and `promtool` are there."""
    return shutil.which("prometheus") is not None and shutil.which("promtool") is not None


#: Its remarks on names that are vLLM's, not ours: colons, and units.
_STYLE = re.compile(
    r"metric names should not contain ':'|no help text|should( not)? have \"_total\" suffix|use base unit"
)


def check_metrics(page: str) -> None:
    """A page of metrics parses, and `promtool` has nothing to say but of style. Nothing happens without it."""
    if shutil.which("promtool") is None:
        return
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=60)
    remarks = [line for line in done.stderr.splitlines() if line and not _STYLE.search(line)]
    assert remarks == [], remarks


def check_rules(path: Path) -> str:
    """What `promtool` says of a file of rules; it has no error."""
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
