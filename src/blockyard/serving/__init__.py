"""An OpenAI-compatible server over the engine: FastAPI and uvicorn in front, one thread that owns the engine behind.

    from blockyard.engine import Engine
    from blockyard.serving import Server, ServerOptions

    Server(Engine.from_pretrained("path/to/model"), ServerOptions(model_name="my-model", port=8000)).run()

Read it in this order; a folder imports only from those before it:

    errors, limits    what clients are told, and what they may ask for
    otlp              where spans of requests go
    openai/           requests and answers in OpenAI's words
    jobs/             the engine's side: prompts encoded, jobs queued, the thread that steps the engine, its metrics
    http/             the clients' side: uvicorn, paths, keys, deadlines, streams

Needs fastapi, uvicorn and prometheus-client: `pip install 'blockyard[serve]'`.
"""

from ..errors import MissingExtra

try:
    import fastapi as _fastapi  # noqa: F401  # asked for here, so that its absence is said in one sentence
    import prometheus_client as _prometheus_client  # noqa: F401
    import uvicorn as _uvicorn  # noqa: F401
except ImportError as error:
    raise MissingExtra(
        f"blockyard.serving needs {error.name or 'fastapi and uvicorn'}: pip install 'blockyard[serve]'"
    ) from error

from .errors import ApiError
from .http.app import create_app
from .http.server import Server, ServerOptions
from .jobs.engine_thread import EngineThread
from .limits import ServerLimits

__all__ = ["ApiError", "EngineThread", "Server", "ServerLimits", "ServerOptions", "create_app"]
