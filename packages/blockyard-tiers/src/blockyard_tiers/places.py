"""A text says which tier is meant: an address and options, as in `serve --tier file:/var/kv,bytes=50GiB`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from blockyard.amounts import parse_memory
from blockyard.arguments import require_bool, require_str
from blockyard.errors import InvalidArgument

from .files import FileTier
from .peer import PeerTier
from .uses import TierUse, require_write_policy

if TYPE_CHECKING:
    from .worker import WorkingTier

_OPTION = re.compile(r",(\w+)=([^,]*)")
_WRITE = re.compile(r",write=([^,]*)")
#: What may follow a place, after a comma, by its scheme.
_OPTIONS = {"file": {"bytes", "policy"}, "s3": {"endpoint", "region"}, "mooncake": {"lent", "admin"}}


def open_tier(name: str, text: str, *, evicts: bool = True, **more: Any) -> WorkingTier:
    """Open the tier that a text names: an address, and options after commas, as file:/var/kv,bytes=50GiB.

    name: the option, for the error. evicts: False for a tool, which keeps no budget and lends nothing: to look
    removes nothing. more: see `WorkingTier`.
    Raises `InvalidArgument` for another text, `MissingExtra` for an absent client.
    """
    evicts = require_bool("evicts", evicts)
    place, options = address_of(require_str(name, text)), dict(_OPTION.findall(text))
    scheme = place.partition(":")[0]
    unknown = sorted(set(options) - _OPTIONS.get(scheme, set()))
    if unknown:
        raise InvalidArgument(f"{name} is {text!r}; {unknown[0]} is no option of a {scheme} tier")
    if scheme == "file":
        folder = place.partition(":")[2]
        if not folder:
            raise InvalidArgument(f"{name} is {text!r}; a folder must follow file:")
        budget = parse_memory(f"{name}'s bytes", options["bytes"]) if "bytes" in options else 2**60
        return FileTier(folder, budget if evicts else 2**60, options.get("policy", "lru"), evicts, **more)
    if scheme in ("redis", "rediss", "unix"):
        from .redis import RedisTier

        return RedisTier(place, **more)
    if scheme in ("s3", "gs", "az"):
        from .buckets import ObjectTier

        return ObjectTier(place, config=options, **more)
    if scheme == "mooncake":
        from .mooncake import MooncakeTier

        lent = parse_memory(f"{name}'s lent", options["lent"]) if evicts and "lent" in options else 0
        admin = options.get("admin", "9003")
        if not admin.isdecimal():
            raise InvalidArgument(f"{name} is {text!r}; admin is {admin!r}, it must be a port")
        return MooncakeTier(place, lent, int(admin), **more)
    if scheme == "peer":
        return PeerTier(place, **more)
    schemes = "file:, redis://, unix://, s3://, gs://, az://, mooncake:// or peer:"
    raise InvalidArgument(f"{name} is {text!r}; it must begin with {schemes}")


def open_tier_use(name: str, text: str) -> TierUse:
    """Open the tier that an option of an engine's command names, with its write policy: file:/var/kv,write=back.

    Raises as `open_tier`, before the tier's storage is touched.
    """
    found = _WRITE.findall(text)
    write = require_write_policy(f"{name}'s write", found[-1] if found else "through")
    return TierUse(open_tier(name, _WRITE.sub("", text)), write)


def address_of(text: str) -> str:
    """Returns the text without its options."""
    return _OPTION.sub("", text)
