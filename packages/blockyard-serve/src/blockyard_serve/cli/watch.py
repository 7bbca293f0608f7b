"""`blockyard watch` finds the page of a running server, and opens it; its options stand here too."""

from __future__ import annotations

import argparse
import threading
import urllib.error
import urllib.request
import webbrowser
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from blockyard.arguments import shown
from blockyard.cli import add_command
from blockyard.errors import InvalidArgument

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
    parser = add_command(commands, "watch", "watch the blocks of a running server in a browser", _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="default: http://127.0.0.1:8000"
    )
    parser.add_argument("--no-open", action="store_true", help="print the address, and open nothing")


#: For each of its pieces, and for all of an answer.
_SECONDS = 10
_SECONDS_IN_ALL = 20
_MAX_BYTES = 2**16
_MAX_WHY = 200
#: What only this page says of itself.
_MARK = b'<meta name="application-name" content="Blockyard">'


def run_watch(options: argparse.Namespace) -> int:
    """Print the page's address, and open it unless told not to."""
    address = page_address(options.url)
    print(address, flush=True)
    if not options.no_open:
        webbrowser.open(address)
    return 0


def page_address(url: str) -> str:
    """Finds the page of a server under /ui/, or at the address itself, by two requests at most.

    Raises `InvalidArgument`, in one sentence, for what is no address, and where there is no such page.
    """
    _require_address(url)
    bare = url.rstrip("/")
    bare = bare.removesuffix("/v1") if urlsplit(bare).path == "/v1" else bare
    why = "it has no page; is it a blockyard server, started without --ui off?"
    for address in (f"{bare}/ui/", f"{bare}/"):
        try:
            if _has_mark(address):
                return address
        except urllib.error.HTTPError:
            continue
        except (OSError, HTTPException, ValueError) as error:
            why = _printable(str(getattr(error, "reason", error)))
            break
    raise InvalidArgument(f"url is {shown(url)}; {why}")


def _require_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_one = is_one and not (parts.username or parts.query or parts.fragment) and url.isprintable()
        is_one = is_one and parts.port != 0  # which raises where it is above 65535
    except ValueError:
        is_one = False
    if not is_one:
        raise InvalidArgument(f"url is {shown(url)}; it must be an address like http://127.0.0.1:8000, without a key")


def _has_mark(address: str) -> bool:
    """Says whether it answers with the page. A socket's timeout begins anew with each byte, so another thread asks."""
    answers: list[bytes] = []
    errors: list[Exception] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(address, timeout=_SECONDS) as answer:
                answers.append(answer.read(_MAX_BYTES))
        except Exception as error:
            errors.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_SECONDS_IN_ALL)
    if errors:
        raise errors[0]
    if not answers:
        raise OSError(f"it has not answered within {_SECONDS_IN_ALL} seconds")
    return _MARK in answers[0]


def _printable(text: str) -> str:
    """Returns a server's own words without what could be escape sequences for a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text[:_MAX_WHY])
