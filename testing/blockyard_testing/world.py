"""A random program over every feature of the manager, with a data plane that remembers what stands in each slot.

The shadow memory holds, in place of keys and values, a name for "this token after all those before it, under these
extra keys". Plans are carried out on it as an engine would; then every context that attention would read is read
back through the block tables of each layer group and compared, token by token. A wrong hit, a lost copy, a block given
to two writers or a swap to the wrong place shows as a wrong name, whatever the counters say.

`World(package, seed)` takes either build; two builds with one seed must tell the same story (`story`).

    python -m tests.world --calls 50000 --seed 7    # many worlds in sequence, and what they did
"""

from __future__ import annotations

import argparse
import array
import random
from collections import Counter
from types import ModuleType
from typing import Any

import numpy as np

from .told import Told
from .twin import (
    NO_NUMBERS,
    NO_TOKENS,
    Record,
    count_handles_from_the_start,
    outcome,
    refused_calls,
    refused_handles,
)
from .used_options import used
from .world_memory import DataPlane, Seq

#: Calls of one world.
NUM_CALLS = 150
POLICY_NAMES = ("lru", "fifo", "lfu", "s3fifo", "arc", "score", "density")
#: Prompts that later ones begin with: some of sequences long gone, whose blocks were evicted meanwhile.
NUM_REMEMBERED = 12


