"""One OpenTelemetry span per request, with the attributes of the GenAI conventions.

A span is made when the request has ended, from the times in its last output: while it runs, nothing is recorded.
OpenTelemetry (the extra `trace`) is imported only by those who make a `Tracing`; without one there is nothing to pay.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from chairlift.errors import ConfigError
from chairlift.request import GenerationOutput, RequestStatus

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider
    from opentelemetry.util.types import AttributeValue


def connect(endpoint: str | None = None) -> "TracerProvider":
    """A provider that sends spans to an OTLP endpoint over HTTP; None: the one in OpenTelemetry's own variables.

    Raises ConfigError, with the remedy, where OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"traces need {missing.name}, which is not installed: pip install 'chairlift[trace]'"
        ) from None
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "chairlift"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class Tracing:
    """Makes the spans of one application. `observe` may be called from any thread."""

    def __init__(self, provider: "TracerProvider", model_name: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("chairlift")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def observe(
        self, output: GenerationOutput, *, operation: str = "chat", headers: Mapping[str, str] | None = None
    ) -> None:
        """Record a request that has ended.

        operation: `chat` or `text_completion`. headers: of the HTTP request, by lower-case name; with a `traceparent`
        the span belongs to the caller's trace.
        """
        from opentelemetry.trace import SpanKind, StatusCode

        now, wall = time.perf_counter(), time.time_ns()

        def wall_time(moment: float) -> int:
            return wall - round((now - moment) * 1e9)

        ended = output.lifespan[1] if output.lifespan[1] >= 0 else now
        span = self._tracer.start_span(
            f"{operation} {self._model_name}",
            context=self._propagator.extract(dict(headers or {})),
            kind=SpanKind.SERVER,
            attributes=self._attributes(output, operation, ended),
            start_time=wall_time(output.created_time),
        )
        if output.timestamps:
            span.add_event("first token", timestamp=wall_time(output.timestamps[0]))
        if output.status is RequestStatus.FAILED:
            span.set_status(StatusCode.ERROR, output.error)
        span.end(end_time=wall_time(ended))

    def close(self) -> None:
        """Send what is left."""
        shutdown: Any = getattr(self._provider, "shutdown", None)
        if shutdown is not None:
            shutdown()

    def _attributes(self, output: GenerationOutput, operation: str, ended: float) -> "dict[str, AttributeValue]":
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "chairlift",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.id": output.request_id,
            "gen_ai.response.finish_reasons": [output.finish_reason or "error"],
            "gen_ai.usage.input_tokens": len(output.prompt_ids),
            "gen_ai.usage.output_tokens": len(output.generated_tokens),
            "gen_ai.usage.cache_read.input_tokens": output.num_cached_tokens,
            "gen_ai.latency.e2e": ended - output.created_time,
        }
        if output.lifespan[0] >= 0:
            attributes["gen_ai.latency.time_in_queue"] = output.lifespan[0] - output.created_time
        if output.timestamps:
            attributes["gen_ai.latency.time_to_first_token"] = output.timestamps[0] - output.created_time
        if output.exception is not None:
            attributes["error.type"] = type(output.exception).__name__
        return attributes
