"""What the user typed, to options; and what it is told when it typed something that no command has."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from .. import __version__
from .._build import build_name
from .commands import COMMANDS

_DESCRIPTION = "Blockyard: the paged KV-cache block manager as a library. This command shows it at work."
_OPTION = re.compile(r"--[a-z][a-z0-9-]*")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command. Exits with status 2, behind the command's own usage, for what it does not have."""
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
    """Exit with the command's usage and the option that was perhaps meant."""
    message = f"unrecognized arguments: {' '.join(unknown)}"
    near = _nearest(unknown, _OPTION.findall(command.format_usage()))
    command.error(f"{message}; did you mean {' '.join(near)}?" if near else message)


def _nearest(unknown: Iterable[str], known: list[str]) -> list[str]:
    """For each option typed, the known one that is most like it, if one is."""
    typed = [each.partition("=")[0] for each in unknown if each.startswith("--")]
    return [match for each in typed for match in difflib.get_close_matches(each, known, 1)]
