"""Requests and responses of POST /v1/hints and POST /v1/retain, which are Blockyard's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictFloat, StrictInt

from .protocol import Salt, SessionId
from .request_fields import FIRST_ERROR, Fields, RequestFields, parse_fields, read_object
from .tokenizing import ChatFields, PromptFields, TextFields, read_prompt

#: Maximum of hints in one request.
MAX_HINTS = 256
#: Maximum duration of a retention, one year.
MAX_SECONDS = 31_536_000.0


class Hint(Fields):
    """A hint about a session.

    Attributes:
        session_id: id of the session.
        action: "over" if the session has no next turn; "forget" withdraws the last hint.
        cache_salt: salt of the session's requests.
    """

    session_id: SessionId
    action: Literal["over", "forget"]
    cache_salt: Salt | None = None

    @classmethod
    def _drop_neutral(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if value is not None}

    def answer(self, outcome: str) -> dict[str, Any]:
        """Return the entry of the response for this hint."""
        return {"session_id": self.session_id, "action": self.action, "outcome": outcome}


class OneHint(RequestFields, Hint):
    """A body with one hint."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


class HintList(RequestFields):
    """A body with several hints."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    hints: Annotated[list[Hint], Field(min_length=1, max_length=MAX_HINTS), FIRST_ERROR]


def parse_hints(body: bytes) -> list[Hint]:
    """Parse a body of /v1/hints. Raises `ApiError` (400) if it is invalid."""
    fields = read_object(body)
    if "hints" in fields:
        return parse_fields(HintList, fields).hints
    return [parse_fields(OneHint, fields)]


class RetainFields(PromptFields):
    """Fields of POST /v1/retain besides the prompt.

    Attributes:
        priority: higher values are evicted later; 0 ends the retention.
        seconds: duration of the retention; None for no end.
        cache_salt: salt of the requests that begin with the prompt.
    """

    priority: Annotated[StrictInt, Field(ge=0, le=2**20)] = 1
    seconds: Annotated[StrictFloat, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)] | None = None
    cache_salt: Salt | None = None


class RetainText(TextFields, RetainFields):
    """POST /v1/retain with text."""


class RetainChat(ChatFields, RetainFields):
    """POST /v1/retain with messages."""


def parse_retain(body: bytes) -> RetainText | RetainChat:
    """Parse a body of /v1/retain. Raises `ApiError` (400) if it is invalid."""
    fields = read_prompt(body)
    return parse_fields(RetainChat, fields) if "messages" in fields else parse_fields(RetainText, fields)
