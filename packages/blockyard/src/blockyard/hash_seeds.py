"""Seed of an index's hash function, random unless the caller sets it."""

from __future__ import annotations

import secrets

from .arguments import require_int

MAX_HASH_SEED = 2**62 - 1


def hash_seed_or_drawn(hash_seed: object) -> int:
    """Return `hash_seed`, or a random seed if it is None, so that clients cannot craft prompts with colliding hashes.

    Raises:
        InvalidArgument: `hash_seed` is not an integer from 0 to 2**62 - 1.
    """
    if hash_seed is None:
        return secrets.randbits(62)
    return require_int("hash_seed", hash_seed, 0, MAX_HASH_SEED)
