"""Public calls with good arguments, for sweeps that interrupt them, let them fail, or make an argument hostile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A public call by its name, as `ConcurrentCall` says it; of what on a site; with good arguments, by name."""

    owner: str
    name: str
    arguments: Callable[[Any], Arguments] = lambda _: {}

    def of(self, site: Any) -> Callable[..., Any]:
        method: Callable[..., Any] = attrgetter(f"{self.owner}.{self.name}")(site)
        return method

    def run(self, site: Any, arguments: Arguments) -> Any:
        return self.of(site)(**arguments)

    def make(self, site: Any) -> Callable[[], Any]:
        """What is nothing but the call: its arguments are made already."""
        method, arguments = self.of(site), self.arguments(site)
        return lambda: method(**arguments)
