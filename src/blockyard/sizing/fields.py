"""A model's config, whatever it comes as, read field by field; each error names the field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from os import PathLike
from pathlib import Path

from ..arguments import require_int, shown
from ..errors import InvalidArgument, ModelError

MAX_FIELD = 2**30
#: Where configs of models of text and more keep the part that describes the text layers.
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")


class ConfigFields:
    """The fields of a Hugging Face config: a mapping, an object with attributes, or a path to a config.json.

    A nested `text_config` is what counts; a field that is absent there is looked for in the config around it only by
    `outer`. None and an absent field are the same.
    """

    def __init__(self, config: object) -> None:
        self._outer = _loaded(config)
        inner = self._outer
        while (nested := _nested(inner)) is not None:
            inner = nested
        self._sources: tuple[object, ...] = (inner,)

    def get(self, *names: str) -> object:
        """Return the first of the fields that is present, or None."""
        return next((value for name in names if (value := self._one(name)) is not None), None)

    def outer(self, *names: str) -> object:
        """Does as `get`, and if it finds nothing, the field of the config around the text config."""
        value = self.get(*names)
        if value is not None:
            return value
        return next((value for name in names if (value := _field(self._outer, name)) is not None), None)

    def of_layer(self, index: int) -> ConfigFields:
        """Return the fields of one layer: those that `per_layer_config` gives it, before those of the model.

        It maps the numbers of layers to fields, or is a sequence with a config for each layer.
        """
        own = _of_layer(self.get("per_layer_config"), index)
        if own is None or own is self._sources[-1]:
            return self
        layer = copy(self)
        layer._sources = (own, *self._sources)
        return layer

    def count(self, *names: str, low: int = 1, default: int | None = None, high: int = MAX_FIELD) -> int:
        """Return the first of the fields that is present, an integer from `low` to `high`; `default` if none is.

        Raises `InvalidArgument` naming the field when it is out of range, or absent and without a default.
        """
        for name in names:
            value = self._one(name)
            if value is not None:
                return require_int(name, value, low, high)
        if default is None:
            also = f" (nor {', '.join(names[1:])})" if names[1:] else ""
            raise InvalidArgument(
                f"{names[0]} is missing{also}; the config must have it. Configs on disk leave out some defaults: "
                f"transformers.AutoConfig fills them in"
            )
        return default

    def flag(self, name: str) -> bool:
        """Return whether the field is present and true. Raises `InvalidArgument` if it is neither true nor false."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidArgument(f"{name} is {shown(value)}; it must be true or false")
        return value is True

    def items(self, name: str) -> list[object] | None:
        """Return the field as a list, None if it is absent. Raises `InvalidArgument` if it is anything else."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            raise InvalidArgument(f"{name} is {shown(value)}; it must be a list")
        return list(value)

    @property
    def model_type(self) -> str:
        """Return the name of the architecture, or an empty string."""
        value = self.get("model_type")
        return value if isinstance(value, str) else ""

    def _one(self, name: str) -> object:
        return next((value for source in self._sources if (value := _field(source, name)) is not None), None)


def _field(config: object, name: str) -> object:
    if isinstance(config, Mapping):
        value: object = config.get(name)
        return value
    return getattr(config, name, None)


def _nested(config: object) -> object:
    return next((value for name in _NESTED if (value := _field(config, name)) is not None), None)


def _of_layer(every: object, index: int) -> object:
    if every is None:
        return None
    if isinstance(every, Mapping):
        return next((value for key, value in every.items() if str(key).isdigit() and int(key) == index), None)
    if not isinstance(every, Sequence) or isinstance(every, str) or len(every) <= index:
        raise InvalidArgument(f"per_layer_config is {every!r}; it must give layer {index} its fields")
    own: object = every[index]
    return own


def _loaded(config: object) -> object:
    if isinstance(config, (str, PathLike)):
        return _read(Path(config))
    if isinstance(config, Mapping) or hasattr(config, "__dict__"):
        return config
    raise InvalidArgument(f"config is {config!r}; it must be a dict, an object with attributes, or a path")


def _read(path: Path) -> object:
    """Return the object in a config.json, or in the one of a model's folder."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file} could not be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    except RecursionError as error:
        raise ModelError(f"{file} is nested too deep to be read") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds a JSON {type(config).__name__}; it must hold an object")
    return config
