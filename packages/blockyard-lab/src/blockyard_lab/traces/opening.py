"""From a name to a trace: a file, a generator, or the trace that comes with the package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from blockyard.arguments import require_bool, require_int
from blockyard.errors import InvalidArgument, TraceError

from ..trace import Trace
from .formats import FORMATS, find_format
from .generators import GENERATORS
from .lines import MAX_REQUESTS
from .reading import FileTrace, FirstRequests

#: The file of the trace that comes with the package.
SHIPPED = Path(__file__).resolve().parent / "data" / "small.jsonl.gz"
#: What it was made from: `write_trace(open_trace(SHIPPED_FROM), SHIPPED)` makes the same file again.
SHIPPED_FROM = "mix:requests=320,seed=1,max_prompt_tokens=8192"
_SHIPPED_NAMES = ("default", "small")


def open_trace(
    source: str | os.PathLike[str],
    *,
    format: str = "auto",  # noqa: A002 - it is what callers look for
    strict: bool = False,
    tokenizer: str | None = None,
    max_requests: int | None = None,
) -> Trace:
    """Return the trace that `source` names. It is read anew, from the beginning, each time it is walked.

    source: a file; "default" or "small" for the trace that comes with the package; or a generator with its options,
    as in "chat:requests=1000,seed=3,turns=8". A file of such a name is reached as "./chat". Files may be plain, gzip
    or zstd (their first bytes say which, not their names) and are streamed: memory is that of the longest line.
    format: one of `FORMATS`; "auto" takes what the first usable line says.
    strict: raise at the first line that has to be left out or corrected, instead of counting it in `skips`.
    tokenizer: a folder with transformers' tokenizer, for traces of text.
    max_requests: stop after this many.

    Raises `TraceError` if there is no such file, it is empty or of no known format; a walk raises it for a damaged
    file, for a strict trace's first problem, and at the end if no request could be read at all. Raises
    `InvalidArgument` for a wrong option, `MissingExtra` for zstd or text without their packages.
    """
    require_bool("strict", strict)
    if max_requests is not None:
        require_int("max_requests", max_requests, 1, MAX_REQUESTS)
    if format not in ("auto", *FORMATS):
        raise InvalidArgument(f"format is {format!r}; it must be auto, {', '.join(FORMATS)}")
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
        raise InvalidArgument(f"source is {source!r}; it must be a file's path or a generator such as chat:seed=1")
    if isinstance(source, str) and source.partition(":")[0] in GENERATORS:
        return _generated(source, format, tokenizer, max_requests)
    if isinstance(source, str) and _reads_as_made(source) and not Path(source).exists():
        raise TraceError(f"there is no file {source}, and no generator; generators are {', '.join(GENERATORS)}")
    path = SHIPPED if source in _SHIPPED_NAMES else Path(source)
    trace = FileTrace(path, find_format(path, format, tokenizer), strict)
    return trace if max_requests is None else FirstRequests(trace, max_requests)


def _reads_as_made(source: str) -> bool:
    """Return whether it may be meant as a generator: it has options, or is a bare word."""
    return source not in _SHIPPED_NAMES and (("=" in source and ":" in source) or source.isidentifier())


def make_trace(kind: str, *, requests: int, seed: int, **options: Any) -> Trace:
    """Return the trace that a generator makes: one of `GENERATORS`, whose classes say what options they have.

    Raises `InvalidArgument` for a kind or an option that does not exist, and for a value outside its limits.
    """
    if not isinstance(kind, str) or kind not in GENERATORS:
        raise InvalidArgument(f"kind is {kind!r}; it must be one of {', '.join(GENERATORS)}")
    generator = GENERATORS[kind]
    known = generator.__dataclass_fields__
    for name in options:
        if name not in known:
            raise InvalidArgument(f"{kind} has no option {name!r}; it has {', '.join(known)}")
    return generator(requests=requests, seed=seed, **options)


def _generated(spec: str, wanted: str, tokenizer: str | None, max_requests: int | None) -> Trace:
    if wanted != "auto" or tokenizer is not None:
        raise InvalidArgument(f"format and tokenizer are for files; {spec} is made by a generator")
    kind, _, text = spec.partition(":")
    options: dict[str, Any] = {"requests": 1000, "seed": 0}
    named: set[str] = set()
    for assignment in filter(None, text.split(",")):
        name, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or name in named:
            raise InvalidArgument(f"{spec} has {assignment!r}; options are written name=value, each once")
        named.add(name)
        options[name] = _number(name, value)
    if max_requests is not None:
        options["requests"] = min(options["requests"], max_requests)
    return make_trace(kind, **options)


def _number(name: str, text: str) -> float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise InvalidArgument(f"{name} is {text!r}; it must be a number")
