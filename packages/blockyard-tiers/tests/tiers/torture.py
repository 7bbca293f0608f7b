"""Random transfers on a tier whose backend is damaged and whose processes are killed: exact, or a miss.

    python -m tests.tiers.torture files --transfers 100000 --kills 1000
    python -m tests.tiers.torture redis --transfers 20000 --kills 100
    python -m tests.tiers.torture bucket --transfers 2000
    python -m tests.tiers.torture mooncake --transfers 5000 --kills 200
    python -m tests.tiers.torture peer --transfers 20000 --kills 200

Transfers: two engines on one backend store, load, look up and drop objects of two layouts. Meanwhile objects lose bits
or their ends, vanish, are swapped or overwritten, and redis-server or Mooncake's master loses its memory. The bytes of
each successful load are compared with the stored ones; the buffers of every other load are zeros.

Kills: a process that stores and loads is killed with kill -9 at a random moment; then every object in the backend is
whole and right. Every other time redis-server, Mooncake's master or the peer is killed as well.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blockyard_testing.seeds import run_seed
from blockyard_testing.tiers_servers import (
    BUCKET,
    Server,
    mooncake_server,
    peer_place,
    redis_server,
    s3_server,
)
from blockyard_tiers import BackendError, BadObject, Cause, FileTier, PeerTier, Transfer, WorkingTier
from blockyard_tiers.header import PAGE_BYTES, require_whole

from .support import LAYOUT, OTHER_LAYOUT, load_transfer, name_of, payload_of, require_right, store_transfer

NUMBERS = 64
LAYOUTS = (LAYOUT, OTHER_LAYOUT)
NAMES = {name_of(number, layout): (number, layout) for number in range(NUMBERS) for layout in LAYOUTS}


class Place:
    """A place where tiers are opened, and the damage that may be done to it."""

    def __init__(self, kind: str, where: Any) -> None:
        self.kind, self.where = kind, where

    def open(self, **more: Any) -> WorkingTier:
        if self.kind == "files":
            return FileTier(self.where, 2_000_000, **more)
        if self.kind == "redis":
            from blockyard_tiers import RedisTier

            return RedisTier(self.where.url, **more)
        if self.kind == "mooncake":
            from blockyard_tiers import MooncakeTier

            return MooncakeTier(self.where.url, admin_port=self.where.admin_port, **more)
        if self.kind == "peer":
            return PeerTier(self.where.url, **more)
        from blockyard_tiers import ObjectTier

        return ObjectTier(f"s3://{BUCKET}", config=self.where, **more)

    @contextmanager
    def behind(self, tier: WorkingTier) -> Iterator[WorkingTier]:
        """Yield a tier that stores any bytes: this one, or the files behind a peer, which takes only whole objects."""
        if self.kind != "peer":
            yield tier
            return
        files = FileTier(self.where.folder, 2**60)
        yield files
        assert files.close(60)

    def harm(self, tier: WorkingTier, draw: random.Random) -> str:
        """Damage the place in one way; return which."""
        what = draw.choice(["flip", "cut", "longer", "zeros", "exchange", "lose", "restart"])
        if what == "restart":
            if isinstance(self.where, Server) and draw.random() < 0.1:
                self.where.kill()
                self.where.start()
            return what
        name, other = draw.choice(list(NAMES)), draw.choice(list(NAMES))
        try:
            data = tier.get(name)
            if what == "lose":
                tier.remove([name])
            elif what == "exchange":
                tier.put(other, data)
            else:
                tier.put(name, damaged(data, what, draw))
        except (BadObject, BackendError):
            return "nothing"
        return what


def damaged(data: bytes, what: str, draw: random.Random) -> bytes:
    if what == "cut":
        return data[: draw.randrange(len(data))]
    if what == "longer":
        return data + bytes(draw.randrange(1, 100))
    if what == "zeros":
        first = draw.randrange(len(data))
        return data[:first] + bytes(len(data) - first)
    changed = bytearray(data)
    changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


@contextmanager
def place_of(kind: str, folder: Path) -> Iterator[Place]:
    if kind == "files":
        yield Place(kind, folder)
    elif kind == "redis":
        with redis_server(folder) as server:
            yield Place(kind, server)
    elif kind == "peer":
        with peer_place(folder) as peer:
            yield Place(kind, peer)
    elif kind == "mooncake":
        with mooncake_server() as store:
            yield Place(kind, store)
    else:
        with s3_server() as config:
            yield Place(kind, config)


class Engine:
    """One user of a place: its transfers under way, each with its expected bytes."""

    def __init__(self, tier: WorkingTier) -> None:
        self.tier = tier
        self.running: dict[int, tuple[Transfer, list[int], bytes, bool]] = {}
        self.next_id = 0
        self.seen: Counter[str] = Counter()

    def act(self, draw: random.Random) -> None:
        numbers = draw.sample(range(NUMBERS), draw.choice([1, 1, 2, 4]))
        layout = draw.choice(LAYOUTS)
        what = draw.choices(["store", "load", "ask", "drop"], [4, 5, 2, 1])[0]
        if what == "ask":
            ask = draw.choice((self.tier.longest_prefix, self.tier.first_present))
            ask([name_of(number, layout) for number in numbers])
        elif what == "drop":
            self.tier.drop([name_of(number, layout) for number in numbers[:1]])
        else:
            self.next_id += 1
            transfer = (load_transfer if what == "load" else store_transfer)(self.next_id, numbers, layout)
            refused = (self.tier.load if what == "load" else self.tier.store)(transfer)
            if refused is None:
                self.running[transfer.id] = (transfer, numbers, layout, what == "load")
            else:
                self.seen[f"refused: {refused.value}"] += 1

    def take(self) -> int:
        """Check what ended; return how many."""
        results = self.tier.take_results()
        for result in results:
            transfer, numbers, layout, is_load = self.running.pop(result.id)
            if is_load:
                require_right(transfer, numbers, result, layout)
            self.seen[("load" if is_load else "store") + (" done" if result.is_done else " missed")] += 1
            for cause in result.causes.values():
                self.seen[cause.value] += 1
        return len(results)


def run_transfers(place: Place, num_transfers: int, seed: int) -> Counter[str]:
    """Run random transfers of two engines until so many have ended; return the counts of results."""
    draw = random.Random(seed)
    engines = [Engine(place.open()), Engine(place.open())]
    harm: Counter[str] = Counter()
    ended = 0
    with place.behind(engines[0].tier) as behind:
        while ended < num_transfers:
            engine = draw.choice(engines)
            if len(engine.running) < 8:
                engine.act(draw)
            else:
                time.sleep(0.0002)
            if draw.random() < 0.1:
                harm[place.harm(behind, draw)] += 1
            ended += engine.take()
    for engine in engines:
        assert engine.tier.close(60)
        engine.take()
        assert engine.running == {}
        engine.tier.check()
    return sum((engine.seen for engine in engines), Counter({f"harm: {what}": count for what, count in harm.items()}))


def require_whole_place(place: Place) -> int:
    """Check that every object in the place is complete and correct; return their number."""
    tier = place.open()
    count = 0
    for name in list(tier.names()):
        try:
            data = memoryview(tier.get(name))
        except BadObject as error:
            if place.kind == "mooncake" and error.cause is Cause.ABSENT:
                continue  # its master names those that a killed process had begun
            raise
        header = require_whole(data, name)
        number, layout = NAMES[name]
        assert header.layout == layout
        assert data[PAGE_BYTES:] == payload_of(number, layout)
        count += 1
    assert tier.close(60)
    return count


def run_kills(place: Place, num_kills: int, seed: int) -> Counter[str]:
    """Kill a process that uses the place (every other time the server too, if it has one) at random moments.

    Most of them come after its first transfer: where the machine is busy a moment is over before anything has begun.
    Whoever looks at the place is a process too: threads that a client leaves behind are in no child then.
    """
    draw, seen = random.Random(seed), Counter[str]()
    shortest, longest = {"mooncake": (0.2, 1.0), "peer": (0.02, 0.3)}.get(place.kind, (0.001, 0.03))
    for trial in range(num_kills):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            live(place, seed + trial, writer)
        os.close(writer)
        try:
            if draw.random() < 0.8:
                os.read(reader, 1)
            time.sleep(draw.uniform(shortest, longest))
            if isinstance(place.where, Server) and draw.random() < 0.5:
                place.where.kill()
                place.where.start()
                seen["servers killed"] += 1
                time.sleep(0.01)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reader)
        seen["processes killed"] += 1
        seen["objects verified"] += in_child(lambda: require_whole_place(place))
    assert seen["objects verified"] or num_kills < 50, "no process lived long enough to store anything"
    return seen


def in_child(count: Callable[[], int]) -> int:
    """Return a function's result from a forked process, which prints its own errors."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(count()).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as answer:
        told = answer.read()
    assert os.waitpid(child, 0)[1] == 0, "a child failed"
    return int(told)


def live(place: Place, seed: int, ready: int) -> None:
    """Store and load, as a child process, until it is killed; report the end of the first transfer."""
    try:
        draw, engine = random.Random(seed), Engine(place.open(num_threads=2))
        while True:
            if len(engine.running) < 8:
                engine.act(draw)
            if engine.take() and ready >= 0:
                os.write(ready, b"1")
                os.close(ready)
                ready = -1
    except BaseException as error:
        print("a child failed:", repr(error), flush=True)
    finally:
        os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.tiers.torture")
    parser.add_argument("place", choices=["files", "redis", "bucket", "mooncake", "peer"])
    parser.add_argument("--transfers", type=int, default=3000)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = run_seed() if options.seed is None else options.seed
    for what, count, run in (("kills", options.kills, run_kills), ("transfers", options.transfers, run_transfers)):
        with tempfile.TemporaryDirectory() as folder, place_of(options.place, Path(folder)) as place:
            if count:
                seen = run(place, count, seed)
                print(f"{options.place}: {count} {what}, seed {seed}: {dict(sorted(seen.items()))}", flush=True)


if __name__ == "__main__":
    main()
