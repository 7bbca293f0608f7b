"""Names contents by what they are: a chain of hashes over keys and tokens is the same at every publisher.

Consumers that follow several publishers look a parent up by its name alone (Dynamo, llm-d and AIBrix, whatever worker
sent it), so equal content must have one name at all of them. The hash is that of the prefix index under keys that
everybody knows: it tells apart what clients happen to send, and not what one of them makes up on purpose. Our own
`Mirror` compares tokens; for others, two contents of one name may cost time.
"""

from hashlib import blake2b

from librt.vecs import vec
from mypy_extensions import i64

from ...core.index.hashing import hash_rows
from ..tagged_keys import PlainKey, tagged
from .content_rows import ContentRows

NAME_BYTES = 8
SIGNED_BITS = 2


def _hashed(text: bytes) -> int:
    """Returns 62 bits."""
    return int.from_bytes(blake2b(text, digest_size=NAME_BYTES).digest(), "big") >> SIGNED_BITS


class ContentNames:
    """Names the rows of a table, each from that of the row before it."""

    def __init__(self, rows: ContentRows) -> None:
        self._rows = rows
        self._keys = vec[i64](
            [_hashed(b"blockyard, token key %d" % number) for number in range(2 * int(rows.num_words))]
        )

    def name_content(self, row: i64) -> None:
        """Names a content; the row before it has a name already. O(tokens)."""
        rows = self._rows
        hash_rows(
            rows.words, 0, self._keys, rows.published_name[i64(rows.parent[row])], rows.published_name, row, row + 1
        )

    def name_root(self, row: i64, request: tuple[PlainKey, ...], spans: tuple[PlainKey, ...]) -> None:
        """Names a root by a request's keys, or by spans and the content before them. O(keys)."""
        before = int(self._rows.published_name[i64(self._rows.parent[row])])
        # The text of nested lists of text and numbers: the same everywhere, and made of any text.
        self._rows.published_name[row] = _hashed(ascii([before, tagged(request, spans)]).encode())
