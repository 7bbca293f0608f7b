"""An OpenAI-compatible server over the engine: FastAPI and uvicorn in front, one thread that owns the engine behind.

    from blockyard.engine import Engine
    from blockyard.serving import Server, ServerOptions

    Server(Engine.from_pretrained("path/to/model"), ServerOptions(model_name="my-model", port=8000)).run()

Read it in this order, a file at a time:

    errors, limits         what clients are told, and what they may ask for
    fields, protocol       the fields of a request: understood, harmless, refused
    refusals               what was wrong with them, in a client's words
    jobs                   what goes to the engine thread and what comes back
    engine_thread          the one thread that steps the engine
    recovery               who made a step fail, found by trying each request alone
    prompts                text and chats to token ids, in a thread of their own
    body, access           a bounded body; the API key
    deadline               the time that a request has, from its arrival
    planning               from a client's request to jobs, within the limits
    running                a client's request from its jobs to its end
    logprobs, forms        answers in OpenAI's shapes, whole and in pieces
    streaming              server-sent events, and clients that vanish
    figures, metrics       what Prometheus is told
    routes, app            the paths
    request_log            an id and a line of the log for each request
    listening              the address, taken first
    connections, server    uvicorn, slow clients, and the way it stops

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

from .app import create_app
from .engine_thread import EngineThread
from .errors import ApiError
from .limits import ServerLimits
from .server import Server, ServerOptions

__all__ = ["ApiError", "EngineThread", "Server", "ServerLimits", "ServerOptions", "create_app"]
