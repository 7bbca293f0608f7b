"""The commands of blockyard-engine: `blockyard generate` and `blockyard demo`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from blockyard.cli import Command

from .command_options import add_demo_options, add_generate_options

if TYPE_CHECKING:
    from .command_options import add_cache_options as add_cache_options
    from .command_options import add_device_options as add_device_options
    from .command_options import add_model_options as add_model_options
    from .command_options import add_rank_options as add_rank_options
    from .model_loading import DEMO_NAME as DEMO_NAME
    from .model_loading import engine_arguments as engine_arguments
    from .model_loading import follow_torchrun as follow_torchrun
    from .model_loading import load_engine as load_engine
    from .tenant_options import add_tenant_options as add_tenant_options
    from .tenant_options import read_tenant as read_tenant

__all__ = [
    "COMMANDS",
    "DEMO_NAME",
    "add_cache_options",
    "add_device_options",
    "add_model_options",
    "add_rank_options",
    "add_tenant_options",
    "engine_arguments",
    "follow_torchrun",
    "load_engine",
    "read_tenant",
]

#: Commands by name, for the entry point `blockyard.commands`.
COMMANDS = {
    "generate": Command(add_generate_options, f"{__name__}.generate", "run_generate"),
    "demo": Command(add_demo_options, f"{__name__}.demo", "run_demo"),
}

#: Modules of the names that the server's commands share, imported on first use.
_LAZY_MODULES = {
    "DEMO_NAME": ".model_loading",
    "add_cache_options": ".command_options",
    "add_device_options": ".command_options",
    "add_model_options": ".command_options",
    "add_rank_options": ".command_options",
    "add_tenant_options": ".tenant_options",
    "engine_arguments": ".model_loading",
    "load_engine": ".model_loading",
    "follow_torchrun": ".model_loading",
    "read_tenant": ".tenant_options",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY_MODULES[name], __name__), name)
