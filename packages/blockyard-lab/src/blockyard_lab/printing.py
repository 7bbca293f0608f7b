"""These functions write numbers and names as people read them, in tables, on pages and in pictures."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` on one line, with "?" for what no page and no picture can show: controls, halves of characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def shortened(text: str, limit: int) -> str:
    """The end of `text`, which distinguishes own policies and files in one folder. At most `limit` characters."""
    return text if len(text) <= limit else "…" + text[len(text) - limit + 1 :]


def cut_off(text: str, limit: int) -> str:
    """Return the beginning of `text`. At most `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def sentence(text: str) -> str:
    """Return `text` with a capital and a full stop."""
    return text[0].upper() + text[1:] + "."


def percent(rate: float) -> str:
    """Return a share as "35.0 %"."""
    return f"{100 * rate:.1f} %"


def counted(number: int, word: str) -> str:
    """ "1 block", "38,667 blocks"."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def compact(number: float) -> str:
    """Return a number at an axis: 0.01, 200, 50k, 1M, 2G."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit * 0.9999:
            return f"{number / unit:,.12g}{letter}"
    return f"{number:.12g}"


def points(difference: float) -> str:
    """Return a difference of percentages at an axis: +2.5, 0, -1 with a minus sign."""
    return f"{difference:+.4g}".replace("-", "\N{MINUS SIGN}") if abs(difference) > 1e-9 else "0"


def fine_percent(share: float) -> str:
    """Writes a share of 0 to 1 with two digits: "35.00 %"."""
    return f"{100 * share:.2f} %"


def short_number(number: float) -> str:
    """Writes a number with three digits and a unit: 160 k, 1.60 M."""
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"
