"""Block managers of small engines and Blockyard in their places: microseconds a step in the manager's calls.

    python -m benchmarks.engine_managers --nano-vllm DIR --mini-sglang DIR

64 requests with prompts of 100 tokens decode 64 tokens each, in pages of 16; two thirds of the prompts begin with the
same 64 tokens. There is no model. nano-vllm's and mini-sglang's managers get the calls of their schedulers, from
checkouts of their sources, which are on no package index; both sides compute on the CPU. transformers' scheduler and
offloading are its own, with blocks for all requests and for less than half of them. The two sides take turns; a step's
time is of the calls alone, prompts and ends included, and the ratio is of the sums of two runs beside each other.

mini-sglang compares keys in a kernel that is built on demand; here numpy does it.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from blockyard import BlockPool

PAGE, PROMPT, SHARED, DECODED, COUNT, ROUNDS = 16, 100, 64, 64, 64, 7
PLENTY, FEW = 2_000, 300
ROW_TOKENS = PROMPT + DECODED + PAGE


class Stopwatch:
    """The thread's own time within some methods of an object; one that calls another is counted once.

    What taking the time costs itself is taken off: the least that a method which does nothing takes.
    """

    def __init__(self) -> None:
        self._spent = self._depth = self._num_calls = 0

    @property
    def nanoseconds(self) -> int:
        empty = Stopwatch()
        nothing = empty._timed(lambda: None)
        least = sys.maxsize
        for _ in range(200):
            empty._spent = 0
            nothing()
            least = min(least, empty._spent)
        return self._spent - self._num_calls * least

    def time(self, target: Any, *names: str) -> None:
        for name in names:
            setattr(target, name, self._timed(getattr(target, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            if self._depth:
                return method(*given, **named)
            self._depth += 1
            self._num_calls += 1
            start = time.thread_time_ns()
            try:
                return method(*given, **named)
            finally:
                self._spent += time.thread_time_ns() - start
                self._depth -= 1

        return timed


def prompts() -> list[list[int]]:
    """Of all requests."""
    draw = random.Random(7)
    head = [draw.randrange(50_000) for _ in range(SHARED)]
    made = []
    for number in range(COUNT):
        start = head if number % 3 else []
        made.append(start + [draw.randrange(50_000) for _ in range(PROMPT - len(start))])
    return made


#: Nanoseconds in the manager, steps, and prompt tokens that were found.
Run = tuple[int, int, int]


class NanoSequence:
    """What nano-vllm's sequences have."""

    block_size = PAGE
    _ids = itertools.count()

    def __init__(self, token_ids: list[int]) -> None:
        self.seq_id = next(self._ids)
        self.token_ids = token_ids
        self.num_cached_tokens = self.num_scheduled_tokens = 0
        self.block_table: list[int] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        return -(-len(self.token_ids) // PAGE)

    @property
    def last_block_num_tokens(self) -> int:
        return len(self.token_ids) - (self.num_blocks - 1) * PAGE

    def block(self, place: int) -> list[int]:
        return self.token_ids[place * PAGE : (place + 1) * PAGE]


def nano_run(manager: Any) -> Run:
    """All prompts, then all decode together."""
    watch = Stopwatch()
    watch.time(manager, "can_allocate", "allocate", "deallocate", "can_append", "may_append", "hash_blocks")
    seqs = [NanoSequence(tokens) for tokens in prompts()]
    found = 0

    def computed(seq: NanoSequence) -> None:
        manager.hash_blocks(seq)
        seq.num_cached_tokens += seq.num_scheduled_tokens

    for seq in seqs:
        manager.allocate(seq, manager.can_allocate(seq))
        found += seq.num_cached_tokens
        seq.num_scheduled_tokens = len(seq) - seq.num_cached_tokens
        computed(seq)
        seq.token_ids.append(3)
    for _ in range(DECODED - 1):
        for seq in seqs:
            assert manager.can_append(seq)
            manager.may_append(seq)
            seq.num_scheduled_tokens = 1
        for seq in seqs:
            computed(seq)
            seq.token_ids.append(3)
    for seq in seqs:
        manager.deallocate(seq)
    return watch.nanoseconds, DECODED, found


def nano_vllm(checkout: str) -> Iterator[tuple[str, list[tuple[Run, Run]]]]:
    """nano-vllm's own manager, and ours."""
    from engines.nano_vllm import BlockManager

    [theirs] = modules(Path(checkout) / "nanovllm", "engine.block_manager")
    yield (
        "nano-vllm",
        [(nano_run(theirs.BlockManager(PLENTY, PAGE)), nano_run(BlockManager(PLENTY, PAGE))) for _ in turns()],
    )


class MiniRequest:
    """What mini-sglang's requests have, pending and running."""

    def __init__(self, uid: int, input_ids: Any) -> None:
        self.uid = self.table_idx = uid
        self.input_ids = input_ids
        self.input_len = self.device_len = len(input_ids)
        self.cached_len = 0
        self.cache_handle: Any = None


def mini_run(manager: Any, torch: Any) -> Run:
    """All prompts in one batch, then all decode together."""
    watch = Stopwatch()
    watch.time(manager, "match_req", "lock", "unlock", "allocate_paged", "cache_req")
    requests = [MiniRequest(uid, torch.tensor(tokens, dtype=torch.int32)) for uid, tokens in enumerate(prompts())]
    token = torch.tensor([3], dtype=torch.int32)
    found = 0

    def admit(request: MiniRequest) -> None:
        nonlocal found
        request.cache_handle = manager.match_req(request).cuda_handle
        manager.lock(request.cache_handle)
        request.cached_len = request.cache_handle.cached_len
        if request.cached_len:
            manager.page_table[request.uid, : request.cached_len] = request.cache_handle.get_matched_indices()
        found += request.cached_len

    def step(batch: list[MiniRequest], first: bool, last: bool) -> None:
        manager.allocate_paged(batch)
        with manager.lazy_free_region():
            for request in batch:
                request.cached_len = request.device_len
                request.device_len += 1
                request.input_ids = torch.cat([request.input_ids, token])
                if first or last:
                    manager.cache_req(request, finished=last)

    # A prompt finds what those before it have cached.
    for request in requests:
        admit(request)
        step([request], first=True, last=False)
    for number in range(DECODED):
        step(requests, first=False, last=number == DECODED - 1)
    return watch.nanoseconds, DECODED, found


def mini_sglang(checkout: str) -> Iterator[tuple[str, list[tuple[Run, Run]]]]:
    """mini-sglang's own manager with its radix tree, and ours."""
    import torch

    from engines.mini_sglang import CacheManager

    theirs = mini_sources(Path(checkout) / "python" / "minisgl", torch)

    def table() -> Any:
        return torch.zeros((COUNT, ROW_TOKENS), dtype=torch.int32)

    found = []
    for _ in turns():
        stock = mini_run(theirs.CacheManager(PLENTY, PAGE, table(), "radix"), torch)
        found.append((stock, mini_run(CacheManager(PLENTY, PAGE, table()), torch)))
    yield "mini-sglang", found


def mini_sources(package: Path, torch: Any) -> Any:
    """Its cache manager on a CPU: without kernels and pinned memory."""
    utils = ModuleType("minisgl.utils")
    utils.Registry = Registered  # type: ignore[attr-defined]
    utils.align_down = lambda number, unit: number // unit * unit  # type: ignore[attr-defined]
    utils.div_ceil = lambda number, unit: -(-number // unit)  # type: ignore[attr-defined]
    core = ModuleType("minisgl.core")
    core.Req = object  # type: ignore[attr-defined]
    core.get_global_ctx = lambda: SimpleNamespace(page_size=PAGE)  # type: ignore[attr-defined]
    kernel = ModuleType("minisgl.kernel")
    kernel.fast_compare_key = first_difference  # type: ignore[attr-defined]
    sys.modules |= {"minisgl.utils": utils, "minisgl.core": core, "minisgl.kernel": kernel}
    [base] = modules(package, "kvcache.base")
    source = (package / "kvcache" / "__init__.py").read_text()
    exec(compile(source, "kvcache", "exec"), sys.modules[base.__package__].__dict__)
    [cache] = modules(package, "scheduler.cache")
    empty = torch.empty
    cache.torch = SimpleNamespace(
        **{name: getattr(torch, name) for name in ("arange", "cat", "int32", "int64", "all", "Tensor")},
        empty=lambda *given, pin_memory=False, **named: empty(*given, **named),
    )
    return cache


class Registered(dict[str, Any]):
    """mini-sglang's table of plug-ins."""

    def __init__(self, _: str) -> None:
        super().__init__()

    def __class_getitem__(cls, _: Any) -> type[Registered]:
        return cls

    def register(self, name: str) -> Callable[[Any], Any]:
        return lambda made: self.setdefault(name, made)


def first_difference(key: Any, input_ids: Any) -> int:
    """How many leading tokens of two arrays are equal."""
    length = min(len(key), len(input_ids))
    differs = key.numpy()[:length] != input_ids.numpy()[:length]
    place = int(differs.argmax()) if length else 0
    return place if length and differs[place] else length


def transformers_run(ours: bool, num_blocks: int) -> Run:
    """Through its processor: admission, offloading and ends are its own."""
    from tests.support.transformers_engine import SmallProcessor

    from engines.transformers_blocks import pooled_cache

    pools: list[BlockPool] = []
    with pooled_cache() if ours else nullcontext(pools) as pools:
        processor = SmallProcessor(num_blocks, PAGE, max_batch_tokens=1024)
    watch, cache = Stopwatch(), processor.cache
    found = 0
    look_up = cache.search_prefix_match

    def counted(*given: Any) -> int:
        nonlocal found
        num_tokens = look_up(*given)
        found += num_tokens
        return int(num_tokens)

    cache.search_prefix_match = counted
    names = ("can_store_request_tokens", "search_prefix_match", "count_new_complete_blocks", "mark_complete_blocks")
    watch.time(cache, *names, "free_blocks", "evict_cached_blocks", "compute_free_capacity", "count_storable_requests")
    [allocator] = cache.cache_allocators.values()
    if ours:
        watch.time(allocator, "has_room")
    for number, tokens in enumerate(prompts()):
        processor.add(str(number), tokens, DECODED)
    steps = 0
    while processor.step():
        steps += 1
    assert len(processor.outputs()) == COUNT
    for pool in pools:
        pool.check()
        assert pool.num_used_blocks == 0
    return watch.nanoseconds, steps, found


def transformers() -> Iterator[tuple[str, list[tuple[Run, Run]]]]:
    """transformers' cache, and ours."""
    for num_blocks in (PLENTY, FEW):
        runs = [(transformers_run(False, num_blocks), transformers_run(True, num_blocks)) for _ in turns()]
        yield f"transformers, {num_blocks} blocks", runs


def modules(package: Path, *names: str) -> list[ModuleType]:
    """Modules of a package, whose own `__init__` files are not run."""
    for name in {package.name, *(f"{package.name}.{name.rpartition('.')[0]}" for name in names)}:
        bare = ModuleType(name)
        bare.__path__ = [str(package.joinpath(*name.split(".")[1:]))]
        bare.__package__ = name
        sys.modules.setdefault(name, bare)
    return [importlib.import_module(f"{package.name}.{name}") for name in names]


def turns() -> Iterator[int]:
    """The rounds; the caches of the processor are warm after the first, which counts too: the median leaves it out."""
    yield from range(ROUNDS)


def row(name: str, runs: list[tuple[Run, Run]]) -> str:
    """A line of the table: medians, and the ratios of the turns."""
    stock, ours = ([run[side][0] / run[side][1] / 1e3 for run in runs] for side in (0, 1))
    ratios = sorted(run[1][0] / run[0][0] for run in runs)
    hits = f"{runs[0][0][2]} and {runs[0][1][2]}"
    return (
        f"{name:28} {statistics.median(stock):9.1f} {statistics.median(ours):9.1f} {statistics.median(ratios):8.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f})   {hits:>16}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nano-vllm", metavar="DIR", help="a checkout of nano-vllm")
    parser.add_argument("--mini-sglang", metavar="DIR", help="a checkout of mini-sglang")
    asked = parser.parse_args()
    print(f"{'':28} {'stock us':>9} {'ours us':>9} {'ratio':>8} {'of the turns':14} {'hit tokens':>16}")
    if asked.nano_vllm:
        for named in nano_vllm(asked.nano_vllm):
            print(row(*named))
    if asked.mini_sglang:
        for named in mini_sglang(asked.mini_sglang):
            print(row(*named))
    for named in transformers():
        print(row(*named))


if __name__ == "__main__":
    main()
