"""What the server counts, under the names that dashboards for vLLM read.

Everything is computed when somebody asks: gauges and counters from the manager's own statistics, histograms from what
the terminal outputs of requests have added up to. Refuses to know HTTP, and holds nothing outside the object.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from chairlift.request import GenerationOutput
from chairlift.stats import STEP_SIZES, Stats

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
    "request_max_num_generation_tokens": ("The same: each of several answers counts for itself.", _TOKENS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens of a request that no cache held.", _TOKENS),
    "request_params_n": ("Answers that were asked for.", (1.0, 2.0, 5.0, 10.0, 20.0)),
    "request_params_max_tokens": ("Tokens of an answer that were allowed, where somebody said so.", _TOKENS),
}
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "timeout": "timeout", "error": "error"}


_UNCOUNTED = frozenset({"/metrics", "/health"})  # asked all the time, by machines


class HasStats(Protocol):
    """What is asked of the manager."""

    @property
    def config(self) -> Any:
        """The resolved config."""
        ...

    @property
    def is_usable(self) -> bool:
        """Neither destroyed nor crashed."""
        ...

    def stats(self) -> Stats:
        """What the engine does now and has done."""
        ...


class Metrics(Collector):
    """The metrics of one application. `observe` and `render` may be called from any thread."""

    def __init__(self, manager: HasStats, model_name: str) -> None:
        self._manager = manager
        self._labels = {"model_name": model_name, "engine": "0"}  # of several engines, there is one
        self._lock = threading.Lock()  # over what follows
        self._histograms = {name: _Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._ended = dict.fromkeys(_REASONS.values(), 0)
        self._responses: dict[tuple[str, str, str], int] = {}  # by handler, method and class of status
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

    def admit(self, num_prompts: int, num_answers: int, max_tokens: int | None) -> None:
        """Count what was asked for; max_tokens: None, if nobody said."""
        with self._lock:
            self._histograms["request_params_n"].add([float(num_answers)] * num_prompts)
            if max_tokens is not None:
                self._histograms["request_params_max_tokens"].add([float(max_tokens)] * num_prompts)

    def respond(self, handler: str, method: str, status: int) -> None:
        """Count an HTTP response. handler: the path of its route, "none" without one."""
        if handler not in _UNCOUNTED:
            key = (handler, method, f"{status // 100}xx")
            with self._lock:
                self._responses[key] = self._responses.get(key, 0) + 1

    def render(self) -> tuple[bytes, str]:
        """Body and content type of the answer to a scrape. Always the plain format, which every scraper reads:
        prometheus-client's OpenMetrics writes `vllm_` where dashboards ask for `vllm:`."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def describe(self) -> Iterable[Metric]:
        """Nothing: asked at registration, when there may be no statistics yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metrics, now."""
        stats, config = self._manager.stats(), self._manager.config
        prompt_tokens = stats.prompt_tokens + stats.prefix_hit_tokens
        yield self._gauge("num_requests_running", "Requests that are being answered.", {"": stats.running})
        yield self._gauge("num_requests_waiting", "Requests that wait.", {"": stats.waiting})
        waiting = {"capacity": stats.waiting, "deferred": 0}
        yield self._gauge("num_requests_waiting_by_reason", "Requests that wait, and for what.", waiting, "reason")
        usage = {"": stats.cache_usage}
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache's blocks in use; 1 is all.", usage)
        if self._manager.is_usable:  # a dead engine neither sleeps nor is awake
            asleep = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
            yield self._gauge("engine_sleep_state", "1 for the state that the engine is in.", asleep, "sleep_state")
        yield self._counter("prompt_tokens", "Prompt tokens, computed or found in the cache.", {"": prompt_tokens})
        sources = {"local_compute": stats.prompt_tokens, "local_cache_hit": stats.prefix_hit_tokens}
        yield self._counter("prompt_tokens_by_source", "Prompt tokens, and where their KV is from.", sources, "source")
        found = {"": stats.prefix_hit_tokens}
        yield self._counter("prompt_tokens_cached", "Prompt tokens found in the cache.", found)
        yield self._counter("generation_tokens", "Generated tokens.", {"": stats.generated_tokens})
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", {"": stats.prefix_queried_tokens})
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", found)
        yield self._counter("num_preemptions", "Requests that gave way to others.", {"": stats.preemptions})
        yield self._cache_config(stats, config)
        with self._lock:
            ended, responses = dict(self._ended), dict(self._responses)
            histograms = {name: histogram.snapshot() for name, histogram in self._histograms.items()}
        yield self._counter("request_success", "Requests that ended, by reason.", ended, "finished_reason")
        for name, (buckets, total) in histograms.items():
            yield self._histogram(name, _HISTOGRAMS[name][0], buckets, total)
        sizes, total = _cumulative(STEP_SIZES, stats.step_sizes), stats.prompt_tokens + stats.generated_tokens
        yield self._histogram("iteration_tokens_total", "Tokens of a step, of prompts and generated.", sizes, total)
        answered = CounterMetricFamily("http_requests", "HTTP responses.", labels=["handler", "method", "status"])
        for key, count in responses.items():
            answered.add_metric(list(key), count)
        yield answered

    def _gauge(self, name: str, text: str, values: Mapping[str, float], label: str | None = None) -> Metric:
        return self._filled(GaugeMetricFamily(f"vllm:{name}", text, labels=self._names(label)), values)

    def _counter(self, name: str, text: str, values: Mapping[str, float], label: str | None = None) -> Metric:
        return self._filled(CounterMetricFamily(f"vllm:{name}", text, labels=self._names(label)), values)

    def _histogram(self, name: str, text: str, buckets: list[tuple[str, float]], total: float) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, total)
        return family

    def _names(self, label: str | None) -> list[str]:
        return [*self._labels, *([] if label is None else [label])]

    def _filled(
        self, family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]
    ) -> GaugeMetricFamily | CounterMetricFamily:
        """With a sample for each value of the family's own label, which is "" where it has none."""
        for own, value in values.items():
            family.add_metric([*self._labels.values(), *([own] if own else [])], value)
        return family

    def _cache_config(self, stats: Stats, config: Any) -> Metric:
        """A gauge that is always 1: what it says is in its labels, which vLLM has named after its first device."""
        facts = {
            "engine": self._labels["engine"],
            "block_size": str(config.page_size),
            "num_gpu_blocks": str(stats.total_blocks),
            "enable_prefix_caching": str(config.allow_block_sharing),
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=list(facts))
        family.add_metric(list(facts.values()), 1)
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
        """Cumulative counts by bound, and the sum."""
        return _cumulative(self._bounds, self._counts), self._sum


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """By bound, as text: how many are up to it. There is one count more than bounds."""
    return list(zip((*(str(float(bound)) for bound in bounds), "+Inf"), accumulate(counts), strict=True))


def _times_of(output: GenerationOutput) -> dict[str, list[float]]:
    """What an ended request adds to each histogram."""
    begun, ended = output.lifespan
    values: dict[str, list[float]] = {
        "request_prompt_tokens": [float(len(output.prompt_ids))],
        "request_generation_tokens": [float(len(output.generated_tokens))],
        "request_max_num_generation_tokens": [float(len(output.generated_tokens))],
    }
    if ended >= 0:
        values["e2e_request_latency_seconds"] = [ended - output.created_time]
    if begun >= 0:
        values["request_prefill_kv_computed_tokens"] = [float(len(output.prompt_ids) - output.num_cached_tokens)]
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
