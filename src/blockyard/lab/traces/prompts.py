"""JSONL of whole prompts: token ids, or text that a tokenizer turns into them.

timestamp (ms, as in Mooncake's traces; 0 where no line has one), output_length (0 where it is unknown) and session may
be missing. There are no hash_ids: a replay hashes the tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...errors import MissingExtra, TraceError
from . import fields
from .lines import Line, LineProblem, json_object, shown
from .reading import TraceLine

#: Names that the prompt's text may have.
TEXT_FIELDS = ("text", "prompt")


class TokenIds:
    """token_ids: the prompt, integers from 0 to 2**31 - 1."""

    name = "tokens"
    units_a_second = 1000
    hash_block_size = 0

    def parser(self) -> TokenIds:
        """Lines do not depend on one another, so this is its own parser."""
        return self

    def row(self, line: Line) -> TraceLine:
        """The request on a line. Raises `LineProblem`."""
        found = json_object(line)
        tokens = fields.token_ids("token_ids", fields.required(found, "token_ids"))
        if "input_length" in found:
            length = fields.prompt_length("input_length", found["input_length"])
            if length != len(tokens):
                text = f"input_length is {length}; token_ids has {len(tokens)}"
                raise LineProblem("token_ids do not match input_length", text)
        return _row(found, tokens)


class Text:
    """text (or prompt): the prompt, which the tokenizer turns into token ids, its special tokens included."""

    name = "text"
    units_a_second = 1000
    hash_block_size = 0

    def __init__(self, tokenizer: str | None) -> None:
        self._tokenizer = load_tokenizer(tokenizer)

    def parser(self) -> Text:
        """Lines do not depend on one another, so this is its own parser."""
        return self

    def row(self, line: Line) -> TraceLine:
        """The request on a line. Raises `LineProblem`."""
        found = json_object(line)
        name = next((name for name in TEXT_FIELDS if name in found), TEXT_FIELDS[0])
        text = fields.required(found, name)
        if type(text) is not str:
            raise LineProblem(f"{name} not a text", f"{name} is {shown(text)}; it must be a text")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise LineProblem("not UTF-8", f"{name} holds half of a surrogate pair, which has no UTF-8 form") from None
        return _row(
            found, fields.token_ids(f"token ids of {name}", list(self._tokenizer(text, verbose=False).input_ids))
        )


def _row(found: fields.Fields, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> TraceLine:
    timestamp = fields.timestamp("timestamp", found.get("timestamp", 0))
    output = fields.output_length("output_length", found.get("output_length", 0))
    return TraceLine(timestamp, len(tokens), output, None, tokens, fields.session("session", found.get("session", "")))


def load_tokenizer(folder: str | None) -> Any:
    """transformers' tokenizer from a folder of this machine; nothing is downloaded, none of the folder's code is run.

    Raises `TraceError` if there is none, `MissingExtra` without the package transformers.
    """
    if folder is None:
        raise TraceError("a trace of text needs tokenizer=, a folder with a tokenizer as transformers saves it")
    if not Path(folder).is_dir():
        raise TraceError(f"there is no tokenizer folder {folder}")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtra("a trace of text needs transformers: pip install 'blockyard[engine]'") from error
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise types of many kinds, some of them bare Exception
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TraceError(f"{folder} holds no tokenizer that can be loaded: {reason[:200]}") from error
