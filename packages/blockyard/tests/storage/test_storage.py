"""The KV tensors: addresses, layouts, copies, and the bytes after calls of a whole manager."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from blockyard import Admission, CacheConfig, CPUPoolConfig, InvalidArgument, KVCacheManager, SeqStatus  # noqa: E402
from blockyard.storage import KVCache, KVLayout  # noqa: E402
from blockyard_testing.seeds import run_seed  # noqa: E402

LAYOUTS = ["NHD", "HND"]
#: Elements of a value, where a key has five.
VALUE_SIZES = [5, 3, 8]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_cache(**changes: Any) -> KVCache:
    options = {"num_blocks": 9, "block_size": 4, "num_layers": 3, "num_kv_heads": 2, "head_size": 5}
    return KVCache(**{**options, **changes})


def random_tokens(cache: KVCache, num_tokens: int, seed: int = 0) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_tokens, cache.num_kv_heads, size) for size in (cache.head_size, cache.value_size)]
    key, value = (torch.randn(shape, generator=generator).to(cache.dtype) for shape in shapes)
    return key, value


# ---------------------------------------------------------------- forms


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_have_the_shapes_that_kernels_take(layout: str) -> None:
    cache = make_cache(layout=layout)
    block = (4, 2, 5) if layout == "NHD" else (2, 4, 5)
    assert cache.layout is KVLayout(layout)
    assert cache.combined(1).shape == (9, 2, *block)
    assert cache.combined(1).is_contiguous()
    assert cache.key_cache(1).shape == cache.value_cache(1).shape == (9, *block)
    assert cache.key_cache(1)[3].is_contiguous()
    # All are windows on one allocation, not copies.
    cache.key_cache(1)[3] = 7
    cache.value_cache(1)[3] = 8
    assert (cache.combined(1)[3, 0] == 7).all()
    assert (cache.data[1, 3, 1] == 8).all()
    assert cache.data.count_nonzero() == 2 * 40


def test_bytes_are_those_of_the_design() -> None:
    """SmolLM2-135M keeps 45 KiB a token in float32, 22.5 in bfloat16."""
    sizes = {"num_blocks": 3, "block_size": 16, "num_layers": 30, "num_kv_heads": 3, "head_size": 64}
    cache = KVCache(**sizes)
    assert cache.bytes_per_token == 45 * 1024
    assert cache.bytes_per_block == 16 * 45 * 1024
    assert cache.num_bytes == 3 * 16 * 45 * 1024 == cache.data.nbytes
    assert KVCache(**sizes, dtype=torch.bfloat16).bytes_per_token == 22.5 * 1024


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_of_uneven_keys_and_values_has_no_padding(layout: str) -> None:
    """DeepSeek-V3's latent vector and rotated key, 576 elements a token and layer, as `sizing` counts them."""
    cache = KVCache(3, 16, 2, 1, 512, value_size=64, layout=layout)
    assert cache.data.shape == (2, 3, 16 * 576)
    assert cache.bytes_per_token == 2 * 576 * 4
    assert cache.num_bytes == cache.data.nbytes
    assert cache.key_cache(1)[2].is_contiguous()
    assert cache.value_cache(1)[2].is_contiguous()
    with pytest.raises(InvalidArgument, match=r"value_size is 64 and index_size 0; .* needs 512"):
        cache.combined(0)


# ---------------------------------------------------------------- write and gather


