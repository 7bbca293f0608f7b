"""Clients of a server that ask in threads of their own while a test does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def asking(ask: Callable[[int, threading.Event], None], num_clients: int, timeout: float) -> Iterator[None]:
    """`ask(number, stop)` in as many threads, until the block is left: then `stop` is set, and each has `timeout` s."""
    stop = threading.Event()
    threads = [threading.Thread(target=ask, args=(number, stop)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout)
