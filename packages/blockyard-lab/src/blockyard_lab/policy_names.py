"""Reads policies and pool sizes as people write them: a name, or a class in a file of their own; 10k, 1.5M, 25%."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np

import blockyard
from blockyard import EvictionPolicy
from blockyard.arguments import require_int
from blockyard.config import MAX_BLOCKS
from blockyard.errors import InvalidArgument, PolicyError
from blockyard.policies import POLICIES, make_policy

#: A name, or what makes a policy from a number of blocks: its class, say.
PolicyName = str | Callable[[int], EvictionPolicy]
#: The offline optimum stands in lists beside policies; no pool can run it.
OPTIMUM = "optimum"


def parse_policies(text: str, argument: str = "policies") -> list[str]:
    """Return the names in a list like "lru,arc,mine.py:Mine", in order, each once.

    A class in a file is found by its path and made from the number of blocks, as `CacheConfig(eviction_policy=...)`.
    Raises `InvalidArgument` for an unknown one; argument: what the error calls the list.
    """
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name != OPTIMUM:
            policy_of(name, argument)
    return names


def policy_of(name: PolicyName, argument: str = "policies") -> object:
    """Return what `CacheConfig(eviction_policy=...)` takes for this name. argument: what errors call it."""
    if not isinstance(name, str):
        if not callable(name):
            raise InvalidArgument(f"{argument} has {name!r}; it must be a name, or make an EvictionPolicy")
        return name
    if name in POLICIES:
        return name
    path, colon, member = name.rpartition(":")
    # os.path answers False where Path raises: for a name that is longer than any file's.
    if not os.path.isfile(path):
        missing = f", but there is no such file as {path}" if colon else ""
        raise InvalidArgument(
            f"{argument} has {name!r}{missing}; it must be one of {', '.join(sorted(POLICIES))}, or a class: "
            f"file.py:ClassName"
        )
    return _member_of(Path(path), member, argument)


def label_of(name: PolicyName) -> str:
    """Return what a policy is called in results."""
    return name if isinstance(name, str) else str(getattr(name, "__name__", repr(name)))


def place_of(error: BaseException) -> str:
    """Return where in a policy's own file an error arose: " (mine.py:17)", or "" where no such line is known."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    return f" ({Path(lines[-1].filename).name}:{lines[-1].lineno})" if lines else ""


def _is_ours(file: str) -> bool:
    """Whether a file is the lab's or the core's. Compiled code has relative file names."""
    ours = (Path(__file__).parent, Path(blockyard.__file__).parent)
    return not Path(file).is_absolute() or any(map(Path(file).is_relative_to, ours))


def policy_for(name: PolicyName, num_blocks: int) -> EvictionPolicy:
    """Return a policy over ids 1 to num_blocks - 1. Raises `InvalidArgument` and `PolicyError` as `make_policy`."""
    return make_policy(policy_of(name), num_blocks)


@contextmanager
def no_exit(name: str) -> Iterator[None]:
    """A policy's own code cannot end the command, which would end with success and without a number.

    Only what no `except Exception` catches becomes a `PolicyError` here; Ctrl-C stays what it is.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise PolicyError(f"policy {name}: it raised {type(error).__name__}: {error}") from error


def _member_of(path: Path, member: str, argument: str) -> object:
    found: object = getattr(_loaded(path, argument), member, None)
    if not callable(found):
        raise InvalidArgument(f"{argument} names {member} in {path}; there is no such class")
    return found


def _loaded(path: Path, argument: str) -> ModuleType:
    """Return the file as a module, which dataclasses and others look for in sys.modules while it is being made."""
    spec = importlib.util.spec_from_file_location(f"_blockyard_policy_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InvalidArgument(f"{argument} names {path}; it must be a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        with no_exit(str(path)):
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        if isinstance(error, PolicyError):
            raise
        raise PolicyError(f"{path}: it raised {type(error).__name__}: {error}") from error
    return module


_UNITS = {"": 1, "k": 1_000, "m": 1_000_000}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([km%]?)", re.IGNORECASE)
MAX_SIZES = 10_000
_MOST_DIGITS = 40


def parse_sizes(text: str, working_set: int) -> list[int]:
    """Return blocks of each pool in a list like "1000,10k,1.5M,25%", ascending, without repetitions.

    working_set: what a percentage is of; a share of less than a block is one block. Raises `InvalidArgument` for
    anything else, naming it.
    """
    sizes = {_parse_size(part.strip(), working_set) for part in text.split(",")}
    if len(sizes) > MAX_SIZES:
        raise InvalidArgument(f"blocks names {len(sizes)} sizes; it may name at most {MAX_SIZES}")
    return sorted(sizes)


def _parse_size(text: str, working_set: int) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InvalidArgument(f"blocks has {text!r}; a size is a number, like 1000, 10k, 1.5M, or a share, like 25%")
    if len(match[1]) > _MOST_DIGITS:
        raise InvalidArgument(f"blocks has a number of {len(match[1])} digits; it must be at most {MAX_BLOCKS}")
    number, unit = float(match[1]), match[2].lower()
    if unit == "%":
        return require_int("blocks", max(round(number * working_set / 100), 1), 1, MAX_BLOCKS)
    blocks = number * _UNITS[unit]
    if blocks != round(blocks):
        raise InvalidArgument(f"blocks has {text!r}, which is {blocks:g}; it must be a whole number of blocks")
    return require_int("blocks", round(blocks), 1, MAX_BLOCKS)


def spread_sizes(count: int, largest: int, smallest: int = 1) -> list[int]:
    """Return at most `count` sizes from `smallest` to `largest`, each about as many times the one before. Ascending."""
    require_int("count", count, 2, MAX_SIZES)
    return sorted({round(size) for size in np.geomspace(smallest, max(largest, smallest), count)})
