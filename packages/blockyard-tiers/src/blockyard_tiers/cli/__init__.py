"""Commands that blockyard-tiers adds to `blockyard`."""

from blockyard.cli import Command

from .tier_command import add_tier_options

__all__ = [
    "COMMANDS",
]

#: Commands by name, for the entry point `blockyard.commands`.
COMMANDS = {
    "tier": Command(add_tier_options, f"{__name__}.tier_command", "run_tier"),
}
