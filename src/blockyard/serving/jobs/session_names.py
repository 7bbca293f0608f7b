"""What the engine calls a client's session, so that no tenant can name another's."""

from __future__ import annotations

import hashlib


def session_name(session_id: str, cache_salt: str | None) -> str:
    """A name of 64 characters, of the id together with the salt that the session's requests have. O(characters).

    A BLAKE2b digest keyed by a digest of the salt: without the salt no name can be found under it, and neither id
    nor salt can be read from the name, which reports and pictures of the cache may show.
    """
    key = b"" if cache_salt is None else hashlib.blake2b(_bytes(cache_salt), digest_size=32).digest()
    return hashlib.blake2b(_bytes(session_id), digest_size=32, key=key, person=b"session").hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
