"""Options of a server, and of the application without the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..limits import ServerLimits

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of a server.

    Attributes:
        model_name: name of the model for clients.
        host: address to listen on.
        port: port to listen on; 0 for any free one.
        api_key: key that clients must send; None for none. Never shown.
        limits: limits on requests.
        access_log: whether to log every request (on stderr).
        has_check: whether to add GET /check.
        cors_origins: origins of web pages that may use the server, as "http://localhost:3000"; "*" for all.
        allowed_hosts: host names under which requests may come, besides `host` and those of loopback; "*" for all.
            Without any, all names are allowed, except on loopback without a key.
        status_seconds: seconds of work between two status lines in the log; 0 for none.
        tenant_metrics: number of tenants that GET /metrics shows by name, at most 100.
        tracer: OpenTelemetry tracer for spans of requests; None for no tracing.
        ui: the page under /ui: "text" (with prompts), "map" (without prompts) or "off".
        tenant_keys: API keys of tenants by name (docs/tenants.md). Never shown.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    limits: ServerLimits = field(default_factory=ServerLimits)
    access_log: bool = False
    has_check: bool = False
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    status_seconds: float = 10.0
    tenant_metrics: int = 0
    tracer: Tracer | None = None
    ui: str = "text"
    tenant_keys: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def has_key(self) -> bool:
        """True if requests need a key."""
        return self.api_key is not None or bool(self.tenant_keys)
