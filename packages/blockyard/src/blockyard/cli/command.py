"""Subcommands of `blockyard`, registered by the installed packages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

#: The extra that provides each command, in the order of `blockyard --help`.
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

    Attributes:
        add_options: adds the command's parser to argparse's subparsers. It imports nothing heavy.
        module: module of the implementation, imported when the command runs.
        function: name of the function in it.
    """

    add_options: Callable[[Any], None]
    module: str
    function: str


@functools.cache
def installed_commands() -> dict[str, Command]:
    """Return the commands of all installed packages by name.

    A package registers its commands as a dict, by an entry point of the group `blockyard.commands`.
    """
    found: dict[str, Command] = {}
    for point in entry_points(group="blockyard.commands"):
        found.update(point.load())
    order = list(EXTRAS)
    return dict(sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
