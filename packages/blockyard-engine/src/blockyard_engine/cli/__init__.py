"""The commands of `blockyard` that blockyard-engine brings."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from blockyard.cli import Command

from .engine_options import add_demo_options, add_generate_options

if TYPE_CHECKING:
    from .engine_options import add_cache_options as add_cache_options
    from .engine_options import add_device_options as add_device_options
    from .engine_options import add_model_options as add_model_options
    from .engine_options import add_rank_options as add_rank_options
    from .model_loading import DEMO_NAME as DEMO_NAME
    from .model_loading import engine_arguments as engine_arguments
    from .model_loading import engine_of as engine_of
    from .model_loading import follow_torchrun as follow_torchrun
    from .tenants import add_tenant_options as add_tenant_options
    from .tenants import read_tenant as read_tenant

__all__ = [
    "COMMANDS",
    "DEMO_NAME",
    "add_cache_options",
    "add_device_options",
    "add_model_options",
    "add_rank_options",
    "add_tenant_options",
    "engine_arguments",
    "engine_of",
    "follow_torchrun",
    "read_tenant",
]

#: By name, for the entry point `blockyard.commands`.
COMMANDS = {
    "generate": Command(add_generate_options, f"{__name__}.generate", "run_generate"),
    "demo": Command(add_demo_options, f"{__name__}.demo", "run_demo"),
}

#: Options and steps that the server's commands share, imported when they are first used.
_LATER = {
    "DEMO_NAME": ".model_loading",
    "add_cache_options": ".engine_options",
    "add_device_options": ".engine_options",
    "add_model_options": ".engine_options",
    "add_rank_options": ".engine_options",
    "add_tenant_options": ".tenants",
    "engine_arguments": ".model_loading",
    "engine_of": ".model_loading",
    "follow_torchrun": ".model_loading",
    "read_tenant": ".tenants",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name], __name__), name)
