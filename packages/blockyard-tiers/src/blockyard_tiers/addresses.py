"""Addresses of servers: host and port."""

from __future__ import annotations

from blockyard.arguments import shown
from blockyard.errors import InvalidArgument

LAST_PORT = 2**16 - 1


def host_and_port(argument: str, text: object, start: str = "") -> tuple[str, int]:
    """Parse an address that begins with `start`, such as [::1]:7600. Raises `InvalidArgument`."""
    host, _, port = text[len(start) :].rpartition(":") if isinstance(text, str) and text.startswith(start) else [""] * 3
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) <= LAST_PORT:
        raise InvalidArgument(
            f"{argument} is {shown(text)}; it must be {start}host:port, with a port of 1 to {LAST_PORT}"
        )
    return host, int(port)
