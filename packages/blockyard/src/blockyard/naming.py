"""Block names that are equal on every machine, for events, tiers and routers.

A name is a digest of everything that determines a block's keys and values, chained like the blocks of a prompt:

    name = digest(CBOR([name of the block before, [token ids], extra keys or null]))

A first block follows the root, the digest of a text. The extra keys of a block are, in this order:

    ["lora", name, path]            on every block of a request with an adapter
    ["mm", content, start]          for each span that reaches into the block, from the first to the last; `start` is
                                    relative to the block's first token, negative where the span began earlier
    ["cache_salt", value]           only on the first block; the chain carries it to the others

These are byte for byte the names of vLLM (0.32) with `--prefix-caching-hash-algo sha256_cbor`. The tests hold vectors
computed with vLLM for text, adapter and salt, and for spans the form that routers read. vLLM's `xxhash_cbor` is
"xxh3_128" here, with vLLM's PYTHONHASHSEED as `root_text`. Names do not include a span's kind and length, so its
`content` must be unique. If spans overlap, a name covers all that reach into the block; vLLM's covers the first.

Names are only for other programs: the index compares the tokens and keys themselves.
Needs cbor2, and xxhash for "xxh3_128": `pip install 'blockyard[names]'`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from .arguments import require_int, require_str
from .errors import InvalidArgument, MissingExtra
from .keys import MAX_POSITION, BlockSpan, CacheSalt, ExtraKey, LoRA, canonical_keys, spans_by_block, spans_of

MAX_TOKEN = 2**31 - 1
MAX_NAMED_BLOCK_SIZE = 4096

#: The text whose digest is vLLM's root when PYTHONHASHSEED is unset.
ROOT_TEXT = "vllm-none-hash"

#: Bytes per name, by algorithm.
NAME_SIZES = {"sha256_cbor": 32, "xxh3_128": 16}


def block_names(
    token_ids: object,
    block_size: object,
    extra_keys: object = (),
    algorithm: object = "sha256_cbor",
    parent: object = None,
    first_block: object = 0,
    root_text: object = ROOT_TEXT,
) -> list[bytes]:
    """Return the names of the full blocks of `token_ids`, in order. O(tokens).

    A partial last block has no name.

    Args:
        token_ids: integers (n,), as a list, an array or any buffer.
        block_size: tokens per block, 1 to 4096.
        extra_keys: extra keys of the whole request, see `blockyard.keys`.
        algorithm: "sha256_cbor" (32 bytes), or "xxh3_128" (16 bytes). The latter is slightly faster, but not
            collision-resistant: use it only if no untrusted tenant's prompts are named.
        parent: name of the block before these tokens, to continue a chain; None at the beginning of a prompt.
        first_block: with a parent, the number in the prompt of the first block of `token_ids`. Only needed with spans.
        root_text: text whose digest is the root. All programs that compare names must use the same.

    Raises:
        InvalidArgument: a value is outside its limits.
        MissingExtra: cbor2 or xxhash is not installed.

    >>> names = block_names([1, 2, 3, 4, 5, 6, 7, 8, 9], block_size=4)
    >>> [name_as_u64(name) for name in names]
    [9561501211280363793, 15292913576410714033]
    >>> block_names([5, 6, 7, 8], block_size=4, parent=names[0]) == names[1:]
    True
    """
    tokens = _token_list(token_ids)
    size = require_int("block_size", block_size, 1, MAX_NAMED_BLOCK_SIZE)
    keys = canonical_keys(extra_keys)
    digest = _digest_function(algorithm)
    name = _parent_name(parent, algorithm, root_text)
    first = _first_block(first_block, parent, keys)
    last = first + len(tokens) // size
    spans = spans_by_block(spans_of(keys), size, last)
    names = []
    for block in range(first, last):
        start = (block - first) * size
        wire = _wire_keys(keys, spans.get(block, ()), parent is None and block == 0)
        name = digest((name, tokens[start : start + size], wire))
        names.append(name)
    return names


def root_name(algorithm: object = "sha256_cbor", root_text: object = ROOT_TEXT) -> bytes:
    """Return the root of a chain of names: the digest of `root_text`. O(1).

    Raises:
        InvalidArgument: the algorithm is unknown, or the text is not valid Unicode.
        MissingExtra: cbor2 or xxhash is not installed.
    """
    return _digest_function(algorithm)(require_str("root_text", root_text))


def name_as_u64(name: object) -> int:
    """Return the low 64 bits of a name, as in vLLM's KV events. O(1).

    Raises `InvalidArgument` for another type or length.
    """
    if not isinstance(name, bytes) or len(name) not in NAME_SIZES.values():
        raise InvalidArgument(f"name is {name!r}; it must be 16 or 32 bytes")
    return int.from_bytes(name[-8:], "big")


def _digest_function(algorithm: object) -> Callable[[object], bytes]:
    """Return a function from an object to the digest of its CBOR."""
    if not isinstance(algorithm, str) or algorithm not in NAME_SIZES:
        raise InvalidArgument(f"algorithm is {algorithm!r}; it must be one of {', '.join(NAME_SIZES)}")
    try:
        import cbor2

        if algorithm == "sha256_cbor":
            return lambda item: hashlib.sha256(_encoded(cbor2.dumps, item)).digest()
        import xxhash

        return lambda item: xxhash.xxh3_128_digest(_encoded(cbor2.dumps, item))
    except ImportError as error:
        raise MissingExtra(f"algorithm {algorithm!r} needs {error.name}: pip install 'blockyard[names]'") from error


def _encoded(dumps: Callable[..., bytes], item: object) -> bytes:
    try:
        return dumps(item, canonical=True)
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"extra_keys or root_text holds {error.object!r}, which has no UTF-8 form") from error


def _parent_name(parent: object, algorithm: object, root_text: object) -> bytes:
    if parent is None:
        return root_name(algorithm, root_text)
    size = NAME_SIZES[str(algorithm)]
    if not isinstance(parent, bytes) or len(parent) != size:
        raise InvalidArgument(f"parent is {parent!r}; a name of {algorithm} is {size} bytes")
    return parent


def _first_block(first_block: object, parent: object, keys: tuple[ExtraKey, ...]) -> int:
    first = require_int("first_block", first_block, 0, MAX_POSITION)
    if parent is None and first > 0:
        raise InvalidArgument(f"first_block is {first}; without a parent it must be 0")
    if parent is not None and first == 0 and spans_of(keys):
        raise InvalidArgument(
            "first_block is 0; with a parent and spans it must be the position of the first block in the prompt, 1 "
            "or more"
        )
    return first


def _wire_keys(keys: tuple[ExtraKey, ...], spans: tuple[BlockSpan, ...], is_first: bool) -> list[Any] | None:
    """Return the extra keys of one block in the form that is encoded; None if there are none."""
    wire: list[Any] = [("lora", key.name, key.path) for key in keys if isinstance(key, LoRA)]
    wire += [("mm", content, start) for _, content, start, _ in spans]
    if is_first:
        wire += [("cache_salt", key.value) for key in keys if isinstance(key, CacheSalt)]
    return wire or None


def _token_list(token_ids: object) -> list[int]:
    if isinstance(token_ids, (str, bytes, bytearray)) or token_ids is None:
        raise InvalidArgument(f"token_ids is {type(token_ids).__name__}; it must be a list or array of integers")
    try:
        array = np.asarray(token_ids)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidArgument(f"token_ids is {type(token_ids).__name__}: {error}") from error
    if array.ndim != 1:
        raise InvalidArgument(f"token_ids has shape {array.shape}; it must have one dimension")
    if array.size == 0:
        return []
    holds_bool = isinstance(token_ids, (list, tuple)) and any(isinstance(token, bool) for token in token_ids)
    if array.dtype.kind not in "iu" or holds_bool:
        raise InvalidArgument(f"token_ids has items of type {array.dtype}; they must be integers")
    if array.min() < 0 or array.max() > MAX_TOKEN:
        index = int(np.flatnonzero((array < 0) | (array > MAX_TOKEN))[0])
        raise InvalidArgument(f"token_ids[{index}] is {array[index]}; a token is from 0 to {MAX_TOKEN}")
    tokens: list[int] = array.tolist()
    return tokens
