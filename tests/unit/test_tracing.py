"""A request is one span, with its own times, in its caller's trace."""

import sys
import time
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from chairlift.errors import ConfigError
from chairlift.request import GenerationOutput, RequestStatus
from chairlift.server.tracing import Tracing, connect


def output() -> GenerationOutput:
    now = time.perf_counter()
    return GenerationOutput(
        request_id="r",
        prompt_ids=[1, 2, 3],
        generated_tokens=[4, 5],
        num_cached_tokens=2,
        status=RequestStatus.FINISHED,
        finish_reason="length",
        created_time=now - 4.0,
        lifespan=(now - 3.0, now - 1.0),
        timestamps=[now - 2.0, now - 1.0],
    )


def span_of(output: GenerationOutput, **asked: object) -> ReadableSpan:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider, "a model")
    tracing.observe(output, **asked)  # type: ignore[arg-type]
    tracing.close()
    (span,) = exporter.get_finished_spans()
    return span


def test_a_span_says_what_was_asked_and_how_long_it_took() -> None:
    before = time.time_ns()
    span = span_of(output())
    assert span.name == "chat a model" and span.kind is SpanKind.SERVER and span.parent is None
    attributes = dict(span.attributes or {})
    assert attributes.pop("gen_ai.latency.e2e") == pytest.approx(3.0)
    assert attributes.pop("gen_ai.latency.time_in_queue") == pytest.approx(1.0)
    assert attributes.pop("gen_ai.latency.time_to_first_token") == pytest.approx(2.0)
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "chairlift",
        "gen_ai.request.model": "a model",
        "gen_ai.response.model": "a model",
        "gen_ai.response.id": "r",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 2,
    }
    assert span.start_time is not None and span.end_time is not None
    assert span.end_time - span.start_time == pytest.approx(3e9)
    assert before - 5e9 < span.start_time < before - 2e9, "by the clock on the wall"
    (event,) = span.events
    assert event.name == "first token" and event.timestamp - span.start_time == pytest.approx(2e9)


def test_a_span_belongs_to_the_trace_of_who_asked() -> None:
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "accept": "*/*"}
    span = span_of(output(), operation="text_completion", headers=headers)
    assert span.name == "text_completion a model"
    assert span.parent is not None and span.parent.span_id == 0xB7AD6B7169203331
    assert span.context is not None and span.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C


def test_a_request_that_failed_or_never_ran() -> None:
    failed = replace(output().failed(ArithmeticError("too large")), timestamps=None, lifespan=(-1.0, -1.0))
    span = span_of(failed)
    attributes = dict(span.attributes or {})
    assert span.status.status_code is StatusCode.ERROR and span.status.description == "ArithmeticError: too large"
    assert attributes["error.type"] == "ArithmeticError"
    assert attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert "gen_ai.latency.time_in_queue" not in attributes and not span.events


def test_spans_can_be_sent_away() -> None:
    provider = connect("http://127.0.0.1:9/v1/traces")
    assert Tracing(provider, "a model")
    provider.shutdown()  # type: ignore[attr-defined]


def test_without_opentelemetry_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'chairlift\[trace\]'"):
        connect()
