"""Every command: its options, and where the work is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .curve_options import add_curve_options
from .demo_options import add_demo_options
from .generate_options import add_generate_options
from .plan_options import add_plan_options
from .replay_options import add_replay_options
from .serve_options import add_serve_options
from .watch_options import add_watch_options


@dataclass(frozen=True, slots=True)
class Command:
    """add_options: adds the parser to argparse's subparsers, without importing the work.
    module, function: where in this package the work is. extra: what `pip install 'blockyard[extra]'` brings it."""

    add_options: Callable[[Any], None]
    module: str
    function: str
    extra: str


COMMANDS = {
    "demo": Command(add_demo_options, "demo", "run_demo", "engine"),
    "replay": Command(add_replay_options, "replay", "run_replay", "lab"),
    "curve": Command(add_curve_options, "curve", "run_curve", "lab"),
    "plan": Command(add_plan_options, "plan", "run_plan", "lab"),
    "generate": Command(add_generate_options, "generate", "run_generate", "engine"),
    "serve": Command(add_serve_options, "serve", "run_serve", "serve"),
    "watch": Command(add_watch_options, "watch", "run_watch", "serve"),
}
