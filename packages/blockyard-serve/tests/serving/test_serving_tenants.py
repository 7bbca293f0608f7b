"""Tenants of a server: their tokens in /metrics, which tenant a request belongs to, and their limits."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("torch")

from blockyard import CacheSalt, InvalidArgument
from blockyard.metrics import tenant_of
from blockyard.tenants import Roster, Tenant, TenantGroup, tenant_groups
from blockyard_serve import ServerLimits, ServerOptions, create_app
from blockyard_serve.jobs.queue_slots import QueueSlots
from blockyard_testing.seeds import run_seed
from blockyard_testing.servers import MODEL, Running, running_server, tiny_engine

PROMPT = "A prompt of fifty characters, which are fifty tokens"


def tenants_of(running: Running) -> dict[tuple[str, str], float]:
    _, _, page = running.call("GET", "/metrics")
    assert b"secret" not in page
    found = re.findall(r'^blockyard:tenant_(\w+)_tokens_total\{.*tenant="(.*)"\} (\S+)$', page.decode(), re.MULTILINE)
    return {(name, tenant): float(value) for name, tenant, value in found}


def ask(running: Running, **fields: object) -> None:
    assert running.post("/v1/completions", prompt=PROMPT, max_tokens=1, **fields)[0] == 200


def test_tenants_are_counted_by_the_digest_of_their_salt() -> None:
    with running_server(tiny_engine(), tenant_metrics=2) as running:
        for salt in ("secret a", "secret a", "secret b"):
            ask(running, cache_salt=salt)
        ask(running)
        one, two = (tenant_of((CacheSalt(salt),)) for salt in ("secret a", "secret b"))
        assert tenants_of(running) == {
            ("prompt", one): 104,
            ("hit", one): 48,
            ("prompt", two): 52,
            ("hit", two): 0,
            ("prompt", "other"): 52,
            ("hit", "other"): 0,
        }


def test_tenant_metrics_are_off_by_default() -> None:
    with running_server(tiny_engine()) as running:
        ask(running, cache_salt="secret a")
        assert tenants_of(running) == {}


TENANTS = (Tenant("acme", min_blocks=60), Tenant("small", max_held=12), Tenant("open"))
KEYS = {"acme": "key of acme", "small": "key of small"}


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    engine = tiny_engine(cache_options={"tenants": TENANTS, "retention_blocks": 9})
    with running_server(engine, api_key="the server's", tenant_keys=KEYS, tenant_metrics=9) as running:
        yield running


def answer(
    running: Running, key: str | None, tenant: str | None = None, path: str = "/v1/completions", **fields: Any
) -> Any:
    """Status, and the answer or its error."""
    headers = {"Content-Type": "application/json"}
    headers |= {} if key is None else {"Authorization": f"Bearer {key}"}
    headers |= {} if tenant is None else {"X-Tenant": tenant}
    body = {"model": MODEL, "prompt": PROMPT, **({"max_tokens": 1} if path == "/v1/completions" else {}), **fields}
    status, _, text = running.call("POST", path, json.dumps(body).encode(), headers)
    found = json.loads(text)
    return status, found.get("error", found)


def hit(running: Running, key: str | None, tenant: str | None = None, **fields: Any) -> int:
    status, found = answer(running, key, tenant, **fields)
    assert status == 200, found
    return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_tenant_key_identifies_the_request(shared: Running) -> None:
    assert [hit(shared, KEYS["acme"]) for _ in range(2)] == [0, 48]
    assert hit(shared, KEYS["acme"], "acme") == 48
    # Neither a salt nor a field makes it another tenant's, and other tenants share nothing with it.
    assert hit(shared, KEYS["small"], cache_salt="acme") == 0
    assert hit(shared, "the server's", cache_salt="acme", user="acme") == 0
    assert hit(shared, "the server's", cache_salt="acme") == 48
    assert hit(shared, "the server's", "acme") == 48  # a proxy that has the server's own key
    assert hit(shared, "the server's", "open") == 0
    status, error = answer(shared, KEYS["small"], "acme")
    assert (status, error["code"]) == (403, "tenant_not_allowed")
    assert error["message"] == "the header X-Tenant is 'acme', but the API key belongs to another tenant"
    for key in ("key of nobody", None):
        assert answer(shared, key, "acme")[0] == 401
    tenants = {name for _, name in tenants_of(shared)}
    assert tenants == {"*", "acme", "small", "open"}


def test_routes_for_all_tenants_need_the_servers_key(shared: Running) -> None:
    for path in ("/check", "/ui/state"):
        for key, status in ((KEYS["acme"], 401), ("the server's", 200)):
            assert shared.call("GET", path, headers={"Authorization": f"Bearer {key}"})[0] == status


def test_hints_and_retentions_belong_to_the_tenant(shared: Running) -> None:
    assert answer(shared, KEYS["acme"], session_id="s")[0] == 200
    for key, outcome in ((KEYS["small"], "unknown"), (KEYS["acme"], "accepted")):
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        body = json.dumps({"session_id": "s", "action": "over"}).encode()
        assert json.loads(shared.call("POST", "/v1/hints", body, headers)[2])["data"][0]["outcome"] == outcome
    retained = [answer(shared, key, path="/v1/retain")[1]["num_blocks"] for key in KEYS.values()]
    assert retained[0] == 3
    assert answer(shared, "the server's", "open", "/v1/retain", cache_salt="nobody")[1]["num_blocks"] == 0


def test_prompt_beyond_a_quota_is_refused_with_the_number(shared: Running) -> None:
    status, error = answer(shared, KEYS["small"], prompt="a" * 250)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert error["message"].endswith("tenant 'small' can hold 12 blocks)")
    assert answer(shared, KEYS["acme"], prompt="a" * 250)[0] == 200


def test_unknown_tenant_names_are_refused(shared: Running) -> None:
    for number in range(40):
        status, error = answer(shared, "the server's", f"{number} " + "x" * 4000)
        assert (status, error["code"]) == (400, "unknown_tenant")
        assert re.fullmatch(
            r"the header X-Tenant is refused: tenant is '.{199}\.\.\.; none of the 4 .*", error["message"]
        )
    assert len(tenants_of(shared)) <= 8


def test_without_keys_the_header_identifies_the_tenant() -> None:
    with running_server(tiny_engine(cache_options={"tenants": TENANTS})) as running:
        assert [hit(running, None, "acme") for _ in range(2)] == [0, 48]
        assert [hit(running, None), hit(running, None, cache_salt="acme"), hit(running, None, "*")] == [0, 0, 48]
    with running_server(tiny_engine()) as running:  # nobody shares, and the header is not this server's
        assert [hit(running, None, "acme"), hit(running, None, "other")] == [0, 48]


def test_tenant_that_fills_the_queue_gets_429_and_leaves_slots() -> None:
    engine = tiny_engine(num_blocks=100, max_num_seqs=2, cache_options={"tenants": (Tenant("a"), Tenant("b"))})
    with running_server(engine, ServerLimits(max_waiting=10)) as running, ThreadPoolExecutor(20) as pool:
        wanted: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
        flood = [pool.submit(answer, running, None, "a", **wanted, prompt=f"{n}") for n in range(18)]
        done = [future.result() for future in flood]
        refused = [error for status, error in done if status == 429]
        assert len(refused) >= 1
        text = (
            r"tenant 'a' has \d+ of 12 queue slots and needs 1 more; 4 are reserved for other "
            r"tenants; try again later"
        )
        assert all(re.fullmatch(text, error["message"]) for error in refused)
        assert sum(status == 200 for status, _ in done) >= 8


def test_slots_are_reserved_by_weight_within_capacity() -> None:
    draw = random.Random(run_seed())
    for _ in range(200):
        alone = [Tenant(f"{n}", draw.randint(1, 9)) for n in range(draw.randint(0, 4))]
        pair = (TenantGroup("pair", (Tenant("x", 3), Tenant("y"))),) if draw.random() < 0.5 else ()
        roster = Roster(tenant_groups((*alone, *pair)))
        places = QueueSlots(draw.randint(1, 60), roster)
        taken = [0] * len(roster.names)
        for _ in range(80):
            tenant, wanted = draw.randrange(len(taken)), draw.randint(1, 8)
            if places.refusal(wanted, tenant) is None:
                places.take(wanted, tenant)
                taken[tenant] += wanted
            elif taken[tenant]:
                places.take(-1, tenant)
                taken[tenant] -= 1
            assert places.num_taken == sum(taken) <= places.capacity
        flood = draw.randrange(len(taken))
        for other, number in enumerate(taken):
            places.take(-number, other)
        while places.refusal(1, flood) is None:
            places.take(1, flood)
        assert all(
            places.refusal(1, other) is None for other in range(len(taken)) if other != flood
        ) or places.capacity // 2 < len(taken)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"acme": "the server's"},
            "the API key of tenant 'acme' equals the server's own; give each tenant a different key",
        ),
        ({"acme": "one", "small": "one"}, "the API key of tenant 'small' equals that of 'acme'"),
        ({"acme": "\n"}, "the API key of 'acme' must be 1 to 4096 printable ASCII characters"),
        ({"nobody": "key"}, "tenant is 'nobody'; none of the 4 tenants has that name"),
    ],
)
def test_invalid_tenant_keys_are_refused(keys: dict[str, str], message: str) -> None:
    engine = tiny_engine(cache_options={"tenants": TENANTS})
    with pytest.raises(InvalidArgument, match=message):
        create_app(engine, ServerOptions("m", api_key="the server's", tenant_keys=keys))