class World(DataPlane):
    """One cache, its shadow memory, and a program that drives both."""

    #: Whether calls may arrive from finalisers, at any time.
    frees_by_itself = False

    def __init__(self, package: ModuleType, seed: int) -> None:
        self.package = package
        count_handles_from_the_start(package)
        self.random = random.Random(seed)
        #: Draws what has no part in the story: the forms in which tokens come.
        self.forms = random.Random(seed)
        self.seed = seed
        self.config = self.choose_config()
        super().__init__(package, self.config, seed, self.random)
        self.cache = package.KVCacheManager(self.config)
        self.seqs: list[Seq] = []
        #: Handles of sequences that ended.
        self.ended: list[int] = []
        self.remembered: list[Seq] = []
        self.story: list[Any] = []
        self.now = 0.0
        #: Blocks retained now and retentions that ended.
        self.num_wishes = 0
        self.told = Told()

    def choose_config(self) -> Any:
        choose = self.random
        package = self.package
        groups: tuple[Any, ...] = ()
        size = choose.choice((1, 2, 3, 4))
        kind = choose.randrange(5)
        if kind >= 2:
            sizes = [size * choose.choice((1, 1, 2, 3)) for _ in range(choose.randint(1, 3))]
            windows = [choose.choice((0, 0, choose.randint(1, 4 * size), choose.randint(1, 9))) for _ in sizes]
            groups = tuple(package.LayerGroup(s, w) for s, w in zip(sizes, windows, strict=True))
        # Every fifth world is tight, over a wide CPU pool, so that what is evicted is asked for again.
        is_tight = kind == 4
        num_cpu_blocks = choose.choice((0, choose.randint(2, 8), choose.randint(2, 50))) if kind != 0 else 0
        options = dict(
            num_blocks=choose.randint(5, 14)
            if is_tight
            else choose.choice((choose.randint(3, 12), choose.randint(4, 60))),
            block_size=size,
            max_num_seqs=choose.choice((choose.randint(1, 8), choose.randint(1, 8), 30)),
            max_model_len=(choose.randint(2, 6) if is_tight else choose.randint(2, 30)) * size,
            enable_prefix_caching=is_tight or choose.random() < 0.9,
            watermark=choose.choice((0.0, 0.0, 0.1)),
            groups=groups,
            num_cpu_blocks=choose.randint(10, 60) if is_tight else num_cpu_blocks,
            keep_evicted=is_tight or choose.random() < 0.7,
            **self.more_config(groups, size),
        )
        return package.config.cache_config(**used(options))

    def more_config(self, groups: tuple[Any, ...], size: int) -> dict[str, Any]:
        choose = self.random
        layers = [group for group in groups if isinstance(group, self.package.LayerGroup)]
        one_size = len({group.block_size for group in layers} or {size}) == 1
        return {
            "eviction_policy": choose.choice(POLICY_NAMES),
            "retention_blocks": choose.choice((0, 0, choose.randint(1, 20))),
            "partial_hits": one_size and choose.random() < 0.5,
            "track_misses": choose.random() < 0.5,
            "history_size": choose.choice((0, 0, 5)),
            "residency_sample": choose.choice((0, 0, 1, 3)),
            "enable_kv_cache_events": self.seed % 3 != 0,
            "max_sessions": choose.choice((0, 1, 3, 3, 100)),
        }

    # ------------------------------------------------------------------ running

    def run(self, num_calls: int) -> None:
        """`num_calls` random calls, the laws proved after each; then everything ends and nothing may be left."""
        self.run_calls(num_calls)
        self.finish()

    def run_calls(self, num_calls: int) -> None:
        """`num_calls` random calls."""
        actors = self.actors()
        for _ in range(num_calls):
            self.act(self.random.choices([a for a, _ in actors], [w for _, w in actors])[0])

    def actors(self) -> list[tuple[Any, float]]:
        swaps = 1.0 if self.config.cpu.num_blocks else 0.05
        return [
            (self.allocate, 10),
            (self.allocate_batch, 2),
            (self.step, 20),
            (self.fork, 3),
            (self.regroup, 2),
            (self.truncate, 2),
            (self.append, 2),
            (self.swap_out, 3 * swaps),
            (self.swap_in, 4 * swaps),
            (self.free, 7),
            (self.reset, 0.3),
            (self.resize, 1),
            (self.retain, 2),
            (self.advance_time, 2),
            (self.hint, 4),
            (self.set_policy, 0.5),
        ]

    def act(self, actor: Any) -> None:
        name = actor.__name__
        try:
            result = actor()
        except self.package.BlockyardError as error:
            result = f"{type(error).__name__}: {error}"
            name = f"{name}: {type(error).__name__}"
        self.counts[name] += 1
        self.cache.check()
        self.count_wishes(name)
        self.take_events()
        self.count_slid()
        self.story.append((name, result, self.state()))

    def take_events(self) -> None:
        """After some calls, so that others are told of together; then what was told is what the cache holds."""
        if self.config.observe.enable_kv_cache_events and len(self.story) % (1 + self.seed % 4) == 0:
            events = self.cache.take_events()
            self.told.apply(events)
            if self.told.differences(self.cache) and self.frees_by_itself:
                # A free that waited for `take_events` has dropped blocks right after it, of a pool that is shrinking.
                self.told.apply(self.cache.take_events())
            assert self.told.differences(self.cache) == []
            self.counts["contents told of"] += len(events.contents)

    def count_wishes(self, name: str) -> None:
        """What was retained is retained still or has ended for a cause; only `retain` makes it more."""
        ended = self.cache.ended_retentions
        num_wishes = self.cache.num_retained_blocks + sum(getattr(ended, f"num_{cause}") for cause in ended.CAUSES)
        assert num_wishes == self.num_wishes or (name == "retain" and num_wishes > self.num_wishes)
        self.num_wishes = num_wishes

    def count_slid(self) -> None:
        """How often a running sequence stood with blocks behind its window released."""
        for group, window in enumerate(self.windows):
            if window and any(
                len(ids) and not ids[0]
                for ids in (self.cache.block_ids(seq.handle, group) for seq in self.seqs if not seq.is_swapped)
            ):
                self.counts["windows slid"] += 1

    def state(self) -> Any:
        stats = self.cache.stats()
        return (
            tuple(getattr(stats, field) for field in ("num_hit_tokens", "num_evicted_blocks", "num_copied_blocks")),
            self.cache.num_free_blocks,
            self.cache.num_cached_blocks,
            self.cache.pool.ref_counts().tolist(),
        )

    def finish(self) -> None:
        stats, kind = self.cache.stats(), "mapped " if self.config.is_mapped else ""
        self.counts[kind + "tokens hit"] += stats.num_hit_tokens
        self.counts[kind + "blocks copied"] += stats.num_copied_blocks
        self.counts[kind + "blocks evicted"] += stats.num_evicted_blocks
        self.counts[kind + "blocks evicted by a hint"] += stats.num_hinted_evictions
        ended = self.cache.ended_retentions
        for cause in ended.CAUSES:
            self.counts[f"retentions {cause}"] += getattr(ended, f"num_{cause}")
        self.cache.free([seq.handle for seq in self.seqs])
        self.cache.check()
        assert self.cache.num_used_blocks == 0
        if self.cache.cpu_pool is not None:
            self.carry_out(self.cache.reserve([], 0))
            assert self.cache.cpu_pool.num_used_blocks == 0
        self.cache.check()

    # ------------------------------------------------------------------ what happens

    def earlier(self) -> Seq | None:
        """A sequence whose tokens a new prompt begins with: a running one, or one remembered."""
        choose = self.random
        known = choose.choice((self.seqs, self.remembered, self.remembered, []))
        return choose.choice(known) if known else None

    def prompt(self, earlier: Seq | None) -> list[int]:
        choose = self.random
        limit = self.config.max_model_len
        tokens = []
        if earlier is not None:
            keep = choose.choice((len(earlier.tokens), choose.randint(1, len(earlier.tokens))))
            tokens = list(earlier.tokens[:keep])
        tokens += [
            choose.choice((1, 1, 1, 2)) for _ in range(choose.randint(1, max(1, limit // choose.choice((2, 6)))))
        ]
        return tokens[:limit] if choose.random() < 0.95 else tokens

    def keys(self, earlier: Seq | None) -> tuple[Any, ...]:
        package = self.package
        if earlier is not None and self.random.random() < 0.8:
            return earlier.keys
        return self.random.choice(((), (), (), (package.LoRA("a"),), (package.CacheSalt("a"),)))

    def spans(self, tokens: list[int], earlier: Seq | None) -> tuple[Any, ...]:
        if earlier is not None and self.random.random() < 0.7:
            return tuple(span for span in earlier.spans if span.end <= len(tokens))
        spans = []
        for _ in range(self.random.choice((0, 0, 0, 0, 1, 2))):
            start = self.random.randrange(len(tokens))
            length = self.random.randint(1, len(tokens) - start)
            spans.append(self.package.Span(self.random.choice("xy"), start, length))
        return tuple(sorted(set(spans), key=repr))

    def given(self, tokens: list[int]) -> Any:
        """The tokens as a list, a buffer or an array."""
        form = self.forms.randrange(5)
        if form == 0:
            return tokens
        if form < 3:
            return memoryview(array.array("iq"[form - 1], tokens))
        return np.array(tokens, dtype=(np.int32, np.int64)[form - 3])

    def allocate(self) -> int:
        earlier = self.earlier()
        tokens, keys = self.prompt(earlier), self.keys(earlier)
        spans = self.spans(tokens, earlier)
        num_seqs = min(self.random.choice((1, 1, 1, 1, 2, 3)), self.config.max_num_seqs)
        given = self.given(tokens)
        answer = self.cache.can_allocate(given, extra_keys=keys + spans, num_seqs=num_seqs).name
        self.require_hope(answer)
        try:
            handle = self.cache.allocate(
                given, holder="someone", extra_keys=keys + spans, num_seqs=num_seqs, session=self.session()
            )
        except self.package.CapacityError:
            assert answer != "OK"
            raise
        self.require_said(answer)
        seq = Seq(handle, tokens, keys, spans, self.cache.generation)
        seq.num_promised = num_seqs - 1
        self.add(seq)
        if self.config.observe.track_misses:
            causes = self.cache.miss_causes(handle)
            amounts = [getattr(causes, name) for name in causes.FIELDS if name != "evicted_ago"]
            assert not self.config.enable_prefix_caching or sum(amounts) == len(tokens)
            assert min(amounts) >= 0
        hit = self.cache.num_computed_tokens(handle)
        self.counts["hits over a span"] += any(span.start < hit for span in spans)
        return hit

    def session(self) -> str | None:
        """Of a few sessions one, in two of three worlds."""
        return self.random.choice((None, "a", "b", "c", "d", "e")) if self.seed % 3 else None

    def hint(self) -> str:
        """True or not: it may change what is evicted, and nothing else."""
        choose = self.random
        target = choose.choice(
            ([seq.handle for seq in self.seqs] or ["a"]) if choose.random() < 0.3 else list("abcdef")
        )
        said = choose.choice(({}, {"over": True}, {"over": True}))
        outcome = self.cache.hint(target, **said)
        self.counts[f"hint {outcome.value}"] += 1
        return str(outcome.name)

    def require_hope(self, answer: str) -> None:
        """LATER promises that waiting helps; with nobody left to wait for it would be a wait forever."""
        assert answer != "LATER" or self.seqs or self.cache.pool.leases(), "LATER, and nothing holds a block"

    def require_said(self, answer: str) -> None:
        """What was taken in had been promised room."""
        assert answer == "OK", answer

    def add(self, seq: Seq) -> None:
        self.seqs.append(seq)
        self.remembered = [*self.remembered[-NUM_REMEMBERED + 1 :], seq]

    def allocate_batch(self) -> list[int]:
        earlier = self.earlier()
        first, keys = self.prompt(earlier), self.keys(earlier)
        prompts = [first]
        for _ in range(self.random.randint(0, 3)):
            other = self.random.choice((None, self.earlier()))
            if other is not None:
                prompts.append(self.prompt(other))
            else:
                tail = self.prompt(None)[: self.random.randint(0, 5)]
                prompts.append(first[: self.random.randint(1, len(first))] + tail)
        answer = self.cache.can_allocate_batch(prompts, extra_keys=keys).name
        self.require_hope(answer)
        try:
            handles = self.cache.allocate_batch(prompts, extra_keys=keys)
        except self.package.CapacityError:
            assert answer != "OK"
            raise
        self.require_said(answer)
        for handle, tokens in zip(handles, prompts, strict=True):
            self.add(Seq(handle, tokens, keys, (), self.cache.generation))
        return handles

    def batch(self) -> list[Seq]:
        ready = [seq for seq in self.seqs if not seq.is_swapped or self.random.random() < 0.02]
        return self.random.sample(ready, self.random.choice((len(ready), self.random.randint(0, len(ready)))))

    def step(self) -> list[int]:
        """Reserve for some sequences, carry out the plan, compute or fail, commit."""
        cache, seqs = self.cache, self.batch()
        counts = [self.wish(seq) for seq in seqs]
        handles = [seq.handle for seq in seqs]
        fits = cache.can_append(handles, counts)
        plan = cache.reserve(handles, counts)
        assert plan.all_fit or not fits, "can_append said yes"
        self.counts["cautious can_append" if plan.all_fit and not fits else "right can_append"] += 1
        self.carry_out(plan)
        self.compute(plan, seqs)
        return plan.status.tolist()

    def wish(self, seq: Seq) -> int:
        """How many tokens to compute: all there are and drafts behind them, or a few."""
        choose = self.random
        lacking = len(seq.tokens) - self.cache.num_computed_tokens(seq.handle)
        seq.drafts = [self.sample(len(seq.tokens) + number) for number in range(choose.choice((0, 0, 0, 1, 2, 5)))]
        full = lacking + len(seq.drafts)
        return int(min(full, choose.choice((full, full, full, 1, 3))))

    def sample(self, position: int) -> int:
        """The token that the model gives at a position."""
        return self.random.choice((1, 2))

    def compute(self, plan: Any, seqs: list[Seq]) -> None:
        """Write what was scheduled, read every context back, and commit what was accepted."""
        scheduled = plan.num_scheduled.tolist()
        self.check_inputs(plan, seqs)
        fails = self.random.random() < 0.1
        for group in range(len(self.sizes)):
            self.write(plan, seqs, group, fails)
        done = [(seq, count) for seq, count in zip(seqs, scheduled, strict=True) if count > 0]
        if not fails:
            for index, (seq, count) in enumerate(zip(seqs, scheduled, strict=True)):
                if count > 0:
                    self.read(plan, index, seq, count)
        self.commit(done, fails)

    def commit(self, done: list[tuple[Seq, int]], fails: bool) -> None:
        choose, cache = self.random, self.cache
        computed, appended = [], []
        for seq, count in done:
            start = cache.num_computed_tokens(seq.handle)
            number = 0 if fails else choose.choice((count, count, count, choose.randint(0, count)))
            reached = start + number
            new = seq.drafts[: max(0, reached - len(seq.tokens))]
            is_last = reached == len(seq.tokens) + len(new) < self.config.max_model_len
            if not fails and is_last and choose.random() < 0.8:
                new = [*new, self.sample(len(seq.tokens) + len(new))]
            computed.append(number)
            appended.append(new)
        width = max([1, *map(len, appended)])
        rows = np.array([new + [-1] * (width - len(new)) for new in appended], dtype=np.int64).reshape(-1, width)
        try:
            cache.commit([seq.handle for seq, _ in done], computed, rows)
        except self.package.BlockyardError as error:
            # A joiner's owner did not get as far, or a token has no place: the step counts for nothing then.
            self.counts[f"commit: {type(error).__name__}"] += 1
            self.forget(done)
            return
        for (seq, _), number, new in zip(done, computed, appended, strict=True):
            seq.tokens = seq.tokens + new
            seq.was_read = seq.was_read or number > 0

    def forget(self, done: list[tuple[Seq, int]]) -> None:
        self.cache.commit([seq.handle for seq, _ in done], 0)

    def one(self) -> Seq | None:
        return self.random.choice(self.seqs) if self.seqs else None

    def append(self) -> None:
        seq = self.one()
        if seq is not None:
            token = self.random.choice((1, 2))
            self.cache.append([seq.handle], [token])
            seq.tokens = [*seq.tokens, token]

    def fork(self) -> int | None:
        seq = self.one()
        if seq is None:
            return None
        count = self.random.randint(1, 3)
        try:
            handles = self.cache.fork(seq.handle, count)
        except self.package.OutOfRows:
            assert count > seq.num_promised, "the rows were promised"
            raise
        seq.num_promised = max(seq.num_promised - count, 0)
        for handle in handles:
            self.add(self.child_of(seq, handle))
        return len(handles)

    def child_of(self, seq: Seq, handle: int) -> Seq:
        child = Seq(handle, list(seq.tokens), seq.keys, seq.spans, seq.generation)
        child.text_from = seq.text_from
        child.was_read = seq.was_read
        child.is_swapped = seq.is_swapped
        return child

    def regroup(self) -> int | None:
        seqs = self.random.sample(self.seqs, self.random.randint(0, min(4, len(self.seqs))))
        if not seqs:
            return None
        parents = [self.random.randrange(len(seqs)) for _ in range(self.random.randint(0, 5))]
        handles = self.cache.regroup([seq.handle for seq in seqs], parents)
        for index, seq in enumerate(seqs):
            seq.num_promised = max(seq.num_promised - max(parents.count(index) - 1, 0), 0)
        by_handle = {seq.handle: seq for seq in seqs}
        self.ended += [handle for handle in by_handle if handle not in handles]
        self.seqs = [seq for seq in self.seqs if seq not in seqs]
        for handle, parent in zip(handles, parents, strict=True):
            self.counts["regrouped forks"] += handle not in by_handle
            self.add(by_handle.get(handle) or self.child_of(seqs[parent], handle))
        return len(handles)

    def truncate(self) -> None:
        seq = self.one()
        if seq is not None:
            length = self.random.randint(1, len(seq.tokens))
            self.cache.truncate(seq.handle, length)
            self.counts["cuts inside a span"] += any(
                span.start < length < span.end <= seq.text_from for span in seq.spans
            )
            seq.tokens = seq.tokens[:length]
            seq.text_from = min(seq.text_from, length)

    def swap_out(self) -> int:
        seqs = self.random.sample(self.seqs, self.random.randint(0, min(3, len(self.seqs))))
        plan = self.cache.swap_out([seq.handle for seq in seqs])
        self.carry_out(plan)
        for seq in seqs:
            seq.is_swapped = True
        return len(seqs)

    def swap_in(self) -> int:
        swapped = [seq for seq in self.seqs if seq.is_swapped or self.random.random() < 0.02]
        seqs = self.random.sample(swapped, self.random.randint(0, len(swapped)))
        plan = self.cache.swap_in([seq.handle for seq in seqs])
        self.carry_out(plan)
        for seq in seqs:
            seq.is_swapped = False
        return len(seqs)

    def free(self) -> int:
        seqs = self.random.sample(self.seqs, self.random.randint(0, min(3, len(self.seqs))))
        self.stop(seqs)
        return len(seqs)

    def stop(self, seqs: list[Seq]) -> None:
        self.cache.free([seq.handle for seq in seqs])
        self.ended += [seq.handle for seq in seqs]
        self.seqs = [seq for seq in self.seqs if seq not in seqs]

    def misuse(self) -> list[Record]:
        """Calls with what no call takes: each is refused, and changes nothing."""
        before = self.state()
        live = [seq.handle for seq in self.seqs]
        dead = self.random.choice([*self.ended, 0, 1 << 20, 3, 2**70])
        tokens, number = self.random.choice(NO_TOKENS), self.random.choice(NO_NUMBERS)
        calls = refused_calls(self.cache, live, tokens, number) + refused_handles(self.cache, live, dead)
        calls += [lambda: self.package.CacheConfig(8, number), lambda: self.package.BlockPool(number)]
        records = [outcome(call) for call in calls]
        assert [n for n, record in enumerate(records) if record[0] != "raised"] == [], (self.seed, tokens, number, dead)
        assert self.state() == before, "a refused call changed something"
        return records

    def resize(self) -> str:
        """Grow or shrink; the memory beyond the pool stays until nothing retires there."""
        answer = self.cache.resize(self.random.randint(2, 70))
        missing = int(self.cache.pool.ref_counts().shape[0]) - len(self.gpu.blocks[0])
        if missing > 0:
            self.gpu.grow(missing)
        return str(answer.name)

    def retain(self) -> int:
        expires_at = self.random.choice((None, self.now + self.random.random()))
        earlier = self.earlier()
        tokens, keys = self.prompt(earlier), self.keys(earlier)
        return int(
            self.cache.retain(tokens, priority=self.random.choice((0, 1, 1, 5)), expires_at=expires_at, extra_keys=keys)
        )

    def advance_time(self) -> None:
        self.now += self.random.random()
        self.cache.advance_time(self.now)

    def set_policy(self) -> None:
        self.cache.set_eviction_policy(self.random.choice(POLICY_NAMES))

    def reset(self) -> None:
        """From here on names differ, so a stale hit shows as wrong keys and values."""
        self.cache.reset_prefix_cache()


def run_worlds(package: ModuleType, seed: int, num_calls: int) -> Counter[str]:
    """Worlds of seeds `seed`, `seed + 1`, ..., in sequence, `num_calls` calls in all; what they did, added up."""
    counts: Counter[str] = Counter()
    for start in range(0, num_calls, NUM_CALLS):
        world = World(package, seed + start // NUM_CALLS)
        try:
            world.run(min(NUM_CALLS, num_calls - start))
        except Exception as error:
            error.add_note(f"World(blockyard, {world.seed}), after {len(world.story)} calls")
            raise
        counts += world.counts
        counts["worlds"] += 1
    return counts


def main() -> None:
    """One long run; prints its seed first, so that it can be repeated whatever happens."""
    import blockyard
    from blockyard.cli import build_name

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--calls", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    print(f"seed {options.seed}, {build_name()}", flush=True)
    for name, count in sorted(run_worlds(blockyard, options.seed, options.calls).items()):
        print(f"{count:10} {name}")


if __name__ == "__main__":
    main()
