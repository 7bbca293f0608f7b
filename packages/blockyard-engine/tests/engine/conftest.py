"""The small model of most engine tests: one per file, because some tests change it."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard_testing.tiny_models import tiny_model


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama-gqa")
