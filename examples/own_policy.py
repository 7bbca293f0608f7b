"""Your own eviction policy in plain Python, compared with "lru" on a workload that suits it: a repeated scan.

Run it with: python examples/own_policy.py
"""

from blockyard import CacheConfig, KVCacheManager
from blockyard.policies import EvictionPolicy


class YoungestFirst(EvictionPolicy):
    """Evicts the block that became idle last: when prompts repeat in a circle, the oldest is the next one needed."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.idle: dict[int, None] = {}

    def insert(self, block: int, key: int, depth: int) -> None:
        self.idle[block] = None

    def remove(self, block: int) -> None:
        del self.idle[block]

    def evict(self) -> int:
        return self.idle.popitem()[0]

    def clear(self) -> None:
        self.idle.clear()


def hit_rate(policy: object, prompts: list[list[int]]) -> float:
    """Run the prompts one after another and return the share of all prompt tokens that were cached."""
    cache = KVCacheManager(CacheConfig(num_blocks=41, max_num_seqs=1, max_model_len=256, eviction_policy=policy))
    for tokens in prompts:
        seq = cache.allocate(tokens)
        cache.commit([seq], cache.reserve([seq]).num_scheduled)
        cache.free(seq)
    cache.check()
    return cache.stats().hit_rate


def main() -> None:
    # Fifteen documents of four blocks, one after another, again and again; forty blocks hold ten of them.
    documents = [[1000 * number + position for position in range(65)] for number in range(15)]
    rounds = documents * 10
    for policy in ("lru", YoungestFirst, "lfu", "arc"):
        name = policy if isinstance(policy, str) else policy.__name__
        print(f"{name:<14} {hit_rate(policy, rounds):6.1%}")


if __name__ == "__main__":
    main()
