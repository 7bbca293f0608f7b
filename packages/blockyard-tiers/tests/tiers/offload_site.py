"""An offload in the middle of its work, and every public call of it, of its tiers and of its manager.

`tests.tiers.interrupts`, `tests.tiers.nomemory` and `tests.tiers.hostile_arguments` make these calls and then ask
`problem`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from blockyard import CacheSalt, KVCacheManager, LayerGroup, StateHints, StateSpec
from blockyard.config import cache_config
from blockyard.tenants import Tenant, TenantGroup
from blockyard_testing.patience import wait_until
from blockyard_testing.public_calls import Arguments, Call
from blockyard_testing.tiers_offload_world import OffloadWorld, Request, SmallBlocks, SmallStates
from blockyard_tiers import (
    BadObject,
    Cause,
    FileTier,
    NameChain,
    ObjectIndex,
    Offload,
    TierAdapter,
    TierUse,
    Transfer,
    WorkingTier,
)
from blockyard_tiers.header import PAGE_BYTES, require_whole
from blockyard_tiers.worker import ActiveTransfer

BLOCK_SIZE = 4
#: How long to wait for a thread: a broken law takes that long.
SECONDS = 15
NUM_ROWS = 60
SALT = CacheSalt("first")
TENANTS = (Tenant("first", min_blocks=2), TenantGroup("others", (Tenant("second", 2), Tenant("third", max_idle=3))))
STATES = (LayerGroup(BLOCK_SIZE, token_bytes=8), StateSpec(state_bytes=30, checkpoint_every=BLOCK_SIZE))
OPTIONS: dict[str, Any] = {
    "tenants": TENANTS,
    "max_sessions": 6,
    "retention_blocks": 10,
    "history_size": 6,
    "track_misses": True,
}
#: By kind: options of the manager, and the write policies of the tier in memory and the tier in a folder.
KINDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "write back": ({"num_blocks": 44}, "selective", "back"),
    "states": ({"num_blocks": 90, "groups": STATES, "cut_chunks": False}, "through", "selective"),
    "CPU pool": (
        {
            "num_blocks": 60,
            "groups": (LayerGroup(BLOCK_SIZE, token_bytes=8), LayerGroup(BLOCK_SIZE, 5, token_bytes=8)),
            "num_cpu_blocks": 12,
            "keep_evicted": True,
        },
        "selective",
        "through",
    ),
}


def tokens(number: int, count: int) -> list[int]:
    """Return a prompt; prompts of different numbers share no block."""
    return [100 * number + position for position in range(count)]


#: Keys of pages of another engine.
KEYS = [b"one", b"two"]
#: Prompts that the tiers have and the pool does not: one of them longer, one computed only in part by the other.
STORED = (tokens(1, 22), [*tokens(1, 14), 7, 7, 7, 7, 7, 7, 7], tokens(2, 30))
#: A prompt that is cached in the pool, and others.
CACHED, NEW, LAST = tokens(4, 18), tokens(5, 20), tokens(6, 17)


class MemoryTier(WorkingTier):
    """Keeps objects in memory. While `gate` is closed, its threads end no transfer."""

    def __init__(self, name: str = "memory") -> None:
        super().__init__(name, ObjectIndex(2**30, 2**20))
        self.objects_by_name: dict[bytes, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self._start()

    def _read(self, active: ActiveTransfer, position: int) -> None:
        self.gate.wait()
        active.fill(position, memoryview(self._get(active.transfer.names[position], None)))

    def _sizes(self, names: Sequence[bytes]) -> list[int]:
        found = []
        for name in names:
            if name not in self.objects_by_name:
                break
            found.append(len(self.objects_by_name[name]) - PAGE_BYTES)
        return found

    def names(self) -> Iterator[bytes]:
        yield from list(self.objects_by_name)

    def _get(self, name: bytes, num_bytes: int | None) -> bytes:
        if name not in self.objects_by_name:
            raise BadObject(Cause.ABSENT)
        return self.objects_by_name[name][:num_bytes]

    def _put(self, name: bytes, data: bytes) -> None:
        if threading.current_thread() is not threading.main_thread():  # the caller of a public call
            self.gate.wait()
        self.objects_by_name[name] = data

    def _remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            self.objects_by_name.pop(name, None)


class LateBlocks(SmallBlocks):
    """Blocks whose copies to rows are done when they are asked about for the second time."""

    is_late = False

    def read(self, block_ids: Any, rows: Sequence[int]) -> Any:
        super().read(block_ids, rows)
        answers = iter([False])
        return (lambda: next(answers, True)) if self.is_late else None


class OffloadSite(OffloadWorld):
    """A manager with tenants, sessions and hints, and an offload with a tier in memory and a tier in a folder.

    One request waits with a finished load, one with a load that has not ended, one is new, one runs, and one has
    computed a step that is not committed. All is as computing would have made it (`require_right`).
    """

    def __init__(self, kind: str) -> None:
        options, _, in_folder = KINDS[kind]
        self.kind, self.write = kind, in_folder
        self.folder = Path(tempfile.mkdtemp(prefix="offload-site-"))
        self.now, self.weights = 0.0, 0
        self.counts = Counter()
        self.block_size = BLOCK_SIZE
        groups = options.get("groups", (LayerGroup(BLOCK_SIZE, token_bytes=8),))
        self.num_groups = sum(isinstance(group, LayerGroup) for group in groups)
        self.state_bytes = 30 if kind == "states" else 0
        self.is_plain = kind == "write back"
        settings = {"block_size": BLOCK_SIZE, "max_num_seqs": 10, "max_model_len": 60, "hash_seed": 5, **OPTIONS}
        self.config = cache_config(watermark=0.0, **{**settings, **options})
        self.cache = KVCacheManager(self.config)
        self.blocks = LateBlocks(self.config.num_blocks + 8, BLOCK_SIZE, self.num_groups, NUM_ROWS)
        self.states = SmallStates(self.blocks, 10, self.state_bytes) if self.state_bytes else None
        self.cpu = np.full((12, BLOCK_SIZE), -1, np.int64)
        self.memory, self.files = MemoryTier(), FileTier(self.folder / "kv", 2**30)
        self.offload = self.new_offload()
        self.adapter = TierAdapter(f"file:{self.folder / 'pages'}", model="a")
        self.running: list[Request] = []
        self._begin()

    def new_offload(self, **more: Any) -> Offload:
        return Offload(**{**self.offload_arguments(), **more})

    def offload_arguments(self) -> Arguments:
        _, in_memory, in_folder = KINDS[self.kind]
        return {
            "cache": self.cache,
            "blocks": self.blocks,
            "tiers": [TierUse(self.memory, in_memory), TierUse(self.files, in_folder)],
            "model": lambda: {"weights": self.weights},
            "step_tokens": 8,
            "on_plan": self.carry_out,
            "clock": lambda: self.now,
            "states": self.states,
        }

    # Work.

    def _begin(self) -> None:
        self.settle()
        for prompt in (*STORED, STORED[0], STORED[2]):
            self.serve(prompt)
        for number in range(20, 26):  # evicts them, which stores them where a tier writes back
            self.serve(tokens(number, 40))
        self.settle()
        self.cache.reset_prefix_cache()
        self.serve(CACHED)
        self.blocks.is_late = self.kind == "states"
        self.ready, self.held, self.fresh = (Request(list(prompt), (SALT,)) for prompt in (STORED[0], STORED[2], NEW))
        self.wait_for(self.ready)
        self.decoding = self.computed(LAST)
        self.stepping = Request(tokens(7, 11), (SALT,))
        self.admit_one(self.stepping)
        plan = self.cache.reserve([self.stepping.seq], [11])
        self.carry_out(plan)
        self.saved = self.put_states(plan, [self.stepping], [11])
        self.put(self.stepping, 11)
        self.settle(has_copies=False)
        if self.blocks.is_late:
            for token in (1, 2, 3):
                self.cache.append(self.decoding.seq, [token])
                self.decoding.tokens.append(token)
                self.step_of(self.decoding)
        self.page = b"page" * 50
        self.wait_batch(self.adapter.submit(False, KEYS, [self.page] * 2))
        self.ticket = self.adapter.submit(True, KEYS, [bytearray(200), bytearray(200)])
        self.chain = NameChain(bytes(16), BLOCK_SIZE, (SALT,))
        self.chain.extend(NEW[:9])
        self.memory.gate.clear()
        self.offload.prepare(self.held, self.held.tokens, self.held.keys)
        self.cache.check()
        self.offload.check()

    def settle(self, has_copies: bool = True) -> None:
        """Wait until nothing runs in the tiers, and take in what they have done."""
        self.memory.gate.set()
        # A poll wakes threads that an interrupted call did not.
        wait_until(lambda: self.offload.poll() or self.is_quiet(), SECONDS)
        self.offload.poll()
        if has_copies:
            wait_until(lambda: self.offload.settle(0.0), SECONDS)

    def is_quiet(self) -> bool:
        for tier in (self.memory, self.files):
            with tier._lock:
                if tier._busy or tier._has_work():
                    return False
        return True

    def wait_for(self, request: Request) -> None:
        """Prepare a request until it can start."""

        def is_ready() -> bool:
            self.offload.poll()
            return not self.offload.prepare(request, request.tokens, request.keys)

        wait_until(is_ready, SECONDS)

    def admit_one(self, request: Request) -> int:
        more: dict[str, Any] = {} if self.states is None else {"states": StateHints([8])}
        request.seq = self.cache.allocate(
            request.tokens, extra_keys=request.keys, holder="request", session="session", **more
        )
        request.weights = self.weights
        self.running.append(request)
        filled = self.offload.fill(request, request.seq)
        self.require_right(request)
        return filled

    def computed(self, prompt: list[int]) -> Request:
        request = Request(list(prompt), (SALT,))
        self.wait_for(request)
        self.admit_one(request)
        while not self.is_computed(request):
            self.step_of(request)
        return request

    def step_of(self, request: Request) -> None:
        """Compute the rest of a request, as much as a step takes."""
        plan = self.cache.reserve([request.seq])
        self.carry_out(plan)
        (count,) = plan.num_scheduled.tolist()
        saved = self.put_states(plan, [request], [count])
        self.put(request, count)
        stop = int(self.cache.num_computed_tokens(request.seq)) + count
        self.offload.save(request, request.seq, request.tokens, stop, saved.get(plan.rows.tolist()[0], ()))
        self.cache.commit([request.seq], [count])
        self.require_right(request)

    def serve(self, prompt: list[int]) -> None:
        """Compute a prompt, and end it."""
        self.end(self.computed(prompt))
        self.settle()

    # Arguments of calls.

    @property
    def site(self) -> OffloadSite:
        return self

    def with_results(self) -> Arguments:
        """Let the load end that the tier in memory holds back."""
        self.memory.gate.set()
        wait_until(self.is_quiet, SECONDS)
        return {}

    def admitted(self, request: Request) -> Arguments:
        request.seq = self.cache.allocate(request.tokens, extra_keys=request.keys)
        return {"key": request, "seq": request.seq}

    def saved_step(self) -> Arguments:
        (states,) = self.saved.values() if self.saved else ((),)
        request = self.stepping
        return {
            "key": request,
            "seq": request.seq,
            "token_ids": request.tokens,
            "num_computed": len(request.tokens),
            "states": states,
        }

    def forked(self) -> Arguments:
        child = Request(list(self.decoding.tokens), (SALT,))
        (child.seq,) = self.cache.fork(self.decoding.seq)
        return {"parent": self.decoding, "keys": [child]}

    def snapshot_taken(self) -> Arguments:
        """Take a snapshot and restart with an empty pool; no snapshot where the cache cannot have one."""
        path = self.folder / "warm"
        self.end_all()
        self.settle()
        if self.is_plain:
            assert self.offload.snapshot(path).is_done
        self.cache.reset_prefix_cache()
        self.settle()
        return {"path": path, "seconds": 30.0}

    def unfollowed(self) -> Arguments:
        """Return the arguments of a second offload on the same manager; the first no longer follows evictions."""
        self.offload._saver.close()
        return self.offload_arguments()

    def transfer(self, number: int, is_load: bool = False) -> Transfer:
        """Return a transfer of two objects; the tiers have the load's first one."""
        names = [bytes([number + at]) * 16 for at in range(2)]
        buffers: list[Any] = [bytearray(100) if is_load else bytes([number]) * 100 for _ in range(2)]
        return Transfer(10**6 + number, bytes(16), names, names, buffers)

    def names_of(self, prompt: list[int]) -> list[bytes]:
        chain = NameChain(self.offload._context.layout(), BLOCK_SIZE, (SALT,))
        chain.extend(prompt)
        return chain.names

    def an_object(self, tier: WorkingTier) -> tuple[bytes, bytes]:
        name = next(iter(tier.names()))
        return name, tier.get(name)

    def reserve_and_move(self, seqs: list[int], counts: list[int]) -> None:
        plan = self.cache.reserve(seqs, counts)
        trace = sys.gettrace()
        sys.settrace(None)
        self.carry_out(plan)
        sys.settrace(trace)

    def wait_batch(self, ticket: int) -> None:
        assert self.adapter.wait(ticket, 60.0) is not None

    # What must hold.

    def end_all(self) -> None:
        """Free all sequences, and forget all requests."""
        for seq in list(self.cache.running()):
            self.cache.free(seq)
        for key in list(self.offload._records):
            self.offload.forget(key)
        self.running.clear()

    def problem(self) -> str:
        """Return what is wrong now or after some more work, and end everything."""
        try:
            self._require_all()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.remove()
        return ""

    def _require_all(self) -> None:
        self.cache.check()
        self.offload.check()
        self.settle()
        for tier in (self.memory, self.files):
            tier.check()
            assert tier.stats().num_waiting == 0, f"{tier.name} still has transfers"
        self.offload.check()
        for request in (self.ready, self.held, self.fresh):
            if request.seq < 0:
                self.wait_for(request)
                self.admit_one(request)
        self.end_all()
        for prompt in (*STORED, CACHED, NEW, LAST):
            self.serve(prompt)
        assert self.offload.num_waiting == 0
        for _ in range(3):
            self.settle()
        self.offload.check()
        self.cache.check()
        assert self.cache.num_used_blocks == 0, f"{self.cache.num_used_blocks} blocks are held by nobody"
        assert self.offload.read().used_bytes == 0, f"{self.offload.read().used_bytes} bytes of buffers are lost"
        self._require_objects()
        self._require_adapter()
        self._require_chain()
        self.weights = 1
        self.cache.reset_prefix_cache()
        for prompt in (*STORED, CACHED):
            self.serve(prompt)
        self.settle()
        self._require_objects()
        assert self.offload.close(60.0)

    def _require_objects(self) -> None:
        """Require that all objects of the tiers are whole, and those of these prompts as computing makes them."""
        expected = self._expected()
        for tier in (self.memory, self.files):
            for name in list(tier.names()):
                data = tier.get(name)
                require_whole(memoryview(data), name)
                assert expected.get(name, data[PAGE_BYTES:]) == data[PAGE_BYTES:], (
                    "an object has another prompt's bytes"
                )

    def _require_adapter(self) -> None:
        """Require that no batch of the adapter is lost, and that its pages are whole."""
        wait_until(lambda: self.adapter.num_running() == 0, SECONDS)
        for result in self.adapter.take_results():
            assert len(result.good) == len(KEYS)
        self.adapter.tier.check()
        for name in list(self.adapter.tier.names()):
            require_whole(memoryview(self.adapter.tier.get(name)), name)

    def _require_chain(self) -> None:
        """Require that the chain's names are those of its tokens."""
        whole = NameChain(bytes(16), BLOCK_SIZE, (SALT,))
        whole.extend(NEW)
        assert self.chain.names == whole.names[: len(self.chain.names)]
        self.chain.extend(NEW)
        assert (self.chain.names, self.chain.digests) == (whole.names, whole.digests)
        assert self.chain.matches(NEW, 0, len(NEW) // BLOCK_SIZE)

    def _expected(self) -> dict[bytes, bytes]:
        """Return the bytes of the prompts' blocks by name, for both weights."""
        layout, found = self.offload._context.layout(), {}
        for prompt in (*STORED, CACHED, NEW, LAST, *(tokens(number, 40) for number in range(20, 26))):
            request = Request(list(prompt), (SALT,), weights=self.weights)
            chain, numbers = NameChain(layout, BLOCK_SIZE, (SALT,)), request.numbers(len(prompt))
            chain.extend(prompt)
            for at, name in enumerate(chain.names):
                part = np.array(numbers[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE], np.int64)
                if self.num_groups == 1:
                    found[name] = part.tobytes()
        return found

    def remove(self) -> None:
        """End the threads, and delete the folder."""
        self.memory.gate.set()
        for tier in (self.memory, self.files, self.adapter.tier):
            tier.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _offload_calls() -> list[Call]:
    rows: list[tuple[str, Callable[[Any], Arguments]]] = [
        ("poll", lambda _: {}),
        ("poll", lambda s: s.with_results()),
        ("prepare", lambda s: {"key": s.fresh, "token_ids": s.fresh.tokens, "extra_keys": s.fresh.keys}),
        ("prepare", lambda s: {"key": s.held, "token_ids": s.held.tokens, "extra_keys": s.held.keys}),
        ("prepare", lambda s: {"key": s.ready, "token_ids": s.ready.tokens, "extra_keys": s.ready.keys}),
        ("prepare", lambda _: {"key": "other", "token_ids": STORED[1], "extra_keys": (SALT,)}),
        ("prepare", lambda s: {**s.with_results(), "key": "again", "token_ids": STORED[2], "extra_keys": (SALT,)}),
        ("prepare", lambda _: {"key": "sure", "token_ids": STORED[1][:14], "extra_keys": (SALT,), "will_start": True}),
        ("prepare", lambda _: {"key": "computed", "token_ids": NEW, "extra_keys": (SALT,), "may_load": False}),
        ("fill", lambda s: s.admitted(s.ready)),
        ("fill", lambda s: s.admitted(s.held)),
        ("save", lambda s: s.saved_step()),
        ("fork", lambda s: s.forked()),
        ("forget", lambda s: {"key": s.ready}),
        ("forget", lambda s: {"key": s.held}),
        ("forget", lambda s: {"key": s.decoding}),
        ("note_computed", lambda _: {"num_tokens": 8, "seconds": 0.5}),
        ("begin_snapshot", lambda s: {"path": s.folder / "warm"}),
        ("snapshot", lambda s: {**s.with_results(), "path": s.folder / "warm", "seconds": 30.0}),
        ("restore", lambda s: s.snapshot_taken()),
        ("is_storing", lambda _: {"token_ids": CACHED, "extra_keys": (SALT,)}),
        ("read", lambda _: {}),
        ("settle", lambda s: {**s.with_results(), "seconds": 30.0}),
        ("close", lambda s: {**s.with_results(), "seconds": 30.0}),
        ("check", lambda _: {}),
    ]
    return [*(Call("offload", *row) for row in rows), Call("site", "new_offload", lambda s: s.unfollowed())]


def _tier_calls(owner: str) -> list[Call]:
    rows: list[tuple[str, Callable[[Any], Arguments]]] = [
        ("store", lambda s: {"transfer": s.transfer(3)}),
        ("load", lambda s: {"transfer": s.transfer(5, is_load=True)}),
        ("longest_prefix", lambda s: {"names": s.names_of(STORED[0])}),
        ("longest_prefix", lambda s: {"names": s.names_of(NEW)}),
        ("first_present", lambda s: {"names": [*s.names_of(NEW), *s.names_of(STORED[0])]}),
        ("drop", lambda s: {"names": s.names_of(STORED[0])[2:]}),
        ("take_results", lambda s: s.with_results()),
        ("stats", lambda _: {}),
        ("check", lambda _: {}),
        ("get", lambda s: {"name": s.an_object(getattr(s, owner))[0]}),
        ("put", lambda s: dict(zip(("name", "data"), s.an_object(getattr(s, owner)), strict=True))),
        ("remove", lambda s: {"names": s.names_of(STORED[0])[2:]}),
        ("remove_bad", lambda s: {"names": s.names_of(STORED[0])[2:]}),
        ("close", lambda s: {**s.with_results(), "timeout": 30.0}),
    ]
    return [Call(owner, *row) for row in rows]


def _other_calls() -> list[Call]:
    """Calls of an adapter, of a chain of names, and of the manager, whose evictions the offload follows."""
    rows: list[tuple[str, str, Callable[[Any], Arguments]]] = [
        ("adapter", "name", lambda _: {"key": b"one"}),
        ("adapter", "longest_prefix", lambda _: {"keys": KEYS}),
        ("adapter", "submit", lambda s: {"is_load": False, "keys": [b"new", b"one"], "buffers": [s.page] * 2}),
        ("adapter", "submit", lambda _: {"is_load": True, "keys": KEYS, "buffers": [bytearray(200), bytearray(200)]}),
        ("adapter", "wait", lambda s: {"ticket": s.ticket, "seconds": 30.0}),
        ("adapter", "take_results", lambda _: {}),
        ("adapter", "num_running", lambda _: {}),
        ("adapter", "drop_all", lambda _: {}),
        ("adapter", "change_layout", lambda _: {}),
        ("adapter", "close", lambda _: {}),
        ("chain", "extend", lambda _: {"token_ids": NEW}),
        ("chain", "matches", lambda _: {"token_ids": NEW, "first": 0, "stop": 2}),
        ("chain", "copy", lambda _: {}),
        ("chain", "clear", lambda _: {}),
        ("cache", "allocate", lambda _: {"token_ids": tokens(9, 50), "extra_keys": (SALT,), "holder": "new"}),
        (
            "site",
            "reserve_and_move",
            lambda s: {"seqs": [s.admitted(Request(tokens(9, 50), (SALT,)))["seq"]], "counts": [50]},
        ),
        ("cache", "commit", lambda s: {"seqs": [s.stepping.seq], "num_computed": [11]}),
        ("cache", "free", lambda s: {"seqs": [s.decoding.seq, s.stepping.seq]}),
        ("cache", "resize", lambda _: {"num_blocks": 30}),
        ("cache", "reset_prefix_cache", lambda _: {}),
        ("cache", "truncate", lambda s: {"seq": s.decoding.seq, "num_tokens": 16}),
        ("cache", "hint", lambda _: {"target": "session", "over": True}),
    ]
    return [Call(*row) for row in rows]


OFFLOAD_CALLS = _offload_calls()
TIER_CALLS = [*_tier_calls("memory"), *_tier_calls("files")]
OTHER_CALLS = _other_calls()
ALL_CALLS = OFFLOAD_CALLS + TIER_CALLS + OTHER_CALLS
