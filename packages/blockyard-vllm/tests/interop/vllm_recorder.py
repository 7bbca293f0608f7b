"""`python vllm_recorder.py SEED`, by an interpreter with vLLM: what its own publisher of KV events sends, as JSON.

Random requests go through vLLM's `KVCacheManager` of one full-attention group, or of two with a sliding window, without
a reset; its `ZmqEventPublisher` sends the events. Printed are the payloads as a consumer gets them, live and by a
replay from 0, and at some points how many leading tokens of prompts the manager says it has. It is what
`tests/events/recorded` was made with.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import torch
import zmq
from vllm import __version__
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

BLOCK_SIZE = 4
WINDOW = 8
NUM_BLOCKS = 24
END_SEQUENCE = (-1).to_bytes(8, "big", signed=True)


class Recorded:
    """A manager whose events go through vLLM's publisher."""

    def __init__(self, seed: int, slides: bool, port: int) -> None:
        self.draw = random.Random(seed)
        shape: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(["layer"], FullAttentionSpec(**shape))]
        if slides:
            groups.append(KVCacheGroupSpec(["sliding layer"], SlidingWindowSpec(**shape, sliding_window=WINDOW)))
        config = KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        self.manager = KVCacheManager(
            config, 200, scheduler_block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE, enable_kv_cache_events=True
        )
        self.hasher = get_request_block_hasher(BLOCK_SIZE, sha256_cbor)
        self.endpoint, self.replay_endpoint = f"ipc://@events-{port}", f"ipc://@replays-{port}"
        self.publisher = ZmqEventPublisher(0, self.endpoint, self.replay_endpoint)
        self.prompts: list[tuple[list[int], str | None]] = []
        self.num_requests = 0

    def request(self, tokens: list[int], salt: str | None) -> Request:
        self.num_requests += 1
        sampling = SamplingParams(max_tokens=1)
        return Request(str(self.num_requests), tokens, sampling, None, cache_salt=salt, block_hasher=self.hasher)

    def step(self) -> bool:
        """One request, begun and ended; whether it had anything to tell."""
        earlier, salt = self.draw.choice(self.prompts) if self.prompts and self.draw.random() < 0.7 else ([], None)
        if not earlier and self.draw.random() < 0.2:
            salt = "tenant"
        tokens = earlier[: self.draw.randint(0, len(earlier))]
        tokens = (tokens + [self.draw.randint(1, 99_000) for _ in range(self.draw.randint(1, 20))])[:40]
        self.prompts = [*self.prompts[-11:], (tokens, salt)]
        request = self.request(tokens, salt)
        hit, num_hit = self.manager.get_computed_blocks(request)[:2]
        assert self.manager.allocate_slots(request, len(tokens) - num_hit, num_hit, hit) is not None
        request.num_computed_tokens = len(tokens)
        self.manager.free(request)
        events = self.manager.take_events()
        if events:
            self.publisher.publish(KVEventBatch(ts=time.time(), events=events))
        return bool(events)

    def truth(self) -> list[list[Any]]:
        """Prompts with their salts, and the leading tokens that the manager would take from its cache.

        A look-up leaves a prompt's last token out, so one more stands behind it.
        """
        return [
            [tokens, salt, int(self.manager.get_computed_blocks(self.request([*tokens, 0], salt))[1])]
            for tokens, salt in self.prompts
        ]


def record(seed: int, slides: bool, num_steps: int = 40) -> dict[str, Any]:
    """The messages and the truth after each tenth step."""
    recorded = Recorded(seed, slides, seed + slides)
    context = zmq.Context.instance()
    live, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    live.connect(recorded.endpoint)
    live.setsockopt(zmq.SUBSCRIBE, b"")
    replay.connect(recorded.replay_endpoint)
    time.sleep(0.5)
    messages, truths = [], []
    for number in range(num_steps):
        if recorded.step():
            _, sequence, payload = live.recv_multipart()
            messages.append([int.from_bytes(sequence, "big"), payload.hex()])
        if number % 10 == 9:
            truths.append([len(messages), recorded.truth()])
    replay.send_multipart([b"", bytes(8)])
    answer = []
    while (frames := replay.recv_multipart())[-2] != END_SEQUENCE:
        answer.append([int.from_bytes(frames[-2], "big"), frames[-1].hex()])
    assert answer == messages
    recorded.publisher.shutdown()
    return {"slides": slides, "messages": messages, "truths": truths}


def main() -> None:
    """Print both streams."""
    init_none_hash(sha256_cbor)
    seed = int(sys.argv[1])
    print(json.dumps({"version": __version__, "streams": [record(seed, slides) for slides in (False, True)]}))


if __name__ == "__main__":
    main()
