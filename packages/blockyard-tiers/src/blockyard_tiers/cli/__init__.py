"""The commands of `blockyard` that blockyard-tiers brings."""

from blockyard.cli import Command

from .tier import add_tier_options

__all__ = [
    "COMMANDS",
]

#: By name, for the entry point `blockyard.commands`.
COMMANDS = {
    "tier": Command(add_tier_options, f"{__name__}.tier", "run_tier"),
}
