"""A small part of `python -m tests.handoff`, and proof that it would see what it looks for."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import InvariantError
from blockyard.parallel import HandoffReceiver, HandoffSender

from .. import handoff
from ..support import seeds


def test_no_block_leaks_and_no_late_read_is_served() -> None:
    counts = handoff.run(1500, seeds.run_seed())
    seeds.lines.append(f"hand-overs: {dict(counts)}")
    for kind in ("finished", "crashes", "late reads refused", "of which wrong bytes", "offers expired", "aborted"):
        assert counts[kind] > 0


def served(self: HandoffSender, offer_id: Any, now: float) -> None:
    self.expire(now)


def kept_nothing(self: HandoffSender, seq: int, now: float, extra_keys: Any = ()) -> Any:
    self._last_number += 1
    return self._describe(seq, extra_keys)


def forgotten(self: HandoffReceiver, transfer: Any) -> bool:
    if self._live.get(transfer.number) is not transfer:
        return False
    self._forget(transfer.number, transfer.offer.id)
    return True


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (HandoffSender, "require_held", served),
        (HandoffSender, "offer", kept_nothing),
        (HandoffReceiver, "abort", forgotten),
    ],
    ids=["late reads served", "blocks not kept", "an abort that frees nothing"],
)
def test_the_world_sees_what_is_broken(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Any) -> None:
    monkeypatch.setattr(owner, name, broken)
    if broken is kept_nothing:
        monkeypatch.setattr(HandoffSender, "require_held", served)
    with pytest.raises((AssertionError, InvariantError)):
        handoff.run(2000, 11)
