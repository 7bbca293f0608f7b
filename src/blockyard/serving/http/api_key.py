"""The API key: where it comes from, and a comparison that takes as long for a near miss as for a far one."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from starlette.requests import Request

from ...errors import InvalidArgument
from ..errors import ApiError

_MAX_KEY_BYTES = 4096


def read_key_file(path: str | Path) -> str:
    """The key in a file, without the white space around it. Raises `InvalidArgument` if there is none."""
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_KEY_BYTES + 1)
        return require_key(f"the key in {path}", content.decode())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the key file {path} cannot be read: {error}") from None


def require_key(name: str, key: str) -> str:
    """A key that can be sent in a header. Raises `InvalidArgument`, which does not show it."""
    stripped = key.strip()
    if not stripped or len(stripped) > _MAX_KEY_BYTES or not (stripped.isascii() and stripped.isprintable()):
        raise InvalidArgument(f"{name} must be 1 to {_MAX_KEY_BYTES} printable ASCII characters")
    return stripped


class KeyGuard:
    """Lets requests with the key pass. Only a digest of the key is kept, and it is written nowhere."""

    def __init__(self, key: str | None) -> None:
        self._digest = None if key is None else _digest(require_key("the API key", key))

    def __call__(self, request: Request) -> None:
        """Raise `ApiError` (401) for a request without the key; nothing if the server has none."""
        if self._digest is None:
            return
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(_digest(key.strip()), self._digest):
            raise ApiError(401, "the API key is missing or wrong", "authentication_error", code="invalid_api_key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
