"""A tracer that sends its spans to a collector of OpenTelemetry."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from blockyard.errors import InvalidArgument, MissingExtra

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


def otlp_tracer(endpoint: str) -> Tracer:
    """Spans go to `endpoint` by OTLP over HTTP (http://localhost:4318/v1/traces, say), in the background, in batches.

    What is left is sent when the process ends. The environment's OTEL_SERVICE_NAME and its like hold; the service is
    called "blockyard" where nothing else is said. Raises `InvalidArgument` for what is no http address, `MissingExtra`
    without opentelemetry's SDK and exporter.
    """
    if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).netloc:
        raise InvalidArgument(f"otlp_traces_endpoint is {endpoint!r}; it must begin with http:// or https://")
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
