"""Blockyard's tiers below vLLM's CPU memory, by configuration alone.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
            "secondary_tiers": [{"type": "BlockyardTier", "module_path": "blockyard_vllm.tier",
                                 "place": "file:/var/kv,bytes=50GiB"}]}}'

Each chunk is an object: vLLM loads exactly the stored bytes, or gets a miss. For `SecondaryTierManager` of vLLM 0.32.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from blockyard import InvalidArgument
from blockyard.engine_versions import VLLM
from blockyard.signatures import engine_imports
from blockyard_tiers import BatchResult, TierAdapter

with engine_imports(VLLM, __name__):
    from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, RequestOffloadingContext
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager


class BlockyardTier(SecondaryTierManager):
    """A tier with vLLM's interface. Only `drain_jobs` and `shutdown` block.

    Args:
        offloading_spec: vLLM's description of the chunks.
        primary_kv_view: vLLM's CPU memory.
        tier_type: vLLM's name for the tier.
        place: the backend, as in `serve --tier` but without write=.
        fingerprint: of the weights; needed if they can change under the same model name.
        locality: LOCAL or REMOTE, for vLLM.
        backpressure_detector: vLLM's own.

    Raises:
        InvalidArgument: for an invalid value.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        place: str = "",
        fingerprint: str = "",
        locality: str | None = None,
        backpressure_detector: Any = None,
    ) -> None:
        if not isinstance(place, str) or not place:
            raise InvalidArgument(f"place is {place!r}; it must name a backend, like file:/var/kv,bytes=50GiB")
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        self._chunks = np.asarray(primary_kv_view).view(np.uint8)
        self._adapter = TierAdapter(
            place, fingerprint=fingerprint, chunk_bytes=self._chunks.shape[1], **_layout_fields(offloading_spec)
        )
        self._jobs: dict[int, Any] = {}
        #: Keys that a request failed to load; they are not reported as hits again.
        self._missed: dict[str, set[bytes]] = {}

    def on_new_request(self, req_context: Any) -> Any:
        """Return a default context: chunks are stored when vLLM passes them."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget the misses of this request."""
        self._missed.pop(req_context.req_id, None)

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Return whether a chunk is there as far as known; RETRY until the backend has answered."""
        if key in self._missed.get(req_context.req_id, ()):
            return LookupResult.MISS
        known = self._adapter.longest_prefix([key])
        if known.num_found:
            return LookupResult.HIT
        return LookupResult.MISS if known.is_final else LookupResult.RETRY

    def submit_store(self, job_metadata: Any) -> None:
        """Start storing chunks, all or none."""
        self._begin(job_metadata, False)

    def submit_load(self, job_metadata: Any) -> None:
        """Start loading chunks; each valid one counts."""
        self._begin(job_metadata, True)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Return the results of the jobs that ended since the last call."""
        return [self._result(result) for result in self._adapter.take_results()]

    def drain_jobs(self) -> None:
        """Wait until no job runs.

        vLLM calls this when weights may change, so nothing stored before is found afterwards.
        """
        while self._adapter.num_running():
            time.sleep(0.0005)
        self._adapter.change_layout()

    def shutdown(self) -> None:
        """Stop the tier's threads and release vLLM's memory."""
        self._adapter.close()
        self._chunks = np.empty((0, 0), np.uint8)

    def _begin(self, job: Any, is_load: bool) -> None:
        chunks = [memoryview(self._chunks[int(number)]) for number in job.chunk_ids]
        self._jobs[self._adapter.submit(is_load, list(job.keys), chunks)] = job

    def _result(self, result: BatchResult) -> Any:
        job = self._jobs.pop(result.ticket)
        keys = list(job.keys)
        good = [key for key, is_good in zip(keys, result.good, strict=True) if is_good]
        if job.is_promotion and len(good) < len(keys):
            self._missed.setdefault(job.req_context.req_id, set()).update(set(keys).difference(good))
        whole = len(good) == len(keys)
        partial = tuple(good) if job.is_promotion and good and not whole else None
        return JobResult(job.job_id, whole, partial, result.seconds, result.num_bytes)


def _layout_fields(spec: Any) -> dict[str, Any]:
    """Return everything that determines the bytes of a chunk. Objects that differ in any field are never mixed up."""
    config = spec.config
    parallel = config.parallel
    return {
        "engine": "vllm",
        "model": config.model.name,
        "dtype": str(config.model.dtype),
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "groups": [[group.group_id, group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "bytes_per_block": config.worker_kv_bytes_per_block,
        "parallel": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size, parallel.rank],
        "bytes_layout": [config.replicated_layout, config.canonical_layout, config.kv_cache_layout],
    }
