"""Text out of tokens, a piece at a time, never more than is certain.

Two things hold a piece back: a character whose bytes are not all there (the tokenizer then shows U+FFFD), and the
beginning of a stop string.
"""

from __future__ import annotations

from typing import Any

_UNKNOWN = "�"
#: Unknown characters at the end that may still become known ones: the bytes of two characters, which tokenizers with
#: byte fallback take back together. More of them are the model's own nonsense.
_MAX_HELD = 8
TextMark = tuple[int, tuple[str, bool], tuple[int, ...]]


class IncrementalDetokenizer:
    """New tokens to new text, decoding only the latest few: O(1) a token.

    A token's text can depend on the one before (a space, bytes of one character), so the tokens of the piece before
    are always decoded along. The pieces joined are the tokenizer's `decode` of all tokens without special ones.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._token_ids: list[int] = []
        #: Tokens before this are settled; from here on they are decoded again.
        self._start = 0
        #: Where the piece given last ends, and how many characters of the decoded window were given.
        self._settled = 0
        self._num_given = 0
        self._num_held = 0
        #: Characters that the last token made certain, of earlier tokens whose bytes cannot be read (U+FFFD).
        self.num_unread = 0

    def push(self, token_id: int) -> str:
        """Take a token; returns the text that is certain now and was not before."""
        self.num_unread = 0
        if token_id in self._special_ids:
            return ""
        self._token_ids.append(token_id)
        window = self._decode(self._start, len(self._token_ids))
        certain = window.rstrip(_UNKNOWN)
        if len(window) - len(certain) > _MAX_HELD:
            certain = window
        piece = certain[self._num_given :]
        self.num_unread = min(self._num_held, len(piece) - len(piece.lstrip(_UNKNOWN)))
        self._num_held = len(window) - len(certain)
        self._num_given = max(self._num_given, len(certain))
        if piece and certain == window:
            self._advance()
        return piece

    def finish(self) -> str:
        """Return the rest, as it stands."""
        piece = self._decode(self._start, len(self._token_ids))[self._num_given :]
        self._num_given += len(piece)
        return piece

    def mark(self) -> tuple[int, ...]:
        """Return where it is now, for `reset`."""
        return len(self._token_ids), self._start, self._settled, self._num_given, self._num_held

    def reset(self, mark: tuple[int, ...]) -> None:
        """Go back to where it was."""
        num_tokens, self._start, self._settled, self._num_given, self._num_held = mark
        del self._token_ids[num_tokens:]

    def _advance(self) -> None:
        """All is given: the next window begins with the tokens of this piece."""
        self._start, self._settled = self._settled, len(self._token_ids)
        self._num_given = len(self._decode(self._start, self._settled))

    def _decode(self, start: int, end: int) -> str:
        text: str = self._tokenizer.decode(
            self._token_ids[start:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class StopStrings:
    """Looks for stop strings in text that comes in pieces. O(longest stop) a character."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        #: Whether one was found.
        self.is_found = False

    def push(self, piece: str) -> str:
        """Take a piece; returns what is certainly in front of any stop string."""
        if self.is_found or not self._stops:
            return "" if self.is_found else piece
        text = self._held + piece
        found = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self.is_found = True
            self._held = ""
            return text[: min(found)]
        keep = len(text) - self._num_possible(text)
        self._held = text[keep:]
        return text[:keep]

    @property
    def num_held(self) -> int:
        """Count the characters that are held back."""
        return len(self._held)

    def finish(self) -> str:
        """Return what was held back: no more is to come."""
        held, self._held = self._held, ""
        return held

    def mark(self) -> tuple[str, bool]:
        """Return where it is now, for `reset`."""
        return self._held, self.is_found

    def reset(self, mark: tuple[str, bool]) -> None:
        """Go back to where it was."""
        self._held, self.is_found = mark

    def _num_possible(self, text: str) -> int:
        """Return how many characters at the end of `text` might be the beginning of a stop string."""
        longest = min(max(len(stop) for stop in self._stops) - 1, len(text))
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class GeneratedText:
    """The text of one completion as it grows. Without a tokenizer it stays empty."""

    def __init__(self, tokenizer: Any, stops: tuple[str, ...]) -> None:
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._pieces: list[str] = []
        self._num_given = 0
        #: Characters before the token that was pushed last, or before the character that it is a part of.
        self.offset = 0

    @property
    def text(self) -> str:
        """Return all pieces so far."""
        return "".join(self._pieces)

    @property
    def is_stopped(self) -> bool:
        """Return whether a stop string came."""
        return self._stops.is_found

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """Take a token; returns the text that is certain now. may_stop: whether stop strings are looked for in it."""
        if self._detokenizer is None:
            return ""
        self.offset = self._num_given + self._stops.num_held
        piece = self._detokenizer.push(token_id)
        self.offset += self._detokenizer.num_unread
        return self._note(self._stops.push(piece) if may_stop else piece)

    def finish(self, may_stop: bool = True) -> str:
        """No more tokens come: returns what was held back, up to a stop string if it has one."""
        if self._detokenizer is None or self.is_stopped:
            return ""
        piece = self._detokenizer.finish()
        found = self._stops.push(piece) if may_stop else piece
        return self._note(found + self._stops.finish())

    def mark(self) -> TextMark:
        """Return where it is now, for `reset`. O(1)."""
        return len(self._pieces), self._stops.mark(), self._detokenizer.mark() if self._detokenizer else ()

    def reset(self, mark: TextMark) -> None:
        """Go back to where it was, as if nothing had come since."""
        num_pieces, stops, detokenizer = mark
        self._num_given -= sum(map(len, self._pieces[num_pieces:]))
        del self._pieces[num_pieces:]
        self._stops.reset(stops)
        if self._detokenizer is not None:
            self._detokenizer.reset(detokenizer)

    def _note(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
            self._num_given += len(piece)
        return piece
