"""Stands in for torchvision, whose wheels need a torch with CUDA: vLLM imports it beside models whose images no test
reads. Every name of it can be imported."""

from __future__ import annotations

import enum
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import torch


class InterpolationMode(enum.Enum):
    """As many members as transformers names."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def pil_to_tensor(image: Any) -> torch.Tensor:
    """uint8 (channels, height, width): the one function that an image of vLLM's profiling passes through."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


class Empty(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return {"InterpolationMode": InterpolationMode, "pil_to_tensor": pil_to_tensor}.get(name, object)


__path__: list[str] = []
__version__ = "0.0"

for _part in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _name = f"{__name__}.{_part}"
    _module = Empty(_name)
    _module.__path__ = []
    _module.__spec__ = ModuleSpec(_name, None)
    sys.modules[_name] = _module
    setattr(sys.modules[_name.rpartition(".")[0]], _name.rpartition(".")[2], _module)
