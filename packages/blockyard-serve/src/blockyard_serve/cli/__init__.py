"""The commands that blockyard-serve adds to `blockyard`."""

from blockyard.cli import Command

from .serve_options import add_fleet_serve_options, add_serve_options
from .watch import add_watch_options

__all__ = [
    "COMMANDS",
]

#: By name, for the entry point `blockyard.commands`.
COMMANDS = {
    "serve": Command(add_serve_options, f"{__name__}.serve", "run_serve"),
    "watch": Command(add_watch_options, f"{__name__}.watch", "run_watch"),
    "fleet serve": Command(add_fleet_serve_options, f"{__name__}.fleet_serve", "run_fleet_serve"),
}
