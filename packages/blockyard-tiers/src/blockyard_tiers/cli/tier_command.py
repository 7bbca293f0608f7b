"""`blockyard tier`: lists, verifies, counts, drops, copies and serves the objects of a tier."""

from __future__ import annotations

import argparse
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockyard.errors import InvalidArgument

if TYPE_CHECKING:
    from .. import Header, WorkingTier

_DESCRIPTION = """\
Inspect a tier: files, Redis, a bucket or a Mooncake Store in which engines keep keys and values (docs/tiers.md).

  list      every object: its name, layout, bytes
  verify    read every object and verify each byte; --drop deletes bad ones
  stats     objects and bytes by layout
  drop      delete objects: by name, all of a layout, or all
  copy      every valid object to another tier
  serve     serve the objects to other engines, which use --tier peer:HOST:PORT, until Ctrl-C
"""

_EPILOG = """\
examples:
  blockyard tier stats file:kv-objects
  blockyard tier verify redis://127.0.0.1:6379/0 --drop
  blockyard tier serve file:/dev/shm/kv,bytes=20GiB 10.0.0.7:7600
  blockyard tier copy file:kv-objects s3://bucket/path,endpoint=http://127.0.0.1:9000
"""
_NAME = re.compile(r"[0-9a-f]{32}")


def add_tier_options(commands: Any) -> None:
    """Add the parser of `tier` to argparse's `commands`."""
    parser = commands.add_parser(
        "tier",
        help="inspect a tier: list, verify, count, drop, copy its objects",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=["list", "verify", "stats", "drop", "copy", "serve"])
    parser.add_argument(
        "tier",
        metavar="TIER",
        help="file:FOLDER, redis://..., unix://..., s3://..., gs://..., az://..., mooncake://HOST:PORT,admin=9003, "
        "peer:HOST:PORT",
    )
    parser.add_argument(
        "more", nargs="*", metavar="NAME|TIER", help="drop: names; copy: the other tier; serve: HOST:PORT"
    )
    parser.add_argument("--layout", metavar="HEX", help="list, drop: only objects of this layout")
    parser.add_argument("--all", action="store_true", help="drop: all objects")
    parser.add_argument("--drop", action="store_true", help="verify: delete bad objects")


@contextmanager
def _opened(name: str, text: str, evicts: bool = False) -> Iterator[WorkingTier]:
    from .. import open_tier

    tier = open_tier(name, text, evicts=evicts)
    try:
        yield tier
    finally:
        tier.close()


def run_tier(options: argparse.Namespace) -> int:
    """Run one action. Return 1 if verifying or copying met bad objects."""
    from .. import BackendError

    _require_arguments(options)
    if options.action == "serve":
        return _serve(options)
    _require_folder(options.tier)
    try:
        with _opened("tier", options.tier) as tier:
            if options.action == "copy":
                with _opened("target", options.more[0]) as target:
                    return _copy(tier, target)
            return _ACTIONS[options.action](tier, options)
    except BackendError as error:
        raise InvalidArgument(f"tier is {options.tier.rpartition('@')[2]!r}; {error.cause.value}: {error}") from None


def _require_folder(text: str) -> None:
    """Refuse a missing folder, which a tier would create: a misspelt one would look like an empty tier."""
    from ..tier_spec import address_of

    scheme, _, folder = address_of(text).partition(":")
    if scheme == "file" and folder and not Path(folder).is_dir():
        raise InvalidArgument(f"tier is {text!r}; there is no such folder")


def _require_arguments(options: argparse.Namespace) -> None:
    wanted = 1 if options.action in ("copy", "serve") else 0
    if options.action != "drop" and len(options.more) != wanted:
        raise InvalidArgument(f"{options.action} got {len(options.more)} more arguments; it takes {wanted}")
    if options.action == "drop" and [bool(options.more), options.all, options.layout is not None].count(True) != 1:
        raise InvalidArgument("drop takes either names, --layout or --all")
    names = options.more if options.action == "drop" else []
    for text in [*names, *([options.layout] if options.layout is not None else [])]:
        if not _NAME.fullmatch(text):
            raise InvalidArgument(f"{text!r} is not a name or layout; these have 32 lower-case hex digits")


