"""Random actors on the manager, with a data plane whose content is checked.

    python -m tests.stress --operations 1000000 --seed N

Each slot of the shadow KV store holds a fingerprint of everything that its key and value would depend on: the extra
keys, and all tokens up to and including its own. Steps write fingerprints by the plan's slot mapping, and every
scheduled sequence reads its whole context back through the plan's block table. A wrong mapping, a hit on other
content, a block used twice or a missed copy-on-write shows as a wrong fingerprint. Steps that fail leave garbage.

An operation is one call for one sequence; a batched call counts once for each sequence in it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import blockyard
from blockyard import CacheConfig, CacheSalt, CapacityError, KVCacheManager, LoRA, SeqStatus, StepPlan

from .support.seeds import run_seed

GARBAGE = -1
VOCABULARY = 64
KEYS: tuple[tuple[Any, ...], ...] = ((), (), (), (LoRA("a"),), (CacheSalt("a"),))
SCHEDULED = int(SeqStatus.SCHEDULED)
NO_BLOCKS = int(SeqStatus.NO_BLOCKS)


@dataclass(eq=False)
class Track:
    """What the driver knows of a running sequence. Its tokens and fingerprints are in row `row` of the driver's."""

    handle: int
    row: int
    keys: int
    num_tokens: int = 0
    drafts: list[int] = field(default_factory=list)
    #: Whether everything computed so far has been read back once, so that it must stay right forever.
    proved: bool = False


class Broken(AssertionError):
    """The manager did what its laws forbid."""


