"""Names of blocks for the outside, against vectors computed with vLLM 0.32 and against a second way to compute them."""

from __future__ import annotations

import array
import hashlib
from typing import Any

import numpy as np
import pytest

from blockyard import CacheSalt, InvalidArgument, LoRA, Span
from blockyard.keys import ExtraKey
from blockyard.naming import NAME_SIZES, block_names, name_as_u64, root_name

from .test_naming_arguments import run_without

cbor2 = pytest.importorskip("cbor2")
xxhash = pytest.importorskip("xxhash")

ALGORITHMS = sorted(NAME_SIZES)
TENANT, ADAPTER = CacheSalt("tenant-a"), LoRA("ad", "/p/ad")


def digest(algorithm: str, data: bytes) -> bytes:
    return hashlib.sha256(data).digest() if algorithm == "sha256_cbor" else xxhash.xxh3_128(data).digest()


def chained(algorithm: str, tokens: list[int], size: int, keys: list[list[list[Any]]]) -> list[bytes]:
    """The same names, the obvious way: `keys` are the encoded extra keys of each block."""
    names = [digest(algorithm, b"\x6e" + b"vllm-none-hash")]
    for block, wire in enumerate(keys):
        item = [names[-1], tokens[block * size : (block + 1) * size], wire or None]
        names.append(digest(algorithm, cbor2.dumps(item)))
    return names[1:]


# ---------------------------------------------------------------- vLLM's vectors


def test_the_root() -> None:
    assert root_name().hex() == "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"


def test_a_chain() -> None:
    names = block_names([1, 2, 3, 4, 5, 6, 7, 8], 4)
    assert [name.hex() for name in names] == [
        "58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111",
        "e1bc29393a2da9fd798f35ff04d215f846aee6df4b803ce3d43b57df56b58fb1",
    ]
    assert [name_as_u64(name) for name in names] == [9561501211280363793, 15292913576410714033]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (TENANT, "0e172de9010f20a975885630390148d0769af6bbe75a732d3b66b62598433cae"),
        (ADAPTER, "92d371af9879e1d18d89d9c59d2a0a8263734a9431e5aaaf5683c325ddb68425"),
    ],
)
def test_a_block_with_a_key(key: ExtraKey, expected: str) -> None:
    assert [name.hex() for name in block_names([1, 2, 3, 4], 4, (key,))] == [expected]


# ---------------------------------------------------------------- which block has which keys


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_kind_of_key_on_the_wire(algorithm: str) -> None:
    """The adapter on every block, the salt on the first alone, a span where it reaches; in this order."""
    tokens = list(range(100, 116))
    image, sound = Span("cat", 2, 7), Span("mew", 9, 1, "audio")
    lora = ["lora", "ad", "/p/ad"]
    expected = chained(
        algorithm,
        tokens,
        4,
        [
            [lora, ["mm", "cat", 2], ["cache_salt", "tenant-a"]],
            [lora, ["mm", "cat", -2]],
            [lora, ["mm", "cat", -6], ["mm", "mew", 1]],
            [lora],
        ],
    )
    assert block_names(tokens, 4, (sound, TENANT, image, ADAPTER), algorithm) == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_salt_part_all_names_of_a_chain(algorithm: str) -> None:
    tokens = list(range(12))
    plain = block_names(tokens, 4, (), algorithm)
    salted = block_names(tokens, 4, (TENANT,), algorithm)
    assert set(plain).isdisjoint(salted)
    assert block_names(tokens, 4, (CacheSalt("tenant-a"),), algorithm) == salted


def test_text_before_a_span_keeps_its_name() -> None:
    tokens = list(range(16))
    cat, dog = (block_names(tokens, 4, (Span(content, 5, 2),)) for content in ("cat", "dog"))
    assert cat[0] == dog[0] == block_names(tokens, 4)[0]
    assert set(cat[1:]).isdisjoint(dog[1:])


def test_keys_of_equal_text_but_other_kinds_part() -> None:
    keys = [
        (),
        (LoRA("a"),),
        (CacheSalt("a"),),
        (LoRA("a", "b"),),
        (LoRA("b"),),
        (Span("a", 0, 1),),
        (Span("a", 1, 1),),
    ]
    assert len({block_names([1, 2], 2, key)[0] for key in keys}) == len(keys)


