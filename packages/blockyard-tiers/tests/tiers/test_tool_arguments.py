"""Arguments of wrong types for the calls of a tier that tools make: refused, and nothing has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blockyard import InvalidArgument
from blockyard_tiers import FileTier


@pytest.mark.parametrize("name", ["text", b"short", None, 3])
def test_names_of_wrong_types_are_refused(tmp_path: Path, name: Any) -> None:
    tier = FileTier(tmp_path, 1 << 20)
    for call in (
        lambda: tier.get(name),
        lambda: tier.put(name, b"data"),
        lambda: tier.remove([name]),
        lambda: tier.remove_bad([name]),
    ):
        with pytest.raises(InvalidArgument, match="it must be 16 bytes"):
            call()
    assert list(tier.names()) == []
    assert tier.close()


@pytest.mark.parametrize("value", ["text", -1, 0.5, [b"data"]])
def test_data_and_lengths_of_wrong_types_are_refused(tmp_path: Path, value: Any) -> None:
    tier = FileTier(tmp_path, 1 << 20)
    with pytest.raises(InvalidArgument, match="num_bytes is"):
        tier.get(bytes(16), value)
    with pytest.raises(InvalidArgument, match="data is"):
        tier.put(bytes(16), value)
    assert list(tier.names()) == []
    assert tier.close()
