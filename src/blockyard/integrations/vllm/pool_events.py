"""KV events by Blockyard's own publisher, beside vLLM's or in its place: snapshots for late consumers, heartbeats."""

from __future__ import annotations

from vllm.logger import init_logger

from ... import BlockPool
from ...events import KVEventPublisher, PublisherError

# Below the one logger that vLLM gives handlers to.
logger = init_logger(f"vllm.{__name__}")


class PoolEvents:
    """Publishes what the pool of one scheduler holds.

    endpoint: of the first data-parallel rank; the others have addresses of their own (`address_of`).
    Raises `PublisherError` and `InvalidArgument` for an address that is bad or in use.
    """

    def __init__(self, pool: BlockPool, endpoint: str, rank: int) -> None:
        self.publisher = KVEventPublisher(pool, address_of(endpoint, rank), data_parallel_rank=rank)
        logger.info(
            "blockyard: KV events of the pool on %s, replays on %s",
            self.publisher.endpoint,
            self.publisher.replay_endpoint,
        )

    def publish(self) -> None:
        """Tell what happened. A publisher that has failed is said so once, and the engine serves on."""
        try:
            self.publisher.publish()
        except PublisherError:
            logger.exception("blockyard: KV events of the pool are published no more")

    def close(self) -> None:
        """Send what is left. A second call does nothing."""
        self.publisher.close()


def address_of(endpoint: str, rank: int) -> str:
    """Where a data-parallel rank publishes: two TCP ports each, the second for replays; of a path a name of its own."""
    base, colon, port = endpoint.rpartition(":")
    if rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    return f"{base}{colon}{int(port) + 2 * rank}" if port.isdecimal() and int(port) else endpoint
