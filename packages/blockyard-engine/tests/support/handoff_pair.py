"""A sender and a receiver of hand-overs in one process."""

from __future__ import annotations

from typing import Any

from blockyard import KVCacheManager
from blockyard.config import cache_config
from blockyard_engine.parallel import HandoffReceiver, HandoffSender, HeadShards, Offer, PeerInfo

PROMPT = list(range(37))
MODEL = {"dtype": "float32", "num_layers": 2, "head_size": 4, "shards": HeadShards.even(2)}


def side(name: str = "prefill", incarnation: int = 1, config: dict[str, Any] | None = None, **fields: Any) -> Any:
    made = cache_config(**{"num_blocks": 40, "block_size": 4, "max_num_seqs": 8, "watermark": 0.0, **(config or {})})
    if made.layer_groups[1:]:  # a layer for each group
        fields = {"layer_groups": ((0,), (1,)), **fields}
    return KVCacheManager(made), PeerInfo.of(made, name, incarnation, **{**MODEL, **fields})


class Pair:
    """A sender and a receiver, and a prompt computed at the sender."""

    def __init__(self, to_config: dict[str, Any] | None = None, **from_config: Any) -> None:
        self.prefill, peer = side(config=from_config)
        self.sender = HandoffSender(self.prefill, peer, ttl=10)
        self.decode, own = side("decode", config=to_config)
        self.receiver = HandoffReceiver(self.decode, own, ttl=10)
        self.receiver.connect(peer)

    def compute(self, tokens: list[int] = PROMPT, extra_keys: tuple[Any, ...] = ()) -> int:
        seq = self.prefill.allocate(tokens, holder="request", extra_keys=extra_keys)
        self.prefill.reserve([seq])
        self.prefill.commit([seq], len(tokens) - self.prefill.num_computed_tokens(seq), [7])
        return int(seq)

    def offer(self, now: float = 0, tokens: list[int] = PROMPT) -> Offer:
        seq = self.compute(tokens)
        offer = self.sender.offer(seq, now)
        self.prefill.free(seq)
        return offer

    def check(self) -> None:
        for part in (self.prefill, self.decode, self.sender, self.receiver):
            part.check()

    def require_empty(self) -> None:
        self.check()
        assert (self.sender.num_offers, self.receiver.num_transfers) == (0, 0)
        assert self.prefill.leak_report() == self.decode.leak_report() == []
