"""From the ids of a cache's contents to rows. Ids come from a counter, so 32 neighbours share a page."""

from typing import Final

from mypy_extensions import i32, i64

from ...core.arrays import grown_i32, zeros_i32
from .holdings import HoldingTable

PAGE_BITS: Final = 5
IDS_A_PAGE: Final[i64] = 32
LAST_OF_PAGE: Final[i64] = 31
FEWEST_PAGES: Final = 16
#: The holder under which `HoldingTable` has the pages; of its numbers, 0 is none.
PAGES: Final[i64] = 0
NO_PAGE: Final[i64] = -1


class IdPages:
    """A page is found by a hash, or is that of the id before. It stays while one of its ids has a row.

    Memory: 5 bytes an id where all of a page are there; up to 200 where one is. There is room for `num_ids` neighbours
    from the start.
    """

    def __init__(self, num_ids: int) -> None:
        num_pages = FEWEST_PAGES + num_ids // int(IDS_A_PAGE)
        self._pages = HoldingTable(0)
        self._rows = zeros_i32(num_pages * int(IDS_A_PAGE))
        #: Rows of each page; of a free one, the next free one.
        self._used = zeros_i32(num_pages)
        self._next_page: i64 = 1
        self._free: i64 = 0
        #: The number and the page that were looked for last.
        self._last_number: i64 = NO_PAGE
        self._last_page: i64 = 0

    def _page_of(self, number: i64) -> i64:
        """The page of a number, 0 for none."""
        if number != self._last_number:
            self._last_page = self._pages.node_of(PAGES, number)
            self._last_number = number
        return self._last_page

    def find(self, name: i64) -> i64:
        """The row of an id, 0 for none. O(1) expected."""
        page = self._page_of(name >> PAGE_BITS)
        if page == 0:
            return 0  # `0 if ... else ...` would make a Python object
        return i64(self._rows[page * IDS_A_PAGE + (name & LAST_OF_PAGE)])

    def put(self, name: i64, row: i64) -> None:
        """Give a row to an id that has none. O(1) expected, amortized."""
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

    def take(self, name: i64) -> None:
        """Forget an id that has a row. O(1) expected, amortized."""
        number = name >> PAGE_BITS
        page = self._page_of(number)
        self._rows[page * IDS_A_PAGE + (name & LAST_OF_PAGE)] = 0
        self._used[page] -= 1
        if self._used[page] == 0:
            self._pages.take(PAGES, number)
            self._used[page] = i32(self._free)
            self._free = page
            self._last_number = NO_PAGE

    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return 4 * (len(self._rows) + len(self._used)) + self._pages.num_bytes()
