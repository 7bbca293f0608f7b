"""Names of blocks that mean the same on every machine, computed only where something asks: events, tiers, routers.

A name is a digest over what decides a block's keys and values, chained like the blocks of a prompt:

    name = digest(CBOR([name of the block before, [token ids], extra keys or null]))

The first block's "before" is a root, the digest of a text. The extra keys of a block are, in this order:

    ["lora", name, path]            on every block of a request with an adapter
    ["mm", content, start]          for each span that reaches into the block, from the first to the last; `start` is
                                    relative to the block's first token, negative where the span began earlier
    ["cache_salt", value]           on the first block alone; the chain carries it to all that follow

This is byte for byte what vLLM (0.32) computes with `--prefix-caching-hash-algo sha256_cbor`: for text, adapter and
salt the tests hold vectors computed with vLLM, for spans its form as routers read it. vLLM's `xxhash_cbor` is our
"xxh3_128" with the text that vLLM was given as PYTHONHASHSEED. A span's kind and length are not on that wire, so its
`content` alone must tell it from others. Where spans overlap we name all that reach into a block; vLLM names the first.

Names are for the outside. The index inside compares tokens and keys themselves and needs no name.
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

#: Bytes of a name, by algorithm.
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
    """Return the names of the full blocks of `token_ids`, in order; a partial last block has none. O(tokens).

    token_ids: integers (n,), as a list, an array or anything with a buffer; may be shorter than a block.
    block_size: tokens a block, 1 to 4096. extra_keys: those of the whole request, see `blockyard.keys`.
    algorithm: "sha256_cbor" (32 bytes), or "xxh3_128" (16 bytes): a little faster, since encoding costs most, but not
    collision-resistant, so only for names that no untrusted tenant's prompts go into.
    parent: the name of the block before these tokens, to continue a chain; None at the beginning of a prompt.
    first_block: with a parent, the number in the prompt of the first block of `token_ids`. Only spans need it.
    root_text: the text whose digest the chain begins with. All who compare names must use the same.

    Raises `InvalidArgument`, or `MissingExtra` where cbor2 or xxhash is not installed.

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
    """Return what stands before a prompt's first block: the digest of a text. O(1).

    Raises `InvalidArgument` or `MissingExtra`, as `block_names` does.
    """
    return _digest_function(algorithm)(require_str("root_text", root_text))


def name_as_u64(name: object) -> int:
    """The low 64 bits of a name, as vLLM's KV events carry it. O(1). Raises `InvalidArgument` for what is no name."""
    if not isinstance(name, bytes) or len(name) not in NAME_SIZES.values():
        raise InvalidArgument(f"name is {name!r}; it must be 16 or 32 bytes")
    return int.from_bytes(name[-8:], "big")


def _digest_function(algorithm: object) -> Callable[[object], bytes]:
    """From an object to the digest of its CBOR."""
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
    """Return where these blocks stand in the prompt, as far as it must be known."""
    first = require_int("first_block", first_block, 0, MAX_POSITION)
    if parent is None and first > 0:
        raise InvalidArgument(f"first_block is {first}; without a parent it must be 0")
    if parent is not None and first == 0 and spans_of(keys):
        raise InvalidArgument(
            "first_block is 0; with a parent and spans it must be 1 or more: where these blocks stand"
        )
    return first


def _wire_keys(keys: tuple[ExtraKey, ...], spans: tuple[BlockSpan, ...], is_first: bool) -> list[Any] | None:
    """Return the extra keys of one block as they are encoded, None for none."""
    wire: list[Any] = [("lora", key.name, key.path) for key in keys if isinstance(key, LoRA)]
    wire += [("mm", content, start) for _, content, start, _ in spans]
    if is_first:
        wire += [("cache_salt", key.value) for key in keys if isinstance(key, CacheSalt)]
    return wire or None


def _token_list(token_ids: object) -> list[int]:
    """`token_ids` as plain integers, checked like the manager's."""
    if isinstance(token_ids, (str, bytes, bytearray)) or token_ids is None:
        raise InvalidArgument(f"token_ids is {type(token_ids).__name__}; a run of integers is needed")
    try:
        array = np.asarray(token_ids)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidArgument(f"token_ids is {type(token_ids).__name__}: {error}") from error
    if array.ndim != 1:
        raise InvalidArgument(f"token_ids has shape {array.shape}; one dimension is needed")
    if array.size == 0:
        return []
    holds_bool = isinstance(token_ids, (list, tuple)) and any(isinstance(token, bool) for token in token_ids)
    if array.dtype.kind not in "iu" or holds_bool:
        raise InvalidArgument(f"token_ids has items that are no integers ({array.dtype}); integers are needed")
    if array.min() < 0 or array.max() > MAX_TOKEN:
        index = int(np.flatnonzero((array < 0) | (array > MAX_TOKEN))[0])
        raise InvalidArgument(f"token_ids[{index}] is {array[index]}; a token is from 0 to {MAX_TOKEN}")
    tokens: list[int] = array.tolist()
    return tokens
