"""The small model that most tests of the engine run: one for each file, because some of them change it."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard_testing.tiny_models import tiny_model


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama-gqa")
