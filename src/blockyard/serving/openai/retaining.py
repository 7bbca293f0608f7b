"""Reads the requests of POST /v1/retain, an API of our own: each names a prompt whose blocks stay longer cached."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictFloat, StrictInt

from .fields import parse_fields
from .hints import MAX_WAIT
from .protocol import Salt
from .tokenizing import ChatFields, PromptFields, TextFields, read_prompt


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
