"""Hybrid models: where vLLM's scheduler keeps states, stock and by our rules; each step reads the right contents."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from .connector import CONFIG
from .engine import Engine, request_of
from .states import LOADS, PLACES, hits_of
from .test_programs import Program


class WorkingEngine(Engine):
    """An engine whose blocks have contents."""

    works = True


#: Of request 1, 2, 3 and all later ones, by tokens a block and a hash.
STOCK = {
    (528, 528): ((0, 0, 1584), (0, 0, 1056)),
    (528, 16): ((0, 0, 1584), (0, 0, 1056)),
    (1056, 16): ((0, 0, 1056), (0, 0, 1056)),
    (1568, 16): ((0, 1568, 1568), (0, 0, 0)),
}
OURS = {
    (528, 528): ((0, 1584, 1584), (0, 528, 1056)),
    (528, 16): ((0, 1024, 1600), (0, 1024, 1488)),
    (1056, 16): ((0, 1024, 1600), (0, 1024, 1488)),
    (1568, 16): ((0, 1568, 1600), (0, 1024, 1488)),
}


@pytest.mark.parametrize(("page", "unit"), STOCK)
def test_shared_prefixes_hit_on_hybrid_models(page: int, unit: int) -> None:
    """The case of vllm#45238: 64 requests, one after another."""
    for load, stock, ours in zip(LOADS, STOCK[page, unit], OURS[page, unit], strict=True):
        assert hits_of("stock", page, unit, load) == [*stock, *[stock[-1]] * 61]
        assert hits_of("names", page, unit, load, state_checkpoints=PLACES) == [*ours, *[ours[-1]] * 61]


@pytest.mark.parametrize("rule", ["requested", "waiting"])
def test_the_second_request_hits_in_full(rule: str) -> None:
    """Where the application says where the shared part ends, or the next request waits already."""
    for load, whole in zip(LOADS, (1600, 1488), strict=True):
        found = hits_of(
            "names", 528, 16, load, state_checkpoints=[*PLACES, rule], requested=rule == "requested", waits=True
        )
        assert found == [0, *[whole] * 63]


def test_eight_requests_in_flight_hit_as_many_tokens_as_one() -> None:
    """From the tenth request on in full; by vLLM's own junctions too, as far as its blocks allow."""
    for load, whole, stock in zip(LOADS, (1600, 1488), (1584, 1056), strict=True):
        found = hits_of("names", 528, 16, load, in_flight=8, waits=True, state_checkpoints=PLACES)
        assert found[9:] == [whole] * 55
        assert set(hits_of("stock", 528, 16, load, in_flight=8, waits=True)[9:]) == {stock}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "no layer of the model keeps a state"),
        ({"page": 64, "is_cached": False}, "mamba_cache_mode is 'none', prefix caching is off"),
        ({"page": 16, "window": 48}, "it has layers of SlidingWindowSpec besides"),
        ({"page": 64, "connector": CONFIG}, "does not work with a KV connector"),
        ({"page": 64, "drafted": 1}, "tokens are drafted"),
        ({"page": 64, "inside": 1}, "num_prefill_checkpoint_blocks of the MambaSpec is not 0"),
        ({"level": "tokens"}, "state_checkpoints needs level 'names'"),
    ],
)
def test_unsupported_checkpoints_are_refused(settings: dict[str, Any], says: str) -> None:
    """Before the first request, by a sentence that names the setting."""
    level = settings.pop("level", "names")
    with pytest.raises(ValueError, match=says):
        Engine(level, 100, **settings, options={"state_checkpoints": PLACES})


@pytest.mark.parametrize("requested", [5, "1600", [True], [-16], [1.5], list(range(1, 2000)), [[1600]]])
def test_invalid_requested_positions_are_ignored(requested: Any) -> None:
    """A request cannot stop the engine."""
    engine = WorkingEngine("names", 100, page=64, unit=16, options={"state_checkpoints": ["requested"]})
    for number in range(2):
        engine.add(request_of(f"r{number}", list(range(200)), 4, requested=requested))
        engine.drain()
    assert engine.hits == 192
    engine.require_empty()


