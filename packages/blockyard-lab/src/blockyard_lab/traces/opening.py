"""Opens traces: files, generators, and the trace that comes with the package."""

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
from .trace_file import FileTrace, FirstRequests
from .weka import WekaTrace, is_archive, require_archive

#: The trace that comes with the package.
SHIPPED = Path(__file__).resolve().parent / "data" / "small.jsonl.gz"
#: Its source: `write_trace(open_trace(SHIPPED_FROM), SHIPPED)` writes the same file again.
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
    """Return the trace that `source` names. Each walk over it starts from the beginning.

    Args:
        source: a file; "default" or "small" for the trace that comes with the package; or a generator with options,
            such as "chat:requests=1000,seed=3,turns=8". Write "./chat" for a file of such a name. Files may be plain,
            gzip or zstd, detected by their first bytes; WEKA's are a tar archive. They are streamed: memory is that of
            the longest line or session.
        format: one of `FORMATS`, or "auto" to decide by the first usable line.
        strict: raise at the first line that would be left out or corrected, instead of counting it in `skips`.
        tokenizer: folder of a transformers tokenizer, for traces of text.
        max_requests: number of requests to stop after.

    Raises:
        TraceError: if the file does not exist, is empty, or has no known format. A walk raises it for a damaged file,
            at the first problem of a strict trace, and at the end if there was no request.
        InvalidArgument: for an invalid option.
        MissingExtra: for zstd or text if the packages they need are not installed.
    """
    require_bool("strict", strict)
    if max_requests is not None:
        require_int("max_requests", max_requests, 1, MAX_REQUESTS)
    if format not in ("auto", *FORMATS):
        raise InvalidArgument(f"format is {format!r}; it must be auto, {', '.join(FORMATS)}")
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
        raise InvalidArgument(f"source is {source!r}; it must be a file's path or a generator such as chat:seed=1")
    if isinstance(source, str) and source.partition(":")[0] in GENERATORS:
        return _make_from_spec(source, format, tokenizer, max_requests)
    path = SHIPPED if source in _SHIPPED_NAMES else Path(source)
    looks_like_spec = isinstance(source, str) and (source.isidentifier() or ("=" in source and ":" in source))
    if looks_like_spec and not path.exists():
        raise TraceError(f"source is {source!r}; it is neither a file nor a generator: {', '.join(GENERATORS)}")
    trace: FileTrace | WekaTrace
    if format == "weka" or (format == "auto" and is_archive(path)):
        require_archive(path)
        trace = WekaTrace(path, strict)
    else:
        trace = FileTrace(path, find_format(path, format, tokenizer), strict)
    return trace if max_requests is None else FirstRequests(trace, max_requests)


def make_trace(kind: str, *, requests: int, seed: int, **options: Any) -> Trace:
    """Return a generator's trace.

    Args:
        kind: one of `GENERATORS`.
        requests: number of requests.
        seed: seed of everything random.
        options: the generator's own options; its class lists them.

    Raises:
        InvalidArgument: for an unknown kind or option, or a value outside its limits.
    """
    if not isinstance(kind, str) or kind not in GENERATORS:
        raise InvalidArgument(f"kind is {kind!r}; it must be one of {', '.join(GENERATORS)}")
    generator = GENERATORS[kind]
    known = generator.__dataclass_fields__
    for name in options:
        if name not in known:
            raise InvalidArgument(f"{kind} has no option {name!r}; it has {', '.join(known)}")
    return generator(requests=requests, seed=seed, **options)


def _make_from_spec(spec: str, wanted: str, tokenizer: str | None, max_requests: int | None) -> Trace:
    if wanted != "auto" or tokenizer is not None:
        raise InvalidArgument(f"format is {wanted!r} and tokenizer {tokenizer!r}; omit both for a generator, {spec}")
    kind, _, text = spec.partition(":")
    options: dict[str, Any] = {"requests": 1000, "seed": 0}
    named: set[str] = set()
    for assignment in filter(None, text.split(",")):
        name, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or name in named:
            raise InvalidArgument(f"{spec} has option {assignment!r}; options are name=value, each given once")
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
