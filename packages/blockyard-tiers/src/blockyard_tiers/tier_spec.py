"""Opens tiers from text: an address and options, as in `serve --tier file:/var/kv,bytes=50GiB`."""

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
#: Options by scheme.
_OPTIONS = {"file": {"bytes", "policy"}, "s3": {"endpoint", "region"}, "mooncake": {"lent", "admin"}}


def open_tier(name: str, text: str, *, evicts: bool = True, **more: Any) -> WorkingTier:
    """Open the tier that a text names: an address, and options after commas, as in file:/var/kv,bytes=50GiB.

    Args:
        name: name of the argument, for errors.
        text: the address and options.
        evicts: False for a tool: no budget applies and no memory is lent, so that looking deletes nothing.
        **more: see `WorkingTier`.

    Raises:
        InvalidArgument: the text names no tier.
        MissingExtra: the tier's client is not installed.
    """
    evicts = require_bool("evicts", evicts)
    address, options = address_of(require_str(name, text)), dict(_OPTION.findall(text))
    scheme = address.partition(":")[0]
    unknown = sorted(set(options) - _OPTIONS.get(scheme, set()))
    if unknown:
        raise InvalidArgument(f"{name} is {text!r}; {unknown[0]} is not an option of a {scheme} tier")
    if scheme == "file":
        folder = address.partition(":")[2]
        if not folder:
            raise InvalidArgument(f"{name} is {text!r}; a folder must follow file:")
        budget = parse_memory(f"{name}'s bytes", options["bytes"]) if "bytes" in options else 2**60
        return FileTier(folder, budget if evicts else 2**60, options.get("policy", "lru"), evicts, **more)
    if scheme in ("redis", "rediss", "unix"):
        from .redis import RedisTier

        return RedisTier(address, **more)
    if scheme in ("s3", "gs", "az"):
        from .buckets import ObjectTier

        return ObjectTier(address, config=options, **more)
    if scheme == "mooncake":
        from .mooncake import MooncakeTier

        lent = parse_memory(f"{name}'s lent", options["lent"]) if evicts and "lent" in options else 0
        admin = options.get("admin", "9003")
        if not admin.isdecimal():
            raise InvalidArgument(f"{name} is {text!r}; its admin is {admin!r}, which must be a port")
        return MooncakeTier(address, lent, int(admin), **more)
    if scheme == "peer":
        return PeerTier(address, **more)
    schemes = "file:, redis://, unix://, s3://, gs://, az://, mooncake:// or peer:"
    raise InvalidArgument(f"{name} is {text!r}; it must begin with {schemes}")


def open_tier_use(name: str, text: str) -> TierUse:
    """Open the tier that an engine's option names, with its write policy: file:/var/kv,write=back.

    Raises as `open_tier` does, before the backend is used.
    """
    found = _WRITE.findall(text)
    write = require_write_policy(f"{name}'s write", found[-1] if found else "through")
    return TierUse(open_tier(name, _WRITE.sub("", text)), write)


def address_of(text: str) -> str:
    """Return the text without its options."""
    return _OPTION.sub("", text)