def test_reset_forgets_prompts() -> None:
    """No state is hit after a reset either."""
    engine = WorkingEngine("names", 100, page=64, unit=16, options={"state_checkpoints": PLACES})
    for number in range(2):
        engine.add(request_of(f"r{number}", list(range(300)), 4))
        engine.drain()
        assert engine.hits == 0
        assert engine.manager.planner.known
        engine.require_empty()
        assert not engine.manager.planner.known


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("unit", [16, 64])
def test_the_next_turn_hits_up_to_the_last_block_of_the_output(unit: int, asynchronous: bool) -> None:
    """Stock keeps no state of an output, unless it keeps the end of every chunk; nor does "last"."""
    hits = {}
    for level, places in (("stock", []), ("names", ["last"]), ("names", ["ends"])):
        options = {"options": {"state_checkpoints": places}} if places else {}
        engine = WorkingEngine(level, 100, asynchronous, page=64, unit=unit, **options)
        first = request_of("first", list(range(100)), 130)
        engine.add(first)
        engine.drain()
        assert engine.hits == 0
        engine.add(request_of("second", [*first.all_token_ids, *range(5000, 5010)], 4))
        engine.drain()
        hits[level, *places] = engine.hits
        engine.require_empty()
    before = 96 if unit == 16 else 64
    assert hits == {("stock",): before, ("names", "last"): before, ("names", "ends"): 192}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("num_blocks", [60, 600])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("seed", range(2))
def test_random_hybrid_programs_behave_as_in_vllm(seed: int, page: int, num_blocks: int, asynchronous: bool) -> None:
    """Without places of ours: stock and level "names" in step, and what is read was written. Hashes of 16 tokens."""
    settings = {"max_model_len": 512, "max_num_batched_tokens": 128, "page": page, "unit": 16}
    engines = [WorkingEngine(level, num_blocks, asynchronous, **settings) for level in ("stock", "names")]
    Program(seed, engines).run(250)
    assert all(engine.worker.num_states_read > 0 for engine in engines)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("page", [16, 64])
def test_request_that_shares_a_prefix_is_admitted_in_the_same_step_as_in_stock_vllm(
    page: int, asynchronous: bool
) -> None:
    """vLLM puts a request off while the request that cached its state is at the token behind it."""
    planned = []
    for level in ("stock", "names"):
        engine = WorkingEngine(level, 200, asynchronous, page=page, unit=16)
        engine.add(request_of("first", list(range(page * 2 + 13)), 20))
        steps = [engine.step()]
        engine.add(request_of("sharer", [*range(page * 2), *range(1000, 1040)], 4))
        steps += [engine.step() for _ in range(5)]
        planned.append(steps)
        engine.drain()
        assert engine.hits == page * 2
        engine.require_empty()
    assert planned[1] == planned[0]


class Sharing(Program):
    """Prompts that part late, so that many hit a state that was cached a step ago."""

    def add(self) -> None:
        """Add a request with one of few prompts."""
        name = f"r{len(self.names)}"
        self.names.append(name)
        end = [self.random.randrange(2) for _ in range(self.random.choice((1, 1, 5, 16, 17, 40)))]
        tokens, num_new = self.random.choice(self.prefixes) + end, self.random.randrange(1, 60)
        for engine in self.engines:
            engine.add(request_of(name, list(tokens), num_new))


@pytest.mark.parametrize("retention", [0, None, 128])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("seed", [2, 4])
def test_random_hybrid_programs_with_sharing_behave_as_in_vllm(seed: int, page: int, retention: int | None) -> None:
    settings = {"max_model_len": 512, "max_num_batched_tokens": 128, "page": page, "unit": 16, "retention": retention}
    engines = [WorkingEngine(level, 60, True, **settings) for level in ("stock", "names")]
    Sharing(seed, engines).run(150)


class Telling(Program):
    """Some requests say where states are wanted."""

    def add(self) -> None:
        """Add a request, which may say where states are wanted."""
        super().add()
        requested = [self.random.randrange(1, 300) for _ in range(self.random.randrange(3))]
        for engine in self.engines:
            request = engine.scheduler.requests[self.names[-1]]
            request.sampling_params.extra_args = {"checkpoint_positions": requested}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("retention", [0, None])
@pytest.mark.parametrize("num_blocks", [70, 600])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("seed", range(3))
def test_random_programs_with_checkpoints_keep_all_invariants(
    seed: int, page: int, num_blocks: int, retention: int | None, asynchronous: bool
) -> None:
    """Storms, aborts, resets: every step goes on from the state and the keys and values of its own tokens."""
    settings: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 128, "page": page, "unit": 16}
    settings |= {
        "retention": retention,
        "options": {"state_checkpoints": [*PLACES, "every:48", "waiting", "requested"]},
    }
    engine = WorkingEngine("names", num_blocks, asynchronous, **settings)
    Telling(seed, [engine]).run(250)
    assert engine.hits > 0
