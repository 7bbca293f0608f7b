"""Parsing of the command line with the options of the installed commands."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .. import __version__
from .._build import build_name
from ..errors import MissingExtra
from .command import EXTRAS, installed_commands

_DESCRIPTION = "Blockyard: the paged KV-cache block manager as a library. This command shows it at work."
_OPTION = re.compile(r"--[a-z][a-z0-9-]*")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command. Exits with status 2 and the usage if an option is unknown."""
    parser, commands = _parsers()
    given = list(sys.argv[1:] if arguments is None else arguments)
    known = {*EXTRAS, *installed_commands()}
    words = [" ".join(given[:2]), *given[2:]] if " ".join(given[:2]) in known else given
    if meant := _near_command(given):
        parser.error(f"{' '.join(given[:2])!r} is not a command; did you mean {meant}?")
    if words and words[0] in EXTRAS and words[0] not in installed_commands():
        raise MissingExtra(f"blockyard {words[0]} is not installed: pip install 'blockyard[{EXTRAS[words[0]]}]'")
    if words and not words[0].startswith("-") and words[0] not in known:
        parser.error(f"{words[0]!r} is not a command; commands: {', '.join(EXTRAS)}")
    options, unknown = parser.parse_known_args(words)
    if unknown:
        _refuse(commands.choices[options.command], unknown)
    return options


def _near_command(given: list[str]) -> str | None:
    """Return the command of two words whose second word `given` misspells, or None; files may have any name."""
    seconds = [name.split()[1] for name in EXTRAS if " " in name and given and name.split()[0] == given[0]]
    near = difflib.get_close_matches(given[1], seconds, 1, 0.8) if given[1:] and given[1] not in seconds else []
    is_path = bool(given[1:]) and (os.sep in given[1] or os.path.exists(given[1]))
    return f"{given[0]} {near[0]}" if near and not is_path else None


def _parsers() -> tuple[argparse.ArgumentParser, Any]:
    parser = argparse.ArgumentParser(prog="blockyard", description=_DESCRIPTION, epilog=_not_installed())
    parser.add_argument("--version", action="version", version=f"blockyard {__version__} ({build_name()})")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in installed_commands().values():
        command.add_options(commands)
    return parser, commands


def _not_installed() -> str | None:
    """Return a sentence with the commands that are not installed and the extras that provide them, or None."""
    by_extra: dict[str, list[str]] = {}
    for name, extra in EXTRAS.items():
        if name not in installed_commands():
            by_extra.setdefault(extra, []).append(name)
    named = [f"{', '.join(names)} with 'blockyard[{extra}]'" for extra, names in by_extra.items()]
    return f"Not installed: {'; '.join(named)}." if named else None


def _refuse(command: argparse.ArgumentParser, unknown: list[str]) -> NoReturn:
    """Exit with the command's usage and the option that was probably meant."""
    message = f"unrecognized arguments: {' '.join(unknown)}"
    typed, known = [each.partition("=")[0] for each in unknown], _OPTION.findall(command.format_usage())
    near = [match for each in typed if each.startswith("--") for match in difflib.get_close_matches(each, known, 1)]
    command.error(f"{message}; did you mean {' '.join(near)}?" if near else message)
