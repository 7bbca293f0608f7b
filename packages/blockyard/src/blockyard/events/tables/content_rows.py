"""Contents and roots as rows of a forest, with their reachability and names.

Consumers that follow several publishers find a parent only by its name, whichever worker sent it (Dynamo, llm-d and
AIBrix). So equal contents need the same name at all publishers: a hash of keys and tokens with public hash keys. It
distinguishes ordinary contents, but not ones crafted to collide. `Mirror` compares tokens, and ignores a name that two
contents have; for other consumers such a name may cost time. Ids of contents come from a counter, so 32 neighbours
share a page.
"""

from hashlib import blake2b
from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...core.arrays import grown_i32, grown_i64, zeros_i32, zeros_i64
from ...core.index.hashing import hash_rows
from ...core.tokens import words_per_block
from ..wire import PlainKey, tag_keys
from .holdings import HoldingTable

PAGE_BITS: Final = 5
IDS_A_PAGE: Final[i64] = 32
LAST_OF_PAGE: Final[i64] = 31
FEWEST_PAGES: Final = 16
#: The holder of all pages in a `HoldingTable`. Page 0 is none.
PAGES: Final[i64] = 0
NO_PAGE: Final[i64] = -1


class IdPages:
    """Rows by id, in pages of 32 ids that are found by hash. A page exists while one of its ids has a row.

    Memory: 5 bytes per id if all ids of a page have rows, up to 200 if only one has. There is room for `num_ids`
    consecutive ids from the start.
    """

    def __init__(self, num_ids: int) -> None:
        num_pages = FEWEST_PAGES + num_ids // int(IDS_A_PAGE)
        self._pages = HoldingTable(0)
        self._rows = zeros_i32(num_pages * int(IDS_A_PAGE))
        #: Number of rows of each page; for a free page, the next free one.
        self._used = zeros_i32(num_pages)
        self._next_page: i64 = 1
        self._free: i64 = 0
        #: Number and page of the last lookup.
        self._last_number: i64 = NO_PAGE
        self._last_page: i64 = 0

    def _page_of(self, number: i64) -> i64:
        """Return the page with this number, 0 if it does not exist."""
        if number != self._last_number:
            self._last_page = self._pages.node_of(PAGES, number)
            self._last_number = number
        return self._last_page

    def find(self, name: i64) -> i64:
        """Return the row of an id, 0 for none. O(1) expected."""
        page = self._page_of(name >> PAGE_BITS)
        if page == 0:
            return 0  # `0 if ... else ...` would make a Python object
        return i64(self._rows[page * IDS_A_PAGE + (name & LAST_OF_PAGE)])

    def put(self, name: i64, row: i64) -> None:
        """Set the row of an id that has none. O(1) expected, amortized."""
        page = self._page_of(name >> PAGE_BITS)
        if page == 0:
            page = self._new_page(name >> PAGE_BITS)
        self._rows[page * IDS_A_PAGE + (name & LAST_OF_PAGE)] = i32(row)
        self._used[page] += 1

    def _new_page(self, number: i64) -> i64:
        page = self._free if self._free != 0 else self._next_page
        if self._free != 0:
            self._free = i64(self._used[page])
        else:
            if page == i64(len(self._used)):
                self._grow()
            self._next_page += 1
        self._pages.put(PAGES, number, page)
        self._used[page] = 0
        self._last_page = page
        return page

    def _grow(self) -> None:
        size = 2 * len(self._used)
        self._used = grown_i32(self._used, size)
        self._rows = grown_i32(self._rows, size * int(IDS_A_PAGE))

    def remove(self, name: i64) -> None:
        """Remove the row of an id. O(1) expected, amortized."""
        number = name >> PAGE_BITS
        page = self._page_of(number)
        self._rows[page * IDS_A_PAGE + (name & LAST_OF_PAGE)] = 0
        self._used[page] -= 1
        if self._used[page] == 0:
            self._pages.remove(PAGES, number)
            self._used[page] = i32(self._free)
            self._free = page
            self._last_number = NO_PAGE

    def num_bytes(self) -> int:
        """Return the bytes of all arrays."""
        return 4 * (len(self._rows) + len(self._used)) + self._pages.num_bytes()


