"""Files that are not snapshots, or forged ones: a clear error or a miss, whatever their contents."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockyard import InvalidArgument
from blockyard.wire.message import Message, pack
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.seeds import draws, run_seed
from blockyard_tiers import snapshot as snapshots

from .test_offload import PROMPT, SmallEngine, cached, snapshot_of

#: Values of every kind that JSON has.
PLAIN: list[Any] = [None, True, -1, 0, 2**31, 10**30, 1.5, float("nan"), "", "salt", [], [[]], [None], {}, {"salt": 1}]


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[tuple[SmallEngine, Path]]:
    path = snapshot_of(tmp_path, PROMPT, list(range(201, 241)))
    engine = SmallEngine(tmp_path / "tier")
    yield engine, path
    engine.close()


def refused(engine: SmallEngine, path: Path) -> bool:
    """Restore from a file; return whether it was refused. Any other exception than `InvalidArgument` comes through."""
    engine.cache.reset_prefix_cache()
    num_tokens, error = 0, ""
    try:
        num_tokens = engine.offload.restore(path, PATIENCE_SECONDS)
    except InvalidArgument as refusal:
        error = str(refusal)
    engine.offload.check()
    assert engine.offload.num_waiting == 0
    assert num_tokens == engine.cache.num_cached_blocks * 4
    assert not error or (num_tokens == 0 and error.startswith(f"path is {str(path)!r}; it"))
    return bool(error)


def test_fields_of_wrong_kinds_are_refused(warm: tuple[SmallEngine, Path]) -> None:
    engine, path = warm
    message = Message.of(path.read_bytes())
    assert not refused(engine, path)
    for name, value in message.fields.items():
        for other in PLAIN:
            path.write_bytes(pack(message.kind, {**message.fields, name: other}, message.arrays))
            assert refused(engine, path), (name, other)
        path.write_bytes(pack(message.kind, {**message.fields, name: [value]}, message.arrays))
        assert refused(engine, path), name
        left = {other: kept for other, kept in message.fields.items() if other != name}
        path.write_bytes(pack(message.kind, left, message.arrays))
        assert refused(engine, path), name


def test_a_number_that_only_equals_the_right_one_is_refused(warm: tuple[SmallEngine, Path]) -> None:
    engine, path = warm
    message = Message.of(path.read_bytes())
    for changed in ({"version": True}, {"version": 1.0}, {"block_size": 4.0}):
        path.write_bytes(pack(message.kind, {**message.fields, **changed}, message.arrays))
        assert refused(engine, path)


def test_arrays_that_are_wrong_are_refused_or_miss(warm: tuple[SmallEngine, Path]) -> None:
    engine, path = warm
    message = Message.of(path.read_bytes())
    choose = random.Random(run_seed())
    extremes = [-(2**31), -2, -1, 0, 1, 2**31 - 1]
    num_refused = 0
    for _ in range(draws(60, 6)):
        arrays = [array.copy() for array in message.arrays]
        kind = choose.randrange(4)
        which = choose.randrange(len(arrays))
        if kind == 0:
            arrays[which][choose.randrange(len(arrays[which]))] = choose.choice(extremes)
        elif kind == 1:
            arrays[which] = arrays[which][: choose.randrange(len(arrays[which]))]
        elif kind == 2:
            arrays.insert(which, np.array(choose.choices(extremes, k=choose.randrange(5)), np.int32))
        else:
            del arrays[which]
        path.write_bytes(pack(message.kind, message.fields, arrays))
        num_refused += refused(engine, path)
        assert kind == 0 or num_refused
    path.write_bytes(pack(message.kind, message.fields, message.arrays))
    assert not refused(engine, path)
    assert cached(engine.cache, PROMPT) == 16


def test_counts_beyond_the_file_are_refused(warm: tuple[SmallEngine, Path]) -> None:
    """The digest is corrected, so that only the counts are wrong."""
    from hashlib import blake2b

    engine, path = warm
    whole = path.read_bytes()
    size_at = 4 + 4 + 16 + 8 + 16
    for at in (size_at, size_at + 4, *range(size_at + 8, len(whole) - 4, 16)):
        for count in (2**32 - 1, 2**31, 0):
            data = bytearray(whole)
            data[at : at + 4] = count.to_bytes(4, "little")
            data[8:24] = blake2b(bytes(data[:8]) + bytes(data[24:]), digest_size=16).digest()
            path.write_bytes(data)
            refused(engine, path)
            if at < size_at + 8:
                assert refused(engine, path), (at, count)


def test_irregular_snapshot_files_are_refused(warm: tuple[SmallEngine, Path], tmp_path: Path) -> None:
    engine, _ = warm
    os.mkfifo(tmp_path / "pipe")
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(2**40)
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path, large):
        assert refused(engine, path)
    with pytest.raises(InvalidArgument, match=f"has {2**40} bytes; a snapshot has at most {snapshots._MAX_BYTES}"):
        engine.offload.restore(large)
