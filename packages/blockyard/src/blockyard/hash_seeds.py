"""The seed of an index's hash function is drawn where the caller gives none."""

from __future__ import annotations

import secrets

from .arguments import require_int

MAX_HASH_SEED = 2**62 - 1


def hash_seed_or_drawn(hash_seed: object) -> int:
    """`hash_seed`, or for None one that cannot be guessed, so that no client can write prompts whose hashes collide.

    Raises `InvalidArgument` for what is no integer from 0 to 2**62 - 1.
    """
    if hash_seed is None:
        return secrets.randbits(62)
    return require_int("hash_seed", hash_seed, 0, MAX_HASH_SEED)