@pytest.mark.parametrize("value_size", VALUE_SIZES)
@pytest.mark.parametrize(("layout", "dtype"), list(itertools.product(LAYOUTS, DTYPES)))
def test_tokens_written_by_slot_are_read_by_table(layout: str, dtype: Any, value_size: int) -> None:
    cache = make_cache(layout=layout, dtype=dtype, value_size=value_size)
    table = np.array([[5, 2, 7], [8, 1, 0]], np.int32)
    lengths = [10, 6]
    slots = [
        int(table[row, position // 4]) * 4 + position % 4
        for row, length in enumerate(lengths)
        for position in range(length)
    ]
    written = [random_tokens(cache, 16, seed=layer) for layer in range(3)]
    order = np.random.default_rng(1).permutation(16)  # slots come in any order
    for layer, (key, value) in enumerate(written):
        cache.write(layer, key[order], value[order], np.array(slots)[order])
    tables = cache.tables(table, lengths)
    for layer, (key, value) in enumerate(written):
        got_key, got_value = cache.gather(layer, tables)
        assert (got_key.shape, got_value.shape) == ((2, 12, 2, 5), (2, 12, 2, value_size))
        for got, sent in ((got_key, key), (got_value, value)):
            assert torch.equal(got[0, :10], sent[:10])
            assert torch.equal(got[1, :6], sent[10:])
            assert got[0, 10:].count_nonzero() == got[1, 6:].count_nonzero() == 0


@pytest.mark.parametrize("value_size", VALUE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slot_lies_where_the_kernels_look_for_it(layout: str, value_size: int) -> None:
    cache = make_cache(layout=layout, value_size=value_size)
    key, value = random_tokens(cache, 1)
    cache.write(2, key, value, [6 * 4 + 3])
    at = (6, 3) if layout == "NHD" else (6, slice(None), 3)
    assert torch.equal(cache.key_cache(2)[at], key[0])
    assert torch.equal(cache.value_cache(2)[at], value[0])
    assert cache.data.count_nonzero() == 2 * (5 + value_size)


@pytest.mark.parametrize("value_size", VALUE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_never_reads_stale_data_not_even_nan(layout: str, value_size: int) -> None:
    """A mask hides finite leftovers, but 0 * NaN is NaN: so leftovers must not be read at all."""
    cache = make_cache(layout=layout, value_size=value_size)
    cache.data[:, 1:] = float("nan")
    key, value = random_tokens(cache, 5)
    cache.write(0, key, value, [8, 9, 10, 11, 12])  # block 2, and the first slot of block 3
    # The row holds two more blocks, for tokens that are not computed yet.
    got_key, got_value = cache.gather(0, cache.tables([[2, 3, 4, 5], [2, 6, 7, 8]], [5, 4]))
    assert got_key.shape[1] == 8
    assert torch.equal(got_key[0, :5], key)
    assert torch.equal(got_value[1, :4], value[:4])
    assert got_key[0, 5:].count_nonzero() == got_key[1, 4:].count_nonzero() == 0
    assert not got_value.isnan().any()


@pytest.mark.parametrize("value_size", VALUE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_buffer_used_again_gives_the_same(layout: str, value_size: int) -> None:
    cache = make_cache(layout=layout, value_size=value_size)
    cache.data.copy_(torch.randn(cache.data.shape))
    cache.data[:, 0] = 0
    buffer = cache.new_buffer(40)
    for table, lengths in (([[1, 2], [3, 4]], [8, 5]), ([[5]], [1]), ([[6, 7], [8, 1], [2, 0]], [7, 8, 2])):
        tables = cache.tables(table, lengths)
        for layer in range(3):
            fresh, used = cache.gather(layer, tables), cache.gather(layer, tables, buffer)
            assert all(torch.equal(one, other) for one, other in zip(fresh, used, strict=True))
            if layout == "NHD":
                assert used[0].data_ptr() == buffer.data_ptr()


def test_slots_and_tables_come_as_lists_arrays_or_tensors() -> None:
    cache, slots, table = make_cache(), [4, 9], [[1, 2]]
    key, value = random_tokens(cache, 2)
    forms: list[Callable[[Any], Any]] = [list, lambda x: np.array(x, np.int32), np.array, torch.tensor]
    for form in forms:
        cache.data.zero_()
        cache.write(0, key, value, form(slots))
        got, _ = cache.gather(0, cache.tables(form(table), form([6])))
        assert torch.equal(got[0, [0, 5]], key)
    cache.write(0, key[:0], value[:0], [])  # a step may write nothing


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("value_size", VALUE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_take_all_layers_and_read_before_they_write(layout: str, value_size: int) -> None:
    cache = make_cache(layout=layout, value_size=value_size)
    cache.data.copy_(torch.randn(cache.data.shape))
    before = cache.data.clone()
    cache.copy_blocks(np.array([[1, 2], [2, 3], [3, 1], [4, 8]], np.int32))
    expected = before.clone()
    expected[:, [2, 3, 1, 8]] = before[:, [1, 2, 3, 4]]
    assert torch.equal(cache.data, expected)
    cache.copy_blocks(np.empty((0, 2), np.int32))
    cache.copy_blocks(torch.empty((0, 2), dtype=torch.int32))
    assert torch.equal(cache.data, expected)


# ---------------------------------------------------------------- layer groups and the CPU pool


def test_layers_of_several_groups_share_places() -> None:
    cache = make_cache(num_layers=5, layer_groups=[(0, 3), (1, 2), (4,)])
    assert cache.data.shape[0] == 2
    assert [(cache.places.group(layer), cache.places.place(layer)) for layer in range(5)] == [
        (0, 0),
        (1, 0),
        (1, 1),
        (0, 1),
        (2, 0),
    ]
    plain = make_cache(num_layers=2)
    assert cache.num_bytes == plain.num_bytes == cache.data.nbytes
    assert cache.bytes_per_block == plain.bytes_per_block
    assert cache.bytes_per_token == 5 * plain.bytes_per_token // 2
    key, value = random_tokens(cache, 1)
    cache.write(3, key, value, [8])  # block 2 is the first group's, block 3 the second's
    cache.write(2, value, key, [12])
    assert torch.equal(cache.gather(3, cache.tables([[2]], [1]))[0][0, :1], key)
    assert torch.equal(cache.gather(2, cache.tables([[3]], [1]))[0][0, :1], value)


@pytest.mark.parametrize("value_size", VALUE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_go_to_the_cpu_pool_and_back(layout: str, value_size: int) -> None:
    cache = make_cache(layout=layout, num_cpu_blocks=6, value_size=value_size)
    assert cache.cpu_data is not None
    assert cache.cpu_data.shape == (3, 6, *cache.data.shape[2:])
    assert make_cache().cpu_data is None
    cache.data.copy_(torch.randn(cache.data.shape))
    before = cache.data.clone()
    cache.swap_out(np.array([[1, 5], [2, 1]], np.int32))
    cache.data[:, 1:4] = 0
    cache.swap_in([[1, 3], [5, 8]])
    assert torch.equal(cache.data[:, 3], before[:, 2])
    assert torch.equal(cache.data[:, 8], before[:, 1])
    assert torch.equal(cache.data[:, 4:8], before[:, 4:8])


def test_a_plan_is_carried_out_in_its_order() -> None:
    config = CacheConfig(num_blocks=6, block_size=4, max_num_seqs=4, max_model_len=32, cpu=CPUPoolConfig(num_blocks=20))
    manager = KVCacheManager(config)
    cache = make_cache(num_blocks=6, num_cpu_blocks=20)
    seq = manager.allocate(list(range(12)))
    plan = manager.reserve([seq], 12)
    cache.move_blocks(plan)
    key, value = random_tokens(cache, 12)
    cache.write(1, key, value, plan.slot_mapping)
    manager.commit([seq], 12)
    cache.move_blocks(manager.swap_out([seq]))
    other = manager.allocate(list(range(100, 120)))
    plan = manager.reserve([other], 20)
    cache.move_blocks(plan)
    cache.write(1, *random_tokens(cache, 20, seed=1), plan.slot_mapping)
    manager.commit([other], 20)
    manager.free([other])
    cache.move_blocks(manager.swap_in([seq]))
    got_key, got_value = cache.gather(1, cache.tables([manager.block_ids(seq)], [12]))
    assert torch.equal(got_key[0], key)
    assert torch.equal(got_value[0], value)


def test_a_plan_with_one_bad_list_moves_nothing() -> None:
    cache = make_cache(num_cpu_blocks=6)
    cache.data.copy_(torch.randn(cache.data.shape))
    assert cache.cpu_data is not None
    before, cpu_before = cache.data.clone(), cache.cpu_data.clone()
    plan = SimpleNamespace(swap_outs=[[1, 2]], swap_ins=[[3, 4]], copies=[[5, 9]])
    for move in (cache.move_blocks, cache.start_moves):
        with pytest.raises(InvalidArgument, match="copies holds 9 at position 1"):
            move(plan)
    assert torch.equal(cache.data, before)
    assert torch.equal(cache.cpu_data, cpu_before)
    plan.copies = [[5, 6]]
    cache.start_moves(plan)
    cache.finish_moves()
    assert torch.equal(cache.cpu_data[:, 2], before[:, 1])
    assert torch.equal(cache.data[:, 6], before[:, 5])


# ---------------------------------------------------------------- memory of the process


@pytest.mark.skipif(sys.platform != "linux", reason="memory in use is read from /proc")
def test_memory_is_taken_when_blocks_are_first_written() -> None:
    pool_bytes = 2**31
    warm = make_cache(num_cpu_blocks=9)  # what torch loads for a first write is not the pool's
    warm.write(0, *random_tokens(warm, 4), np.arange(4, 8))
    before = resident_bytes()
    sizes = {"block_size": 16, "num_layers": 4, "num_kv_heads": 8, "head_size": 64}
    num_blocks = pool_bytes // make_cache(**sizes).bytes_per_block
    cache = make_cache(**sizes, num_blocks=num_blocks, num_cpu_blocks=num_blocks)
    assert cache.num_bytes == pool_bytes
    used = num_blocks // 100
    key, value = random_tokens(cache, used * 16)
    for layer in range(4):
        cache.write(layer, key, value, np.arange(16, 16 + used * 16))
    cache.swap_out([[1, 1]])
    assert torch.equal(cache.key_cache(3)[1 : used + 1].reshape(key.shape), key)
    assert not cache.key_cache(3)[used + 1 : used + 10].any()
    assert 0.009 * pool_bytes < resident_bytes() - before < 0.1 * pool_bytes
    assert cache.data.data_ptr() % 64 == 0  # as torch's own: kernels load whole lines


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------- bad input


BAD_SIZES = [
    ({"num_blocks": 1}, "num_blocks is 1; it must be from 2"),
    ({"num_blocks": True}, "num_blocks is True"),
    ({"value_size": 0}, "value_size is 0; it must be from 1"),
    ({"block_size": 0}, "block_size is 0; it must be from 1 to 4096"),
    ({"block_size": 4.0}, r"block_size is 4\.0; it must be an integer"),
    ({"num_layers": 0}, "num_layers is 0"),
    ({"num_kv_heads": -1}, "num_kv_heads is -1"),
    ({"head_size": "64"}, "head_size is '64'"),
    ({"dtype": torch.float64}, r"dtype is torch\.float64; it must be float32, bfloat16 or float16"),
    ({"num_cpu_blocks": 1}, "num_cpu_blocks is 1; it must be from 2"),
    ({"num_cpu_blocks": 2**27, "head_size": 2**16}, "num_cpu_blocks is 134217728, .*could not be allocated"),
    ({"layer_groups": [[0, 1]]}, r"layer_groups is \[\[0, 1\]\]; it must name each of the 3 layers, from 0, once"),
    ({"layer_groups": [[0, 1, 2], [2]]}, "layer_groups is"),
    ({"layout": "DHN"}, "layout is 'DHN'; it must be 'NHD' or 'HND'"),
    ({"device": "nowhere"}, "device is nowhere.*could not be allocated there"),
    ({"num_blocks": 2**27, "num_layers": 2**12, "head_size": 2**20}, "could not be allocated there"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_SIZES)
def test_bad_sizes_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make_cache(**changes)


def key_like(cache: KVCache, *shape: int, dtype: Any = torch.float32) -> Any:
    return torch.ones(shape or (2, 2, 5), dtype=dtype)


BAD_CALLS: list[tuple[Callable[[KVCache], Any], str]] = [
    (lambda c: c.swap_out([[1, 1]]), "swap_outs has 1 blocks to move; it must be empty without a CPU pool"),
    (lambda c: c.swap_in([[1, 1]]), "swap_ins has 1 blocks to move; it must be empty without a CPU pool"),
    (lambda c: make_cache(num_cpu_blocks=4).swap_out([[1, 4]]), "swap_outs holds 4 at position 0; .* from 1 to 3"),
    (lambda c: make_cache(num_cpu_blocks=4).swap_in([[0, 4]]), "swap_ins holds 0 at position 0; .* from 1 to 3"),
    (lambda c: make_cache(num_cpu_blocks=4).swap_in([[1, 9]]), "swap_ins holds 9 at position 0; .* from 1 to 8"),
    (lambda c: make_cache(num_cpu_blocks=4).swap_in([[1, 2], [3, 2]]), "swap_ins writes a block twice"),
    (lambda c: make_cache(num_cpu_blocks=4).swap_in([[1, 2, 3]]), r"swap_ins has shape \(1, 3\)"),
    (lambda c: c.write(0, key_like(c), key_like(c), [4, 36]), "slot_mapping holds 36 at position 1; .* from 4 to 35"),
    (lambda c: c.write(0, key_like(c), key_like(c), [3, 4]), "slot_mapping holds 3 at position 0"),
    (lambda c: c.write(0, key_like(c), key_like(c), [4, -1]), "slot_mapping holds -1"),
    (lambda c: c.write(0, key_like(c), key_like(c), [4]), r"key has shape \(2, 2, 5\); .* = \(1, 2, 5\)"),
    (lambda c: c.write(0, key_like(c), key_like(c, 2, 5, 2), [4, 5]), "value has shape"),
    (lambda c: c.write(0, key_like(c), key_like(c, dtype=torch.float16), [4, 5]), "value has dtype .*float16"),
    (lambda c: c.write(0, key_like(c), key_like(c), [4.0, 5.0]), "slot_mapping has dtype float64"),
    (lambda c: c.write(0, key_like(c), key_like(c), [[4, 5]]), r"slot_mapping has shape \(1, 2\)"),
    (lambda c: c.write(3, key_like(c), key_like(c), [4, 5]), "layer is 3; it must be from 0 to 2"),
    (lambda c: c.write(0, key_like(c), key_like(c), make_cache(num_blocks=5).slots([4, 5])), "made for 5 blocks"),
    (lambda c: c.tables([[1, 9]], [5]), "block_tables holds 9 at position 1; it must be from 0 to 8"),
    (lambda c: c.tables([[1, 2]], [9]), "seq_lens holds 9 at position 0; it must be from 1 to 8"),
    (lambda c: c.tables([[1, 2]], [0]), "seq_lens holds 0"),
    (lambda c: c.tables([[1, 2]], [1, 1]), "seq_lens has 2 entries; block_tables has 1 rows"),
    (lambda c: c.tables([1, 2], [1, 1]), "block_tables has shape"),
    (lambda c: c.gather(-1, c.tables([[1]], [1])), "layer is -1"),
    (lambda c: c.gather(0, np.array([[1]])), r"tables is a ndarray; it must be the result of tables\(\)"),
    (lambda c: c.gather(0, c.tables([[1, 2]], [5]), c.new_buffer(4)), "out has shape"),
    (lambda c: c.gather(0, c.tables([[1]], [1]), torch.empty(8, 40, dtype=torch.float16)), "out has .*float16"),
    (lambda c: c.gather(0, make_cache(block_size=2).tables([[1]], [1])), "9 blocks of 2 tokens; this cache has 9 of 4"),
    (lambda c: c.copy_blocks([[0, 1]]), "copies holds 0 at position 0; it must be from 1 to 8"),
    (lambda c: c.copy_blocks([[1, 9]]), "copies holds 9"),
    (lambda c: c.copy_blocks([[1, 3], [2, 3]]), "copies writes a block twice"),
    (lambda c: c.copy_blocks([[1, 2, 3]]), r"copies has shape \(1, 3\)"),
    (lambda c: c.copy_blocks([[1.5, 2.0]]), "copies has dtype"),
    (lambda c: c.new_buffer(0), "num_tokens is 0"),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS)
def test_a_refused_call_writes_nothing(call: Callable[[KVCache], Any], message: str) -> None:
    cache = make_cache()
    cache.data.copy_(torch.randn(cache.data.shape))
    before = cache.data.clone()
    with pytest.raises(InvalidArgument, match=message):
        call(cache)
    assert torch.equal(cache.data, before)


# ---------------------------------------------------------------- a whole life, in real bytes


class FakeEngine:
    """Serves random sequences; a token's "keys and values" say which tokens stand up to it.

    So a wrong slot, a wrong table, a copy left out or a block given to two sequences shows as wrong content. Blocks
    that are shared hold the same content for all who share them, as real keys and values do.
    """

    def __init__(self, seed: int, layout: str) -> None:
        self.rng = np.random.default_rng(seed)
        num_blocks = 24 if seed % 2 else 40
        self.cache = KVCacheManager(CacheConfig(num_blocks=num_blocks, block_size=4, max_num_seqs=8, max_model_len=64))
        self.kv = KVCache(num_blocks, 4, 2, 1, 2, layout=layout)
        self.kv.data[:, 1:] = float("nan")
        self.tokens: dict[int, list[int]] = {}
        self.prompt_len: dict[int, int] = {}
        self.num_seen = {"hits": 0, "copies": 0, "waits": 0, "no_blocks": 0, "failed": 0}

    def admit(self) -> None:
        """Prompts are built of few pieces, so that prefixes are shared, whole and in part."""
        length = int(self.rng.integers(1, 30))
        pieces = self.rng.integers(0, 3, 8).repeat(4)[:length]
        prompt = (pieces * 10 + np.arange(length) % 4).tolist()
        if self.cache.can_allocate(prompt) is Admission.OK:
            seq = self.cache.allocate(prompt)
            self.num_seen["hits"] += self.cache.num_computed_tokens(seq)
            self.tokens[seq] = prompt
            self.prompt_len[seq] = len(prompt)

    def step(self) -> None:
        seqs = [seq for seq in self.tokens if self.rng.random() < 0.8]
        self.rng.shuffle(seqs)
        left = [len(self.tokens[seq]) - self.cache.num_computed_tokens(seq) for seq in seqs]
        pairs = [(seq, int(self.rng.integers(1, n + 1))) for seq, n in zip(seqs, left, strict=True) if n > 0]
        if not pairs:
            return
        plan = self.cache.reserve([seq for seq, _ in pairs], [count for _, count in pairs])
        statuses = plan.status.tolist()
        self.num_seen["waits"] += statuses.count(SeqStatus.WAITS_FOR_PREFIX)
        self.num_seen["no_blocks"] += statuses.count(SeqStatus.NO_BLOCKS)
        self.num_seen["copies"] += len(plan.copies)
        self.kv.copy_blocks(plan.copies)
        scheduled = [seq for (seq, _), status in zip(pairs, statuses, strict=True) if status == SeqStatus.SCHEDULED]
        rows = np.flatnonzero(plan.fits)
        starts, ends = plan.num_computed[rows], plan.seq_lens[rows]
        if not scheduled:
            self.end_one()
            return
        if self.rng.random() < 0.15:
            self.fail(plan, scheduled)
            return
        content = [self.content(seq, start, end) for seq, start, end in zip(scheduled, starts, ends, strict=True)]
        key = torch.cat(content)
        for layer in range(2):
            self.kv.write(layer, key + layer, -key - layer, plan.slot_mapping)
        self.read(scheduled, plan.block_tables[rows], ends)
        self.commit(scheduled, plan.num_scheduled[rows].copy(), ends.tolist())

    def fail(self, plan: Any, scheduled: list[int]) -> None:
        """A step that breaks half-way leaves rubbish in its slots, which must never be read."""
        self.num_seen["failed"] += 1
        rubbish = torch.full((len(plan.slot_mapping), 1, 2), float("nan"))
        self.kv.write(0, rubbish, rubbish, plan.slot_mapping)
        self.cache.commit(scheduled, 0)

    def content(self, seq: int, start: int, end: int) -> Any:
        rows = []
        for position in range(int(start), int(end)):
            tokens = self.tokens[seq][: position + 1]
            digest = sum((token + 1) * 7**place for place, token in enumerate(tokens)) % 1_000_003
            rows.append([[float(digest), float(position)]])
        return torch.tensor(rows)

    def read(self, seqs: list[int], tables: Any, lengths: Any) -> None:
        gathered = self.kv.tables(tables, lengths)
        for layer in range(2):
            key, value = self.kv.gather(layer, gathered)
            for row, (seq, length) in enumerate(zip(seqs, lengths, strict=True)):
                expected = self.content(seq, 0, length) + layer
                assert torch.equal(key[row, :length], expected)
                assert torch.equal(value[row, :length], -expected)

    def commit(self, seqs: list[int], num_computed: Any, ends: list[int]) -> None:
        next_tokens = [
            int(self.rng.integers(0, 30)) if end == len(self.tokens[seq]) and end < 60 else -1
            for seq, end in zip(seqs, ends, strict=True)
        ]
        self.cache.commit(seqs, num_computed, next_tokens)
        for seq, token in zip(seqs, next_tokens, strict=True):
            if token >= 0:
                self.tokens[seq].append(token)

    def branch_or_cut(self) -> None:
        ready = [
            seq
            for seq, tokens in self.tokens.items()
            if self.cache.num_computed_tokens(seq) >= max(self.prompt_len[seq], len(tokens) - 1)
        ]
        if not ready:
            return
        seq = int(self.rng.choice(ready))
        if self.rng.random() < 0.8 and self.cache.num_seqs < 8:
            (child,) = self.cache.fork(seq)
            self.tokens[child] = list(self.tokens[seq])
            self.prompt_len[child] = self.prompt_len[seq]
        else:
            length = int(self.rng.integers(1, len(self.tokens[seq]) + 1))
            self.cache.truncate(seq, length)
            del self.tokens[seq][length:]
            self.prompt_len[seq] = min(self.prompt_len[seq], length)

    def end_one(self) -> None:
        if self.tokens:
            seq = int(self.rng.choice(list(self.tokens)))
            self.cache.free(seq)
            del self.tokens[seq]

    def run(self, num_steps: int) -> None:
        actions = [self.admit, self.step, self.branch_or_cut, self.end_one]
        for _ in range(num_steps):
            action = actions[self.rng.choice(4, p=[0.2, 0.5, 0.2, 0.1])]
            action()
            self.cache.check()
        while self.tokens:
            self.end_one()
        self.cache.check()
        assert self.cache.num_used_blocks == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_sequence_reads_its_own_bytes(layout: str) -> None:
    drawn = run_seed()
    seen = {"hits": 0, "copies": 0, "waits": 0, "no_blocks": 0, "failed": 0}
    for seed in (5, 6, drawn, drawn + 1):  # the first two meet everything, whatever is drawn
        engine = FakeEngine(seed, layout)
        engine.run(400)
        seen = {name: seen[name] + count for name, count in engine.num_seen.items()}
    assert all(seen.values()), f"the run met too little: {seen}"
