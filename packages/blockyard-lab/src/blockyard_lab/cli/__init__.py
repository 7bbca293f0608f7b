"""The subcommands of `blockyard` in this package."""

from blockyard.cli import Command

from .lab_options import add_curve_options, add_fleet_options, add_plan_options, add_replay_options

__all__ = [
    "COMMANDS",
]

#: By name, for the entry point `blockyard.commands`.
COMMANDS = {
    "replay": Command(add_replay_options, f"{__name__}.replay", "run_replay"),
    "curve": Command(add_curve_options, f"{__name__}.curve", "run_curve"),
    "plan": Command(add_plan_options, f"{__name__}.plan", "run_plan"),
    "fleet": Command(add_fleet_options, f"{__name__}.fleet", "run_fleet"),
}
