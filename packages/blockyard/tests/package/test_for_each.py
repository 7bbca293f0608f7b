"""A test that looks at many things names each that fails."""

from __future__ import annotations

import pytest

from blockyard_testing.each import for_each


def test_each_file_that_breaks_a_rule_is_named() -> None:
    def check(number: int) -> None:
        assert number % 2 == 0, "odd"

    for_each([2, 4], str)(check)()
    with pytest.raises(AssertionError, match=r"^3: odd\n.*\n\n5: odd"):
        for_each([2, 3, 4, 5], str)(check)()
    with pytest.raises(AssertionError):
        for_each([], str)(check)()
