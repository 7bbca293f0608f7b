"""`blockyard` runs a command, and says in a sentence what is wrong."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from .. import __version__
from .._build import build_name
from ..errors import BlockyardError, MissingExtra
from .engine_options import add_demo_options, add_generate_options
from .lab_options import add_curve_options, add_fleet_options, add_plan_options, add_replay_options
from .serve_options import add_fleet_serve_options, add_serve_options
from .tier import add_tier_options
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
    "fleet": Command(add_fleet_options, "fleet", "run_fleet", "lab"),
    "fleet serve": Command(add_fleet_serve_options, "fleet_serve", "run_fleet_serve", "fleet,serve"),
    "generate": Command(add_generate_options, "generate", "run_generate", "engine"),
    "serve": Command(add_serve_options, "serve", "run_serve", "serve"),
    "tier": Command(add_tier_options, "tier", "run_tier", "tiers"),
    "watch": Command(add_watch_options, "watch", "run_watch", "serve"),
}


_DESCRIPTION = "Blockyard: the paged KV-cache block manager as a library. This command shows it at work."
_OPTION = re.compile(r"--[a-z][a-z0-9-]*")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of a command. Exits with status 2, and its usage, for what the command does not have."""
    parser, commands = _parsers()
    given = list(sys.argv[1:] if arguments is None else arguments)
    words = [" ".join(given[:2]), *given[2:]] if " ".join(given[:2]) in COMMANDS else given
    options, unknown = parser.parse_known_args(words)
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 2 for what the user can fix, 130 when interrupted."""
    options = parse(arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows "?" and goes on
    try:
        status = int(_function(COMMANDS[options.command])(options))
        if sys.stdout is not None:  # it is None where the shell has closed it, with >&-
            sys.stdout.flush()  # here, where a full disk can still be told
        return status
    except BlockyardError as error:
        print(f"blockyard: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        _close_output()
        return 0  # the reader has what it wanted, as of `| head -1`
    except OSError as error:
        print(f"blockyard: {error.strerror or error}{f': {error.filename}' * bool(error.filename)}", file=sys.stderr)
        _close_output()
        return 2
    except KeyboardInterrupt:
        print("blockyard: interrupted", file=sys.stderr)
        return 130


def _close_output() -> None:
    """Sends what is left in the buffer nowhere, so that the interpreter does not complain of it at its end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _function(command: Command) -> Callable[[argparse.Namespace], int]:
    """Returns the function behind a command, imported only now: most need an extra, and --version should not."""
    try:
        module = importlib.import_module(f".{command.module}", __package__)
    except ImportError as error:
        if isinstance(error, MissingExtra):
            raise
        raise MissingExtra(
            f"blockyard {command.module.replace('_', ' ')} needs {error.name}: pip install 'blockyard[{command.extra}]'"
        ) from error
    function: Callable[[argparse.Namespace], int] = getattr(module, command.function)
    return function


if __name__ == "__main__":
    sys.exit(main())
