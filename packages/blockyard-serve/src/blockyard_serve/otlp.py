"""A tracer that exports spans to an OpenTelemetry collector."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from blockyard.errors import InvalidArgument, MissingExtra

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


def otlp_tracer(endpoint: str) -> Tracer:
    """Return a tracer that sends spans to `endpoint` by OTLP over HTTP, in batches from a background thread.

    Pending spans are sent when the process exits. Environment variables such as OTEL_SERVICE_NAME apply; the default
    service name is "blockyard".

    Args:
        endpoint: URL of the collector, for example http://localhost:4318/v1/traces.

    Raises:
        InvalidArgument: if `endpoint` is not an http or https URL.
        MissingExtra: if opentelemetry's SDK or exporter is not installed.
    """
    if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).netloc:
        raise InvalidArgument(f"otlp_traces_endpoint is {endpoint!r}; it must be a URL with http:// or https://")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MissingExtra(f"tracing needs {error.name}: pip install 'blockyard[tracing]'") from error
    named = Resource({"service.name": "blockyard"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    tracer: Tracer = provider.get_tracer("blockyard")
    return tracer
