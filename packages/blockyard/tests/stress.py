"""A million operations of the random program, on larger caches than `tests.world` has, looked at now and then.

    python -m tests.stress --operations 1000000 --seed N

Blocks of up to 32 tokens, up to 64 sequences of up to 400. In a crowd all prompts branch off one text and are computed
slowly, so that they join one another's blocks, and many end between reservation and commit. Every sequence is read back
as a whole now and then, beside what its steps read.

An operation is one call for one sequence; a batched call counts once for each sequence in it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from types import ModuleType
from typing import Any

import blockyard
from blockyard_testing.seeds import run_seed
from blockyard_testing.used_options import used
from blockyard_testing.world import World
from blockyard_testing.world_memory import NOTHING, Seq


class LargeWorld(World):
    """A world of many sequences, which looks at its cache as a whole once in a while."""

    def __init__(self, package: ModuleType, seed: int, check_every: int = 1000) -> None:
        super().__init__(package, seed)
        self.check_every = check_every
        self.num_operations = 0
        self.next_check = check_every
        limit = min(self.config.max_model_len, self.config.num_blocks * self.sizes[0] // 6)
        #: What the prompts of a crowd begin with.
        self.text = [self.random.randrange(64) for _ in range(self.random.randint(1, max(1, limit)))]

    def choose_config(self) -> Any:
        choose, package = self.random, self.package
        #: A crowd branches off one text, is computed slowly and loses members early: it joins blocks of others.
        self.is_crowd = choose.random() < 0.4
        size = choose.choice((1, 2, 3, 4, 8, 16, 16, 32))
        windowed = (package.LayerGroup(size, 0), package.LayerGroup(size, choose.randint(1, 4 * size)))
        groups = windowed if not self.is_crowd and choose.random() < 0.3 else ()
        more = self.more_config(groups, size) if choose.random() < 0.5 else {}
        options = dict(
            num_blocks=choose.choice((8, 40, 120, 400)),
            block_size=size,
            max_num_seqs=choose.choice((2, 8, 24, 64)),
            max_model_len=choose.choice((17, 60, 150, 400)),
            enable_prefix_caching=choose.random() < 0.85,
            watermark=choose.choice((0.0, 0.01, 0.1)),
            groups=groups,
            hash_seed=choose.randrange(2**30),
            **{**more, "enable_kv_cache_events": False},
        )
        return package.config.cache_config(**used(options))

    def actors(self) -> list[tuple[Any, float]]:
        arrive, free, truncate, abandon = (30, 6, 2, 3) if self.is_crowd else (22, 14, 4, 1)
        actors = [(self.arrive, arrive), (self.step, 60), (self.free, free), (self.fork, 2), (self.regroup, 0.5)]
        actors += [(self.truncate, truncate), (self.misuse, 1), (self.abandon_step, abandon), (self.reset, 0.15)]
        return [*actors, (self.hint, 1), (self.retain, 0.5), (self.advance_time, 0.5), (self.set_policy, 0.1)]

    def run_operations(self, num_operations: int) -> None:
        """At least so many operations; then everything ends and nothing may be left."""
        while self.num_operations < num_operations:
            self.run_calls(50)
        self.finish()

    def act(self, actor: Any) -> None:
        name = actor.__name__
        try:
            actor()
        except self.package.BlockyardError as error:
            name = f"{name}: {type(error).__name__}"
        self.did(name)
        if self.num_operations >= self.next_check:
            self.verify()
            self.next_check = self.num_operations + self.check_every

    def did(self, name: str, times: int = 1) -> None:
        self.counts[name] += times
        self.num_operations += times

    def finish(self) -> None:
        self.verify()
        super().finish()

    def verify(self) -> None:
        """Every sequence that was read once still has all that it computed, and its tokens; all laws hold."""
        for seq in self.seqs:
            if self.cache.token_ids(seq.handle).tolist() != seq.tokens:
                raise AssertionError(f"{self.seed}: sequence {seq.handle} has other tokens")
            self.verify_seq(seq)
        self.cache.check()

    def verify_seq(self, seq: Seq) -> None:
        if not seq.was_read:
            return
        end = self.cache.num_computed_tokens(seq.handle)
        names = self.names(seq, seq.tokens)
        for group, window in enumerate(self.windows):
            first = max(end - window + 1, 0) if window else 0
            self.read_back(group, self.cache.block_ids(seq.handle, group), names, first, end)

    # ------------------------------------------------------------------ what happens

    def prompt(self, earlier: Seq | None) -> list[int]:
        if not self.is_crowd:
            return super().prompt(earlier)
        branch = [self.random.randrange(3) for _ in range(self.random.randint(0, 2 * self.sizes[0]))]
        whole = self.text[: self.random.randint(0, len(self.text))] + branch
        return whole[: self.config.max_model_len] or [0]

    def keys(self, earlier: Seq | None) -> tuple[Any, ...]:
        return () if self.is_crowd else super().keys(earlier)

    def spans(self, tokens: list[int], earlier: Seq | None) -> tuple[Any, ...]:
        return () if self.is_crowd else super().spans(tokens, earlier)

    def sample(self, position: int) -> int:
        """A crowd mostly says what its prompts say, so that what it generates is hit."""
        if self.is_crowd and position < len(self.text) and self.random.random() < 0.8:
            return self.text[position]
        return self.random.randrange(3)

    def arrive(self) -> None:
        for _ in range(self.random.choice((1, 1, 1, 1, 3, 6))):
            self.allocate()
            self.did("allocate")

    def batch(self) -> list[Seq]:
        share = 0.25 if self.is_crowd else 0.9
        return [seq for seq in self.random.sample(self.seqs, len(self.seqs)) if self.random.random() < share]

    def wish(self, seq: Seq) -> int:
        room = self.config.max_model_len - self.cache.num_computed_tokens(seq.handle)
        wanted = min(super().wish(seq), room)
        return min(wanted, self.random.choice((1, 2, 3))) if self.is_crowd else wanted

    def step(self) -> list[int]:
        statuses = super().step()
        kinds = Counter(self.package.SeqStatus(status).name for status in statuses)
        self.did("reserve", len(statuses))
        self.counts.update({f"reserve: {name}": number for name, number in kinds.items()})
        if self.seqs and (kinds["NO_BLOCKS"] or self.random.random() < 0.01):
            self.preempt()
        return statuses

    def commit(self, done: list[tuple[Seq, int]], fails: bool) -> None:
        self.did("commit", len(done))
        self.counts["failed steps"] += fails
        super().commit(done, fails)

    def preempt(self) -> None:
        """The youngest makes room; a later prompt begins with its tokens."""
        self.stop([self.seqs[-1]])
        self.did("preempted")

    def abandon_step(self) -> None:
        """Sequences end between reservation and commit; the others commit what they computed, if they may."""
        seqs = self.batch()
        if len(seqs) < 2:
            return
        plan = self.cache.reserve([seq.handle for seq in seqs], [self.wish(seq) for seq in seqs])
        self.carry_out(plan)
        ends = self.random.sample(range(len(seqs)), self.random.randint(1, 2))
        bounds = plan.query_start_loc
        for group in range(len(self.sizes)):
            self.write(plan, seqs, group, False)
            memory, slots = self.gpu.blocks[group].reshape(-1), plan.groups[group].slot_mapping
            for index in ends:
                memory[slots[bounds[index] : bounds[index + 1]]] = NOTHING
        starts, counts = plan.num_computed.tolist(), plan.num_scheduled.tolist()
        self.stop([seqs[index] for index in ends])
        for index, seq in enumerate(seqs):
            known = min(counts[index], len(seq.tokens) - starts[index])
            if index not in ends and known > 0:
                self.commit_alone(seq, known)

    def commit_alone(self, seq: Seq, number: int) -> None:
        """Commit; refused where what the sequence joined went away with its owner, or is not there yet."""
        try:
            ended = self.cache.commit([seq.handle], number)
        except self.package.SequenceNotReady:
            self.did("refused commit")
            return
        if ended:
            self.did("commit of an ended reservation")
            return
        self.did("commit")
        seq.was_read = True
        self.verify_seq(seq)


def run_stress(seed: int, num_operations: int, num_worlds: int = 20, check_every: int = 1000) -> Counter[str]:
    """Spread the operations over worlds of several shapes; returns how often each thing happened."""
    choose = random.Random(seed)
    counts: Counter[str] = Counter()
    for _ in range(num_worlds):
        world = LargeWorld(blockyard, choose.randrange(2**32), check_every)
        try:
            world.run_operations(-(-num_operations // num_worlds))
        except Exception as error:
            error.add_note(f"LargeWorld(blockyard, {world.seed}), after {world.num_operations} operations")
            raise
        counts += world.counts
        counts["operations"] += world.num_operations
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Random operations on the manager, its content checked.")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=None, help="default: BLOCKYARD_SEED, or a random one")
    parser.add_argument("--worlds", type=int, default=20, help="caches of different sizes, one after another")
    parser.add_argument("--check-every", type=int, default=1000, help="operations between two whole checks")
    options = parser.parse_args()
    seed = run_seed() if options.seed is None else options.seed
    build = "compiled" if blockyard.compiled() else "interpreted"
    print(f"seed {seed}, {build} build, {options.operations} operations in {options.worlds} worlds", flush=True)
    began = time.perf_counter()
    counts = run_stress(seed, options.operations, options.worlds, options.check_every)
    for name, count in sorted(counts.items()):
        print(f"{count:>12,}  {name}")
    print(f"no law broken, no blocks leaked, {time.perf_counter() - began:.1f} s, seed {seed}")


if __name__ == "__main__":
    main()
