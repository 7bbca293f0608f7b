"""An OpenAI-compatible server over the engine: FastAPI and uvicorn in front, one thread that owns the engine behind.

    from blockyard_engine import Engine
    from blockyard_serve import Server, ServerOptions

    Server(Engine.from_pretrained("path/to/model"), ServerOptions(model_name="my-model", port=8000)).run()

Read it in this order; a folder imports only from those before it:

    errors, limits    what clients are told, and what they may ask for
    otlp              where spans of requests go
    openai/           requests and answers in OpenAI's words
    jobs/             the engine's side: prompts encoded, jobs queued, the thread that steps the engine, its metrics
    http/             the clients' side: uvicorn, paths, keys, deadlines, streams
    fleet/            the same over several engines, processes of Ray Serve, one of which may die

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
    from .http.server import Server, ServerOptions
    from .jobs.engine_thread import EngineThread

__all__ = ["ApiError", "EngineThread", "Server", "ServerLimits", "ServerOptions", "create_app"]

#: What takes seconds to import is imported when it is first asked for, so that wrong options are told at once.
_PLACES = {
    "EngineThread": ".jobs.engine_thread",
    "Server": ".http.server",
    "ServerOptions": ".http.server",
    "create_app": ".http.app",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for needed in ("fastapi", "prometheus_client", "uvicorn"):
        if find_spec(needed) is None:
            raise MissingExtra(f"blockyard_serve needs {needed}: pip install 'blockyard[serve]'")
    return getattr(import_module(_PLACES[name], __name__), name)
