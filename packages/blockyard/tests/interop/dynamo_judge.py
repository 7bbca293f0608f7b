"""Random caches published to Dynamo's indexer, over a network that loses messages; run in a network namespace.

    unshare --net python -m tests.interop.dynamo_judge DYNAMO_PYTHON --seed N --rounds N
    unshare --net python -m tests.interop.dynamo_judge DYNAMO_PYTHON --conversations 60    # over three workers
    unshare --net python -m tests.interop.dynamo_judge DYNAMO_PYTHON --bursts 500

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

from blockyard import CacheConfig, KVCacheManager, ObserveConfig
from blockyard.events import KVEventPublisher
from blockyard_testing.told import contents_of

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
    """A cache and its publisher, which loses some of its messages, and prompts that begin alike.

    number: of the worker, from 0. names: see `KVEventPublisher`.
    """

    def __init__(self, seed: int, replayed: int, number: int = 0, num_blocks: int = 40, names: str = "content") -> None:
        self.draw = random.Random(seed)
        self.replayed = replayed
        self.number = number
        self.num_blocks = num_blocks
        self.names = names
        self.counts: Counter[str] = Counter()
        self.prompts: list[list[int]] = []
        self.loss = 0.0
        #: Seconds until the indexer was right again, at most.
        self.longest = 0.0
        self.start()

    def start(self) -> None:
        """A cache, empty, under the same endpoint: what a restart of the engine is."""
        config = CacheConfig(
            self.num_blocks,
            BLOCK_SIZE,
            max_model_len=64,
            watermark=0.0,
            observe=ObserveConfig(enable_kv_cache_events=True),
        )
        self.cache = KVCacheManager(config)
        self.publisher = KVEventPublisher(
            self.cache,
            f"tcp://127.0.0.1:{5557 + 2 * self.number}",
            names=self.names,
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

    def register(self) -> None:
        """Have the indexer follow it."""
        body = {"instance_id": 1 + self.number, "model_name": MODEL, "block_size": BLOCK_SIZE, "dp_rank": 0}
        endpoints = {"endpoint": self.publisher.endpoint, "replay_endpoint": self.publisher.replay_endpoint}
        ask("/register", body | endpoints)

    def restart(self) -> None:
        self.publisher.close()
        self.counts["restarts"] += 1
        self.start()

    def steps(self, number: int, pause: float = 0.001) -> None:
        """Prompts that go on from earlier ones, computed and freed; a reset now and then."""
        for _ in range(number):
            earlier = self.draw.choice(self.prompts) if self.prompts and self.draw.random() < 0.8 else []
            prompt = earlier[: self.draw.randint(0, len(earlier))]
            prompt = (prompt + [self.draw.randint(1, 4) for _ in range(self.draw.randint(1, 24))])[:64]
            self.prompts = [*self.prompts[-60:], prompt]
            self.compute(prompt)
            if self.draw.random() < 0.01:
                self.cache.reset_prefix_cache()
            self.publisher.publish()
            self.counts["steps"] += 1
            time.sleep(pause)

    def compute(self, prompt: list[int]) -> None:
        """One request, begun and ended."""
        seq = self.cache.allocate(prompt)
        missing = len(prompt) - self.cache.num_computed_tokens(seq)
        self.cache.reserve([seq], missing)
        self.cache.commit([seq], missing)
        self.cache.free(seq)

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
        told = scores.get(str(1 + self.number), {}).get("0", 0)
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
    judged.register()
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


def judge_conversations(seed: int, number: int, names: str) -> dict[str, Any]:
    """Conversations over three workers, on three system prompts: each of their turns goes to any worker."""
    draw = random.Random(seed)
    workers = [Judged(seed + one, 1000, one, 4000, names) for one in range(3)]
    for worker in workers:
        worker.register()
    systems = [[draw.randint(1, 1000) for _ in range(4 * BLOCK_SIZE)] for _ in range(3)]
    prompts = []
    for _ in range(number):
        prompt = list(draw.choice(systems))
        for _ in range(draw.randint(1, 3)):
            prompt = prompt + [draw.randint(1, 1000) for _ in range(2 * BLOCK_SIZE)]
            worker = draw.choice(workers)
            worker.compute(prompt)
            worker.publisher.publish()
        prompts.append(prompt)
    wrong = []
    for worker in workers:
        worker.prompts = prompts
        wrong += worker.differences()
        worker.publisher.close()
    longest = round(max(worker.longest for worker in workers), 1)
    num_wrong = len({line.partition(":")[0] for line in wrong})
    return {"counts": {"conversations": number, "wrong": num_wrong}, "longest": longest, "wrong": wrong[:5]}


def judge_bursts(seed: int, number: int) -> dict[str, Any]:
    """Many steps without a pause, and then none: what an engine does before it is idle. Looked at after a heartbeat."""
    judged = Judged(seed, replayed=1000)
    judged.register()
    wrong = judged.differences()
    for _ in range(number):
        judged.steps(judged.draw.randint(65, 400), 0.0)
        judged.counts["bursts"] += 1
        beats = judged.publisher.stats().num_heartbeats
        while judged.publisher.stats().num_heartbeats == beats:
            time.sleep(HEARTBEAT / 10)
        time.sleep(HEARTBEAT)  # for the indexer to take it in
        judged.counts["wrong after a heartbeat"] += any(map(judged.difference, judged.prompts))
        wrong += judged.differences()
    judged.counts["merged"] = judged.publisher.stats().num_merged
    judged.publisher.close()
    return {"counts": dict(judged.counts), "longest": round(judged.longest, 1), "wrong": wrong[:5]}


def main() -> None:
    """Run the indexer and judge."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("dynamo_python")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--conversations", type=int, help="over three workers")
    parser.add_argument("--names", default="content", help="of conversations: content or ids")
    parser.add_argument("--bursts", type=int)
    options = parser.parse_args()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    command = [options.dynamo_python, "-m", "dynamo.indexer", "--port", str(PORT), "--threads", "1"]
    indexer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_indexer()
        if options.conversations:
            found = judge_conversations(options.seed, options.conversations, options.names)
        elif options.bursts:
            found = judge_bursts(options.seed, options.bursts)
        else:
            found = judge(options.seed, options.rounds)
        print(json.dumps(found))
    finally:
        indexer.terminate()
        indexer.wait(10)


if __name__ == "__main__":
    main()
