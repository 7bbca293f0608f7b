"""How long a test waits for a thread, a process or a socket that does its work: only a failure takes that long.

The suite shares its processors with itself and with others, so a thread may wait for seconds to be scheduled.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 60


def wait_until(is_so: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for something that another thread or process does."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"nothing came of it in {seconds} s"
        time.sleep(0.005)