FEWEST_ROWS: Final = 64
#: Bytes of a row besides its tokens.
ROW_BYTES: Final = 36
#: Most bytes allocated from the start.
MOST_AT_START: Final = 2**27
#: Kinds of rows: removed but still with children, a content, a root.
GONE: Final[i32] = 0
CONTENT: Final[i32] = 1
ROOT: Final[i32] = 2


class ContentRows:
    """A row for each content and root, and for each removed id that still has children. Row 0 is none.

    Children are a list: `first_child`, then `next_one`. `request` is the row of the request root that a row is
    reachable from, 0 for none. Free rows are reused. There is room for `num_rows` from the start, in at most 128 MiB
    (1.3 million rows of 16 tokens), because copying large arrays holds the interpreter's lock; if that is not enough,
    arrays double.

    `name` is the cache's id of a row and `published_name` the consumers' name: the same array, until `name_apart`.
    """

    def __init__(self, block_size: int, num_rows: int) -> None:
        self._is_named_apart = False
        self.num_words: i64 = words_per_block(block_size)
        most = MOST_AT_START // (ROW_BYTES + 8 * int(self.num_words))
        self._set_arrays(min(num_rows + FEWEST_ROWS, max(most, FEWEST_ROWS)))
        self.clear()

    def clear(self) -> None:
        """Remove all rows. Rows are initialised when they are allocated."""
        self._by_id = IdPages(int(self.capacity))
        self.num_rows: i64 = 0
        self._next_row: i64 = 1
        self._free: i64 = 0

    def _set_arrays(self, capacity: int) -> None:
        self.capacity: i64 = capacity
        self.name = zeros_i64(capacity)
        self.published_name = zeros_i64(capacity) if self._is_named_apart else self.name
        self.kind = zeros_i32(capacity)
        self.request = zeros_i32(capacity)
        self.parent = zeros_i32(capacity)
        self.first_child = zeros_i32(capacity)
        self.next_one = zeros_i32(capacity)
        self.previous = zeros_i32(capacity)
        #: First row of a content in `PlaceRows`.
        self.first_place = zeros_i32(capacity)
        #: Packed tokens (`core.tokens`), `num_words` per row.
        self.words = zeros_i64(capacity * int(self.num_words))

    def _grow(self) -> None:
        capacity = 2 * int(self.capacity)
        names = grown_i64(self.name, capacity)
        self.published_name = grown_i64(self.published_name, capacity) if self._is_named_apart else names
        self.name = names
        self.kind = grown_i32(self.kind, capacity)
        self.request = grown_i32(self.request, capacity)
        self.parent = grown_i32(self.parent, capacity)
        self.first_child = grown_i32(self.first_child, capacity)
        self.next_one = grown_i32(self.next_one, capacity)
        self.previous = grown_i32(self.previous, capacity)
        self.first_place = grown_i32(self.first_place, capacity)
        self.words = grown_i64(self.words, capacity * int(self.num_words))
        self.capacity = capacity

    def name_apart(self, is_apart: bool) -> None:
        """Give `published_name` a separate array of zeros, or make it the same array as `name`."""
        self._is_named_apart = is_apart
        self.published_name = zeros_i64(int(self.capacity)) if is_apart else self.name

    def find(self, name: i64) -> i64:
        """Return the row of an id, 0 for none. O(1) expected."""
        return self._by_id.find(name)

    def row_of(self, name: i64) -> i64:
        """Return the row of an id, creating it if there is none. O(1) expected, amortized."""
        row = self._by_id.find(name)
        if row != 0:
            return row
        row = self._free if self._free != 0 else self._next_row
        self._by_id.put(name, row)
        if self._free != 0:
            self._free = i64(self.next_one[row])
        else:
            self._next_row += 1
            if self._next_row == self.capacity:
                self._grow()
        self.name[row] = name
        self.kind[row] = GONE
        self.request[row] = 0
        self.parent[row] = 0
        self.first_child[row] = 0
        self.next_one[row] = 0
        self.previous[row] = 0
        self.first_place[row] = 0
        self.num_rows += 1
        return row

    def drop_if_unused(self, row: i64) -> None:
        """Free the row of a removed id without children and places."""
        if self.kind[row] != GONE or self.first_child[row] != 0 or self.first_place[row] != 0:
            return
        self._by_id.remove(self.name[row])
        self.next_one[row] = i32(self._free)
        self._free = row
        self.num_rows -= 1

    def link(self, row: i64, parent: i64) -> None:
        """Make a row a child of another. O(1)."""
        after = i64(self.first_child[parent])
        self.parent[row] = i32(parent)
        self.next_one[row] = i32(after)
        self.previous[row] = 0
        if after != 0:
            self.previous[after] = i32(row)
        self.first_child[parent] = i32(row)

    def unlink(self, row: i64) -> None:
        """Remove a row from its parent. The parent's row is freed if only this child needed it. O(1)."""
        parent, before, after = i64(self.parent[row]), i64(self.previous[row]), i64(self.next_one[row])
        if parent == 0:
            return
        if before != 0:
            self.next_one[before] = i32(after)
        else:
            self.first_child[parent] = i32(after)
        if after != 0:
            self.previous[after] = i32(before)
        self.parent[row] = 0
        self.drop_if_unused(parent)

    # Walks.

    def next_preorder(self, row: i64, top: i64) -> i64:
        """Return the next descendant of `top` in a traversal with parents first; 0 at the end."""
        if self.first_child[row] != 0:
            return i64(self.first_child[row])
        while row != top and self.next_one[row] == 0:
            row = i64(self.parent[row])
        if row == top:
            return 0
        return i64(self.next_one[row])

    def deepest(self, row: i64) -> i64:
        """Return the row where a traversal of this subtree with children first begins."""
        while self.first_child[row] != 0:
            row = i64(self.first_child[row])
        return row

    def next_postorder(self, row: i64) -> i64:
        """Return the next row of a traversal with children first."""
        after = i64(self.next_one[row])
        return self.deepest(after) if after != 0 else i64(self.parent[row])

    def content_before(self, row: i64) -> i64:
        """Return the row of the content before this one, skipping roots; 0 at the beginning of a prompt.

        Removed contents count.
        """
        before = i64(self.parent[row])
        while before != 0 and self.kind[before] == ROOT:
            before = i64(self.parent[before])
        return before

    def set_tokens(self, row: i64, words: vec[i64], start: i64) -> None:
        """Copy the packed tokens of a content, from word `start` on."""
        own, size = self.words, self.num_words
        at = row * size
        for place in range(size):
            own[at + place] = words[start + place]

    def num_bytes(self) -> int:
        """Return the bytes of all arrays."""
        own_names = 8 if self._is_named_apart else 0
        return (ROW_BYTES + own_names + 8 * int(self.num_words)) * int(self.capacity) + self._by_id.num_bytes()


