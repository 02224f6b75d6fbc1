"""What the server counts, under the names that dashboards for vLLM read.

Everything is computed when somebody asks: gauges and counters from the manager's own statistics, histograms from what
the terminal outputs of requests have added up to. Refuses to know HTTP, and holds nothing outside the object.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from chairlift.request import GenerationOutput
from chairlift.stats import Stats

# The bounds of vLLM's histograms, so that the quantiles of a dashboard mean the same.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_NEXT_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", _FIRST_TOKEN),
    "inter_token_latency_seconds": ("Between two tokens of a request.", _NEXT_TOKEN),
    "request_time_per_output_token_seconds": ("Between two tokens, on average over a request.", _NEXT_TOKEN),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", _REQUEST),
    "request_queue_time_seconds": ("From a request's arrival to its first step.", _REQUEST),
    "request_inference_time_seconds": ("From a request's first step to its end.", _REQUEST),
    "request_prefill_time_seconds": ("From a request's first step to its first token.", _REQUEST),
    "request_decode_time_seconds": ("From a request's first token to its last.", _REQUEST),
    "request_prompt_tokens": ("Tokens of a request's prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens of a request's answer.", _TOKENS),
}
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "timeout": "timeout", "error": "error"}


class HasStats(Protocol):
    """What is asked of the manager."""

    def stats(self) -> Stats:
        """What the engine does now and has done."""
        ...


class Metrics(Collector):
    """The metrics of one application. `observe` and `render` may be called from any thread."""

    def __init__(self, manager: HasStats, model_name: str) -> None:
        self._manager = manager
        self._label = [model_name]
        self._lock = threading.Lock()  # over what follows
        self._histograms = {name: _Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._ended = dict.fromkeys(_REASONS.values(), 0)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def observe(self, output: GenerationOutput) -> None:
        """Count a request that has ended. Times that a request never came to (it was cancelled while it waited, say)
        are left out; those of tokens need `record_timestamps=True`."""
        times = _times_of(output)
        with self._lock:
            self._ended[_REASONS.get(output.finish_reason or "", "error")] += 1
            for name, values in times.items():
                self._histograms[name].add(values)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Body and content type of an answer to a scrape with this `Accept` header."""
        try:
            encode, content_type = choose_encoder(accept)
        except TypeError:  # a version in it that is no number
            encode, content_type = choose_encoder("")
        return encode(self._registry), content_type

    def describe(self) -> Iterable[Metric]:
        """Nothing: asked at registration, when there may be no statistics yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metrics, now."""
        stats = self._manager.stats()
        yield self._gauge("num_requests_running", "Requests that are being answered.", stats.running)
        yield self._gauge("num_requests_waiting", "Requests that wait.", stats.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache's blocks in use; 1 is all.", stats.cache_usage)
        prompt_tokens = stats.prompt_tokens + stats.prefix_hit_tokens
        yield self._counter("prompt_tokens", "Prompt tokens, computed or found in the cache.", prompt_tokens)
        yield self._counter("generation_tokens", "Generated tokens.", stats.generated_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queried_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.prefix_hit_tokens)
        yield self._counter("num_preemptions", "Requests that gave way to others.", stats.preemptions)
        with self._lock:
            ended = dict(self._ended)
            histograms = {name: histogram.snapshot() for name, histogram in self._histograms.items()}
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in ended.items():
            success.add_metric([*self._label, reason], count)
        yield success
        for name, (buckets, total) in histograms.items():
            family = HistogramMetricFamily(f"vllm:{name}", _HISTOGRAMS[name][0], labels=["model_name"])
            family.add_metric(self._label, buckets, total)
            yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        family.add_metric(self._label, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        family.add_metric(self._label, value)
        return family


class _Histogram:
    """Counts by upper bound. An answer of thousands of tokens adds thousands of values at once, so that this is a
    plain list and not one of prometheus-client's, which locks for each value."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, values: list[float]) -> None:
        for value in values:
            self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += sum(values)

    def snapshot(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by bound, as text, and the sum."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets, self._sum


def _times_of(output: GenerationOutput) -> dict[str, list[float]]:
    """What an ended request adds to each histogram."""
    begun, ended = output.lifespan
    values: dict[str, list[float]] = {
        "request_prompt_tokens": [float(len(output.prompt_ids))],
        "request_generation_tokens": [float(len(output.generated_tokens))],
    }
    if ended >= 0:
        values["e2e_request_latency_seconds"] = [ended - output.created_time]
    if begun >= 0:
        values["request_queue_time_seconds"] = [begun - output.created_time]
        values["request_inference_time_seconds"] = [ended - begun]
    if tokens := output.timestamps:
        decode = tokens[-1] - tokens[0]
        values["time_to_first_token_seconds"] = [tokens[0] - output.created_time]
        values["request_prefill_time_seconds"] = [tokens[0] - begun]
        values["request_decode_time_seconds"] = [decode]
        values["inter_token_latency_seconds"] = [after - before for before, after in pairwise(tokens)]
        if len(tokens) > 1:
            values["request_time_per_output_token_seconds"] = [decode / (len(tokens) - 1)]
    return values
