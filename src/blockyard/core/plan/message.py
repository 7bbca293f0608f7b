"""The byte form of a plan: what stands where.

A message is a header of 48 bytes and a body of 32-bit integers, all little-endian:

    magic (8 bytes)  version (4)  kind (4)  step (8)  words in the body (8)  digest of the one before (8)  digest (8)

    groups  max_num_seqs  sequences  tokens  unserved  swap_outs  swap_ins  copies
    block size, width, changed rows, block ids           of each group
    from, to, group                                      of each swap_out, swap_in and copy
    row                                                  of each sequence; then where it starts; then its new tokens
    place in the batch, status                           of each sequence that is not served
    token id                                             of each new token, -1 for one that is not known
    place in the batch, first, blocks, null blocks       of each row of a group that has changed, then the block ids

A row that has changed lists its block ids from `first` on; 0 says that all of it is new. A digest is the BLAKE2b of all
that stands before and behind it, so it covers the digest of the message before: it is that of the whole chain.
"""

import struct
from hashlib import blake2b
from typing import Final

from mypy_extensions import i64

from ...arguments import shown
from ...config import CacheConfig
from ...errors import InvalidArgument

MAGIC: Final = b"BLKYPLAN"
VERSION: Final = 1
SWAP: Final = 0
STEP: Final = 1
DIGEST_BYTES: Final = 8
HEADER: Final = struct.Struct("<8sIIqq8s8s")
HEADER_BYTES: Final = 48
DIGEST_AT: Final = 40
WORD_BYTES: Final = 4
NO_DIGEST: Final = bytes(DIGEST_BYTES)
#: Words of the body before the groups; of each group; of each move; of each changed row.
COUNTS: Final[i64] = 8
GROUP_WORDS: Final[i64] = 4
MOVE_WORDS: Final[i64] = 3
ROW_WORDS: Final[i64] = 4


def digest_of(message: bytes) -> bytes:
    """The digest of a message, whatever stands in its place. O(bytes)."""
    digest = blake2b(message[:DIGEST_AT], digest_size=DIGEST_BYTES)
    digest.update(memoryview(message)[HEADER_BYTES:])
    return digest.digest()


def sealed(kind: int, step: int, before: bytes, body: bytes) -> bytes:
    """A whole message."""
    num_words = len(body) // WORD_BYTES
    bare = HEADER.pack(MAGIC, VERSION, kind, step, num_words, before, NO_DIGEST) + body
    return HEADER.pack(MAGIC, VERSION, kind, step, num_words, before, digest_of(bare)) + body


class Header:
    """The header of a message, checked against its length and digest. Raises `InvalidArgument`."""

    def __init__(self, message: bytes) -> None:
        if len(message) < HEADER_BYTES or message[: len(MAGIC)] != MAGIC:
            raise InvalidArgument(f"data is {shown(message)} of {len(message)} bytes; a plan's message is needed")
        fields = HEADER.unpack(message[:HEADER_BYTES])
        self.kind = int(fields[2])
        self.step = int(fields[3])
        self.before = bytes(fields[5])
        self.digest = bytes(fields[6])
        self._require(int(fields[1]), int(fields[4]), message)

    def _require(self, version: int, num_words: int, message: bytes) -> None:
        if version != VERSION:
            raise InvalidArgument(f"data is a plan of version {version}; version {VERSION} is read here")
        if self.kind != SWAP and self.kind != STEP:
            raise InvalidArgument(f"data is a plan of kind {self.kind}; {SWAP} and {STEP} are known")
        if len(message) - HEADER_BYTES != num_words * WORD_BYTES:
            raise InvalidArgument(f"data has {len(message)} bytes; its header says {num_words} words behind the header")
        digest = digest_of(message)
        if digest != self.digest:
            raise InvalidArgument(
                f"data has digest {self.digest.hex()}, its bytes have {digest.hex()}: it was changed on its way"
            )


class Shape:
    """What all ranks must agree on: the sequences at once, and the block size and places of each group's table."""

    def __init__(self, config: object) -> None:
        if not isinstance(config, CacheConfig):
            raise InvalidArgument(f"config is {shown(config)}; it must be a CacheConfig")
        self.max_num_seqs = config.max_num_seqs
        self.num_blocks = config.num_blocks
        self.num_cpu_blocks = config.num_cpu_blocks
        self.block_sizes = [group.block_size for group in config.layer_groups]
        self.widths = [-(-config.max_model_len // size) for size in self.block_sizes]
