"""Tokens in every form: what must work is the same tokens, what must not is refused and changes nothing."""

from __future__ import annotations

import array
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard import CacheConfig, InvalidArgument, KVCacheManager

from ..support.busy_manager import Scene
from ..support.checked import Checked, prompt


@pytest.fixture
def scene() -> Scene:
    return Scene()


def unreadable_array(error: type[Exception] = ValueError) -> Any:
    class Unreadable:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            raise error("nothing to read")

    return Unreadable()


def released_memoryview() -> memoryview:
    view = memoryview(array.array("i", [1]))
    view.release()
    return view


HOSTILE_TOKENS: dict[str, Any] = {
    "empty list": [],
    "empty array": np.array([], dtype=np.int32),
    "empty floats": [[]],
    "negative": [1, 2, -1],
    "negative array": np.array([1, -5]),
    "negative int8": np.array([1, -5], dtype=np.int8),
    "too large": [2**31],
    "too large array": np.array([2**31]),
    "too large unsigned": np.array([2**31], dtype=np.uint32),
    "huge": [2**63],
    "huge unsigned": np.array([2**63], dtype=np.uint64),
    "beyond 64 bits": [2**64],
    "beyond all": [10**100],
    "float": [1.0],
    "float array": np.array([1.0]),
    "float16": np.array([1], dtype=np.float16),
    "nan": [float("nan")],
    "complex": [1j],
    "bool array": np.array([True]),
    "text": "hello",
    "bytes": b"hello",
    "bytearray": bytearray(b"hello"),
    "strings": ["1"],
    "string array": np.array(["1"]),
    "none": None,
    "nones": [None],
    "object array": np.array([1, None], dtype=object),
    "objects of ints": np.array([1, 2], dtype=object),
    "two dimensions": [[1, 2], [3, 4]],
    "two dimensions array": np.array([[1, 2]]),
    "no dimension": np.array(1),
    "an integer": 1,
    "ragged": [[1], [1, 2]],
    "mixed": [1, [2]],
    "dict": {1: 2},
    "set": {1, 2},
    "generator": (token for token in (1, 2)),
    "type": int,
    "dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "records": np.array([(1, 2)], dtype=[("a", "i4"), ("b", "i4")]),
    "memoryview of bytes shaped twice": memoryview(bytes(8)).cast("B", (2, 4)),
    "memoryview of floats": memoryview(array.array("d", [1.0])),
    "released memoryview": released_memoryview(),
    "unreadable": unreadable_array(),
    "unreadable by a KeyError": unreadable_array(KeyError),
    "unreadable by an error of its own": unreadable_array(OSError),
}


@pytest.mark.parametrize("name", HOSTILE_TOKENS)
def test_hostile_tokens_are_refused_without_a_change(scene: Scene, name: str) -> None:
    tokens = HOSTILE_TOKENS[name]
    scene.refused(InvalidArgument, lambda: scene.cache.allocate(tokens), "token_ids")
    scene.refused(InvalidArgument, lambda: scene.cache.can_allocate(tokens), "token_ids")


def test_what_foreign_code_raised_is_the_cause(scene: Scene) -> None:
    class Number:
        def __index__(self) -> int:
            raise KeyError("mine")

    with pytest.raises(InvalidArgument, match="token_ids is Unreadable, which gives no array") as told:
        scene.cache.allocate(unreadable_array(KeyError))
    assert isinstance(told.value.__cause__, KeyError)
    with pytest.raises(InvalidArgument, match="block_id is a Number, whose __index__ fails: KeyError") as told:
        scene.cache.block(Number())  # type: ignore[arg-type]
    assert isinstance(told.value.__cause__, KeyError)


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20),
    where=st.integers(0, 19),
    bad=st.one_of(
        st.integers(-(2**70), -1),
        st.integers(2**31, 2**70),
        st.floats(),
        st.text(max_size=3),
        st.none(),
        st.lists(st.integers(0, 5), max_size=2),
        st.complex_numbers(),
        st.binary(max_size=3),
    ),
)
def test_one_bad_token_is_refused_by_its_position(tokens: list[Any], where: int, bad: Any) -> None:
    scene = Scene()
    tokens.insert(min(where, len(tokens)), bad)
    position = f"token_ids[{min(where, len(tokens) - 1)}]"
    scene.refused(InvalidArgument, lambda: scene.cache.allocate(tokens))
    with pytest.raises(InvalidArgument, match=re.escape(position)):
        scene.cache.can_allocate(tokens)


def good_forms(tokens: list[int]) -> dict[str, Any]:
    """The same tokens in every form that must work."""
    strided = np.zeros((len(tokens), 3), dtype=np.int32)
    strided[:, 1] = tokens
    read_only = np.array(tokens, dtype=np.int32)
    read_only.setflags(write=False)
    unaligned = np.frombuffer(b"x" + np.array(tokens, dtype="<i4").tobytes(), dtype=np.uint8)[1:].view("<i4")
    forms = {
        "list": tokens,
        "tuple": tuple(tokens),
        "list of numpy integers": list(np.array(tokens, dtype=np.int64)),
        "int32": np.array(tokens, dtype=np.int32),
        "int64": np.array(tokens, dtype=np.int64),
        "uint32": np.array(tokens, dtype=np.uint32),
        "uint64": np.array(tokens, dtype=np.uint64),
        "big-endian": np.array(tokens, dtype=">i4"),
        "big-endian int64": np.array(tokens, dtype=">i8"),
        "strided": strided[:, 1],
        "reversed": np.array(tokens[::-1], dtype=np.int32)[::-1],
        "reversed int64": np.array(tokens[::-1], dtype=np.int64)[::-1],
        "unaligned": unaligned,
        "read-only": read_only,
        "array('i')": array.array("i", tokens),
        "array('q')": array.array("q", tokens),
        "memoryview": memoryview(array.array("i", tokens)),
        "strided memoryview": memoryview(array.array("q", [t for token in tokens for t in (token, 0)]))[::2],
        "read-only memoryview": memoryview(np.array(tokens, dtype="<i4").tobytes()).cast("i"),
    }
    torch = pytest.importorskip("torch") if HAS_TORCH else None
    if torch is not None:
        forms["int32 tensor"] = torch.tensor(tokens, dtype=torch.int32)
        forms["int64 tensor"] = torch.tensor(tokens, dtype=torch.int64)
        forms["strided tensor"] = torch.tensor([[t, 0] for t in tokens], dtype=torch.int32)[:, 0]
    return forms