class Stress:
    """One manager, its shadow store, and the actors."""

    def __init__(self, config: CacheConfig, seed: int) -> None:
        self.config = config
        self.cache = KVCacheManager(config)
        self.random = random.Random(seed)
        #: A crowd branches off one text, is computed slowly and loses members early: it joins blocks of others.
        self.is_crowd = self.random.random() < 0.4
        self.counts: Counter[str] = Counter()
        self.num_operations = 0
        self.running: list[Track] = []
        self.dead: list[int] = []
        self.chats: list[tuple[list[int], int]] = []
        self.free_rows = list(range(config.max_num_seqs))
        self.store = np.full(config.num_blocks * config.block_size, GARBAGE, dtype=np.int64)
        width = config.max_blocks_per_seq * config.block_size
        numbers = np.random.default_rng(seed)
        # 2**40 times the longest sequence stays far from 2**63.
        self.mix = numbers.integers(1, 2**40, (VOCABULARY, width), dtype=np.int64)
        self.salts = numbers.integers(1, 2**40, len(KEYS), dtype=np.int64) * np.array([0, 0, 0, 1, 1])
        self.tokens = np.zeros((config.max_num_seqs, width), dtype=np.int64)
        self.prints = np.zeros((config.max_num_seqs, width), dtype=np.int64)
        self.families = [
            [self.random.randrange(VOCABULARY) for _ in range(self.random.randint(1, self.longest()))] for _ in range(6)
        ]

    def longest(self) -> int:
        """Tokens of the longest prompt in families: most of them must fit."""
        slots = self.config.num_blocks * self.config.block_size
        return min(self.config.max_model_len, slots // (6 if self.is_crowd else 2))

    def sample(self, position: int) -> int:
        """A token to append. A crowd mostly says what its prompts say, so that what it generates is hit."""
        family = self.families[0]
        if self.is_crowd and position < len(family) and self.random.random() < 0.8:
            return family[position]
        return self.random.randrange(3)

    # ------------------------------------------------------------------ bookkeeping

    def did(self, name: str, times: int = 1) -> None:
        self.counts[name] += times
        self.num_operations += times

    def write_tokens(self, track: Track, start: int, tokens: list[int]) -> None:
        """Set the tokens from position `start` on, and the fingerprints that follow from them."""
        if not tokens:
            return
        end = start + len(tokens)
        self.tokens[track.row, start:end] = tokens
        before = self.prints[track.row, start - 1] if start else self.salts[track.keys]
        self.prints[track.row, start:end] = before + np.cumsum(self.mix[tokens, np.arange(start, end)])

    def text_of(self, track: Track) -> list[int]:
        tokens: list[int] = self.tokens[track.row, : track.num_tokens].tolist()
        return tokens

    def num_computed(self, track: Track) -> int:
        return self.cache.num_computed_tokens(track.handle)

    def start(self, handle: int, keys: int, tokens: list[int]) -> Track:
        track = Track(handle, self.free_rows.pop(), keys, len(tokens))
        self.write_tokens(track, 0, tokens)
        self.running.append(track)
        return track

    def stop(self, tracks: list[Track]) -> None:
        """Free them all in one call."""
        self.cache.free([track.handle for track in tracks])
        self.did("free", len(tracks))
        for track in tracks:
            self.running.remove(track)
            self.free_rows.append(track.row)
            self.dead.append(track.handle)
        del self.dead[:-50]

    def must_raise(self, error: type[Exception], call: Callable[[], object]) -> None:
        try:
            call()
        except error:
            self.did(f"refused {error.__name__}")
            return
        raise Broken(f"{error.__name__} was not raised")

    # ------------------------------------------------------------------ arrivals

    def prompt(self) -> tuple[list[int], int]:
        """A chat that goes on, a question under a known system prompt, a repeat, or something new."""
        choose = self.random
        limit = self.config.max_model_len
        if self.is_crowd:
            family = self.families[0]
            branch = [choose.randrange(3) for _ in range(choose.randint(0, 2 * self.config.block_size))]
            return (family[: choose.randint(0, len(family))] + branch)[:limit] or [0], 0
        keys = choose.randrange(len(KEYS))
        kind = choose.random()
        if kind < 0.35 and self.chats:
            tokens, keys = choose.choice(self.chats)
            tokens = tokens + [choose.randrange(VOCABULARY) for _ in range(choose.randint(0, 20))]
        elif kind < 0.5 and self.running:
            track = choose.choice(self.running)
            tokens, keys = self.text_of(track), track.keys
        elif kind < 0.9:
            family = choose.choice(self.families)
            tokens = family[: choose.randint(1, len(family))] if choose.random() < 0.5 else list(family)
            tokens = tokens + [choose.randrange(3) for _ in range(choose.randint(0, 8))]
        else:
            tokens = [choose.randrange(VOCABULARY) for _ in range(choose.randint(1, limit))]
        return tokens[: limit + (choose.random() < 0.01)], keys

    def arrive(self) -> None:
        tokens, keys = self.prompt()
        for _ in range(self.random.choice((1, 1, 1, 1, 3, 6))):
            self.admit(tokens, keys)

    def admit(self, tokens: list[int], keys: int) -> None:
        form = self.random.randrange(3)
        given: Any = tokens if form == 0 else np.array(tokens, dtype=(np.int32, np.int64)[form - 1])
        answer = self.cache.can_allocate(given, KEYS[keys]).name
        before = self.cache.num_free_blocks
        try:
            handle = self.cache.allocate(given, f"chat {self.num_operations}", KEYS[keys])
        except CapacityError as error:
            if answer == "OK" or (answer == "NEVER") != isinstance(error, blockyard.NeverFits):
                raise Broken(f"can_allocate says {answer}, allocate says {error!r}") from error
            if self.cache.num_free_blocks != before:
                raise Broken("a refused allocation took blocks") from error
            self.did("refused allocate")
            return
        if answer != "OK":
            raise Broken(f"can_allocate says {answer}, allocate went through")
        self.did("allocate")
        self.start(handle, keys, tokens)

    # ------------------------------------------------------------------ steps

    def step(self) -> None:
        """One forward pass over some of the sequences, which may fail, be cut short, or lose a sequence."""
        choose = self.random
        share = 0.25 if self.is_crowd else 0.9
        batch = [track for track in self.running if choose.random() < share]
        choose.shuffle(batch)
        chunk = choose.choice((1, 2, 3) if self.is_crowd else (1, 7, 64, self.config.max_model_len))
        wanted = [(track, self.wish(track, chunk)) for track in batch]
        batch = [track for track, num in wanted if num]
        if not batch:
            return
        plan = self.cache.reserve(
            [track.handle for track in batch], np.array([num for _, num in wanted if num], dtype=np.int64)
        )
        self.did("reserve", len(batch))
        status = plan.status.tolist()
        self.counts["waits"] += sum(s not in (SCHEDULED, NO_BLOCKS) for s in status)
        if NO_BLOCKS in status:
            self.counts["no blocks"] += status.count(NO_BLOCKS)
        self.forward(batch, plan, status)
        if NO_BLOCKS in status or choose.random() < 0.01:
            self.preempt()

    def wish(self, track: Track, chunk: int) -> int:
        """How many tokens to compute: what is there, a chunk of it, or drafts behind it."""
        computed = self.num_computed(track)
        lack = track.num_tokens - computed
        room = self.config.max_model_len - track.num_tokens
        track.drafts = []
        if lack > chunk:
            return chunk
        if room > 0 and self.random.random() < 0.2:
            num_drafts = min(self.random.choice((1, 2, 5)), room)
            track.drafts = [self.sample(track.num_tokens + offset) for offset in range(num_drafts)]
            self.write_tokens(track, track.num_tokens, track.drafts)
        return lack + len(track.drafts)

    def forward(self, batch: list[Track], plan: StepPlan, status: list[int]) -> None:
        """Carry the plan out, commit what became of it, and read everything back that counts as computed."""
        self.copy_blocks(plan.copies)
        slots = np.array(plan.slot_mapping)
        self.check_slots(slots)
        if self.random.random() < 0.06:
            self.store[slots] = GARBAGE
            self.fail_step(batch)
            return
        done = [index for index, state in enumerate(status) if state == SCHEDULED]
        tracks = [batch[index] for index in done]
        if not tracks:
            return
        computed, scheduled = plan.num_computed[done], plan.num_scheduled[done]
        outcome = [self.outcome(*each) for each in zip(tracks, computed.tolist(), scheduled.tolist(), strict=True)]
        reached = computed + [num for num, _ in outcome]
        self.write_step(tracks, slots, computed, scheduled, reached)
        tables = np.array(plan.block_tables, dtype=np.int64)[done]
        if self.commit(tracks, outcome):
            # Without progress, a sequence may still wait for the prefix that it joined.
            self.read_back(tracks, tables, np.where(reached > computed, reached, 0))

    def check_slots(self, slots: npt.NDArray[np.int64]) -> None:
        """No slot is written twice, and none that holds what a running sequence has computed (I7)."""
        if len(np.unique(slots)) != len(slots):
            raise Broken("a slot is written twice in one step")
        if self.random.random() < 0.3:
            settled = np.zeros(len(self.store), dtype=bool).reshape(-1, self.config.block_size)
            for track in self.running:
                num_computed = self.num_computed(track) if track.proved else 0
                full, rest = divmod(num_computed, self.config.block_size)
                blocks = self.cache.block_ids(track.handle)
                settled[blocks[:full]] = True
                settled[blocks[full : full + 1], :rest] = True
            if settled.reshape(-1)[slots].any():
                raise Broken("a step writes over what a running sequence has computed")

    def write_step(
        self,
        tracks: list[Track],
        slots: npt.NDArray[np.int64],
        computed: npt.NDArray[Any],
        scheduled: npt.NDArray[Any],
        reached: npt.NDArray[Any],
    ) -> None:
        """Fingerprints where each step came to, garbage in the slots that it was given and did not compute."""
        rows = np.repeat([track.row for track in tracks], scheduled)
        within = np.arange(len(slots)) - np.repeat(np.cumsum(scheduled) - scheduled, scheduled)
        positions = np.repeat(computed, scheduled) + within
        inside = positions < np.repeat(reached, scheduled)
        self.store[slots] = np.where(inside, self.prints[rows, positions], GARBAGE)

    def copy_blocks(self, copies: npt.NDArray[np.int32]) -> None:
        blocks = self.store.reshape(-1, self.config.block_size)
        blocks[copies[:, 1]] = blocks[copies[:, 0]]

    def read_back(self, tracks: list[Track], tables: npt.NDArray[np.int64], reached: npt.NDArray[np.int64]) -> None:
        """Every sequence sees, through its block table, exactly its own context."""
        blocks = self.store.reshape(-1, self.config.block_size)
        seen = blocks[tables].reshape(len(tracks), -1)
        rows = [track.row for track in tracks]
        inside = np.arange(seen.shape[1]) < reached[:, None]
        wrong = (seen != self.prints[rows, : seen.shape[1]]) & inside
        if wrong.any():
            index, position = (int(axis[0]) for axis in np.nonzero(wrong))
            raise Broken(f"sequence {tracks[index].handle} reads something else at position {position}")

    def outcome(self, track: Track, computed: int, scheduled: int) -> tuple[int, list[int]]:
        """Tokens computed, and tokens appended: accepted drafts, then a sampled one, if the end was reached."""
        num = scheduled
        if self.random.random() < 0.04:
            num = self.random.randint(0, scheduled)
        known = track.num_tokens - computed
        if num < known:
            return num, []
        accepted = self.random.randint(0, num - known)
        tokens = track.drafts[:accepted]
        if track.num_tokens + accepted < self.config.max_model_len:
            tokens = [*tokens, self.sample(track.num_tokens + accepted)]
        return known + accepted, tokens

    def commit(self, tracks: list[Track], outcome: list[tuple[int, list[int]]]) -> bool:
        """Whether the manager took it."""
        width = max([1, *(len(tokens) for _, tokens in outcome)])
        appended = np.full((len(tracks), width), -1, dtype=np.int64)
        for index, (_, tokens) in enumerate(outcome):
            appended[index, : len(tokens)] = tokens
        try:
            self.cache.commit(
                [track.handle for track in tracks],
                np.array([num for num, _ in outcome], dtype=np.int64),
                appended[:, 0] if width == 1 else appended,
            )
        except blockyard.SequenceNotReady:
            # A prefix that one joined was not computed, now or in the step that promised it: all is void.
            self.did("refused commit")
            self.fail_step(tracks)
            return False
        self.did("commit", len(tracks))
        for track, (num, tokens) in zip(tracks, outcome, strict=True):
            self.write_tokens(track, track.num_tokens, tokens)
            track.num_tokens += len(tokens)
            track.proved = track.proved or num > 0
        return True

    def fail_step(self, batch: list[Track]) -> None:
        """Tell the manager that nothing was computed, or forget to: the next reservation replaces this one."""
        if self.random.random() < 0.7:
            self.cache.commit([track.handle for track in batch], 0)
            self.did("commit", len(batch))
        self.counts["failed steps"] += 1

    # ------------------------------------------------------------------ ends and branches

    def finish(self) -> None:
        if not self.running:
            return
        tracks = self.random.sample(self.running, self.random.randint(1, min(3, len(self.running))))
        for track in tracks:
            self.chats.append((self.text_of(track), track.keys))
        del self.chats[:-20]
        self.stop(tracks)

    def preempt(self) -> None:
        """The youngest makes room, and comes back with all its tokens."""
        if self.running:
            track = self.running[-1]
            self.chats.append((self.text_of(track), track.keys))
            self.stop([track])
            self.counts["preempted"] += 1

    def abandon_step(self) -> None:
        """Sequences end between reservation and commit; the others commit what they computed, if they may."""
        batch = list(self.running)
        self.random.shuffle(batch)
        wanted = [(track, self.wish(track, 9)) for track in batch]
        batch = [track for track, num in wanted if num]
        if len(batch) < 2:
            return
        plan = self.cache.reserve([track.handle for track in batch], [num for _, num in wanted if num])
        self.did("reserve", len(batch))
        self.copy_blocks(plan.copies)
        slots, computed, scheduled = (
            np.array(each) for each in (plan.slot_mapping, plan.num_computed, plan.num_scheduled)
        )
        self.check_slots(slots)
        # Who ends is not computed: what others joined of it is garbage.
        ends = self.random.sample(batch, self.random.randint(1, 2))
        given = np.where([track in ends for track in batch], 0, scheduled)
        self.write_step(batch, slots, computed, scheduled, computed + given)
        self.stop(ends)
        for track, start, num in zip(batch, computed.tolist(), scheduled.tolist(), strict=True):
            known = min(num, track.num_tokens - start)
            if track in self.running and known > 0:
                self.commit_alone(track, known)

    def commit_alone(self, track: Track, num: int) -> None:
        """Commit; refused where what the sequence joined went away with its owner, or is not there yet."""
        try:
            self.cache.commit([track.handle], num)
        except (blockyard.SequenceNotReady, blockyard.InvalidArgument):
            self.did("refused commit")
            return
        self.did("commit")
        track.proved = True
        self.verify_track(track)

    def fork(self) -> None:
        if not self.running:
            return
        track = self.random.choice(self.running)
        num_children = min(self.random.choice((1, 1, 2, 4)), self.config.max_num_seqs)
        try:
            handles = self.cache.fork(track.handle, num_children)
        except (blockyard.SequenceNotReady, blockyard.OutOfRows) as error:
            self.did(f"refused fork {type(error).__name__}")
            return
        self.did("fork", num_children)
        for handle in handles:
            child = self.start(handle, track.keys, self.text_of(track))
            child.proved = track.proved
            if self.num_computed(track) == track.num_tokens < self.config.max_model_len:
                token = self.random.randrange(3)
                self.cache.commit([handle], 0, [token])
                self.did("append")
                self.write_tokens(child, child.num_tokens, [token])
                child.num_tokens += 1

    def truncate(self) -> None:
        if not self.running:
            return
        track = self.random.choice(self.running)
        num_tokens = self.random.randint(1, track.num_tokens)
        try:
            self.cache.truncate(track.handle, num_tokens)
        except blockyard.SequenceNotReady:
            self.did("refused truncate")
            return
        self.did("truncate")
        track.num_tokens = num_tokens

    def misuse(self) -> None:
        """Bugs of the caller: each is caught, and changes nothing."""
        live = [track.handle for track in self.running]
        dead = self.random.choice(self.dead) if self.dead else 1
        cache = self.cache
        before = cache.pool.ref_counts().copy()
        self.must_raise(blockyard.UnknownSequence, lambda: cache.free(dead))
        self.must_raise(blockyard.UnknownSequence, lambda: cache.free([*live, dead]))
        self.must_raise(blockyard.UnknownSequence, lambda: cache.reserve([*live, dead], 1))
        if live:
            self.must_raise(blockyard.InvalidArgument, lambda: cache.free([*live, live[0]]))
            self.must_raise(blockyard.InvalidArgument, lambda: cache.commit(live, self.config.max_model_len + 1))
        if not np.array_equal(before, cache.pool.ref_counts()):
            raise Broken("a refused call changed a reference count")

    def reset(self) -> None:
        self.cache.reset_prefix_cache()
        self.did("reset")

    # ------------------------------------------------------------------ the whole

    def verify(self) -> None:
        """What every proved sequence has computed is still in its blocks; all laws hold."""
        for track in self.running:
            if self.cache.num_tokens(track.handle) != track.num_tokens:
                raise Broken(f"sequence {track.handle} has another number of tokens")
            if self.cache.token_ids(track.handle).tolist() != self.text_of(track):
                raise Broken(f"sequence {track.handle} has other tokens")
            if track.proved:
                self.verify_track(track)
        self.cache.check()

    def verify_track(self, track: Track) -> None:
        computed = self.num_computed(track)
        blocks = np.asarray(self.cache.block_ids(track.handle))
        seen = self.store.reshape(-1, self.config.block_size)[blocks].reshape(-1)[:computed]
        if not np.array_equal(seen, self.prints[track.row, :computed]):
            raise Broken(f"sequence {track.handle} lost what it had computed")

    def run(self, num_operations: int, check_every: int) -> None:
        actors = [self.arrive, self.step, self.finish, self.fork, self.truncate, self.misuse]
        actors += [self.abandon_step, self.reset]
        weights = [22, 60, 14, 4, 4, 1, 1, 0.15]
        if self.is_crowd:
            weights = [30, 60, 6, 1, 2, 1, 3, 0.15]
        next_check = check_every
        while self.num_operations < num_operations:
            self.random.choices(actors, weights)[0]()
            if self.num_operations >= next_check:
                self.verify()
                next_check = self.num_operations + check_every
        self.verify()
        if self.running:
            self.stop(list(self.running))
        self.cache.check()
        if self.cache.num_used_blocks or self.cache.num_seqs:
            raise Broken(f"{self.cache.num_used_blocks} blocks leaked")


def random_config(choose: random.Random) -> CacheConfig:
    block_size = choose.choice((1, 2, 3, 4, 8, 16, 16, 32))
    return CacheConfig(
        num_blocks=choose.choice((8, 40, 120, 400)),
        block_size=block_size,
        max_num_seqs=choose.choice((2, 8, 24, 64)),
        max_model_len=choose.choice((17, 60, 150, 400)),
        enable_prefix_caching=choose.random() < 0.85,
        watermark=choose.choice((0.0, 0.01, 0.1)),
        hash_seed=choose.randrange(2**30),
    )


def run_stress(seed: int, num_operations: int, num_managers: int = 20, check_every: int = 1000) -> Counter[str]:
    """Spread the operations over managers of several shapes; returns how often each operation ran."""
    choose = random.Random(seed)
    counts: Counter[str] = Counter()
    for _ in range(num_managers):
        stress = Stress(random_config(choose), choose.randrange(2**62))
        stress.run(-(-num_operations // num_managers), check_every)
        counts += stress.counts
        counts["operations"] += stress.num_operations
        counts["tokens hit"] += stress.cache.stats().num_hit_tokens
        counts["blocks copied"] += stress.cache.stats().num_copied_blocks
        counts["blocks evicted"] += stress.cache.stats().num_evicted_blocks
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Random operations on the manager, its content checked.")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=None, help="default: BLOCKYARD_SEED, or a random one")
    parser.add_argument("--managers", type=int, default=20, help="managers of different sizes, one after another")
    parser.add_argument("--check-every", type=int, default=1000, help="operations between two whole checks")
    options = parser.parse_args()
    seed = run_seed() if options.seed is None else options.seed
    build = "compiled" if blockyard.compiled() else "interpreted"
    print(f"seed {seed}, {build} build, {options.operations} operations on {options.managers} managers", flush=True)
    began = time.perf_counter()
    counts = run_stress(seed, options.operations, options.managers, options.check_every)
    for name, count in sorted(counts.items()):
        print(f"{count:>12,}  {name}")
    print(f"no law broken, no blocks leaked, {time.perf_counter() - began:.1f} s, seed {seed}")


if __name__ == "__main__":
    main()
