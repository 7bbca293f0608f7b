"""This module has every command with its options and the place of its work, and reads what the user typed."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from .. import __version__
from .._build import build_name
from .curve_options import add_curve_options
from .demo_options import add_demo_options
from .generate_options import add_generate_options
from .plan_options import add_plan_options
from .replay_options import add_replay_options
from .serve_options import add_serve_options
from .watch import add_watch_options


@dataclass(frozen=True, slots=True)
class Command:
    """add_options: adds the parser to argparse's subparsers, without importing the work.
    module, function: where in this package the work is. extra: what `pip install 'blockyard[extra]'` brings it."""

    add_options: Callable[[Any], None]
    module: str
    function: str
    extra: str


COMMANDS = {
    "demo": Command(add_demo_options, "demo", "run_demo", "engine"),
    "replay": Command(add_replay_options, "replay", "run_replay", "lab"),
    "curve": Command(add_curve_options, "curve", "run_curve", "lab"),
    "plan": Command(add_plan_options, "plan", "run_plan", "lab"),
    "generate": Command(add_generate_options, "generate", "run_generate", "engine"),
    "serve": Command(add_serve_options, "serve", "run_serve", "serve"),
    "watch": Command(add_watch_options, "watch", "run_watch", "serve"),
}


_DESCRIPTION = "Blockyard: the paged KV-cache block manager as a library. This command shows it at work."
_OPTION = re.compile(r"--[a-z][a-z0-9-]*")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of a command. Exits with status 2, and its usage, for what the command does not have."""
    parser, commands = _parsers()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse(commands.choices[options.command], unknown)
    return options


def _parsers() -> tuple[argparse.ArgumentParser, Any]:
    parser = argparse.ArgumentParser(prog="blockyard", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"blockyard {__version__} ({build_name()})")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS.values():
        command.add_options(commands)
    return parser, commands


def _refuse(command: argparse.ArgumentParser, unknown: list[str]) -> NoReturn:
    """Exits and shows the command's usage and the option that was perhaps meant."""
    message = f"unrecognized arguments: {' '.join(unknown)}"
    near = _nearest(unknown, _OPTION.findall(command.format_usage()))
    command.error(f"{message}; did you mean {' '.join(near)}?" if near else message)


def _nearest(unknown: Iterable[str], known: list[str]) -> list[str]:
    """Returns, for each option typed, the known one that is most like it, if one is."""
    typed = [each.partition("=")[0] for each in unknown if each.startswith("--")]
    return [match for each in typed for match in difflib.get_close_matches(each, known, 1)]
