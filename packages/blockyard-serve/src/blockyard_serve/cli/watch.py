"""The command `blockyard watch`: find the page of a running server and open it."""

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
Open the page of a running server, which shows its blocks: print its address and open it in a browser.
"""

_EPILOG = """\
examples:
  blockyard watch                                  a server on this machine: http://127.0.0.1:8000
  blockyard watch http://127.0.0.1:8001 --no-open

If the server has an API key, the page asks for it; the address never contains it.
"""


def add_watch_options(commands: Any) -> None:
    """Add the parser of `watch` to argparse's `commands`."""
    parser = add_command(commands, "watch", "watch the blocks of a running server in a browser", _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="default: http://127.0.0.1:8000"
    )
    parser.add_argument("--no-open", action="store_true", help="only print the address")


#: Timeouts of one read and of the whole response.
_SECONDS = 10
_TOTAL_SECONDS = 20
_MAX_BYTES = 2**16
_MAX_WHY = 200
#: Part of the page that identifies it.
_MARK = b'<meta name="application-name" content="Blockyard">'


def run_watch(options: argparse.Namespace) -> int:
    """Print the page's address, and open it unless `--no-open` is given."""
    address = page_address(options.url)
    print(address, flush=True)
    if not options.no_open:
        webbrowser.open(address)
    return 0


def page_address(url: str) -> str:
    """Return the address of a server's page, at /ui/ or at the URL itself. Sends at most two requests.

    Raises `InvalidArgument` if `url` is not a URL, or there is no page.
    """
    _require_address(url)
    bare = url.rstrip("/")
    bare = bare.removesuffix("/v1") if urlsplit(bare).path == "/v1" else bare
    why = "there is no page; check that it is a blockyard server without --ui off"
    for address in (f"{bare}/ui/", f"{bare}/"):
        try:
            if _has_mark(address):
                return address
        except urllib.error.HTTPError:
            continue
        except (OSError, HTTPException, ValueError) as error:
            # The text is the server's: remove what could be escape sequences of a terminal.
            reason = str(getattr(error, "reason", error))[:_MAX_WHY]
            why = "".join(each if each.isprintable() else "?" for each in reason)
            if isinstance(getattr(error, "reason", error), ConnectionRefusedError):
                why = "no server listens there; start one with `blockyard serve`, or name the URL of yours"
            break
    raise InvalidArgument(f"url is {shown(url)}; {why}")


def _require_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_one = is_one and not (parts.username or parts.query or parts.fragment) and url.isprintable()
        is_one = is_one and parts.port != 0  # raises if it is above 65535
    except ValueError:
        is_one = False
    if not is_one:
        raise InvalidArgument(f"url is {shown(url)}; it must be a URL such as http://127.0.0.1:8000, without a key")


def _has_mark(address: str) -> bool:
    """Return whether the page is at `address`. Uses a thread, because socket timeouts restart with every byte."""
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
    asking.join(_TOTAL_SECONDS)
    if errors:
        raise errors[0]
    if not answers:
        raise OSError(f"it did not answer within {_TOTAL_SECONDS} seconds")
    return _MARK in answers[0]
