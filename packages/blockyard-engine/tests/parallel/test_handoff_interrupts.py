"""Ctrl-C at every line of every call of a hand-over: after a close, no block is held."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import Admission, BlockPool, CacheConfig, KVCacheManager, LayerGroup, StateSpec
from blockyard_engine.parallel import (
    HandoffReceiver,
    HandoffSender,
    HeadShards,
    MultiBlockPool,
    PeerInfo,
    Transfer,
)
from blockyard_testing.interrupter import Interrupter

PROMPT = list(range(30))


class Two:
    """A sender and a receiver with a computed prompt, and the calls of a hand-over one by one."""

    def __init__(self, has_states: bool = False, is_warm: bool = False) -> None:
        groups = (LayerGroup(4, token_bytes=8), StateSpec(state_bytes=50, checkpoint_every=4)) if has_states else ()
        config = CacheConfig(num_blocks=40, block_size=4, max_num_seqs=6, watermark=0.0, groups=groups)
        self.prefill, self.decode = KVCacheManager(config), KVCacheManager(config)
        shape: dict[str, Any] = {"dtype": "float32", "num_layers": 1, "head_size": 2, "shards": HeadShards.even(1)}
        peers = [PeerInfo.of(config, name, 1, **shape) for name in ("prefill", "decode")]
        self.sender = HandoffSender(self.prefill, peers[0], 5)
        self.receiver = HandoffReceiver(self.decode, peers[1], 5, lambda plan: None)
        self.receiver.connect(peers[0])
        self.seq = self.compute(self.prefill, PROMPT)
        if is_warm:  # it has keys and values of 28 tokens, and no state that the prompt can go on from
            self.decode.free(self.compute(self.decode, PROMPT + [9] * 8))
        self.got: list[int] = []
        self.transfer: Transfer | Admission = Admission.LATER

    def compute(self, cache: KVCacheManager, prompt: list[int]) -> int:
        seq = cache.allocate(prompt)
        while (left := len(prompt) - int(cache.num_computed_tokens(seq))) > 0:
            count = int(cache.reserve([seq]).num_scheduled[0])
            cache.commit([seq], count, [1] if count == left else None)
        return seq

    def offer(self) -> None:
        self.made = self.sender.offer(self.seq, 0)

    def take_over(self) -> None:
        self.made = self.sender.take_over(self.seq, 0)

    def accept(self) -> None:
        self.transfer = self.receiver.accept(self.made, 0)

    def finish(self) -> None:
        assert isinstance(self.transfer, Transfer)
        self.got.append(self.receiver.finish(self.transfer, 1))

    def drop_checkpoint(self) -> None:
        assert isinstance(self.transfer, Transfer)
        assert self.transfer.checkpoint_tokens == 28
        self.receiver.drop_checkpoint(self.transfer)

    def abort(self) -> None:
        assert isinstance(self.transfer, Transfer)
        self.receiver.abort(self.transfer)

    def release(self) -> None:
        self.sender.release(self.made.id)

    def expire(self) -> None:
        self.sender.expire(9)
        self.receiver.expire(9)

    def end(self) -> None:
        """Close both, and free the caller's sequences: those in no offer and no transfer."""
        self.sender.close()
        self.receiver.close()
        for cache in (self.prefill, self.decode):
            mine = [seq for seq in (self.seq, *self.got) if seq in cache.running()]
            cache.free(mine)
            cache.check()
        self.sender.check()
        self.receiver.check()


@pytest.mark.parametrize(
    "way",
    [
        ("offer",),
        ("take_over",),
        ("offer", "accept"),
        ("offer", "accept", "abort"),
        ("offer", "release"),
        ("offer", "accept", "expire"),
        ("offer", "accept", "finish"),
        ("offer", "accept", "drop_checkpoint"),
    ],
    ids="-".join,
)
@pytest.mark.parametrize("kind", ["plain", "states", "states, warm"])
def test_an_interrupt_at_any_line_leaves_nothing_held(way: tuple[str, ...], kind: str) -> None:
    has_states, is_warm = kind != "plain", kind == "states, warm"
    if "drop_checkpoint" in way and not has_states:
        return
    line, reached = 0, True
    while reached:
        line += 1
        two = Two(has_states, is_warm)
        for name in way[:-1]:
            getattr(two, name)()
        if isinstance(two.transfer, Transfer):
            assert (two.transfer.start, two.transfer.checkpoint_tokens) == (28 * is_warm, 28 * has_states)
        reached = Interrupter("blockyard_engine/parallel", line).run(getattr(two, way[-1]))
        if reached and way[-1] == "finish":
            assert two.got == []
        two.end()
        assert two.prefill.leak_report() == two.decode.leak_report() == [], line
    assert line > 4


@pytest.mark.parametrize("call", ["get_new_blocks", "extend", "free_blocks"])
def test_an_interrupt_at_any_line_of_a_request_over_pools(call: str) -> None:
    line, reached = 0, True
    while reached:
        line += 1
        pool = MultiBlockPool([BlockPool(10, 4) for _ in range(3)])
        lease = pool.get_new_blocks(5)
        ask = {
            "get_new_blocks": lambda pool=pool: pool.get_new_blocks(6),
            "extend": lambda pool=pool, lease=lease: pool.extend(lease, 6),
            "free_blocks": lambda pool=pool, lease=lease: pool.free_blocks(lease),
        }[call]
        reached = Interrupter("blockyard_engine/parallel", line).run(ask)
        pool.check()
        for each in pool.leases():
            pool.free_blocks(each)
        assert [inner for each in pool.pools for inner in each.leases()] == [], line
    assert line > 5
