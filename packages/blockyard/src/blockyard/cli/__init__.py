"""The `blockyard` command."""

from .._build import build_name
from .command import Command
from .options import add_cache_field, add_command, parse_lengths
from .parsing import parse
from .tables import as_csv, as_json, as_narrow_text, as_text

__all__ = [
    "Command",
    "add_cache_field",
    "add_command",
    "as_csv",
    "as_json",
    "as_narrow_text",
    "as_text",
    "build_name",
    "parse",
    "parse_lengths",
]
