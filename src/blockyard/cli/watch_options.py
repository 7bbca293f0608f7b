"""The options of `blockyard watch`, apart from the work."""

from __future__ import annotations

import argparse
from typing import Any

_DESCRIPTION = """\
Open the page of a running server, which shows its blocks. It prints the page's address, and opens a browser
where there is one.
"""

_EPILOG = """\
examples:
  blockyard watch                                  a server on this machine: http://127.0.0.1:8000
  blockyard watch http://127.0.0.1:8001 --no-open

A server with an API key lets the page ask for it: it is never part of the address.
"""


def add_watch_options(commands: Any) -> None:
    """Add the parser of `watch` to argparse's `commands`."""
    parser = commands.add_parser(
        "watch",
        help="watch the blocks of a running server in a browser",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="default: http://127.0.0.1:8000"
    )
    parser.add_argument("--no-open", action="store_true", help="print the address, and open nothing")
