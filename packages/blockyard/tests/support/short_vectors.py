"""Blocks of sixteen tokens that all have one hash, for an attacker who knows the seed: lattice reduction.

With the second token of each pair left as it is, the hash's sum is linear in the eight first ones: a change d of them
leaves it alone where sum(d[i] * (key + second token)[i]) is a multiple of 2**62. Such d are a lattice of dimension 8
and volume 2**62, so it has eight independent vectors of about eight bits each, and their sums are more than anybody
can count.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction

from .hash_chains import HASH_SPAN

Vector = list[int]
NUM_PAIRS = 8
MAX_TOKEN = 2**31 - 1


def changes_without_trace(block: Sequence[int], keys: Sequence[int]) -> list[Vector]:
    """Short independent changes of the first tokens of the pairs that leave the sum as it is."""
    weights = [keys[2 * pair + 1] + block[2 * pair + 1] for pair in range(NUM_PAIRS)]
    odd = next(pair for pair in range(NUM_PAIRS) if weights[pair] % 2)
    inverse = pow(weights[odd], -1, HASH_SPAN)
    basis = []
    for pair in range(NUM_PAIRS):
        vector = [0] * NUM_PAIRS
        vector[pair] = 1
        if pair == odd:
            vector[odd] = HASH_SPAN
        else:
            vector[odd] = -weights[pair] * inverse % HASH_SPAN
        basis.append(vector)
    return reduced(basis)


def flood(block: Sequence[int], keys: Sequence[int], count: int, draw: random.Random) -> list[list[int]]:
    """`count` different blocks with the hash of `block`."""
    vectors = changes_without_trace(block, keys)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        times = [draw.randint(-9, 9) for _ in vectors]
        change = [sum(t * vector[i] for t, vector in zip(times, vectors, strict=True)) for i in range(NUM_PAIRS)]
        tokens = list(block)
        for pair in range(NUM_PAIRS):
            tokens[2 * pair] += change[pair]
        if all(0 <= token <= MAX_TOKEN for token in tokens):
            found[tuple(tokens)] = None
    return [list(tokens) for tokens in found]


def dot(u: Sequence[Fraction | int], v: Sequence[Fraction | int]) -> Fraction:
    return sum((Fraction(a) * b for a, b in zip(u, v, strict=True)), Fraction(0))


def reduced(basis: list[Vector]) -> list[Vector]:
    """Lenstra, Lenstra and Lovász' reduction, as it stands in books; slow and exact."""
    basis, k = [list(vector) for vector in basis], 1
    stars, factors = orthogonal(basis)
    while k < len(basis):
        for j in range(k - 1, -1, -1):
            times = round(factors[k][j])
            if times:
                basis[k] = [a - times * b for a, b in zip(basis[k], basis[j], strict=True)]
                stars, factors = orthogonal(basis)
        if dot(stars[k], stars[k]) >= (Fraction(3, 4) - factors[k][k - 1] ** 2) * dot(stars[k - 1], stars[k - 1]):
            k += 1
        else:
            basis[k - 1], basis[k] = basis[k], basis[k - 1]
            stars, factors = orthogonal(basis)
            k = max(k - 1, 1)
    return basis


def orthogonal(basis: list[Vector]) -> tuple[list[list[Fraction]], list[list[Fraction]]]:
    """Gram and Schmidt."""
    stars: list[list[Fraction]] = []
    factors = [[Fraction(0)] * len(basis) for _ in basis]
    for i, vector in enumerate(basis):
        star = [Fraction(a) for a in vector]
        for j, other in enumerate(stars):
            factors[i][j] = dot(vector, other) / dot(other, other)
            star = [a - factors[i][j] * b for a, b in zip(star, other, strict=True)]
        stars.append(star)
    return stars, factors
