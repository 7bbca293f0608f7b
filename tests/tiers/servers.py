"""Real servers for tiers, on loopback, ended by whoever started them: Debian's redis-server, and moto's S3."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..support.patience import PATIENCE_SECONDS

BUCKET = "objects"
KEYS = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}


def missing_for_redis() -> str:
    """Why there can be no Redis here; nothing where there can be one."""
    if shutil.which("redis-server") is None:
        return "redis-server is not installed (Debian: apt-get install redis-server)"
    return "" if importlib.util.find_spec("redis") else "redis is not installed (make interop-tiers)"


def missing_for_buckets(*modules: str) -> str:
    """Why there can be no bucket here; nothing where there can be one. modules: those that are needed, not all."""
    names = modules or ("obstore", "moto", "flask")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed (make interop-tiers)" if missing else ""


class RedisServer:
    """A redis-server on a unix socket, without files of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.socket, self.options = folder / "redis.sock", options
        self.url = f"unix://{self.socket}"
        self.start()

    def start(self) -> None:
        command = ["redis-server", "--port", "0", "--unixsocket", str(self.socket), "--save", "", *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.answers():
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.005)

    def answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket))
                probe.sendall(b"PING\r\n")
                return probe.recv(1) in (b"+", b"-")
            except OSError:
                return False

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_SECONDS)


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options)
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def s3_server(**environment: str) -> Iterator[dict[str, str]]:
    """moto's server with a bucket; what obstore needs to know of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet, env={**os.environ, **environment})
    endpoint = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"), timeout=10).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "moto's server does not answer"  # noqa: PT018
                time.sleep(0.05)
        yield {**KEYS, "endpoint": endpoint}
    finally:
        process.kill()
        process.wait(PATIENCE_SECONDS)
