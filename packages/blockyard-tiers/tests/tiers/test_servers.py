"""Redis, a bucket, a Mooncake Store and a peer as tiers: a common contract, own faults, real servers on loopback."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from blockyard import InvalidArgument
from blockyard_testing.patience import PATIENCE_SECONDS, wait_until
from blockyard_testing.places import child_environment
from blockyard_testing.tiers_servers import (
    BUCKET,
    free_port,
    missing_for_buckets,
    missing_for_mooncake,
    missing_for_redis,
    mooncake_server,
    redis_server,
    s3_server,
)
from blockyard_tiers import Cause, Tier, Transfer, WorkingTier

from .support import (
    LAYOUT,
    Clock,
    first_known,
    known,
    load,
    load_transfer,
    name_of,
    size_of,
    store,
    store_transfer,
    wait_for,
)
from .torture import Place, place_of

needs_redis = pytest.mark.skipif(bool(missing_for_redis()), reason=missing_for_redis())
needs_bucket = pytest.mark.skipif(bool(missing_for_buckets()), reason=missing_for_buckets())
needs_mooncake = pytest.mark.skipif(bool(missing_for_mooncake()), reason=missing_for_mooncake())
KINDS = [
    "files",
    pytest.param("redis", marks=needs_redis),
    pytest.param("bucket", marks=needs_bucket),
    pytest.param("mooncake", marks=needs_mooncake),
    "peer",
]


@pytest.fixture(scope="module", params=KINDS)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place_of(request.param, tmp_path_factory.mktemp("tier")) as place:
        yield place


@pytest.fixture
def place(shared: Place) -> Place:
    """An empty place on a server that is started once for all tests."""
    tier = shared.open()
    tier.remove(list(tier.names()))
    assert tier.close()
    return shared


def opened(place: Place) -> WorkingTier:
    tier = place.open()
    assert isinstance(tier, Tier)
    return tier


def test_objects_are_loaded_by_another_tier(place: Place) -> None:
    first, second = opened(place), opened(place)
    numbers = list(range(12))
    assert known(second, numbers) == 0
    assert store(first, numbers).is_done
    wait_until(lambda: known(second, numbers) == 12)
    absent = list(range(1000, 1150))
    wait_until(lambda: first_known(second, [*absent, 5, 1700, 6]) == 150)
    assert first_known(second, absent) == 150
    assert load(second, numbers) == {}
    assert sorted(second.names()) == sorted(map(name_of, numbers))
    assert second.stats().loaded_bytes == sum(map(size_of, numbers))
    assert first.drop([name_of(3)]) is None
    wait_until(lambda: name_of(3) not in list(first.names()))
    assert load(second, [2, 3, 4]) == {3: Cause.GONE}
    assert load(first, [3]) == {3: Cause.ABSENT}
    for tier in (first, second):
        assert tier.close()
        tier.check()


def test_bad_objects_are_misses_and_deleted(place: Place) -> None:
    tier = opened(place)
    for change, cause in (
        (lambda data: data[:-1], Cause.TRUNCATED),
        (lambda data: data[:100], Cause.TRUNCATED),
        (lambda data: bytes(len(data)), Cause.DAMAGED),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), Cause.DAMAGED),
        (lambda data: data[:300] + bytes([data[300] ^ 1]) + data[301:], Cause.DAMAGED),
        (lambda data: data[:4] + bytes([data[4] ^ 1]) + data[5:], Cause.OTHER_VERSION),
    ):
        store(tier, [4])
        with place.behind(tier) as behind:
            behind.put(name_of(4), change(tier.get(name_of(4))))
        assert load(tier, [4]) == {4: cause}
        wait_until(lambda: not list(tier.names()))
    store(tier, [1, 2])
    with place.behind(tier) as behind:
        behind.put(name_of(1), tier.get(name_of(2)))
    assert load(tier, [1, 2]) == {1: Cause.FOREIGN}
    assert tier.close()


def test_an_empty_object_is_a_miss_and_deleted(place: Place) -> None:
    """Redis returns it, but it is no object; Mooncake stores no empty ones."""
    tier = opened(place)
    store(tier, [4])
    if place.kind != "mooncake":
        with place.behind(tier) as behind:
            behind.put(name_of(4), b"")
        assert load(tier, [4]) == {4: Cause.GONE if place.kind == "redis" else Cause.TRUNCATED}
        wait_until(lambda: place.kind == "redis" or not list(tier.names()))
    assert store(tier, [4]).is_done
    assert load(tier, [4]) == {}
    assert tier.close()


@needs_redis
def test_redis_without_memory_refuses_the_whole_transfer(tmp_path: Path) -> None:
    from blockyard_tiers import RedisTier

    with redis_server(tmp_path, "--maxmemory", "2mb") as server:
        tier = RedisTier(server.url)
        results = []
        for first in range(0, 60, 3):
            tier.store(store_transfer(first, [5 * first + 4, 5 * first + 9, 5 * first + 14]))
            results.append(wait_for(tier, first) if tier.stats().num_waiting else None)
        causes = {cause for result in results if result for cause in result.causes.values()}
        assert causes == {Cause.FULL}
        assert len(list(tier.names())) % 3 == 0
        assert tier.close()


@needs_redis
def test_objects_that_redis_evicts_are_misses(tmp_path: Path) -> None:
    from blockyard_tiers import RedisTier

    with redis_server(tmp_path, "--maxmemory", "2mb", "--maxmemory-policy", "allkeys-lru") as server:
        tier = RedisTier(server.url)
        numbers = list(range(4, 400, 5))
        for number in numbers:
            assert store(tier, [number]).is_done
        gone = [number for number in numbers if load(tier, [number]) == {number: Cause.GONE}]
        assert 0 < len(gone) < len(numbers)
        assert tier.close()


def require_misses_until_it_is_back(server: Any, tier: Any, clock: Clock) -> None:
    """Check that loads miss while the server is gone, soon without asking it, and after it returns empty."""

    def is_back() -> bool:
        clock.now += 100
        assert tier.load(load_transfer(21, [1])) is None
        return wait_for(tier, 21).causes == {0: Cause.GONE}

    server.kill()
    for identity in range(10, 13):
        assert tier.load(load_transfer(identity, [1])) is None
        assert wait_for(tier, identity).causes == {0: Cause.UNREACHABLE}
    assert tier.load(load_transfer(20, [1])) is Cause.CIRCUIT_OPEN
    server.start()
    wait_until(is_back)


@needs_redis
def test_a_restarted_redis_is_used_again(tmp_path: Path) -> None:
    from blockyard_tiers import RedisTier

    clock = Clock()
    with redis_server(tmp_path) as server:
        tier = RedisTier(server.url, clock=clock)
        store(tier, [1])
        require_misses_until_it_is_back(server, tier, clock)
        assert store(tier, [1]).is_done
        assert load(tier, [1]) == {}
        assert tier.close()


@needs_redis
def test_redis_needs_its_password(tmp_path: Path) -> None:
    from blockyard_tiers import RedisTier

    with redis_server(tmp_path, "--requirepass", "right") as server:
        for password, cause in (("", {0: Cause.DENIED}), (":wrong@", {0: Cause.DENIED}), (":right@", {})):
            tier = RedisTier(server.url.replace("://", f"://{password}"))
            assert "wrong" not in tier.name
            assert store(tier, [1]).causes == cause
            assert tier.close()


@needs_redis
def test_redis_values_of_another_type_are_damaged(tmp_path: Path) -> None:
    import redis

    from blockyard_tiers import RedisTier

    with redis_server(tmp_path) as server:
        redis.Redis.from_url(server.url).rpush(b"blockyard:" + name_of(1), "x")
        tier = RedisTier(server.url)
        assert known(tier, [1]) == 0
        assert load(tier, [1]) == {1: Cause.DAMAGED}
        assert tier.close()


@needs_redis
def test_only_the_requested_bytes_of_a_value_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import redis

    from blockyard_tiers import RedisTier

    with redis_server(tmp_path) as server:
        tier = RedisTier(server.url)
        assert store(tier, [1]).is_done
        redis.Redis.from_url(server.url).append(b"blockyard:" + name_of(1), bytes(2**20))
        answers: list[int] = []
        real = RedisTier._get

        def get(self: RedisTier, *words: Any) -> bytes:
            answers.append(len(data := real(self, *words)))
            return data

        monkeypatch.setattr(RedisTier, "_get", get)
        assert load(tier, [1]) == {1: Cause.TRUNCATED}
        wait_until(lambda: not list(tier.names()))
        assert max(answers) == 4096 + size_of(1) + 1
        assert tier.close()


@needs_redis
@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis://user:sec@ret@127.0.0.1:9/1", "redis://127.0.0.1:9/1"),
        ("redis://127.0.0.1:9/1?password=secret&socket_timeout=1", "redis://127.0.0.1:9/1"),
        ("unix://user:secret@/run/redis.sock?db=2&password=secret", "unix:///run/redis.sock?db=2"),
    ],
)
def test_the_name_has_no_password(url: str, name: str) -> None:
    from blockyard_tiers import RedisTier

    tier = RedisTier(url)
    assert tier.name == name
    assert tier.close()


@pytest.mark.skipif(bool(missing_for_buckets("obstore")), reason=missing_for_buckets("obstore"))
def test_larger_objects_than_requested_are_not_read() -> None:
    import obstore

    from blockyard_tiers import ObjectTier

    tier = ObjectTier("memory:///")
    assert store(tier, [1]).is_done
    assert load(tier, [1]) == {}
    obstore.put(tier._store, name_of(1).hex(), tier.get(name_of(1)) + bytes(2**20))
    assert load(tier, [1]) == {1: Cause.TRUNCATED}
    assert tier.close()


class Together(BaseHTTPRequestHandler):
    """Answers HEAD requests only when as many are open as a tier sends together."""

    barrier = threading.Barrier(32)
    present = name_of(7).hex()

    def do_HEAD(self) -> None:
        self.barrier.wait(PATIENCE_SECONDS)
        self.send_response(200 if self.path.endswith(self.present) else 404)
        for header, value in (("Content-Length", "5000"), ("ETag", '"1"'), ("Last-Modified", self.date_time_string())):
            self.send_header(header, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class TogetherServer(ThreadingHTTPServer):
    request_queue_size = 64


@pytest.mark.skipif(bool(missing_for_buckets("obstore")), reason=missing_for_buckets("obstore"))
def test_a_search_in_a_bucket_sends_many_requests_at_once() -> None:
    from blockyard_tiers import ObjectTier

    with TogetherServer(("127.0.0.1", 0), Together) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        keys = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
        tier = ObjectTier("s3://bucket", config={**keys, "endpoint": f"http://127.0.0.1:{server.server_address[1]}"})
        names = [name_of(number) for number in (*range(1000, 1040), 7, *range(2000, 2023))]
        assert tier._first(names) == (40, [5000 - 4096])
        assert tier._first(names[:32]) == (32, [])
        assert tier._sizes([name_of(7), *names[:31]]) == [5000 - 4096]
        assert tier.close()
        server.shutdown()
        thread.join(PATIENCE_SECONDS)


@needs_bucket
def test_missing_or_silent_buckets_are_unreachable(shared: Place) -> None:
    from blockyard_tiers import ObjectTier

    if shared.kind != "bucket":
        pytest.skip("asks moto's server")
    tier = ObjectTier("s3://another", config=shared.where)
    assert store(tier, [1]).causes == {0: Cause.UNREACHABLE}
    assert load(tier, [1]) == {1: Cause.ABSENT}
    assert tier.close()
    tier = ObjectTier(f"s3://{BUCKET}", config={**shared.where, "endpoint": "http://127.0.0.1:9"}, timeout=1.0)
    assert store(tier, [1]).causes == {0: Cause.UNREACHABLE}
    assert load(tier, [1]) == {1: Cause.UNREACHABLE}
    assert tier.close()


@needs_bucket
def test_a_bucket_without_permission_is_denied() -> None:
    """moto's server checks permissions from the second request on, and these keys belong to nobody."""
    from blockyard_tiers import ObjectTier

    with s3_server(INITIAL_NO_AUTH_ACTION_COUNT="1") as config:
        tier = ObjectTier(f"s3://{BUCKET}", config=config)
        assert store(tier, [1]).causes == {0: Cause.DENIED}
        assert load(tier, [1]) == {1: Cause.DENIED}
        assert tier.close()


