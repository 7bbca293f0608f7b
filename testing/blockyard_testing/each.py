"""One test that looks at many things: where a look takes a millisecond, a test for each costs more than the looks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

T = TypeVar("T")


def for_each(items: Collection[T], name: Callable[[T], str]) -> Callable[[Callable[[T], None]], Callable[[], None]]:
    """Decorator: a check of one item as a test of all, which says which of them fail, and how."""

    def decorate(check: Callable[[T], None]) -> Callable[[], None]:
        def test() -> None:
            assert items
            failures = []
            for item in items:
                try:
                    check(item)
                except AssertionError as error:
                    failures.append(f"{name(item)}: {error}")
            assert not failures, "\n\n".join(failures)

        test.__name__, test.__qualname__, test.__doc__ = check.__name__, check.__qualname__, check.__doc__
        return test

    return decorate