NAME_BYTES = 8
SIGNED_BITS = 2
#: Replaces the hash 0, which means no parent.
IN_PLACE_OF_0: Final[i64] = 1


def _hashed(text: bytes) -> int:
    """Return 62 bits of a hash."""
    return int.from_bytes(blake2b(text, digest_size=NAME_BYTES).digest(), "big") >> SIGNED_BITS


class ContentNames:
    """Names the rows of a table. A name is derived from the name of the parent."""

    def __init__(self, rows: ContentRows) -> None:
        self._rows = rows
        self._keys = vec[i64](
            [_hashed(b"blockyard, token key %d" % number) for number in range(2 * int(rows.num_words))]
        )

    def name_content(self, row: i64) -> None:
        """Name a content whose parent has a name. O(tokens)."""
        rows = self._rows
        before = rows.published_name[i64(rows.parent[row])]
        if hash_rows(rows.words, 0, self._keys, before, rows.published_name, row, row + 1) == 0:
            rows.published_name[row] = IN_PLACE_OF_0

    def name_root(self, row: i64, request: tuple[PlainKey, ...], spans: tuple[PlainKey, ...]) -> None:
        """Name a root by a request's keys, or by spans and the content before them. O(keys)."""
        before = int(self._rows.published_name[i64(self._rows.parent[row])])
        # The repr of nested lists of text and numbers: the same everywhere, and defined for any text.
        self._rows.published_name[row] = _hashed(ascii([before, tag_keys(request, spans)]).encode())