@needs_mooncake
def test_a_restarted_mooncake_master_is_used_again() -> None:
    from blockyard_tiers import MooncakeTier

    clock = Clock()
    with mooncake_server() as server:
        tier = MooncakeTier(server.url, clock=clock)
        assert store(tier, [1]).is_done
        require_misses_until_it_is_back(server, tier, clock)
        wait_until(lambda: tier.store(store_transfer(22, [1])) is None)
        assert wait_for(tier, 22).is_done
        assert load(tier, [1]) == {}
        assert tier.close()


@needs_mooncake
def test_objects_in_memory_lent_to_mooncake_vanish_with_its_engine() -> None:
    from blockyard_tiers import MooncakeTier

    with mooncake_server(lent_bytes=0) as server:
        user = MooncakeTier(server.url)
        assert store(user, [1]).causes == {0: Cause.FULL}
        lender = MooncakeTier(server.url, 2**26)
        server.wait_for(1)
        assert store(user, [1, 2, 4]).is_done
        assert load(lender, [1, 2, 4]) == {}
        assert lender.close()
        assert load(user, [1]) == {1: Cause.GONE}
        assert user.close()


@needs_mooncake
def test_a_full_mooncake_store_refuses_the_whole_transfer() -> None:
    from blockyard_tiers import MooncakeTier

    with mooncake_server(lent_bytes=2**24) as server:
        tier = MooncakeTier(server.url, admin_port=server.admin_port)
        big = [Transfer(at, LAYOUT, [name_of(at)], [name_of(at)], [bytes(2**22 + at)]) for at in range(6)]
        ended = [wait_for(tier, transfer.id) for transfer in big if tier.store(transfer) is None]
        causes = [set(result.causes.values()) for result in ended]
        assert {Cause.FULL} in causes
        assert set() in causes
        assert all(cause in (set(), {Cause.FULL}) for cause in causes)
        assert len(list(tier.names())) <= causes.count(set())
        assert tier.close()


