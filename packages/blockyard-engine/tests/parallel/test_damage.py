"""Damaged messages between processes are refused, and a link that receives one releases what it holds."""

from __future__ import annotations

import pytest

from blockyard import InvalidArgument
from blockyard_testing.seeds import run_seed

from .. import damage
from ..support.handoff_pair import Pair


def test_damaged_messages_are_refused() -> None:
    counts = damage.run(6000, run_seed())
    assert len(counts) == len(damage.KINDS) * len(damage.DAMAGES)


def test_every_bit_of_an_offer_counts() -> None:
    """A flipped bit in the tokens used to be accepted; another prompt then hit these keys and values."""
    pair = Pair()
    data = pair.offer().to_bytes()
    for place in range(8 * len(data)):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        with pytest.raises(damage.REFUSED):
            damage.Offer.from_bytes(changed)
    with pytest.raises(InvalidArgument, match="it was damaged"):
        damage.Offer.from_bytes(data[:-4] + bytes(4))
    assert damage.Offer.from_bytes(data).token_ids.tolist() == [*range(37), 7]
