"""Parses policies and pool sizes from the command line: lru, mine.py:Mine; 10k, 1.5M, 25%."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np

import blockyard
from blockyard.arguments import require_int
from blockyard.cache_options import MAX_BLOCKS
from blockyard.errors import InvalidArgument, PolicyError
from blockyard.policies import POLICIES, EvictionPolicy, make_policy

#: A name, or a callable (such as a class) that makes a policy from a number of blocks.
PolicyName = str | Callable[[int], EvictionPolicy]
#: The offline optimum. It may be listed among policies, but no pool can run it.
OPTIMUM = "optimum"


def parse_policies(text: str, argument: str = "policies") -> list[str]:
    """Return the distinct policies in a list such as "lru,arc,mine.py:Mine", in order.

    A class is loaded from its file and called with the number of blocks, as `CacheConfig(eviction_policy=...)` does.

    Args:
        text: the comma-separated list.
        argument: name of the list in errors.

    Raises:
        InvalidArgument: for an unknown policy.
    """
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name != OPTIMUM:
            policy_of(name, argument)
    return names


def policy_of(name: PolicyName, argument: str = "policies") -> object:
    """Return the value for `CacheConfig(eviction_policy=...)`.

    Args:
        name: name, file.py:Class, or a callable that makes a policy.
        argument: name of the list in errors.

    Raises:
        InvalidArgument: for an unknown policy.
    """
    if not isinstance(name, str):
        if not callable(name):
            raise InvalidArgument(
                f"{argument} has {name!r}; it must be a name or a callable that makes an EvictionPolicy"
            )
        return name
    if name in POLICIES:
        return name
    path, colon, member = name.rpartition(":")
    # For a name longer than file names may be, os.path.isfile returns False where Path raises.
    if not os.path.isfile(path):
        missing = f", but there is no file {path}" if colon else ""
        raise InvalidArgument(
            f"{argument} has {name!r}{missing}; it must be one of {', '.join(sorted(POLICIES))}, {OPTIMUM} (only in "
            f"`curve`), or a class: file.py:ClassName"
        )
    found: object = getattr(_load_module(Path(path), argument), member, None)
    if not callable(found):
        raise InvalidArgument(f"{argument} has {name!r}, but {path} has no class {member}")
    return found


def label_of(name: PolicyName) -> str:
    """Return the policy's name in results."""
    return name if isinstance(name, str) else str(getattr(name, "__name__", repr(name)))


def labels_of(names: Sequence[PolicyName]) -> list[str]:
    """Return the policies' names in results, with the folders of their files only if two files have one name."""
    short = [label_of(name).rpartition(os.sep)[2] for name in names]
    return [label if short.count(label) == 1 else label_of(name) for label, name in zip(short, names, strict=True)]


def error_location(error: BaseException) -> str:
    """Return where in a policy's file an error arose, such as " (mine.py:17)"; "" if unknown."""
    ours = (Path(__file__).parent, Path(blockyard.__file__).parent)
    files = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    # Compiled code has relative file names.
    lines = [(file, line) for file, line in files if file.is_absolute() and not any(map(file.is_relative_to, ours))]
    return f" ({lines[-1][0].name}:{lines[-1][1]})" if lines else ""


def policy_for(name: PolicyName, num_blocks: int) -> EvictionPolicy:
    """Return a policy over ids 1 to num_blocks - 1.

    Raises:
        InvalidArgument: for an unknown policy.
        PolicyError: if the policy's constructor fails.
    """
    return make_policy(policy_of(name), num_blocks)


@contextmanager
def exit_as_error(name: str) -> Iterator[None]:
    """Turn SystemExit and the like from a policy's code into `PolicyError`.

    Otherwise the command would end with success and no result. Exceptions and KeyboardInterrupt pass through.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise PolicyError(f"policy {name} raised {type(error).__name__}: {error}") from error


def _load_module(path: Path, argument: str) -> ModuleType:
    """Import a file. It is in `sys.modules` while it runs because dataclasses, for example, look for it there."""
    spec = importlib.util.spec_from_file_location(f"_blockyard_policy_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InvalidArgument(f"{argument} has {path}; it must be a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        with exit_as_error(str(path)):
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        if isinstance(error, PolicyError):
            raise
        raise PolicyError(f"importing {path} raised {type(error).__name__}: {error}") from error
    return module


_UNITS = {"": 1, "k": 1_000, "m": 1_000_000}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([km%]?)", re.IGNORECASE)
MAX_SIZES = 10_000
_MOST_DIGITS = 40


def parse_sizes(text: str, working_set: int) -> list[int]:
    """Return the pool sizes, in blocks, of a list such as "1000,10k,1.5M,25%". Ascending, without duplicates.

    Args:
        text: the comma-separated list.
        working_set: number of blocks that is 100 %. A percentage gives at least one block.

    Raises:
        InvalidArgument: for anything that is not a size.
    """
    sizes = {_parse_size(part.strip(), working_set) for part in text.split(",")}
    if len(sizes) > MAX_SIZES:
        raise InvalidArgument(f"blocks has {len(sizes)} sizes; it may have at most {MAX_SIZES}")
    return sorted(sizes)


def _parse_size(text: str, working_set: int) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InvalidArgument(f"blocks has {text!r}; a size is a number (1000, 10k, 1.5M) or a percentage (25%)")
    if len(match[1]) > _MOST_DIGITS:
        raise InvalidArgument(f"blocks has a number of {len(match[1])} digits; it must be at most {MAX_BLOCKS}")
    number, unit = float(match[1]), match[2].lower()
    if unit == "%":
        return require_int("blocks", max(round(number * working_set / 100), 1), 1, MAX_BLOCKS)
    blocks = number * _UNITS[unit]
    if blocks != round(blocks):
        raise InvalidArgument(f"blocks has {text!r}, that is {blocks:g}; it must be a whole number of blocks")
    return require_int("blocks", round(blocks), 1, MAX_BLOCKS)


def spread_sizes(count: int, largest: int, smallest: int = 1) -> list[int]:
    """Return at most `count` sizes from `smallest` to `largest`, geometrically spaced and ascending."""
    require_int("count", count, 2, MAX_SIZES)
    return sorted({round(size) for size in np.geomspace(smallest, max(largest, smallest), count)})
