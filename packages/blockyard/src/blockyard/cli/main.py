"""Entry point of `blockyard`: runs a command and reports errors in one sentence."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from ..errors import BlockyardError, MissingExtra
from .command import EXTRAS, installed_commands
from .parsing import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 2 for an error the user can fix, 130 when interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows "?" and goes on
    try:
        options = parse(arguments)
        status = int(_function(options.command)(options))
        if sys.stdout is not None:  # it is None where the shell has closed it, with >&-
            sys.stdout.flush()  # here, where a full disk can still be reported
        return status
    except BlockyardError as error:
        print(f"blockyard: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        _close_output()
        return 0  # the reader has read enough, as in `| head -1`
    except OSError as error:
        print(f"blockyard: {error.strerror or error}{f': {error.filename}' * bool(error.filename)}", file=sys.stderr)
        _close_output()
        return 2
    except KeyboardInterrupt:
        print("blockyard: interrupted", file=sys.stderr)
        return 130


def _close_output() -> None:
    """Redirect stdout to devnull, so that the interpreter does not complain about unflushed output at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _function(name: str) -> Callable[[argparse.Namespace], int]:
    """Return the function of a command, imported on demand: most need extras that `--version` does not."""
    command = installed_commands()[name]
    try:
        module = importlib.import_module(command.module)
    except ImportError as error:
        if isinstance(error, MissingExtra):
            raise
        hint = f": pip install 'blockyard[{EXTRAS[name]}]'" if name in EXTRAS else ""
        raise MissingExtra(f"blockyard {name} needs {error.name}{hint}") from error
    function: Callable[[argparse.Namespace], int] = getattr(module, command.function)
    return function


if __name__ == "__main__":
    sys.exit(main())
