"""This package is the `blockyard` command."""

from .options import add_cache_field, add_command, parse_lengths
from .tables import as_csv, as_json, as_narrow_text, as_text

__all__ = [
    "add_cache_field",
    "add_command",
    "as_csv",
    "as_json",
    "as_narrow_text",
    "as_text",
    "parse_lengths",
]
