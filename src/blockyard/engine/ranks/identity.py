"""What the ranks of an engine must have in common, and a sentence with both values where they do not."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from ... import __version__
from ...errors import RankError
from ..borrowing import BorrowedModel
from ..shape import ModelShape
from . import step_message

#: Of a config: what depends on how it was loaded, and on nothing that is computed.
_OF_LOADING = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
_SAMPLED = 64


def identity_of(borrowed: BorrowedModel, shape: ModelShape, block_size: int) -> dict[str, Any]:
    """What a rank has before it joins, in plain values. O(parameters' number), some elements of each."""
    config = json.loads(borrowed.model.config.to_json_string(use_diff=False))
    return {
        "blockyard": __version__,
        "step format": step_message.FORMAT,
        "torch": torch.__version__.partition("+")[0],
        "model": type(borrowed.model).__name__,
        "dtype": str(borrowed.dtype).removeprefix("torch."),
        "device type": borrowed.device.type,
        "block_size": block_size,
        "max_model_len": shape.max_model_len,
        "num_layers": shape.num_layers,
        "num_kv_heads": shape.num_kv_heads,
        "head_size": shape.head_size,
        "value_size": shape.value_size,
        "windows": list(shape.windows),
        "config": {name: value for name, value in config.items() if name not in _OF_LOADING},
        "weights (a sample's digest)": _sample_digest(borrowed.model),
    }


def require_same(rank: int, other: dict[str, Any], own: dict[str, Any]) -> None:
    """Raise `RankError`, naming the first difference and both values. own: of rank 0. O(fields)."""
    for name in dict.fromkeys([*own, *other]):
        mine, theirs = own.get(name), other.get(name)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            require_same(rank, _named(name, theirs), _named(name, mine))
        elif mine != theirs:
            raise RankError(f"rank {rank} has {name} {theirs!r}; rank 0 has {mine!r}, and all ranks need the same")


def agreed_bytes(identity: dict[str, Any]) -> bytes:
    """What steps' digests begin with."""
    return json.dumps(identity, sort_keys=True).encode()


def _named(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}.{field}": value for field, value in fields.items()}


def _sample_digest(model: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, weights in model.named_parameters():
        flat = weights.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // _SAMPLED)].contiguous().cpu()
        digest.update(f"{name} {tuple(weights.shape)} {weights.dtype}".encode())
        digest.update(sample.view(torch.uint8).numpy())
    return digest.hexdigest()
