"""The requests of POST /v1/hints, and their answers: what comes next of a session. It is an API of our own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictFloat, StrictInt

from .fields import FIRST_ERROR, Fields, RequestFields, parse_fields, read_object
from .protocol import Salt, SessionId
from .tokenizing import ChatFields, PromptFields, TextFields, read_prompt

#: Of one request.
MAX_HINTS = 256
#: A year, in seconds: no retention is longer.
MAX_WAIT = 31_536_000.0


class Hint(Fields):
    """action: "over", the session has no next turn; "forget", what was said before holds no longer. cache_salt: that of
    the session's requests."""

    session_id: SessionId
    action: Literal["over", "forget"]
    cache_salt: Salt | None = None

    @classmethod
    def _asked_for(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if value is not None}

    def answer(self, outcome: str) -> dict[str, Any]:
        """Return what came of it, as the client reads it."""
        return {"session_id": self.session_id, "action": self.action, "outcome": outcome}


class OneHint(RequestFields, Hint):
    """A body that is one hint."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


class HintList(RequestFields):
    """A body with several."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    hints: Annotated[list[Hint], Field(min_length=1, max_length=MAX_HINTS), FIRST_ERROR]


def parse_hints(body: bytes) -> list[Hint]:
    """Read a body: one hint, or `hints`, a list of up to 256. Raises `ApiError` (400) for what is not understood."""
    fields = read_object(body)
    if "hints" in fields:
        return parse_fields(HintList, fields).hints
    return [parse_fields(OneHint, fields)]


class RetainFields(PromptFields):
    """These are the wish. priority: higher ones go later; 0 takes the wish back. seconds: after which it ends; None for
    never. cache_salt: that of the requests that begin with the prompt."""

    priority: Annotated[StrictInt, Field(ge=0, le=2**20)] = 1
    seconds: Annotated[StrictFloat, Field(gt=0, le=MAX_WAIT, allow_inf_nan=False)] | None = None
    cache_salt: Salt | None = None


class RetainText(TextFields, RetainFields):
    """This is POST /v1/retain for a text."""


class RetainChat(ChatFields, RetainFields):
    """This is POST /v1/retain for messages."""


def parse_retain(body: bytes) -> RetainText | RetainChat:
    """Read a body of /v1/retain. Raises `ApiError` (400) for what is not understood."""
    fields = read_prompt(body)
    return parse_fields(RetainChat, fields) if "messages" in fields else parse_fields(RetainText, fields)
