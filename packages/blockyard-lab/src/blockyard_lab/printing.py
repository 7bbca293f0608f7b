"""Formats numbers and names for tables, pages and pictures."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return `text` on one line, with "?" for unprintable characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def keep_end(text: str, limit: int) -> str:
    """Return the end of `text`, at most `limit` characters. Paths in one folder differ in their ends."""
    return text if len(text) <= limit else "…" + text[len(text) - limit + 1 :]


def truncate(text: str, limit: int) -> str:
    """Return the beginning of `text`, at most `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def sentence(text: str) -> str:
    """Return `text` with a capital letter and a full stop."""
    return text[0].upper() + text[1:] + "."


def percent(rate: float) -> str:
    """Return a fraction as "35.0 %"."""
    return f"{100 * rate:.1f} %"


def count_of(number: int, word: str) -> str:
    """Return "1 block" or "38,667 blocks"."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def compact(number: float) -> str:
    """Format an axis label: 0.01, 200, 50k, 1M, 2G."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit * 0.9999:
            return f"{number / unit:,.12g}{letter}"
    return f"{number:.12g}"


def points(difference: float) -> str:
    """Format a difference in percentage points as an axis label: +2.5, 0, -1 with a minus sign."""
    return f"{difference:+.4g}".replace("-", "\N{MINUS SIGN}") if abs(difference) > 1e-9 else "0"


def fine_percent(share: float) -> str:
    """Return a fraction with two decimals: "35.00 %"."""
    return f"{100 * share:.2f} %"


def short_number(number: float) -> str:
    """Return a number with three digits and a unit: 160 k, 1.60 M."""
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"