# ---------------------------------------------------------------- incremental


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("cut", [4, 8, 12])
def test_a_chain_goes_on_from_any_block(algorithm: str, cut: int) -> None:
    tokens = list(range(50, 68))
    keys = (TENANT, ADAPTER, Span("cat", 6, 5))
    names = block_names(tokens, 4, keys, algorithm)
    before = block_names(tokens[:cut], 4, keys, algorithm)
    after = block_names(tokens[cut:], 4, keys, algorithm, before[-1], first_block=cut // 4)
    assert before + after == names
    assert len(names) == 4


def test_without_spans_a_parent_says_enough() -> None:
    tokens = list(range(12))
    names = block_names(tokens, 4, (TENANT, ADAPTER))
    assert block_names(tokens[4:], 4, (TENANT, ADAPTER), parent=names[0]) == names[1:]


@pytest.mark.parametrize("length", [0, 1, 3])
def test_less_than_a_block_has_no_name(length: int) -> None:
    assert block_names([7] * length, 4) == []
    assert block_names([7] * (4 + length), 4) == block_names([7] * 4, 4)


def test_another_root_parts_everything() -> None:
    tokens = list(range(8))
    assert root_name(root_text="0") != root_name()
    assert set(block_names(tokens, 4, root_text="0")).isdisjoint(block_names(tokens, 4))
    assert block_names(tokens, 4, parent=root_name(root_text="0")) == block_names(tokens, 4, root_text="0")


@pytest.mark.parametrize(
    "tokens",
    [
        np.array([1, 2, 3, 4], dtype=np.int32),
        np.array([1, 2, 3, 4], dtype=np.uint64),
        np.array([1, 0, 2, 0, 3, 0, 4, 0], dtype=">i8")[::2],
        array.array("i", [1, 2, 3, 4]),
        (1, 2, 3, 4),
        memoryview(array.array("q", [1, 2, 3, 4])),
    ],
)
def test_tokens_in_every_form(tokens: Any) -> None:
    assert block_names(tokens, 4) == block_names([1, 2, 3, 4], 4)


def test_the_largest_token_has_a_name() -> None:
    assert block_names([0, 2**31 - 1], 2) == chained("sha256_cbor", [0, 2**31 - 1], 2, [[]])


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("parent", [b"", bytes(16), bytes(33), "a" * 32, 7, bytearray(32)])
def test_bad_parents(parent: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"parent is .* 32 bytes"):
        block_names([1], 1, parent=parent)


def test_a_name_of_the_other_algorithm_is_no_parent() -> None:
    name = block_names([1], 1)[0]
    with pytest.raises(InvalidArgument, match=r"parent is .* 16 bytes"):
        block_names([1], 1, algorithm="xxh3_128", parent=name)


def test_where_the_blocks_stand_must_be_known() -> None:
    parent = root_name()
    with pytest.raises(InvalidArgument, match=r"first_block is 2; without a parent"):
        block_names([1], 1, first_block=2)
    with pytest.raises(InvalidArgument, match=r"first_block is 0; with a parent and spans"):
        block_names([1], 1, (Span("cat", 0, 1),), parent=parent)
    with pytest.raises(InvalidArgument, match=r"first_block is -1"):
        block_names([1], 1, parent=parent, first_block=-1)


@pytest.mark.parametrize("text", [None, 0, b"0"])
def test_bad_root_texts(text: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"root_text"):
        root_name(root_text=text)


def test_text_that_has_no_encoding() -> None:
    with pytest.raises(InvalidArgument, match=r"value holds '\\ud800' at position 0; it must be valid Unicode"):
        block_names([1], 1, (CacheSalt("\ud800"),))
    with pytest.raises(InvalidArgument, match=r"no UTF-8 form"):
        root_name(root_text="\ud800")


# ---------------------------------------------------------------- without the extra


def test_each_algorithm_needs_only_its_own() -> None:
    code = "from blockyard.naming import block_names\nprint(block_names([1], 1)[0].hex())\n"
    assert run_without("xxhash", code) == block_names([1], 1)[0].hex() + "\n"
