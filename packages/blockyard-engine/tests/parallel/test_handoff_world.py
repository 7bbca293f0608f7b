"""A short run of `python -m tests.handoff`, and proof that it detects faults."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import InvariantError
from blockyard_engine.parallel import HandoffReceiver, HandoffSender
from blockyard_testing import seeds

from .. import handoff


def test_no_block_leaks_and_no_late_read_is_served() -> None:
    counts = handoff.run(1300, seeds.run_seed()) + handoff.run(200, WITH_STATES)
    seeds.lines.append(f"hand-overs: {dict(counts)}")
    wanted = ("finished", "crashes", "late reads refused", "of which wrong bytes", "offers expired", "aborted")
    for kind in (*wanted, "finished with a state", "states kept", "kept states gone"):
        assert counts[kind] > 0


#: Of a run whose first world has states.
WITH_STATES = 4


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


def anothers(self: HandoffSender, offer_id: Any, now: float) -> int:
    self.require_held(offer_id, now)
    return (int(self.cache.states.slot(self._held[offer_id.number].seq)) + 1) % 4


def kept_all_the_same(self: HandoffReceiver, transfer: Any) -> None:
    del self, transfer


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (HandoffSender, "require_held", served),
        (HandoffSender, "offer", kept_nothing),
        (HandoffReceiver, "abort", forgotten),
        (HandoffSender, "state_slot", anothers),
        (HandoffReceiver, "drop_checkpoint", kept_all_the_same),
    ],
    ids=["late reads served", "blocks not kept", "an abort that frees nothing", "states of others", "no state kept"],
)
def test_the_random_world_detects_injected_faults(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Any
) -> None:
    monkeypatch.setattr(owner, name, broken)
    if broken is kept_nothing:
        monkeypatch.setattr(HandoffSender, "require_held", served)
    with pytest.raises((AssertionError, InvariantError, KeyError)):
        handoff.run(2000, WITH_STATES if name in ("state_slot", "drop_checkpoint") else 11)
