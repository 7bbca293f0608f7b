"""The messages of a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictStr

from .fields import FIRST_ERROR, MAX_ITEMS, Fields


class TextPart(Fields):
    """A part of a message's content; this server reads text alone."""

    type: Literal["text"]
    text: StrictStr

    @classmethod
    def _asked_for(cls, fields: dict[str, Any]) -> dict[str, Any]:
        # Of an image it is the type that is wrong, and not the fields that go with it.
        return fields if fields.get("type") == "text" else {"type": fields.get("type")}


#: What answers carry besides nulls and says nothing.
_EMPTY: list[tuple[str, list[Any]]] = [("annotations", []), ("tool_calls", [])]


class Message(Fields):
    """One message of a chat. name: taken; most chat templates do not show it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: StrictStr | Annotated[list[TextPart], Field(max_length=MAX_ITEMS), FIRST_ERROR] = ""
    name: StrictStr | None = None

    @classmethod
    def _asked_for(cls, fields: dict[str, Any]) -> dict[str, Any]:
        # Messages that a client got as an answer and sends back have many fields that are null.
        return {name: value for name, value in fields.items() if value is not None and (name, value) not in _EMPTY}

    def as_template_input(self) -> dict[str, str]:
        """The message as chat templates read it; "developer" is OpenAI's newer word for "system"."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS), FIRST_ERROR]