try:
    import torch as _torch  # noqa: F401

    HAS_TORCH = True
except ImportError:
    HAS_TORCH = False


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.lists(st.one_of(st.integers(0, 2**31 - 1), st.just(2**31 - 1)), min_size=1, max_size=30),
    block_size=st.sampled_from((1, 2, 3, 4, 16)),
)
def test_all_good_forms_are_the_same_tokens(tokens: list[int], block_size: int) -> None:
    cache = KVCacheManager(CacheConfig(200, block_size))
    for number, (name, form) in enumerate(good_forms(tokens).items()):
        seq = cache.allocate(form)
        assert cache.token_ids(seq).tolist() == tokens, name
        hit = cache.num_computed_tokens(seq)
        assert hit == (0 if number == 0 else (len(tokens) - 1) // block_size * block_size), name
        cache.reserve([seq], len(tokens) - hit)
        cache.commit([seq], len(tokens) - hit)
        cache.free(seq)


def test_callers_array_is_never_written() -> None:
    tokens = np.arange(1, 9, dtype=np.int32)
    cache = KVCacheManager(CacheConfig(10, 4))
    seq = cache.allocate(tokens)
    tokens[:] = 77
    assert cache.token_ids(seq).tolist() == list(range(1, 9))
    cache.token_ids(seq)[:] = 5
    assert cache.token_ids(seq).tolist() == list(range(1, 9))


@pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
def test_hostile_tensors_are_refused(scene: Scene) -> None:
    torch = pytest.importorskip("torch")
    for tokens in (
        torch.tensor([1.0]),
        torch.tensor([1.0], requires_grad=True),
        torch.tensor([True]),
        torch.tensor([[1]]),
        torch.tensor(1),
        torch.tensor([], dtype=torch.int32),
        torch.tensor([-1]),
        torch.tensor([1], device="meta"),
        torch.tensor([1, 2]).to_sparse(),
        torch.tensor([1.0], dtype=torch.bfloat16),
    ):
        scene.refused(InvalidArgument, lambda tokens=tokens: scene.cache.allocate(tokens), "token_ids")


# ---------------------------------------------------------------- rows of different lengths


@pytest.mark.parametrize("make", [list, tuple, np.array])
def test_accepted_drafts_may_differ_in_number(make: Any) -> None:
    cache = Checked(20)
    seqs = [cache.allocate(prompt(1, 5)), cache.allocate(prompt(2, 3)), cache.allocate(prompt(3, 2))]
    cache.commit(seqs, cache.reserve(seqs).num_scheduled, [1, 2, 3])
    cache.reserve(seqs, [3, 2, 1])
    cache.commit(seqs, [3, 1, 0], [make([11, 12, 13]), make([21]), []])
    assert cache.tokens(seqs[0])[5:] == [1, 11, 12, 13]
    assert cache.tokens(seqs[1])[3:] == [2, 21]
    assert cache.tokens(seqs[2])[2:] == [3]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1], 2], r"^next_tokens\[1\] is 2; it must be a list of tokens like the other rows$"),
        ([1, [2]], r"^next_tokens is \[1, \[2\]\]; integers are needed, and no lists of different lengths or beside"),
        ([[1], [2, [3]]], r"^next_tokens\[1\] is \[2, \[3\]\]; integers are needed"),
        ([[1]], r"^next_tokens has 1 rows; it must have one for each of the 2 sequences$"),
        ([[1], [True, 2]], r"next_tokens\[1\]\[0\] is True; integers are needed$"),
        ([[1], [2.5]], r"^next_tokens\[1\] has items of type float64; integers are needed$"),
        ([[1, -1, 3], [2]], r"^next_tokens\[0\] has 3 after -1"),
    ],
)
def test_invalid_rows_of_tokens_are_refused_by_name(tokens: Any, message: str) -> None:
    cache = Checked(20)
    seqs = [cache.allocate(prompt(1, 5)), cache.allocate(prompt(2, 3))]
    cache.commit(seqs, cache.reserve(seqs).num_scheduled)
    with pytest.raises(InvalidArgument, match=message):
        cache.append(seqs, tokens)
    assert [cache.num_tokens(seq) for seq in seqs] == [5, 3]


def test_ragged_lists_are_refused_by_name_in_every_call() -> None:
    cache = Checked(20)
    seq = cache.allocate(prompt(1, 5))
    ragged: Any = [[1], [2, 3]]
    for call in (
        lambda: cache.reserve(ragged),
        lambda: cache.reserve([seq], ragged),
        lambda: cache.commit([seq], ragged),
        lambda: cache.free(ragged),
        lambda: cache.regroup([seq], ragged),
    ):
        with pytest.raises(InvalidArgument, match=r"no lists of different lengths or beside integers$"):
            call()
