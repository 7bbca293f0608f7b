"""A pytest plugin in the place of vLLM's own tests/conftest.py, which imports all of its model zoo: the fixtures that
the tests of its scheduler and block manager ask for."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """The marks of vLLM's tests."""
    for mark in ("cpu_test", "skip_global_cleanup", "slow_test", "optional", "distributed", "core_model"):
        config.addinivalue_line("markers", f"{mark}: of vLLM's tests")


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """`caplog` that sees vLLM's loggers."""
    logger = logging.getLogger("vllm")
    logger.propagate = True
    yield caplog
    logger.propagate = False
