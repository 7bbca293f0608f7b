"""Block names without the extra `names`: which arguments are refused, and what is said when a package is missing."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from blockyard import CacheSalt, InvalidArgument, LoRA
from blockyard.keys import canonical_keys
from blockyard.naming import block_names, name_as_u64
from blockyard_testing.places import PACKAGE_DIR


@pytest.mark.parametrize(
    "tokens", [None, "abcd", b"abcd", [1.0, 2.0], [True, 2], [-1, 2], [1, 2**31], [[1, 2]], [None], ["1"], 5, [2**70]]
)
def test_bad_tokens(tokens: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"token_ids"):
        block_names(tokens, 1)


@pytest.mark.parametrize("size", [0, -1, 4097, 4.0, True, None, "4"])
def test_bad_block_sizes(size: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"block_size is .* 1 to 4096"):
        block_names([1], size)


@pytest.mark.parametrize("algorithm", ["sha256", "", None, 1, ["sha256_cbor"]])
def test_bad_algorithms(algorithm: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"algorithm is .* sha256_cbor, xxh3_128"):
        block_names([1], 1, (), algorithm)


@pytest.mark.parametrize("name", [b"", bytes(31), "a" * 32, 9561501211280363793, None])
def test_bad_names(name: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"name is .* 16 or 32 bytes"):
        name_as_u64(name)


def test_keys_are_checked_as_everywhere() -> None:
    with pytest.raises(InvalidArgument, match=r"extra_keys"):
        block_names([1], 1, "a")
    assert canonical_keys((LoRA("ad"), CacheSalt("a"))) == canonical_keys([CacheSalt("a"), LoRA("ad")])


def run_without(missing: str, code: str) -> str:
    """What `code` prints where a package is not installed."""
    script = f"import sys\nsys.path.insert(0, {str(PACKAGE_DIR.parent)!r})\nsys.modules[{missing!r}] = None\n{code}"
    return subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120
    ).stdout


@pytest.mark.parametrize(("missing", "algorithm"), [("cbor2", "sha256_cbor"), ("xxhash", "xxh3_128")])
def test_a_missing_package_is_one_sentence(missing: str, algorithm: str) -> None:
    if missing == "xxhash":
        pytest.importorskip("cbor2")  # asked for first
    code = (
        "from blockyard import MissingExtra\nfrom blockyard.naming import block_names\n"
        f"try:\n    block_names([1], 1, algorithm={algorithm!r})\nexcept MissingExtra as error:\n    print(error)\n"
    )
    assert run_without(missing, code) == f"algorithm {algorithm!r} needs {missing}: pip install 'blockyard[names]'\n"
