"""A model's config, read field by field. Each error names the field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from copy import copy
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import require_int, shown
from ..errors import InvalidArgument, ModelError

if TYPE_CHECKING:
    from .family import Family

MAX_FIELD = 2**30
#: Fields of multimodal configs that hold the config of the text layers.
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
#: Sizes that a top-level config always has. A nested config omits those that equal the class's default.
_ALWAYS_HELD = frozenset({"num_hidden_layers", "num_attention_heads", "hidden_size"})


class ConfigFields:
    """The fields of a Hugging Face config: a mapping, an object with attributes, or a path to a config.json.

    Fields are read from the nested text config if there is one; only `outer` and `top` also read the configs around it.
    None counts as absent.
    """

    def __init__(self, config: object) -> None:
        self._outer = _loaded(config)
        around = [self._outer]
        while (nested := _nested(around[-1])) is not None:
            around.append(nested)
        self._around = tuple(around)
        self._sources: tuple[object, ...] = (around[-1],)

    def get(self, *names: str) -> object:
        """Return the first of the fields that is present, or None."""
        return next((value for name in names if (value := self._one(name)) is not None), None)

    def outer(self, *names: str) -> object:
        """Return the first of the fields that is present in the text config, else in the outermost config, or None."""
        value = self.get(*names)
        if value is not None:
            return value
        return next((value for name in names if (value := _field(self._outer, name)) is not None), None)

    def top(self, *names: str) -> object:
        """Return the first of the fields that is present, searching from the outermost config inwards, or None."""
        values = (_field(config, name) for config in self._around for name in names)
        return next((value for value in values if value is not None), None)

    def of_layer(self, index: int) -> ConfigFields:
        """Return the fields of one layer: those in `per_layer_config` take precedence over the model's.

        `per_layer_config` maps layer numbers to fields, or is a sequence with a config per layer.
        """
        own = _of_layer(_field(self._sources[-1], "per_layer_config"), index)
        if own is None or own is self._sources[-1]:
            return self
        layer = copy(self)
        layer._sources = (own, *self._sources)
        return layer

    def count(self, *names: str, low: int = 1, default: int | None = None, high: int = MAX_FIELD) -> int:
        """Return the first of the fields that is present, as an integer from `low` to `high`.

        Args:
            *names: names of the field, the usual one first.
            low: smallest valid value.
            default: result if none is present; None if the field is required.
            high: largest valid value.

        Raises:
            InvalidArgument: the field is out of range, or absent and required.
        """
        for name in names:
            value = self._one(name)
            if value is not None:
                return require_int(self.name_in_config(name), value, low, high)
        if default is None:
            also = f" (nor {', '.join(names[1:])})" if names[1:] else ""
            raise InvalidArgument(
                f"{names[0]} is missing{also}; the config must have it. Configs on disk leave out some defaults: "
                f"transformers.AutoConfig fills them in"
            )
        return default

    def flag(self, name: str) -> bool:
        """Return whether the field is present and true. Raises `InvalidArgument` if it is not a boolean."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidArgument(f"{self.name_in_config(name)} is {shown(value)}; it must be true or false")
        return value is True

    def items(self, name: str) -> list[object] | None:
        """Return the field as a list, or None if it is absent. Raises `InvalidArgument` if it is not a list."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            raise InvalidArgument(f"{self.name_in_config(name)} is {shown(value)}; it must be a list")
        return list(value)

    def name_in_config(self, name: str) -> str:
        """Return the name that the config uses for a field, for errors."""
        return name

    @property
    def model_type(self) -> str:
        """Return the model type, or ""."""
        return _text(_field(self._sources[-1], "model_type"))

    @property
    def outer_model_type(self) -> str:
        """Return the model type of the outermost config, or ""."""
        return _text(_field(self._outer, "model_type"))

    @property
    def architectures(self) -> list[str]:
        """Return the architecture classes named by the config, or by the outermost one."""
        for source in (self._sources[-1], self._outer):
            names = _field(source, "architectures")
            if isinstance(names, (list, tuple)) and names:
                return [name for name in names if isinstance(name, str)]
        return []

    @property
    def is_nested(self) -> bool:
        """Return whether the text layers have a nested config."""
        return self._sources[-1] is not self._outer

    def present(self) -> dict[str, object]:
        """Return all fields of the text layers, including those that apply to single layers. O(fields)."""
        inner = self._sources[-1]
        fields = dict(_all_fields(inner))
        every = fields.pop("per_layer_config", None)
        for own in every.values() if isinstance(every, Mapping) else ():
            fields |= {name: value for name, value in _all_fields(own).items() if name not in fields}
        return fields

    def _one(self, name: str) -> object:
        return next((value for source in self._sources if (value := _field(source, name)) is not None), None)


class FamilyFields(ConfigFields):
    """The fields that a family of models reads, with the family's names and defaults.

    An absent field has the default of the family's class, a null one is None. Any field that the class does not read is
    None, whatever the config has.
    """

    def __init__(self, fields: ConfigFields, family: Family) -> None:
        self._outer = fields._outer
        self._around = fields._around
        self._sources = fields._sources
        self._family = family

    def fixed(self, name: str, default: Any) -> Any:
        """Return a property of the family's class that no field changes; `default` if the class does not have it."""
        return self._family.fixed.get(name, default)

    @property
    def read_names(self) -> Set[str]:
        """Return the names of the fields that the family reads."""
        return self._family.reads.keys()

    @property
    def has_layer_configs(self) -> bool:
        """Return whether the config has fields for single layers."""
        return bool(_field(self._sources[-1], "per_layer_config"))

    def name_in_config(self, name: str) -> str:
        """Return the name that the config uses for a field, or the family's own name if the field is absent."""
        for source in self._sources:
            for spelling in self._family.names_of(name):
                if _field(source, spelling) is not None:
                    return spelling
        return name

    def _one(self, name: str) -> object:
        if name not in self._family.reads:
            return None
        for source in self._sources:
            for spelling in self._family.names_of(name):
                if spelling in source if isinstance(source, Mapping) else hasattr(source, spelling):
                    value = _field(source, spelling)
                    if value is not None or spelling == self._family.names_of(name)[-1]:
                        return value
        if name in _ALWAYS_HELD and not self.is_nested:
            return None
        return self._family.reads[name]


def _field(config: object, name: str) -> object:
    if isinstance(config, Mapping):
        value: object = config.get(name)
        return value
    return getattr(config, name, None)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _all_fields(config: object) -> Mapping[str, object]:
    """Return the fields of a mapping, or the public attributes of an object."""
    if isinstance(config, Mapping):
        return {name: value for name, value in config.items() if isinstance(name, str)}
    return {name: value for name, value in getattr(config, "__dict__", {}).items() if name[:1] != "_"}


def _nested(config: object) -> object:
    for name in _NESTED:
        value = _field(config, name)
        if value is not None:
            if not isinstance(value, Mapping) and not hasattr(value, "__dict__"):
                raise InvalidArgument(f"{name} is {shown(value)}; it must be an object that describes the text layers")
            return value
    return None


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
    """Return the object in a config.json, or in the one of a model's folder, or in Mistral's params.json there."""
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.exists() and (path / "params.json").exists():
        file = path / "params.json"
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
