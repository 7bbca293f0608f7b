"""Every class of transformers that generates: sized as the cache that it fills on the meta device, or refused."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NoReturn

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from blockyard import InvalidArgument
from blockyard.sizing.config_fields import ConfigFields
from blockyard.sizing.from_config import read_layers
from blockyard_testing import seeds

from ..support.meta_caches import generating_classes, kept_elements, small_meta_config, text_models


def sized_elements(config: Any) -> tuple[int, int, int]:
    """Elements of a token, of the convolutions and of the recurrent states of a sequence."""
    layers, states = read_layers(ConfigFields(config))
    parts = [part for state in states for part in state.parts]
    recurrent = sum(part.elements() for part in parts if part.is_recurrent)
    convolutions = sum(part.elements() for part in parts if not part.is_recurrent)
    return sum(layer.elements_per_token() for layer in layers), convolutions, recurrent


@pytest.mark.drawn
@pytest.mark.parametrize(("kind", "name"), generating_classes())
def test_a_class_is_sized_as_its_cache_or_refused(kind: str, name: str) -> None:
    try:
        model_class, config = small_meta_config(kind, name)
    except Exception as error:
        skip_unchecked(f"{kind}, {name}", error)
    try:
        sized = sized_elements(config)
    except InvalidArgument as error:
        refusal = str(error)
    else:
        # The config as it is written to a file means what the object means.
        assert sized_elements(config.to_dict()) == sized
        assert sized == _kept(model_class, config)
        return
    assert refusal.split(" ")[0].isidentifier()  # the name of a field


def _kept(model_class: Any, config: Any) -> tuple[int, int, int]:
    """What a model keeps; of one that needs an image, or whose default sizes do not fit together, its text layers."""
    try:
        return kept_elements(model_class, config)
    except Exception as error:
        first = error
    for text in text_models(model_class, config):
        with suppress(Exception):
            return kept_elements(*text)
    skip_unchecked(f"{config.model_type}, {model_class.__name__}", first)


def skip_unchecked(name: str, error: Exception) -> NoReturn:
    """Skip a class that does not run here, and list it at the end of the test run."""
    seeds.lines.append(f"sizing, not checked: {name}: {type(error).__name__}: {error}".partition("\n")[0][:200])
    pytest.skip(f"{name} does not run on the meta device: {type(error).__name__}: {error}")
