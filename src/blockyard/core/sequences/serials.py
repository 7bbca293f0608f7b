"""Serial numbers that no two managers of a process share."""

from typing import Final

from mypy_extensions import i64

#: Serials are drawn from shares of this many, so that managers that run side by side seldom ask for one.
SHARE_BITS: Final = 16
SHARE_SPAN: Final[i64] = 65536


class Shares:
    """Which shares were given out in this process, to whichever manager."""

    def __init__(self) -> None:
        self.last: i64 = 0

    def draw(self) -> i64:
        """A share that no manager has."""
        self.last += 1
        return self.last


_SHARES: Final = Shares()


class Serials:
    """The serials of one manager, ascending. 2**42 in a process: more than a century at a thousand a second."""

    def __init__(self) -> None:
        self._shares: dict[int, bool] = {}
        self._last: i64 = 0
        #: The first serial that the next share has to be drawn for.
        self._end: i64 = 0

    def draw(self) -> i64:
        """The next serial. O(1)."""
        if self._last + 1 >= self._end:
            self._draw_share()
        self._last += 1
        return self._last

    def prepare(self, count: i64) -> None:
        """Let the next `count` serials be drawn without asking for memory in the middle of a change."""
        if self._last + count >= self._end and count < SHARE_SPAN:
            self._draw_share()

    def _draw_share(self) -> None:
        share = _SHARES.draw()
        self._shares[int(share)] = True
        self._last = share * SHARE_SPAN - 1
        self._end = share * SHARE_SPAN + SHARE_SPAN

    def has_given(self, serial: i64) -> bool:
        """Whether this manager drew `serial`."""
        return int(serial >> SHARE_BITS) in self._shares and serial <= self._last

    def was_drawn_from(self, serial: i64) -> bool:
        """Whether some manager of this process has the share that `serial` is of."""
        return SHARE_SPAN <= serial < (_SHARES.last + 1) * SHARE_SPAN
