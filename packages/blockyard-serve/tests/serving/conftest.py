"""A server for the tests of a file, and the look at it after each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blockyard_testing.servers import Running, running_server, tiny_engine


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running_server(tiny_engine()) as running:
        yield running


@pytest.fixture
def nothing_leaks(served: Running) -> Iterator[None]:
    yield
    served.require_idle()
