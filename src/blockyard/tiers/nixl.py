"""NIXL's POSIX plug-in moves the bytes of a `FileTier`: the same files, so that a folder may be used by both.

Needs NIXL's wheel, which loads without CUDA: `pip install 'blockyard[nixl]'`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ..errors import MissingExtra
from .file_io import PlainIO

try:
    from nixl._api import nixl_agent, nixl_agent_config
except ImportError as error:
    raise MissingExtra(f"io=nixl of a FileTier needs NIXL: pip install 'blockyard[nixl]' ({error})") from error

_BACKEND = "POSIX"
_log = logging.getLogger(__name__)


class NixlIO(PlainIO):
    """Moves the bytes of an object in one transfer. What NIXL fails at is done by the system's calls, which say why.

    Raises `MissingExtra` where the wheel has no POSIX plug-in.
    """

    def __init__(self) -> None:
        logging.getLogger("nixl").setLevel(logging.WARNING)  # else each agent is announced on stdout
        self._own = threading.local()
        if _BACKEND not in self._agent().backends:
            raise MissingExtra("io=nixl of a FileTier needs NIXL's POSIX plug-in, which this NIXL does not have")

    def _agent(self) -> Any:
        """Returns the agent of this thread: agents are not safe for several."""
        if not hasattr(self._own, "agent"):
            self._own.agent = nixl_agent("blockyard", nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND]))
        return self._own.agent

    def read(self, file: int, parts: Sequence[memoryview], at: int) -> None:
        """Fills the pieces from byte `at` on. See `PlainIO.read`."""
        if not self._is_moved("READ", file, parts, at):
            super().read(file, parts, at)

    def write(self, file: int, pieces: Sequence[bytes | memoryview]) -> None:
        """Writes the pieces. See `PlainIO.write`."""
        if not self._is_moved("WRITE", file, pieces, 0):
            super().write(file, pieces)

    def _is_moved(self, operation: str, file: int, pieces: Sequence[bytes | memoryview], at: int) -> bool:
        agent, memory, places = self._agent(), [], []
        for piece in pieces:
            if len(piece):
                memory.append((np.frombuffer(piece, np.uint8).ctypes.data, len(piece), 0))
                places.append((at, len(piece), file))
                at += len(piece)
        handle, registered = None, []
        try:
            for each, kind in ((memory, "DRAM"), (places, "FILE")):
                registered.append(agent.register_memory([(*one, "") for one in each], kind))
            ends = (agent.get_xfer_descs(memory, "DRAM"), agent.get_xfer_descs(places, "FILE"))
            handle = agent.initialize_xfer(operation, *ends, agent.name)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            return bool(state == "DONE")
        except Exception as error:  # NIXL has a class for each of its errors, and none of them says why
            _log.debug("NIXL: %s", error)
            return False
        finally:
            with suppress(Exception):
                if handle is not None:
                    agent.release_xfer_handle(handle)
                for some in registered:
                    agent.deregister_memory(some)