def _headers(tier: WorkingTier, layout: str | None = None) -> Iterator[tuple[bytes, Header | None, str]]:
    """Yield each object's name, its header, and why the header is wrong, if it is. Vanished objects are skipped."""
    from .. import BadObject, Cause, Header
    from ..header import PAGE_BYTES

    for name, read in tier.objects():
        try:
            header = Header.from_page(read(PAGE_BYTES))
        except BadObject as error:
            if layout is None and error.cause is not Cause.ABSENT:
                yield name, None, error.cause.value
            continue
        if layout in (None, header.layout.hex()):
            yield name, header, "" if header.name == name else "foreign"


def _list(tier: WorkingTier, options: argparse.Namespace) -> int:
    for name, header, wrong in _headers(tier, options.layout):
        layout, length = ("-" * 32, 0) if header is None else (header.layout.hex(), header.length)
        print(f"{name.hex()}  {layout}  {length:>10}  {wrong}".rstrip())
    return 0


def _stats(tier: WorkingTier, options: argparse.Namespace) -> int:
    counts, sizes = Counter[str](), Counter[str]()
    for _, header, wrong in _headers(tier, options.layout):
        layout = wrong if header is None or wrong else header.layout.hex()
        counts[layout] += 1
        sizes[layout] += 0 if header is None else header.length
    for layout, count in sorted(counts.items()):
        print(f"{layout:<32}  {count:>10} objects  {sizes[layout]:>15} bytes")
    print(f"{'all':<32}  {counts.total():>10} objects  {sizes.total():>15} bytes")
    return 0


def _whole_objects(tier: WorkingTier) -> Iterator[tuple[bytes, bytes, str]]:
    """Yield each object's name, its bytes, and why they are wrong, if they are. Vanished objects are skipped."""
    from .. import BadObject, Cause
    from ..header import require_whole

    for name, read in tier.objects():
        try:
            data = read(None)
            require_whole(memoryview(data), name)
        except BadObject as error:
            if error.cause is not Cause.ABSENT:
                yield name, b"", error.cause.value
            continue
        yield name, data, ""


def _verify(tier: WorkingTier, options: argparse.Namespace) -> int:
    counts = Counter[str]()
    for name, _, wrong in _whole_objects(tier):
        counts[wrong] += 1
        if wrong:
            print(f"{name.hex()}  {wrong}")
            if options.drop:
                tier.remove_bad([name])
    bad = counts.total() - counts[""]
    print(f"{counts['']} objects are valid, {bad} are bad{' and deleted' if bad and options.drop else ''}")
    return 1 if bad else 0


def _drop(tier: WorkingTier, options: argparse.Namespace) -> int:
    if options.more:
        names = [bytes.fromhex(text) for text in options.more]
    else:
        names = list(tier.names()) if options.all else [name for name, _, _ in _headers(tier, options.layout)]
    tier.remove(names)
    print(f"{len(names)} objects dropped")
    return 0


def _copy(tier: WorkingTier, target: WorkingTier) -> int:
    counts = Counter[str]()
    for name, data, wrong in _whole_objects(tier):
        counts[wrong] += 1
        if not wrong:
            target.put(name, data)
    bad = counts.total() - counts[""]
    print(f"{counts['']} objects copied, {bad} bad ones skipped")
    return 1 if bad else 0


def _serve(options: argparse.Namespace) -> int:
    from .. import PeerServer

    with _opened("tier", options.tier, evicts=True) as tier:
        server = PeerServer(tier, options.more[0])
        print(f"{tier.name} is served to --tier peer:{options.more[0]}", flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
        server.close()
    return 0


_ACTIONS = {"list": _list, "verify": _verify, "stats": _stats, "drop": _drop}
