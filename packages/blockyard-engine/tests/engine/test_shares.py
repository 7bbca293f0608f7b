"""Tenants that share the pool: who starts, who makes room, and a guarantee during a flood, token for token."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from blockyard import CacheSalt, InvalidArgument, KVCacheManager, LayerGroup, LoRA, NeverFits
from blockyard.config import cache_config
from blockyard.tenants import OTHERS, Roster, Tenant, TenantGroup, tenant_groups
from blockyard_engine import Engine, SamplingParams
from blockyard_engine.engine_options import Preemption
from blockyard_engine.request import Branch, make_request
from blockyard_engine.scheduling.scheduler import Scheduler
from blockyard_testing.seeds import draws, run_seed
from blockyard_testing.tiny_models import reference_tokens

from .test_scheduler import finish


def make(tenants: tuple[Tenant | TenantGroup, ...], num_blocks: int = 41, rows: int = 8) -> Scheduler:
    sizes: dict[str, Any] = {"block_size": 4, "max_num_seqs": rows, "max_model_len": 200, "watermark": 0.0}
    return Scheduler(KVCacheManager(cache_config(num_blocks, tenants=tenants, **sizes)), 64)


def add(scheduler: Scheduler, number: int, tenant: str, length: int, max_tokens: int = 60, n: int = 1) -> Branch:
    prompt = list(range(1000 * number, 1000 * number + length))
    wanted = SamplingParams(max_tokens=max_tokens, n=n, temperature=1.0 if n > 1 else 0.0)
    request = make_request(number, prompt, wanted, extra_keys=(CacheSalt(tenant),))
    scheduler.add(request)
    return request.branches[0]


def step(scheduler: Scheduler) -> list[Branch]:
    """Run a step and return the branches preempted in it."""
    scheduled = scheduler.schedule()
    if scheduled.rows:
        finish(scheduler, scheduled)
    return scheduled.preempted


def test_the_tenant_with_the_largest_overuse_makes_room() -> None:
    scheduler = make((Tenant("a"), Tenant("b")))
    many = [add(scheduler, number, "a", 39) for number in (1, 2, 3)]  # 30 of 40 blocks
    last = add(scheduler, 4, "b", 36)  # the other 10, soon
    preempted: list[Branch] = []
    while not preempted:
        preempted = step(scheduler)
    assert set(preempted) <= set(many)
    assert last in scheduler.running


def test_a_tenant_keeps_its_guarantee_when_it_makes_room() -> None:
    scheduler = make((Tenant("a", 1, 12), Tenant("b", 10)))
    one = add(scheduler, 1, "a", 50, 20)  # 13 blocks, soon more: no block of it is to be had without its guarantee
    others = [add(scheduler, number, "b", 50, 20) for number in (2, 3)]
    preempted = []
    while one in scheduler.running or not preempted:
        preempted += step(scheduler)
    assert preempted == [others[1]]


def test_the_tenant_with_the_least_overuse_starts_first_in_order_of_arrival() -> None:
    scheduler = make((Tenant("a"), Tenant("b", 3)), rows=3)
    first = [add(scheduler, number, "a", 30, 4) for number in range(1, 6)]
    late = [add(scheduler, number, "b", 30, 4) for number in (6, 7)]
    step(scheduler)
    assert set(scheduler.running) == {first[0], *late}
    while late[1] in scheduler.running:
        step(scheduler)
    step(scheduler)
    assert first[1] in scheduler.running


def test_a_tenant_at_its_limit_delays_no_other_and_preempts_its_own() -> None:
    scheduler = make((Tenant("a", max_held=12), Tenant("b")))
    few = [add(scheduler, number, "a", 22, 20) for number in (1, 2, 3)]
    other = add(scheduler, 4, "b", 40, 20)
    preempted = step(scheduler)
    assert scheduler.running == [few[0], few[1], other]
    while few[0] in scheduler.running:
        preempted += step(scheduler)
        assert scheduler._cache.num_held_by_tenant.tolist()[1] <= 12
    assert set(preempted) == {few[1]}
    assert other not in preempted


def test_a_tenant_above_its_guarantee_gives_up_rows() -> None:
    scheduler = make((Tenant("a"), Tenant("b", min_blocks=6)), rows=4)
    flood = [add(scheduler, number, "a", 10, 30, n) for number, n in ((1, 1), (2, 1), (3, 2), (4, 1))]
    step(scheduler)
    assert scheduler.running == flood[:3]  # a row is kept for the second answer
    guest = add(scheduler, 9, "b", 12)
    assert step(scheduler) in ([each] for each in flood[:3])
    assert guest in scheduler.running
    for number in range(10, 13):
        add(scheduler, number, "b", 30)  # beyond the guarantee: in turn, and nobody gives a row for it
    assert step(scheduler) == []


def test_a_tenant_by_name_and_a_salt_of_a_client_make_one_salt() -> None:
    tenants = (Tenant("acme"), Tenant("secret", keys=(CacheSalt("s3cret"),)), Tenant("fr", keys=(LoRA("fr"),)))
    roster = Roster(tenant_groups(tenants))
    assert roster.names == [OTHERS, "acme", "secret", "fr"]
    assert roster.keys_of(None, (CacheSalt("acme"),)) == (CacheSalt("acme"),)
    made: dict[tuple[str, str], tuple[Any, ...]] = {}
    for name in (OTHERS, "acme", "secret"):
        for salt in ("", "acme", "s3cret", "acme\x1f", "\x1facme", "\x1fs3cret\x1fx", "other"):
            keys = roster.keys_of(name, (LoRA("fr"), CacheSalt(salt)) if salt else (LoRA("fr"),))
            made[name, salt] = keys
            assert roster.number_of(tuple(("salt", key.value) for key in keys if isinstance(key, CacheSalt))) == (
                roster.names.index(name)
            )
            assert LoRA("fr") in keys
    assert len(set(made.values())) == len(made)  # whoever sends something else shares with nobody
    for name, message in (
        ("nobody", "tenant is 'nobody'; none of the 4 tenants has that name"),
        ("x" * 10**6, r"tenant is 'x{199}\.\.\.; none of the 4 tenants"),
        ("fr", "tenant is 'fr', which only has adapters; add a CacheSalt to its keys"),
        (7, "tenant is 7; it must be a string"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            roster.keys_of(name, ())
    with pytest.raises(InvalidArgument, match=r"a salt of 'a' contains U\+001F"):
        Tenant("a", keys=(CacheSalt("b\x1fc"),))


def test_requests_beyond_a_tenants_limit_are_refused_with_its_name(llama: Any) -> None:
    tenants = (Tenant("small", max_held=5), Tenant("sure", min_blocks=10))
    engine = Engine(llama, num_blocks=33, block_size=4, max_num_seqs=8, cache_options={"tenants": tenants})
    before = engine.cache.stats()
    with pytest.raises(NeverFits, match=r"6 blocks of 4; the cache can give tenant 'small' 5 \(num_blocks is 33, "):
        engine.add_request([1] * 20, SamplingParams(max_tokens=2), tenant="small")
    with pytest.raises(NeverFits, match=r"the cache can give tenant '\*' 2[12] "):
        engine.add_request([1] * 90, SamplingParams(max_tokens=9))
    with pytest.raises(InvalidArgument, match="tenant is 'who'; none of the 3 tenants"):
        engine.generate([[1, 2]], tenant="who")
    assert (engine.cache.stats(), engine.has_unfinished) == (before, False)
    with pytest.raises(InvalidArgument, match=r"tenants have guarantees .* of 10 blocks together; num_blocks is 9"):
        Engine(llama, num_blocks=9, block_size=4, max_num_seqs=8, cache_options={"tenants": tenants})
    for made, message in ((7, "tenants is 7; it must be a tuple"), ((Tenant("a", 1, 99),), "99 blocks together")):
        with pytest.raises(InvalidArgument, match=message):
            Engine(llama, num_blocks=33, max_num_seqs=8, cache_options={"tenants": lambda _, made=made: made})
    asked: list[int] = []
    options = {"tenants": lambda usable: (Tenant("a", 1, asked.append(usable) or usable // 2),), "watermark": 0.1}
    engine = Engine(llama, kv_cache_memory_bytes=2**20, block_size=4, max_num_seqs=8, cache_options=options)
    config = engine.cache.config
    assert asked == [config.num_blocks - 1 - config.watermark_blocks]
    assert [use.min_blocks for use in engine.cache.stats().tenants] == [0, asked[0] // 2]


class Flood:
    """A tenant that uses all it may: many long prompts with four answers each, all retained."""

    def __init__(self, engine: Engine, draw: random.Random) -> None:
        self.engine = engine
        self.draw = draw
        self.ids: set[int] = set()

    def pour(self) -> None:
        names = ["flood", OTHERS, None]
        while len(self.ids) < 24:
            prompt = [self.draw.randrange(5, 90) for _ in range(self.draw.choice((3, 30, 60, 90)))]
            n = self.draw.choice((1, 4))
            wanted = SamplingParams(max_tokens=self.draw.choice((2, 30)), n=n, temperature=1.0, seed=1)
            salts = self.draw.choice(((), (CacheSalt("flood"),), (CacheSalt(str(self.draw.random())),)))
            arguments: dict[str, Any] = {"priority": self.draw.choice((-(2**20), 0)), "extra_keys": salts}
            self.ids.add(self.engine.add_request(prompt, wanted, tenant=self.draw.choice(names), **arguments))
            self.engine.retain(prompt, priority=9, extra_keys=salts)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_guarantee_holds_during_a_flood_token_for_token(llama: Any, preemption: str) -> None:
    """Each request within the guarantee runs at once, is never preempted, and has the tokens that it has alone."""
    draw, num_preemptions, num_floods = random.Random(f"{run_seed()} {preemption}"), 0, 0
    while num_floods < draws(9, 3) or num_preemptions == 0:  # some floods make room without a preemption
        num_floods += 1
        assert num_floods < 60
        guarantee = draw.randint(8, 14)
        pair = TenantGroup("pair", (Tenant("sure", min_blocks=guarantee), Tenant("flood", 10_000)), 10_000)
        tenants = draw.choice(((pair, Tenant(OTHERS, 10_000)), (Tenant("sure", 1, guarantee), Tenant("flood", 10_000))))
        options: dict[str, Any] = {"tenants": tenants, "retention_blocks": 40, "watermark": draw.choice((0.0, 0.1))}
        engine = Engine(
            llama,
            num_blocks=60,
            block_size=4,
            max_num_seqs=6,
            max_num_batched_tokens=draw.choice((7, 20, 64)),
            num_cpu_blocks=20,
            preemption=preemption,
            cache_options=options,
        )
        flood = Flood(engine, draw)
        prompts = [[draw.randrange(5, 90) for _ in range(4 * (guarantee - 3) - draw.randint(0, 3))] for _ in range(4)]
        wanted = SamplingParams(max_tokens=8, ignore_eos=True)
        answers = []
        for prompt in prompts:
            flood.pour()
            for _ in range(draw.randint(3, 9)):
                flood.ids -= {result.request_id for result in engine.step().finished}
                engine.cache.check()
            guest = engine.add_request(prompt, wanted, tenant="sure", extra_keys=draw.choice(((), (CacheSalt("c"),))))
            found = None
            while found is None:
                flood.pour()
                report = engine.step()
                flood.ids -= {result.request_id for result in report.finished}
                assert guest in engine._scheduler.running_ids() or report.finished
                found = next((result for result in report.finished if result.request_id == guest), None)
            assert found.num_preemptions == 0
            answers.append(found.token_ids)
        assert answers == reference_tokens(llama, prompts, 8)
        num_preemptions += engine.num_preemptions
        engine.abort_all()
        engine.cache.check()


def watch_lenders(scheduler: Scheduler, pair: TenantGroup) -> None:
    """Check that tenants that make room for others keep their guarantees, and their groups', as the cache counts."""
    cache, choose = scheduler._cache, scheduler._preemptor.choose_lender

    def watched(running: list[Branch], needy: Branch, *rest: Any) -> Branch | None:
        lender = choose(running, needy, *rest)
        if lender is not None:
            uses = cache.stats().tenants
            owned = int(cache.num_owned_blocks([lender.seq])[0])
            lending, asking = uses[lender.request.tenant], uses[needy.request.tenant]
            assert lending.num_held - owned >= lending.min_blocks
            assert lending.name != asking.name
            if lending.group == "pair" != asking.group:
                assert sum(use.num_held for use in uses if use.group == "pair") - owned >= pair.guarantee
        return lender

    scheduler._preemptor.choose_lender = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["plain", "windows", "swap"])
