"""A subcommand of `blockyard`, and where the packages that are installed bring theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

#: The extra that brings each command, in the order in which `blockyard --help` lists them.
EXTRAS = {
    "demo": "engine",
    "replay": "lab",
    "curve": "lab",
    "plan": "lab",
    "fleet": "lab",
    "fleet serve": "fleet",
    "generate": "engine",
    "serve": "serve",
    "tier": "tiers",
    "watch": "serve",
}


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand.

    add_options: adds its parser to argparse's subparsers, without importing the work.
    module, function: where the work is, imported when the command runs.
    """

    add_options: Callable[[Any], None]
    module: str
    function: str


@functools.cache
def installed_commands() -> dict[str, Command]:
    """Return the commands of all installed packages by name.

    A package brings its own by an entry point of the group `blockyard.commands`, whose value is a dict of them.
    """
    found: dict[str, Command] = {}
    for point in entry_points(group="blockyard.commands"):
        found.update(point.load())
    order = list(EXTRAS)
    return dict(sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