@needs_mooncake
def test_a_missing_mooncake_master_fails_at_once() -> None:
    from blockyard_tiers import BackendError, MooncakeTier

    tier = MooncakeTier(f"mooncake://127.0.0.1:{free_port()}", admin_port=free_port())
    assert store(tier, [1]).causes == {0: Cause.UNREACHABLE}
    assert load(tier, [1]) == {1: Cause.UNREACHABLE}
    with pytest.raises(BackendError, match="HTTP port"):
        list(tier.names())
    assert tier.close()


@needs_mooncake
def test_a_forked_child_leaves_mooncakes_client_alone() -> None:
    program = """
import gc, os, sys, warnings
from blockyard_tiers import Cause, MooncakeTier
from tests.tiers.support import load, store, store_transfer
tier = MooncakeTier(sys.argv[1])
assert store(tier, [1, 2]).is_done
child = os.fork()
if child == 0:
    closed = tier.store(store_transfer(1, [3])) is Cause.CLOSED
    del tier
    gc.collect()
    os._exit(0 if closed else 1)
assert os.waitpid(child, 0)[1] == 0
assert load(tier, [1, 2]) == {}
"""  # and it ends without having closed the tier
    with mooncake_server() as server:
        command = [sys.executable, "-c", program, server.url]
        subprocess.run(command, check=True, env=child_environment(), cwd=None, timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("kind", "module", "extra"),
    [
        ("RedisTier", "redis", "redis"),
        ("ObjectTier", "obstore", "buckets"),
        ("MooncakeTier", "mooncake", "mooncake"),
    ],
)
def test_a_missing_client_names_its_extra(kind: str, module: str, extra: str) -> None:
    program = f"""
import sys
sys.modules[{module!r}] = None
import blockyard, blockyard_tiers
try:
    blockyard_tiers.{kind}
except blockyard.errors.MissingExtra as error:
    assert "blockyard[{extra}]" in str(error), error
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=child_environment())


@pytest.mark.parametrize(
    ("kind", "url"),
    [
        ("RedisTier", "http://x"),
        ("RedisTier", "redis://x?nosuchoption=1"),
        ("RedisTier", "redis://x?decode_responses=True"),
        ("ObjectTier", "nothing"),
        ("MooncakeTier", "http://x:1"),
        ("MooncakeTier", "mooncake://x"),
        ("MooncakeTier", "mooncake://x:0"),
        ("MooncakeTier", "mooncake://:1"),
    ],
)
def test_bad_addresses_are_refused(kind: str, url: str) -> None:
    needs = {"RedisTier": missing_for_redis, "ObjectTier": missing_for_buckets, "MooncakeTier": missing_for_mooncake}
    if needs[kind]():
        pytest.skip(needs[kind]())
    import blockyard_tiers

    make: Any = getattr(blockyard_tiers, kind)
    with pytest.raises(InvalidArgument, match=r"url (is|sets)"):
        make(url)


def test_many_positions_are_searched_in_one_query(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for states: the backend returns the first of the names that is present."""
    writer, reader = place.open(), place.open()
    assert store(writer, [7, 9]).is_done
    asked: list[int] = []
    first = type(reader)._first
    monkeypatch.setattr(type(reader), "_first", lambda tier, names: asked.append(len(names)) or first(tier, names))
    absent = list(range(1000, 1200))
    assert first_known(reader, [*absent, 9, 7]) == 200
    assert first_known(reader, absent) == 200
    assert len(asked) <= 3
    assert writer.close()
    assert reader.close()
