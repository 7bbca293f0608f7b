"""NIXL (NVIDIA Inference Xfer Library): one-sided reads of the sender's memory by UCX (shared memory, TCP, RDMA).

Needs the package `nixl` with its wheel for a CUDA version, and torch. Tested between CPU memories.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import time
from typing import Any

from blockyard.arguments import require_number, require_str
from blockyard.errors import HandoffError, InvalidArgument, MissingExtra
from blockyard.storage import KVCache

from .one_sided import MemoryShape, OneSided, byte_runs
from .runs import TransferPlan

try:
    _api: Any = importlib.import_module("nixl._api")
except ImportError as error:
    raise MissingExtra("blockyard_engine.parallel.nixl needs NIXL: pip install nixl") from error

_PAUSE = 5e-5


class NixlMemory(OneSided):
    """Tensors of one rank as NIXL memory; both ends of a link take it as their transport.

    `close` deregisters the memory.

    Args:
        kv_cache: the tensors.
        name: name of the NIXL agent, unique among those that communicate.
        timeout: seconds that a read may take.
        backend: NIXL's backend.
    """

    def __init__(self, kv_cache: KVCache, name: str, timeout: float = 30.0, backend: str = "UCX") -> None:
        self._shape = MemoryShape.of(kv_cache)
        self._timeout = require_number("timeout", timeout)
        self._agent: Any = _api.nixl_agent(require_str("name", name), _api.nixl_agent_config(backends=[backend]))
        places = kv_cache.places
        groups = [places.group(layer) for layer in range(kv_cache.num_layers)]
        self._num_layers = [groups.count(group) for group in range(places.num_groups)]
        self._is_cuda = kv_cache.device.type == "cuda"
        self._memory = "VRAM" if self._is_cuda else "DRAM"
        self._device = kv_cache.device.index or 0
        size = kv_cache.data.numel() * kv_cache.data.element_size()
        self._registered = self._agent.register_memory([(self._shape.base, size, self._device, "")], self._memory)
        self._peer: tuple[str, MemoryShape, int, str] | None = None

    def describe(self) -> bytes:
        """Return the shape of this memory and the agent's metadata, for the receiver's `connect`."""
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return self._shape.to_bytes(f"{self._memory} {self._device} {metadata}")

    def connect(self, message: object) -> None:
        """Connect to the sender's memory by the result of its `describe`. Raises `InvalidArgument`."""
        shape, access = MemoryShape.from_bytes(message)
        try:
            memory, device, metadata = access.split(" ")
            name = self._agent.add_remote_agent(base64.b64decode(metadata, validate=True))
            self._peer = (name.decode() if isinstance(name, bytes) else name, shape, int(device), memory)
        except (ValueError, binascii.Error) as error:
            raise InvalidArgument(f"message has no valid NIXL agent: {error}") from None

    def read(self, plan: TransferPlan) -> None:
        """Read all runs in one NIXL transfer. O(runs * layers)."""
        if self._peer is None:
            raise HandoffError("no memory is connected; call connect with the sender's describe() first")
        name, shape, device, memory = self._peer
        runs = byte_runs(plan, shape, self._shape, self._num_layers).tolist()
        if not runs:
            return
        agent = self._agent
        here = agent.get_xfer_descs([(new, size, self._device) for _, new, size in runs], self._memory)
        there = agent.get_xfer_descs([(old, size, device) for old, _, size in runs], memory)
        handle = agent.initialize_xfer("READ", here, there, name, b"")
        try:
            self._wait(handle)
        finally:
            agent.release_xfer_handle(handle)

    def _wait(self, handle: Any) -> None:
        deadline = time.monotonic() + self._timeout
        state = self._agent.transfer(handle)
        while state not in ("DONE", "ERR"):
            if time.monotonic() > deadline:
                raise HandoffError(f"the read took longer than {self._timeout:g} s")
            time.sleep(_PAUSE)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise HandoffError("the read failed; the other side may be gone")

    def close(self) -> None:
        """Disconnect from the other side and deregister the memory. A second call does nothing."""
        if self._peer is not None:
            self._agent.remove_remote_agent(self._peer[0])
            self._peer = None
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
            self._registered = None
