"""What the objects of all requests have in common: strict types ("1" is no number), and one error for what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from ..errors import invalid
from .refusals import UNKNOWN_FIELD, refusal_of
from .unsupported_fields import asked_for

MAX_TOKEN_ID = 2**31 - 1
#: Of prompts, of messages, and of the parts of a message. OpenAI takes as many messages.
MAX_ITEMS = 2048
#: Every list: a body of half a million bad elements is refused at the first, not after as many errors.
FIRST_ERROR = Field(fail_fast=True)
TokenId = Annotated[StrictInt, Field(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Field(min_length=1), FIRST_ERROR]


class Fields(BaseModel):
    """An object of a request, which may have no field but these."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, fields: Any) -> Any:
        """One error for the first of them: pydantic would make one for each, and a body has room for 90,000."""
        if not isinstance(fields, dict):
            return fields
        asked = cls._asked_for(fields)
        unknown = next((name for name in asked if name not in cls.model_fields), None)
        if unknown is not None:
            known = {"name": unknown, "known": list(cls.model_fields)}
            raise PydanticCustomError(UNKNOWN_FIELD, "is not known", known)
        return asked

    @classmethod
    def _asked_for(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields without those that say nothing."""
        return fields


class RequestFields(Fields):
    """A whole request. refused: the fields that are not supported, with the values that ask for nothing."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]]


RequestT = TypeVar("RequestT", bound=RequestFields)


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object that a body is. Raises `ApiError` (400) for any other body."""
    try:
        fields = pydantic_core.from_json(body, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        raise invalid(f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise invalid("the body must be a JSON object")
    return fields


def parse_fields(kind: type[RequestT], fields: dict[str, Any]) -> RequestT:
    """The request that an object is. Raises `ApiError` (400), naming the field, for what is not understood."""
    try:
        return kind.model_validate(asked_for(fields, kind.refused))
    except ValidationError as error:
        raise refusal_of(error) from None
