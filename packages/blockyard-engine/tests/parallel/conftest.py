"""Fixtures of the hand-over tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..support.handoff_pair import Pair


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.sender.close()
    made.receiver.close()
    made.check()
