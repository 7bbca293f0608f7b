"""Random caches published to Dynamo's indexer, over a network that loses messages; run in a network namespace.

    unshare --net python -m tests.interop.dynamo_judge DYNAMO_PYTHON --seed N --rounds N

The indexer's HTTP server listens on all interfaces, so the program wants a namespace with none but loopback. It prints
a JSON object: how often what the indexer says was compared with the cache, how long it took to be right again
at most, and each difference that stayed.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from typing import Any

from blockyard import CacheConfig, KVCacheManager
from blockyard.events import KVEventPublisher

from ..support.told import contents_of

BLOCK_SIZE = 4
PORT = 8090
MODEL = "model"
HEARTBEAT = 0.1
#: Seconds: the indexer connects again, and asks for replays, at a pace of its own.
PATIENCE = 20.0


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read() or b"null")


def wait_for_indexer() -> None:
    for _ in range(200):
        try:
            ask("/workers")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
    raise SystemExit("the indexer did not start")


class Judged:
    """A cache and its publisher, which loses some of its messages, and prompts that begin alike."""

    def __init__(self, seed: int, replayed: int) -> None:
        self.draw = random.Random(seed)
        self.replayed = replayed
        self.counts: Counter[str] = Counter()
        self.prompts: list[list[int]] = []
        self.loss = 0.0
        #: Seconds until the indexer was right again, at most.
        self.longest = 0.0
        self.start()

    def start(self) -> None:
        """A cache, empty, under the same endpoint: what a restart of the engine is."""
        config = CacheConfig(40, BLOCK_SIZE, max_model_len=64, watermark=0.0, enable_kv_cache_events=True)
        self.cache = KVCacheManager(config)
        self.publisher = KVEventPublisher(
            self.cache,
            "tcp://127.0.0.1:5557",
            heartbeat=HEARTBEAT,
            replayed=self.replayed,
            data_parallel_rank=0,
        )
        send = self.publisher._send

        def lossy(message: tuple[int, bytes]) -> None:
            if self.draw.random() < self.loss:
                self.counts["lost"] += 1
            else:
                send(message)

        self.publisher._send = lossy  # type: ignore[method-assign]

    def restart(self) -> None:
        self.publisher.close()
        self.counts["restarts"] += 1
        self.start()

    def steps(self, number: int) -> None:
        """Prompts that go on from earlier ones, computed and freed; a reset now and then."""
        for _ in range(number):
            earlier = self.draw.choice(self.prompts) if self.prompts and self.draw.random() < 0.8 else []
            prompt = earlier[: self.draw.randint(0, len(earlier))]
            prompt = (prompt + [self.draw.randint(1, 4) for _ in range(self.draw.randint(1, 24))])[:64]
            self.prompts = [*self.prompts[-60:], prompt]
            seq = self.cache.allocate(prompt)
            missing = len(prompt) - self.cache.num_computed_tokens(seq)
            self.cache.reserve([seq], missing)
            self.cache.commit([seq], missing)
            self.cache.free(seq)
            if self.draw.random() < 0.01:
                self.cache.reset_prefix_cache()
            self.publisher.publish()
            self.counts["steps"] += 1
            time.sleep(0.001)

    def differences(self) -> list[str]:
        """What the indexer says otherwise than the cache, after heartbeats; none if it comes round in time."""
        self.loss = 0.0
        begin = time.monotonic()
        while True:
            found = [line for prompt in self.prompts if (line := self.difference(prompt))]
            waited = time.monotonic() - begin
            if not found or waited > PATIENCE:
                self.longest = max(self.longest, waited)
                self.counts["compared"] += len(self.prompts)
                return found
            time.sleep(HEARTBEAT)

    def difference(self, prompt: list[int]) -> str:
        scores = ask("/query", {"token_ids": prompt, "model_name": MODEL})["scores"]
        told = scores.get("1", {}).get("0", 0)
        return "" if told == self.cached(prompt) else f"{prompt}: {told} tokens, the cache has {self.cached(prompt)}"

    def cached(self, prompt: list[int]) -> int:
        index = self.cache._parts.token_blocks.index
        names = {block: name for name, block in contents_of(index, BLOCK_SIZE).items()}
        name = index.known_root(())
        for start in range(0, len(prompt) - BLOCK_SIZE + 1, BLOCK_SIZE):
            name = names.get((name, tuple(prompt[start : start + BLOCK_SIZE])), 0)
            if not name:
                return start
        return len(prompt) // BLOCK_SIZE * BLOCK_SIZE


def judge(seed: int, rounds: int) -> dict[str, Any]:
    """Late start, gaps within the kept messages and beyond them, restarts, in random order."""
    draw = random.Random(seed)
    judged = Judged(seed, replayed=draw.choice((3, 1000)))
    judged.steps(30)
    body = {"instance_id": 1, "model_name": MODEL, "block_size": BLOCK_SIZE, "dp_rank": 0}
    ask("/register", body | {"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558"})
    wrong = judged.differences()
    for _ in range(rounds):
        judged.loss = draw.choice((0.0, 0.1, 0.5, 1.0))
        judged.steps(draw.randint(1, 60))
        if draw.random() < 0.3:
            judged.restart()
            judged.steps(draw.randint(0, 20))
        wrong += judged.differences()
    judged.publisher.close()
    return {"counts": dict(judged.counts), "longest": round(judged.longest, 1), "wrong": wrong[:5]}


def main() -> None:
    """Run the indexer and judge."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("dynamo_python")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    command = [options.dynamo_python, "-m", "dynamo.indexer", "--port", str(PORT), "--threads", "1"]
    indexer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_indexer()
        print(json.dumps(judge(options.seed, options.rounds)))
    finally:
        indexer.terminate()
        indexer.wait(10)


if __name__ == "__main__":
    main()
