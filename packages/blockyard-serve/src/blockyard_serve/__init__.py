"""An OpenAI-compatible server: FastAPI and uvicorn in front of one thread that owns the engine.

    from blockyard_engine import Engine
    from blockyard_serve import Server, ServerOptions

    Server(Engine.from_pretrained("path/to/model"), ServerOptions(model_name="my-model", port=8000)).run()

Reading order; each folder imports only from those above it:

    errors, limits    error responses and the limits on requests
    otlp              export of request spans
    openai/           requests and responses of OpenAI's API
    jobs/             the engine's side: prompt encoding, the queue, the engine thread, its metrics
    http/             the clients' side: uvicorn, routes, keys, deadlines, streams
    fleet/            the same API over several engines, each a Ray Serve process that may fail

Needs fastapi, uvicorn and prometheus-client: `pip install 'blockyard[serve]'`.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from blockyard.errors import MissingExtra

from .errors import ApiError
from .limits import ServerLimits

if TYPE_CHECKING:
    from .http.app import create_app
    from .http.server import Server
    from .http.server_options import ServerOptions
    from .jobs.engine_thread import EngineThread

__all__ = ["ApiError", "EngineThread", "Server", "ServerLimits", "ServerOptions", "create_app"]

#: Imported on first use: these imports take seconds, and wrong options should be reported at once.
_MODULES = {
    "EngineThread": ".jobs.engine_thread",
    "Server": ".http.server",
    "ServerOptions": ".http.server_options",
    "create_app": ".http.app",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for needed in ("fastapi", "prometheus_client", "uvicorn"):
        if find_spec(needed) is None:
            raise MissingExtra(f"blockyard_serve needs {needed}: pip install 'blockyard[serve]'")
    return getattr(import_module(_MODULES[name], __name__), name)
