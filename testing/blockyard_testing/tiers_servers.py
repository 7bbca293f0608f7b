"""Real servers for tiers, on loopback, ended by whoever started them: Debian's redis-server, moto's S3, Mooncake."""

from __future__ import annotations

import ctypes.util
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

from .patience import PATIENCE_SECONDS
from .places import child_environment

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


def missing_for_mooncake() -> str:
    """Why there can be no Mooncake Store here; nothing where there can be one."""
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake is not installed (make interop-tiers)"
    for library in ("ibverbs", "rdmacm", "numa"):
        if ctypes.util.find_library(library) is None:
            return f"lib{library} is not installed (Debian: apt-get install lib{library}1)"
    return ""


class Server:
    """A server of a process of its own, which may be killed and started again; it has no files then."""

    process: subprocess.Popen[bytes]

    def start(self) -> None:
        """Start the process, and wait until it answers."""
        raise NotImplementedError

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_SECONDS)


class RedisServer(Server):
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


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options)
    try:
        yield server
    finally:
        server.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PeerPlace(Server):
    """A process that serves a folder to peers; the folder stays when it is killed."""

    def __init__(self, folder: Path, budget: str) -> None:
        self.folder, self.budget, self.address = folder, budget, f"127.0.0.1:{free_port()}"
        self.url = f"peer:{self.address}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "blockyard", "tier", "serve", f"file:{self.folder},bytes={self.budget}"]
        self.process = subprocess.Popen(
            [*command, self.address], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=child_environment()
        )
        assert self.process.stdout is not None
        with self.process.stdout as told:
            assert b"is served" in told.readline()


class MooncakeServer(Server):
    """A master of a Mooncake Store, and a process that lends it memory, without which nothing can be stored."""

    def __init__(self) -> None:
        self.port, self.admin_port = free_port(), free_port()
        self.url = f"mooncake://127.0.0.1:{self.port}"
        self.lenders: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the master; those who lent it memory come back by themselves."""
        import mooncake

        command = [str(Path(mooncake.__file__).parent / "mooncake_master"), "--rpc_thread_num=2"]
        command += ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", "--enable_metric_reporting=false"]
        command += [f"--rpc_port={self.port}", f"--metrics_port={self.admin_port}"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.wait_for(len(self.lenders))

    def lend(self, num_bytes: int) -> None:
        program = "import sys, time; from blockyard_tiers import MooncakeTier\n"
        program += "tier = MooncakeTier(sys.argv[1], int(sys.argv[2])); time.sleep(1e6)"
        command = [sys.executable, "-c", program, self.url, str(num_bytes)]
        quiet = subprocess.DEVNULL
        self.lenders.append(subprocess.Popen(command, stdout=quiet, stderr=quiet, env=child_environment()))
        self.wait_for(len(self.lenders))

    def wait_for(self, num_lenders: int) -> None:
        """Wait until the master knows so many that lend."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            assert time.monotonic() < deadline, "Mooncake's master does not know who lends"
            assert all(each.poll() is None for each in self.lenders), "who lends to Mooncake has ended"
            try:
                url = f"http://127.0.0.1:{self.admin_port}/get_all_segments"
                with urllib.request.urlopen(url, timeout=10) as answer:
                    if len(answer.read().split()) >= num_lenders:
                        return
            except OSError:
                pass
            time.sleep(0.02)

    def end(self) -> None:
        for process in (self.process, *self.lenders):
            process.kill()
            process.wait(PATIENCE_SECONDS)


@contextmanager
def peer_place(folder: Path, budget: str = "2MB") -> Iterator[PeerPlace]:
    server = PeerPlace(folder, budget)
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def mooncake_server(lent_bytes: int = 2**26) -> Iterator[MooncakeServer]:
    server = MooncakeServer()
    try:
        server.start()
        if lent_bytes:
            server.lend(lent_bytes)
        yield server
    finally:
        server.end()


@contextmanager
def s3_server(**environment: str) -> Iterator[dict[str, str]]:
    """moto's server with a bucket; what obstore needs to know of it."""
    port = free_port()
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
