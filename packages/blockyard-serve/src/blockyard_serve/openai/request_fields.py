"""Base classes of request objects: strict types ("1" is not a number) and one error for the first invalid field."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from ..errors import ApiError, invalid
from .unsupported_fields import REFUSED_IN_MESSAGES, requested_fields, unsupported

MAX_TOKEN_ID = 2**31 - 1
#: Maximum of prompts, of messages, and of parts of a message. OpenAI has the same limit for messages.
MAX_ITEMS = 2048
#: For every list: validation stops at the first bad element, of which a body can hold half a million.
FIRST_ERROR = Field(fail_fast=True)
TokenId = Annotated[StrictInt, Field(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Field(min_length=1), FIRST_ERROR]


class Fields(BaseModel):
    """An object of a request. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, fields: Any) -> Any:
        """Raise for the first unknown field only: pydantic would report each, and a body can hold 90,000."""
        if not isinstance(fields, dict):
            return fields
        requested = cls._drop_neutral(fields)
        unknown = next((name for name in requested if name not in cls.model_fields), None)
        if unknown is not None:
            known = {"name": unknown, "known": list(cls.model_fields)}
            raise PydanticCustomError(UNKNOWN_FIELD, "is not known", known)
        return requested

    @classmethod
    def _drop_neutral(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields without unsupported ones that have accepted values."""
        return fields


class RequestFields(Fields):
    """The body of a request.

    Attributes:
        refused: unsupported fields, with the values that are accepted all the same because they request nothing.
    """

    refused: ClassVar[Mapping[str, tuple[Any, ...]]]


RequestT = TypeVar("RequestT", bound=RequestFields)


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Raises `ApiError` (400) if the body is not one."""
    try:
        fields = pydantic_core.from_json(body, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        raise invalid(f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise invalid("the body must be a JSON object")
    return fields


def parse_fields(kind: type[RequestT], fields: dict[str, Any]) -> RequestT:
    """Return the request that `fields` describe. Raises `ApiError` (400), with the field, for an invalid one."""
    try:
        return kind.model_validate(requested_fields(fields, kind.refused))
    except ValidationError as error:
        raise refusal_of(error) from None


#: Type of the error for an unknown field; its context has the "name" and the "known" names.
UNKNOWN_FIELD = "unknown_field"
_MAX_NAME = 60
#: With at most this many known fields, an error lists them all.
_MAX_LISTED = 8
_KINDS = {
    "bool_type": "true or false",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}


def refusal_of(error: ValidationError) -> ApiError:
    """Return a 400 error for the first invalid field, with its value if that is short. O(errors)."""
    # A union reports an error for each member; the member that got furthest is the one that the client meant.
    errors = error.errors(include_url=False)
    found = max(errors, key=_how_far)
    name = _name(_path(found))
    if found["type"] == UNKNOWN_FIELD and found["ctx"]["name"] in REFUSED_IN_MESSAGES:
        return unsupported(found["ctx"]["name"], name)
    if found["type"] == UNKNOWN_FIELD:
        return invalid(f"unknown field '{name}'{_perhaps(**found['ctx'])}", name, "unknown_parameter")
    if found["type"] == "missing":
        return invalid(f"'{name}' is missing", name, "missing_required_parameter")
    return invalid(f"'{name}'{_shown(found['input'])}: {_words(found, errors)}", name, "invalid_value")


def _how_far(found: ErrorDetails) -> tuple[int, bool, list[int]]:
    path = _path(found)
    return len(path), found["type"] not in _KINDS, [part for part in path if isinstance(part, int)]


def _path(found: ErrorDetails) -> list[int | str]:
    """Return the path of the invalid field as the client wrote it, without pydantic's names of union members."""
    path = [part for part in found["loc"] if isinstance(part, int) or (part.isidentifier() and part != "str")]
    return [*path, found["ctx"]["name"]] if found["type"] == UNKNOWN_FIELD else path


def _name(path: list[int | str]) -> str:
    """Return the path as messages[0].role, at most 200 characters: a client may send a megabyte as a field's name."""
    first, *others = path
    parts = [f"[{part}]" if isinstance(part, int) else f".{part[:200]}" for part in others]
    return f"{str(first)[:200]}{''.join(parts)}"[:200]


def _words(found: ErrorDetails, errors: list[ErrorDetails]) -> str:
    """Return the requirement: every type that its union allows, or the limit."""
    if found["type"] not in _KINDS:
        words = found["msg"].replace("Input should", "it must").replace(" after validation", "")
        return words[0].lower() + words[1:]
    path = _path(found)
    kinds = list(dict.fromkeys(_KINDS[other["type"]] for other in errors if _path(other) == path))
    return f"it must be {' or '.join([', '.join(kinds[:-1]), kinds[-1]] if kinds[1:] else kinds)}"


def _perhaps(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.75) if len(name) < _MAX_NAME else []
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; it takes {', '.join(sorted(known))}" if len(known) <= _MAX_LISTED else ""


def _shown(value: object) -> str:
    return f" is {json.dumps(value)[:40]}" if isinstance(value, bool | int | float) else ""
