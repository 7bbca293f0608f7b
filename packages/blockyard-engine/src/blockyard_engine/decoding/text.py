"""Turns tokens into text, in pieces that are final.

Text is held back while the bytes of a character are incomplete (the tokenizer then shows U+FFFD), or while it may be
the beginning of a stop string.
"""

from __future__ import annotations

from typing import Any

_UNKNOWN = "�"
#: Trailing unknown characters that may still be completed: the bytes of two characters, which tokenizers with byte
#: fallback revise together. Longer runs are invalid output of the model.
_MAX_HELD = 8
TextMark = tuple[int, tuple[str, bool], tuple[int, ...]]


class IncrementalDetokenizer:
    """Turns new tokens into new text by decoding only the latest few: O(1) per token.

    A token's text can depend on the previous one (a space, the bytes of one character), so the tokens of the previous
    piece are decoded again with it. Joined, the pieces equal the tokenizer's `decode` of all tokens without special
    ones.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._token_ids: list[int] = []
        #: Index of the first token that is decoded again.
        self._start = 0
        #: End of the latest piece, and the number of characters of the decoded window that were returned.
        self._settled = 0
        self._num_given = 0
        self._num_held = 0
        #: Characters of earlier tokens that the last token showed to be unreadable (U+FFFD).
        self.num_unread = 0

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became final."""
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
        if piece and certain == window:  # all text is returned: start the next window with the tokens of this piece
            self._start, self._settled = self._settled, len(self._token_ids)
            self._num_given = len(self._decode(self._start, self._settled))
        return piece

    def finish(self) -> str:
        """Return the remaining text as it is."""
        piece = self._decode(self._start, len(self._token_ids))[self._num_given :]
        self._num_given += len(piece)
        return piece

    def mark(self) -> tuple[int, ...]:
        """Return a mark of the present state, for `reset`."""
        return len(self._token_ids), self._start, self._settled, self._num_given, self._num_held

    def reset(self, mark: tuple[int, ...]) -> None:
        """Return to the state of `mark`."""
        num_tokens, self._start, self._settled, self._num_given, self._num_held = mark
        del self._token_ids[num_tokens:]

    def _decode(self, start: int, end: int) -> str:
        text: str = self._tokenizer.decode(
            self._token_ids[start:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class StopStrings:
    """Finds stop strings in text that arrives in pieces. O(longest stop) per character."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        #: Whether a stop string was found.
        self.is_found = False

    def push(self, piece: str) -> str:
        """Add a piece; return the text that can no longer be part of a stop string."""
        if self.is_found or not self._stops:
            return "" if self.is_found else piece
        text = self._held + piece
        found = [start for start in (text.find(stop) for stop in self._stops) if start >= 0]
        if found:
            self.is_found = True
            self._held = ""
            return text[: min(found)]
        keep = len(text) - self._num_possible(text)
        self._held = text[keep:]
        return text[:keep]

    @property
    def num_held(self) -> int:
        """Number of characters held back."""
        return len(self._held)

    def finish(self) -> str:
        """Return the text held back, at the end of the input."""
        held, self._held = self._held, ""
        return held

    def mark(self) -> tuple[str, bool]:
        """Return a mark of the present state, for `reset`."""
        return self._held, self.is_found

    def reset(self, mark: tuple[str, bool]) -> None:
        """Return to the state of `mark`."""
        self._held, self.is_found = mark

    def _num_possible(self, text: str) -> int:
        """Return how many characters at the end of `text` may be the beginning of a stop string."""
        longest = min(max(len(stop) for stop in self._stops) - 1, len(text))
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class GeneratedText:
    """Text of one completion in progress; empty without a tokenizer."""

    def __init__(self, tokenizer: Any, stops: tuple[str, ...]) -> None:
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._pieces: list[str] = []
        self._num_given = 0
        #: Characters before the latest token, or before the character that it is part of.
        self.offset = 0

    @property
    def text(self) -> str:
        """All final text so far."""
        return "".join(self._pieces)

    @property
    def is_stopped(self) -> bool:
        """True if a stop string was found."""
        return self._stops.is_found

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """Add a token; return the text that became final. may_stop: whether to look for stop strings in it."""
        if self._detokenizer is None:
            return ""
        self.offset = self._num_given + self._stops.num_held
        piece = self._detokenizer.push(token_id)
        self.offset += self._detokenizer.num_unread
        return self._note(self._stops.push(piece) if may_stop else piece)

    def finish(self, may_stop: bool = True) -> str:
        """Return the text held back at the end, up to a stop string if there is one."""
        if self._detokenizer is None or self.is_stopped:
            return ""
        piece = self._detokenizer.finish()
        found = self._stops.push(piece) if may_stop else piece
        return self._note(found + self._stops.finish())

    def mark(self) -> TextMark:
        """Return a mark of the present state, for `reset`. O(1)."""
        return len(self._pieces), self._stops.mark(), self._detokenizer.mark() if self._detokenizer else ()

    def reset(self, mark: TextMark) -> None:
        """Return to the state of `mark`."""
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
