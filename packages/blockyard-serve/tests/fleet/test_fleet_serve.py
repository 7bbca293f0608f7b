"""`blockyard fleet serve` as a user starts it: a replica is killed in mid stream; a tenant floods beside another."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("zmq")
pytest.importorskip("ray.serve", reason="needs the extra `fleet`: pip install 'blockyard[fleet]'")

from blockyard_testing.patience import wait_until
from blockyard_testing.servers import Running, running_server, tiny_engine
from blockyard_testing.tiny_models import tiny_folder

from ..support.fleets import RunningFleet, running_fleet

#: Streams that go on for some seconds, so that one is in the middle when its replica dies.
LONG = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "seed": 11},
    "two of them": {"temperature": 1.0, "seed": 12, "n": 2},
    "penalized": {"temperature": 1.0, "seed": 13, "frequency_penalty": 0.5, "top_p": 0.9},
}


@pytest.fixture(scope="module")
def single() -> Iterator[Running]:
    with running_server(tiny_engine(600, max_position_embeddings=2048)) as running:
        yield running


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = tiny_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)
    with running_fleet(folder, "--num-blocks", "600", "--check-endpoint") as running:
        yield running


def streamed(served: Running | RunningFleet, fields: dict[str, Any], begun: threading.Event | None = None) -> list[str]:
    """The text of each completion of a stream, whose pieces came one after another."""
    texts = [""] * int(fields.get("n", 1))
    stream = served.client().completions.create(
        model="tiny", prompt="What is a block?", stream=True, max_tokens=900, extra_body={"ignore_eos": True}, **fields
    )
    for number, piece in enumerate(stream):
        for choice in piece.choices:
            texts[choice.index] += choice.text
        if number > 30 and begun is not None:
            begun.set()
    return texts


def plain(answer: dict[str, Any]) -> Any:
    """An answer without its id, its time and what the cache had."""
    return {"choices": answer["choices"], "tokens": answer["usage"]["total_tokens"]}


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "one two three", "max_tokens": 20, "temperature": 0}),
    ("/v1/completions", {"prompt": ["one", "two"], "max_tokens": 9, "temperature": 0.7, "seed": 3, "n": 2}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "stop": ["a", "e", "i"]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 100_000}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 4, "suffix": "y"}),
    ("/tokenize", {"prompt": "one two", "return_blocks": True}),
]


def test_a_fleet_serves_and_survives_the_loss_of_a_replica(single: Running, fleet: RunningFleet) -> None:
    for path, body in BODIES:
        expected, found = single.post(path, **body), fleet.post(path, **body)
        assert found[0] == expected[0], (body, found)
        if "usage" in expected[2]:
            assert plain(found[2]) == plain(expected[2])
        else:
            assert found[2] == expected[2]
    an_answer_fills_the_block_of_its_prompt(fleet)
    both_know(fleet)
    the_page_is_there(fleet)
    a_replica_dies_in_mid_stream(single, fleet)
    both_know(fleet)
    a_stopped_replica_is_left(single, fleet)
    nothing_is_left(fleet)


def an_answer_fills_the_block_of_its_prompt(fleet: RunningFleet) -> None:
    """Fill the last block of a prompt with its last token, which is the one that `/check` appends."""
    body = {"prompt": [5] * 31, "max_tokens": 4, "temperature": 0, "logit_bias": {"5": 100}}
    assert fleet.post("/v1/completions", **body)[0] == 200


def both_know(fleet: RunningFleet) -> None:
    """Check that the mirror equals what the replicas hold, no request is booked, and the page shows the claims."""
    wait_until(lambda: [each["trust"] for each in fleet.get("/fleet")["replicas"]] == ["live", "live"])
    wait_until(lambda: fleet.check()["booked"] == 0)
    answer = fleet.check()
    assert answer["ok"], answer
    assert answer["compared"] > 0
    assert len(answer["replicas"]) == 2
    assert {psutil.Process(process).nice() for process in answer["replicas"].values()} == {fleet.process.nice()}
    state = fleet.get("/fleet")
    assert sum(each["over"] for each in state["claims"].values()) == 0
    assert 'blockyard:fleet_replica_believed{engine="fleet"' in fleet.page()


def the_page_is_there(fleet: RunningFleet) -> None:
    for path, kind in [("/ui/", "text/html"), ("/ui/fleet.js", "text/javascript"), ("/ui/page.css", "text/css")]:
        status, headers, _ = fleet.call("GET", path)
        assert (status, headers["content-type"].partition(";")[0]) == (200, kind)
    assert fleet.call("GET", "/ui")[1]["location"] == "ui/"
    assert fleet.call("POST", "/ui/")[0] == 405
    assert fleet.call("GET", "/ui/state")[0] == 404


def a_replica_dies_in_mid_stream(single: Running, fleet: RunningFleet) -> None:
    expected = {name: streamed(single, fields) for name, fields in LONG.items()}
    found: dict[str, list[str]] = {}
    begun = [threading.Event() for _ in LONG]

    def ask(name: str, event: threading.Event) -> None:
        found[name] = streamed(fleet, LONG[name], event)

    threads = [threading.Thread(target=ask, args=each) for each in zip(LONG, begun, strict=True)]
    for thread in threads:
        thread.start()
    for event in begun:
        wait_until(event.is_set)
    busiest = max(fleet.get("/fleet")["replicas"], key=lambda each: each["requests"])
    assert busiest["requests"] > 0
    os.kill(fleet.check()["replicas"][busiest["name"]], signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert found == expected
    state = fleet.get("/fleet")
    assert state["resumed_requests"] >= 1
    assert state["resumed_tokens"] > 30


def a_stopped_replica_is_left(single: Running, fleet: RunningFleet) -> None:
    expected, begun, found = streamed(single, LONG["sampled"]), threading.Event(), []
    thread = threading.Thread(target=lambda: found.append(streamed(fleet, LONG["sampled"], begun)))
    thread.start()
    wait_until(begun.is_set)
    busiest = max(fleet.get("/fleet")["replicas"], key=lambda each: each["requests"])
    process = fleet.check()["replicas"][busiest["name"]]
    os.kill(process, signal.SIGSTOP)
    try:
        thread.join()
    finally:
        os.kill(process, signal.SIGCONT)
    assert found == [expected]


def nothing_is_left(fleet: RunningFleet) -> None:
    """SIGTERM ends the command, all that it has started, and its folder."""
    ours = [fleet.process, *fleet.process.children(recursive=True)]
    assert len(ours) > 5
    folder = fleet.folder()
    assert folder.is_dir()
    fleet.process.terminate()
    assert fleet.wait() == 0
    wait_until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in ours))
    assert not folder.exists()


def uses(fleet: RunningFleet) -> dict[str, dict[str, Any]]:
    """Return the blocks that tenants hold on all replicas."""
    return {each["name"]: each for each in fleet.get("/fleet")["tenants"]}


def test_tenants_guarantee_holds_in_a_flooded_fleet(single: Running, tmp_path: Path) -> None:
    """The flood exceeds both queues; requests beyond its tenant's part of the front queue are refused with 429."""
    options = ("--num-blocks", "300", "--max-num-seqs", "8", "--max-waiting", "30", "--check-endpoint")
    tenants = ("--tenant", "acme,min=40%,weight=3", "--tenant", "flood", "--tenant", "small,max=10")
    folder = tiny_folder(tmp_path, max_position_embeddings=2048)
    with running_fleet(folder, *options, *tenants) as fleet, ThreadPoolExecutor(60) as pool:
        over = threading.Event()

        def ask(tenant: str, **fields: Any) -> tuple[int, dict[str, str], Any]:
            body = json.dumps({"model": "tiny", **fields}).encode()
            status, headers, text = fleet.call("POST", "/v1/completions", body, {"X-Tenant": tenant})
            return status, headers, json.loads(text)

        def flood(number: int) -> Counter[int]:
            seen: Counter[int] = Counter()
            while not over.is_set():
                status, headers, told = ask("flood", prompt=f"{number}", max_tokens=400, ignore_eos=True)
                seen[status] += 1
                if status == 429:
                    assert int(headers["retry-after"]) >= 1
                    # The second where all others have their parts.
                    assert re.search("tenant 'flood' has|the queue is full", told["error"]["message"])
                    over.wait(0.2)
            return seen

        floods = [pool.submit(flood, number) for number in range(50)]
        wait_until(lambda: sum(each["requests"] for each in fleet.get("/fleet")["replicas"]) > 20)
        wanted = [{"prompt": f"{number} of mine", "max_tokens": 30, "temperature": 0} for number in range(20)]
        try:
            found = list(pool.map(lambda fields: ask("acme", **fields), wanted[:8]))
            found += [ask("acme", **fields) for fields in wanted[8:]]
            wait_until(lambda: uses(fleet)["flood"]["held"] > 0 < uses(fleet)["acme"]["idle"])
            assert not any(each.done() for each in floods)
        finally:
            over.set()
        assert [status for status, _, _ in found] == [200] * len(wanted)
        floor = uses(fleet)["acme"]["floor"]
        assert floor == 2 * (296 * 40 // 100)
        assert (
            f'blockyard:share_blocks_floor{{engine="fleet",model_name="tiny",tenant="acme"}} {float(floor)}'
            in fleet.page()
        )
        for tenant, fields, code in [
            ("small", {"prompt": "x" * 200, "max_tokens": 9}, "context_length_exceeded"),
            ("nobody" * 2000, {"prompt": "x"}, "unknown_tenant"),
        ]:
            status, _, told = ask(tenant, **fields)
            assert (status, told["error"]["code"]) == (400, code)
        refused = sum((each.result() for each in floods), Counter[int]())
        assert refused.keys() == {200, 429}
        for fields, (_, _, told) in zip(wanted, found, strict=True):
            assert plain(told) == plain(single.post("/v1/completions", **fields)[2])
        wait_until(lambda: fleet.check()["booked"] == 0)
        assert fleet.check()["ok"]