def test_all_requests_finish_and_no_tenant_falls_below_its_guarantee(kind: str) -> None:
    draw, num_preemptions, num_runs = random.Random(f"{run_seed()} {kind}"), 0, 0
    while num_runs < draws(24, 8) or num_preemptions == 0:
        num_runs += 1
        guarantees = [draw.choice((0, draw.randint(1, 8))) for _ in range(4)]
        most = [draw.choice((None, guarantee + draw.randint(8, 30))) for guarantee in guarantees]
        a, b, c, others = (
            Tenant(name, draw.choice((1, 3, 10_000)), guarantee, limit)
            for name, guarantee, limit in zip(("a", "b", "c", OTHERS), guarantees, most, strict=True)
        )
        limit = draw.choice((None, sum(guarantees[:2]) + draw.randint(12, 30)))
        pair = TenantGroup("pair", (a, b), draw.choice((1, 9)), draw.choice((0, sum(guarantees[:2]) + 2)), limit)
        sizes: dict[str, Any] = {"block_size": 4, "max_num_seqs": draw.choice((3, 8)), "max_model_len": 90}
        if kind == "windows":
            sizes["groups"] = (LayerGroup(4), LayerGroup(4, sliding_window=draw.choice((3, 9))))
        config = cache_config(
            draw.randint(48, 70),
            watermark=draw.choice((0.0, 0.1)),
            num_cpu_blocks=30 if kind == "swap" else 0,
            tenants=(pair, c, others),
            **sizes,
        )
        cache = KVCacheManager(config)
        way = Preemption.SWAP if kind == "swap" else Preemption.RECOMPUTE
        scheduler = Scheduler(cache, draw.choice((8, 30)), way)
        watch_lenders(scheduler, pair)
        number = 0
        for _ in range(2000):
            while number < 40 and draw.random() < 0.5:
                number += 1
                with suppress(NeverFits):
                    add(scheduler, number, draw.choice("abcd"), draw.randint(1, 60), draw.randint(1, 30))
            if number == 40 and not scheduler.requests():
                break
            scheduled = scheduler.schedule()
            num_preemptions += len(scheduled.preempted)
            scheduler.moves.clear()
            if scheduled.rows:
                finish(scheduler, scheduled)
            cache.check()
        assert not scheduler.requests(), config.tenants
