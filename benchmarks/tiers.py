"""Tiers beside the bare calls that they are made of, in one run.

    python -m benchmarks.tiers [files redis bucket mooncake peer index manager]

Each row stores and loads objects of 1 MiB in jobs of eight, and does the same with the plain call in turns: pwritev and
preadv of the same files, `set` and `get` of redis-py, `put` and `get` of obstore (against moto's server, so that row
says what a tier adds, not what S3 gives), Mooncake's `put` and `get` over TCP. The best of the rounds counts, since
other programs can only slow them down. `peer` is a process that serves a folder; its plain call is a bare socket to a
process that writes and reads files. ratio: the tier's speed over the plain call's, which has one thread; the tier has
one, and its usual two.
`index` makes a folder of a million small objects: seconds from opening it to the first hit of a load and to the whole
index, and bytes of the process's memory an object. `manager` gives what the engine's thread pays a block of 16 tokens,
in microseconds of its own CPU time, beside copying: a place that does nothing, 2,000 blocks.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
import time
from collections.abc import Callable
from hashlib import shake_128
from pathlib import Path
from typing import Any

from blockyard import CacheConfig, KVCacheManager
from blockyard_testing.tiers_servers import (
    BUCKET,
    mooncake_server,
    peer_place,
    redis_server,
    s3_server,
)
from blockyard_tiers import (
    FileTier,
    Header,
    ObjectIndex,
    Offload,
    PeerTier,
    Transfer,
    WorkingTier,
    layout_id,
    object_names,
)
from blockyard_tiers.header import checksum_of

OBJECT_BYTES = 2**20
NUM_OBJECTS = 64
A_JOB = 8
LAYOUT = layout_id(model="a", dtype="float16", rank=0)
Seconds = tuple[float, float]


def name_of(number: int) -> bytes:
    return shake_128(b"name" + number.to_bytes(8, "little")).digest(16)


def tokens_of(number: int) -> bytes:
    return shake_128(b"tokens" + number.to_bytes(8, "little")).digest(16)


def measured(tier: WorkingTier, source: list[bytes], target: list[bytearray], numbers: list[int]) -> Seconds:
    """Seconds to store all objects and to load them again."""
    seconds = []
    for is_load, buffers in ((False, source), (True, target)):
        begun = time.perf_counter()
        jobs = 0
        for first in range(0, len(numbers), A_JOB):
            some = numbers[first : first + A_JOB]
            names, tokens = [name_of(each) for each in some], [tokens_of(each) for each in some]
            transfer = Transfer(first, LAYOUT, names, tokens, buffers[first : first + A_JOB])
            assert (tier.load if is_load else tier.store)(transfer) is None
            jobs += 1
        while jobs:
            for result in tier.take_results():
                assert result.is_done, result
                jobs -= 1
            time.sleep(0.0005)
        seconds.append(time.perf_counter() - begun)
    assert target == source
    return seconds[0], seconds[1]


def compare(what: str, tiers: dict[str, WorkingTier], plain: Callable[..., Seconds], rounds: int) -> None:
    source = [os.urandom(OBJECT_BYTES) for _ in range(NUM_OBJECTS)]
    target = [bytearray(OBJECT_BYTES) for _ in range(NUM_OBJECTS)]
    seen: dict[str, list[Seconds]] = {name: [] for name in (*tiers, "plain")}
    for number in range(rounds):
        numbers = list(range(number * NUM_OBJECTS, (number + 1) * NUM_OBJECTS))
        seen["plain"].append(plain(source, target, numbers))
        for name, tier in tiers.items():
            seen[name].append(measured(tier, source, target, numbers))
            tier.drop([name_of(each) for each in numbers])
            while tier.stats().num_objects:
                time.sleep(0.01)
            time.sleep(0.1)
    for place, verb in enumerate(("store", "load")):
        best = {name: min(each[place] for each in rows) for name, rows in seen.items()}
        size = NUM_OBJECTS * OBJECT_BYTES / 1e9
        told = ", ".join(
            f"{name} {size / best[name]:.2f} GB/s, ratio {best['plain'] / best[name]:.2f}" for name in tiers
        )
        print(f"{what:<7} {verb:<6} plain {size / best['plain']:.2f} GB/s; {told}", flush=True)
    for tier in tiers.values():
        tier.close()


def plain_files(folder: Path) -> Callable[..., Seconds]:
    """The same pieces by the same system calls, without names, checksums and threads."""
    page = bytes(4096)

    def run(source: list[bytes], target: list[bytearray], numbers: list[int]) -> Seconds:
        begun = time.perf_counter()
        for number, data in zip(numbers, source, strict=True):
            file = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT)
            os.pwritev(file, [page, data], 0)
            os.close(file)
        stored = time.perf_counter()
        for number, buffer in zip(numbers, target, strict=True):
            file = os.open(folder / str(number), os.O_RDONLY)
            os.preadv(file, [buffer], 4096)
            os.close(file)
        loaded = time.perf_counter()
        for number in numbers:
            os.unlink(folder / str(number))
        return stored - begun, loaded - stored

    return run


def plain_client(put: Callable[[str, bytes], Any], get: Callable[[str], Any], remove: Callable[[str], Any]) -> Any:
    def run(source: list[bytes], target: list[bytearray], numbers: list[int]) -> Seconds:
        begun = time.perf_counter()
        for number, data in zip(numbers, source, strict=True):
            put(f"plain{number}", data)
        stored = time.perf_counter()
        for number in numbers:
            get(f"plain{number}")
        loaded = time.perf_counter()
        for number in numbers:
            remove(f"plain{number}")
        return stored - begun, loaded - stored

    return run


def both(make: Callable[[int], WorkingTier]) -> dict[str, WorkingTier]:
    return {"one thread": make(1), "two": make(2)}


def files(folder: Path) -> None:
    (folder / "plain").mkdir()
    tiers = both(lambda threads: FileTier(folder / f"tier{threads}", 2**33, num_threads=threads))
    compare("files", tiers, plain_files(folder / "plain"), 15)


def redis(folder: Path) -> None:
    import redis

    from blockyard_tiers import RedisTier

    with redis_server(folder) as server:
        client: Any = redis.Redis.from_url(server.url, socket_timeout=5.0)  # as the tier's
        tiers = both(lambda threads: RedisTier(server.url, num_threads=threads))
        compare("redis", tiers, plain_client(client.set, client.get, client.delete), 9)


def bucket(folder: Path) -> None:
    import obstore
    from obstore.store import from_url

    from blockyard_tiers import ObjectTier

    with s3_server() as config:
        store: Any = from_url(f"s3://{BUCKET}", config=config, client_options={"allow_http": True})
        plain = plain_client(
            lambda key, data: obstore.put(store, key, data, use_multipart=False),
            lambda key: obstore.get(store, key).bytes(),
            lambda key: obstore.delete(store, key),
        )
        # Each has a path of its own: what one drops is removed while the next one stores.
        tiers = both(lambda n: ObjectTier(f"s3://{BUCKET}/{n}", config=config, num_threads=n))
        compare("bucket", tiers, plain, 3)


def mooncake(folder: Path) -> None:
    from mooncake.store import MooncakeDistributedStore

    from blockyard_tiers import MooncakeTier

    with mooncake_server(2**30) as server:
        client: Any = MooncakeDistributedStore()
        client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 2**26, "tcp", "", server.url.removeprefix("mooncake://"))
        plain = plain_client(client.put, client.get, lambda key: client.remove(key, True))
        compare("mooncake", both(lambda threads: MooncakeTier(server.url, num_threads=threads)), plain, 9)


def serve_plainly(connection: socket.socket, folder: Path) -> None:
    """Write what comes to files, and send files; a byte says which, two the number."""
    data = memoryview(bytearray(OBJECT_BYTES))
    while len(kind := connection.recv(3, socket.MSG_WAITALL)) == 3:
        path = folder / str(int.from_bytes(kind[1:], "big"))
        if kind[:1] == b"g":
            connection.sendall(path.read_bytes())
        elif kind[:1] == b"r":
            path.unlink()
        else:
            connection.recv_into(data, 0, socket.MSG_WAITALL)
            file = os.open(path, os.O_WRONLY | os.O_CREAT)
            os.writev(file, [data])
            os.close(file)
            connection.sendall(b"k")


def peer(folder: Path) -> None:
    """The plain call does the same over a socket of its own, also TCP, with nothing verified and no names."""
    (folder / "plain").mkdir()
    listener = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        theirs, _ = listener.accept()
        theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        serve_plainly(theirs, folder / "plain")
        os._exit(0)
    ours = socket.create_connection(listener.getsockname())
    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.close()

    def plain(source: list[bytes], target: list[bytearray], numbers: list[int]) -> Seconds:
        begun = time.perf_counter()
        for number, data in zip(numbers, source, strict=True):
            ours.sendall(b"p" + number.to_bytes(2, "big"), socket.MSG_MORE)
            ours.sendall(data)
            ours.recv(1)
        stored = time.perf_counter()
        for number, buffer in zip(numbers, target, strict=True):
            ours.sendall(b"g" + number.to_bytes(2, "big"))
            ours.recv_into(buffer, 0, socket.MSG_WAITALL)
        loaded = time.perf_counter()
        assert target == source
        for number in numbers:
            ours.sendall(b"r" + number.to_bytes(2, "big"))
        return stored - begun, loaded - stored

    with peer_place(folder / "1", "8GiB") as one, peer_place(folder / "2", "8GiB") as two:
        tiers = both(lambda n: PeerTier((one, two)[n - 1].url, num_threads=n))
        compare("peer", tiers, plain, 15)
    ours.close()
    os.waitpid(child, 0)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def index(folder: Path, count: int = 10**6) -> None:
    for key in range(256):
        (folder / "objects" / f"{key:02x}").mkdir(parents=True)
    wanted = b"\xfe" * 16
    header = Header(wanted, bytes(16), LAYOUT, 1, checksum_of([memoryview(b"x")]))
    for _ in range(count):
        name = os.urandom(16).hex()
        os.close(os.open(folder / "objects" / name[:2] / name, os.O_WRONLY | os.O_CREAT))
    (folder / "objects" / "fe" / wanted.hex()).write_bytes(header.to_page() + b"x")
    before, begun = resident(), time.perf_counter()
    tier = FileTier(folder, 2**40)
    slowest = 0.0
    while not (found := tier.longest_prefix([wanted])).num_found:
        assert not found.is_final
        time.sleep(0.0005)
    tier.load(Transfer(1, LAYOUT, [wanted], [bytes(16)], [bytearray(1)]))
    while not (results := tier.take_results()):
        time.sleep(0.0005)
    assert results[0].is_done
    first = time.perf_counter() - begun
    while tier.stats().num_objects < count:
        asked = time.perf_counter()
        tier.longest_prefix([wanted] * 100)
        slowest = max(slowest, time.perf_counter() - asked)
        time.sleep(0.001)
    whole = time.perf_counter() - begun
    size = (resident() - before) / count
    print(
        f"index   {count} objects: first hit after {first:.3f} s, whole index after {whole:.2f} s, "
        f"{size:.0f} bytes an object; longest call meanwhile {slowest * 1e3:.0f} ms"
    )
    tier.close()


class Nowhere(WorkingTier):
    """A place that does nothing at once, and has everything once `is_full`."""

    is_full = False

    def __init__(self) -> None:
        super().__init__("nowhere", ObjectIndex(2**60, 2**20))
        self._start()

    def _write(self, active: Any, positions: Any) -> None:
        pass

    def _read(self, active: Any, position: int) -> None:
        pass

    def _sizes(self, names: Any) -> list[int]:
        return [OBJECT_BYTES] * len(names) if self.is_full else []

    def remove(self, names: Any) -> None:
        pass


class NoBlocks:
    """Blocks that are not copied."""

    object_bytes, num_rows = OBJECT_BYTES // 4, 8192
    bytes = memoryview(bytearray(OBJECT_BYTES // 4))

    def layout(self) -> dict[str, Any]:
        return {"none": 0}

    def buffer(self, row: int) -> memoryview:
        return self.bytes

    def read(self, block_ids: Any, rows: Any) -> None:
        pass

    def write(self, block_ids: Any, rows: Any) -> None:
        pass


def manager_times(num_blocks: int) -> dict[str, float]:
    """Microseconds a block of each call, of a prompt that is stored, and then loaded after a reset."""
    size = 16 * num_blocks
    cache = KVCacheManager(CacheConfig(2 * num_blocks + 9, max_num_seqs=2, max_model_len=size + 9))
    nowhere = Nowhere()
    offload = Offload(cache, NoBlocks(), [nowhere], {"model": 0})
    tokens = [token % 50000 for token in range(size + 1)]
    times: dict[str, float] = {}

    def timed(what: str, call: Callable[[], Any]) -> None:
        begun = time.thread_time()
        call()
        times[what] = times.get(what, 0.0) + (time.thread_time() - begun) / num_blocks * 1e6

    def end_jobs(what: str) -> None:
        while offload.read().num_waiting or nowhere.stats().num_waiting:
            time.sleep(0.01)
            timed(what, offload.poll)

    timed("name", lambda: object_names(LAYOUT, tokens, 16))
    while offload.prepare(0, tokens):
        time.sleep(0.001)
    seq = cache.allocate(tokens)
    offload.fill(0, seq)
    cache.reserve([seq], [size])
    timed("store", lambda: offload.save(0, seq, tokens, size))
    end_jobs("store")
    cache.commit([seq], [size])
    cache.free(seq)
    offload.forget(0)
    cache.reset_prefix_cache()
    nowhere.is_full = True
    timed("name, look up, load", lambda: offload.prepare(0, tokens))
    end_jobs("name, look up, load")
    seq = cache.allocate(tokens)
    timed("fill", lambda: offload.fill(0, seq))
    assert cache.num_computed_tokens(seq) == size
    offload.close()
    return times


def manager(folder: Path) -> None:
    rounds = [manager_times(2000) for _ in range(7)]
    told = ", ".join(f"{what} {min(each[what] for each in rounds):.2f}" for what in rounds[0])
    print(f"manager µs a block: {told}")


PARTS = {
    "files": files,
    "redis": redis,
    "bucket": bucket,
    "mooncake": mooncake,
    "peer": peer,
    "index": index,
    "manager": manager,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.tiers", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="|".join(PARTS))
    parser.add_argument("--folder", type=Path, help="where folders are made (the file system that is measured)")
    options = parser.parse_args()
    for part in options.parts or PARTS:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            PARTS[part](Path(folder))


if __name__ == "__main__":
    main()
