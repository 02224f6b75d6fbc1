"""What a scrape reads: real requests counted, under vLLM's names, in Prometheus' own format read by its own parser."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families as parse

from chairlift.request import GenerationOutput, RequestStatus
from chairlift.server.metrics import Metrics
from chairlift.stats import Stats, StepRecorder
from tests.server import toy


class Resting:
    """A manager that has done nothing yet."""

    config = SimpleNamespace(page_size=16, allow_block_sharing=True)
    is_usable = True

    def stats(self) -> Stats:
        blocks = {"free_blocks": 4, "cached_blocks": 1, "used_blocks": 5, "total_blocks": 10}
        counters = {"preemptions": 3, "swaps": 0, "prefix_hit_tokens": 20, "prefix_queried_tokens": 80}
        recorder = StepRecorder()
        recorder.record(prompt_tokens=60, generated_tokens=7, schedule=0.0, device=0.0, commit=0.0)
        return recorder.snapshot(running=2, waiting=1, **blocks, **counters)


def read(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Each sample by its name and its label beside the model's."""
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain; version=")
    samples = {}
    for family in parse(body.decode()):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                labels = dict(sample.labels)
                assert labels.pop("model_name", "a model") == "a model"
                assert labels.pop("engine") == "0"
                samples[sample.name, next(iter(labels.values()), "")] = sample.value
    return samples


OUTPUT = GenerationOutput(
    request_id="r",
    prompt_ids=[1, 2, 3],
    generated_tokens=[4, 5, 6],
    status=RequestStatus.FINISHED,
    finish_reason="stop",
    created_time=100.0,
    lifespan=(100.5, 103.0),
    num_cached_tokens=1,
    timestamps=[101.0, 101.03, 103.0],
)


def test_the_state_of_the_engine() -> None:
    samples = read(Metrics(Resting(), "a model"))
    assert samples["vllm:num_requests_running", ""] == 2
    assert samples["vllm:num_requests_waiting", ""] == 1
    assert samples["vllm:kv_cache_usage_perc", ""] == 0.5
    assert samples["vllm:prompt_tokens_total", ""] == 80
    assert samples["vllm:generation_tokens_total", ""] == 7
    assert samples["vllm:prefix_cache_queries_total", ""] == 80
    assert samples["vllm:prefix_cache_hits_total", ""] == 20
    assert samples["vllm:num_preemptions_total", ""] == 3
    assert samples["vllm:num_requests_waiting_by_reason", "capacity"] == 1
    assert samples["vllm:prompt_tokens_cached_total", ""] == 20
    assert samples["vllm:prompt_tokens_by_source_total", "local_compute"] == 60
    assert samples["vllm:prompt_tokens_by_source_total", "local_cache_hit"] == 20
    assert samples["vllm:engine_sleep_state", "awake"] == 1
    assert samples["vllm:request_success_total", "stop"] == 0, "a counter is there before it counts"
    assert samples["vllm:e2e_request_latency_seconds_count", ""] == 0
    steps = {bound: value for (name, bound), value in samples.items() if name == "vllm:iteration_tokens_total_bucket"}
    sizes = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
    assert steps == {str(float(size)): float(size >= 67) for size in sizes} | {"+Inf": 1}, "60 of prompts, 7 generated"


# What the dashboards that come with vLLM ask for, as far as this engine has it: type, and labels beside `le`.
COMMON = {"model_name", "engine"}
ASKED = {
    "gauge": {
        "vllm:num_requests_running": COMMON,
        "vllm:num_requests_waiting": COMMON,
        "vllm:num_requests_waiting_by_reason": COMMON | {"reason"},
        "vllm:kv_cache_usage_perc": COMMON,
        "vllm:engine_sleep_state": COMMON | {"sleep_state"},
        "vllm:cache_config_info": {"engine", "block_size", "num_gpu_blocks", "enable_prefix_caching"},
        "process_resident_memory_bytes": set(),
    },
    "counter": {
        "vllm:prompt_tokens": COMMON,
        "vllm:prompt_tokens_cached": COMMON,
        "vllm:prompt_tokens_by_source": COMMON | {"source"},
        "vllm:generation_tokens": COMMON,
        "vllm:prefix_cache_queries": COMMON,
        "vllm:prefix_cache_hits": COMMON,
        "vllm:num_preemptions": COMMON,
        "vllm:request_success": COMMON | {"finished_reason"},
        "http_requests": {"handler", "method", "status"},
        "process_cpu_seconds": set(),
    },
    "histogram": {
        f"vllm:{name}": COMMON
        for name in (
            *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
            *("request_time_per_output_token_seconds", "request_queue_time_seconds", "request_inference_time_seconds"),
            *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
            *("request_generation_tokens", "request_max_num_generation_tokens", "request_params_n"),
            *("request_params_max_tokens", "request_prefill_kv_computed_tokens", "iteration_tokens_total"),
        )
    },
}


def test_what_dashboards_ask_for_is_there() -> None:
    metrics = Metrics(Resting(), "a model")
    metrics.respond("/v1/models", "GET", 200)
    told: dict[str, dict[str, set[str]]] = {kind: {} for kind in ASKED}
    for family in parse(metrics.render()[0].decode()):
        if family.type in told:
            for sample in family.samples:
                told[family.type].setdefault(family.name, set()).update(sample.labels.keys() - {"le"})
    for kind, families in ASKED.items():
        assert families.items() <= told[kind].items(), kind


def test_what_was_asked_for_and_what_was_answered() -> None:
    metrics = Metrics(Resting(), "a model")
    metrics.admit(num_prompts=2, num_answers=3, max_tokens=None)
    metrics.admit(num_prompts=1, num_answers=1, max_tokens=40)
    for handler, status in (("/v1/models", 200), ("/v1/models", 404), ("/v1/models", 404), ("/metrics", 200)):
        metrics.respond(handler, "GET", status)
    samples = read(metrics)
    assert samples["vllm:request_params_n_count", ""] == 3 and samples["vllm:request_params_n_sum", ""] == 7
    assert samples["vllm:request_params_max_tokens_count", ""] == 1
    assert samples["vllm:request_params_max_tokens_sum", ""] == 40
    text = metrics.render()[0].decode()
    assert 'http_requests_total{handler="/v1/models",method="GET",status="2xx"} 1.0' in text
    assert 'http_requests_total{handler="/v1/models",method="GET",status="4xx"} 2.0' in text
    assert 'handler="/metrics"' not in text


def test_a_dead_engine_is_not_awake() -> None:
    manager = Resting()
    manager.is_usable = False
    assert "sleep_state" not in Metrics(manager, "a model").render()[0].decode()


def test_the_times_of_a_request() -> None:
    metrics = Metrics(Resting(), "a model")
    metrics.observe(OUTPUT)
    samples = read(metrics)
    expected = {
        "time_to_first_token_seconds": (1, 1.0),
        "inter_token_latency_seconds": (2, 2.0),
        "request_time_per_output_token_seconds": (1, 1.0),
        "e2e_request_latency_seconds": (1, 3.0),
        "request_queue_time_seconds": (1, 0.5),
        "request_inference_time_seconds": (1, 2.5),
        "request_prefill_time_seconds": (1, 0.5),
        "request_decode_time_seconds": (1, 2.0),
        "request_prompt_tokens": (1, 3.0),
        "request_generation_tokens": (1, 3.0),
        "request_max_num_generation_tokens": (1, 3.0),
        "request_prefill_kv_computed_tokens": (1, 2.0),
    }
    for name, (count, total) in expected.items():
        assert samples[f"vllm:{name}_count", ""] == count
        assert samples[f"vllm:{name}_sum", ""] == pytest.approx(total)
        buckets = [value for (each, _), value in samples.items() if each == f"vllm:{name}_bucket"]
        assert buckets == sorted(buckets) and buckets[-1] == count, "cumulative, and all in the last"
    assert samples["vllm:time_to_first_token_seconds_bucket", "0.75"] == 0
    assert samples["vllm:time_to_first_token_seconds_bucket", "1.0"] == 1, "a bound belongs to its bucket"
    assert samples["vllm:inter_token_latency_seconds_bucket", "0.05"] == 1
    assert samples["vllm:request_success_total", "stop"] == 1


@pytest.mark.parametrize(
    ("finish_reason", "label"),
    [("stop", "stop"), ("length", "length"), ("cancelled", "abort"), ("timeout", "timeout"), ("error", "error")],
)
def test_how_requests_ended(finish_reason: str, label: str) -> None:
    metrics = Metrics(Resting(), "a model")
    metrics.observe(replace(OUTPUT, finish_reason=finish_reason))
    ended = {label: value for (name, label), value in read(metrics).items() if name == "vllm:request_success_total"}
    assert ended == dict.fromkeys(("stop", "length", "abort", "timeout", "error"), 0) | {label: 1}


def test_a_request_that_never_ran_has_no_times() -> None:
    metrics = Metrics(Resting(), "a model")
    output = replace(OUTPUT, generated_tokens=[], timestamps=[], lifespan=(-1.0, 102.0), finish_reason="cancelled")
    metrics.observe(output)
    metrics.observe(replace(output, timestamps=None, lifespan=(-1.0, -1.0)))
    samples = read(metrics)
    assert samples["vllm:e2e_request_latency_seconds_count", ""] == 1
    for name in ("time_to_first_token_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"):
        assert samples[f"vllm:{name}_count", ""] == 0


def test_two_applications_share_nothing() -> None:
    first, second = Metrics(Resting(), "a model"), Metrics(Resting(), "a model")
    first.observe(OUTPUT)
    assert read(first)["vllm:request_success_total", "stop"] == 1
    assert read(second)["vllm:request_success_total", "stop"] == 0
    assert not [family for family in REGISTRY.collect() if family.name.startswith("vllm")]


def test_real_requests() -> None:
    manager, _ = toy.manager()
    try:
        metrics = Metrics(manager, "a model")
        outputs = []
        for _ in range(2):  # the second finds the first one's prompt in the cache
            prompt = [5] * 300
            request_id = manager.add_request(prompt, max_new_tokens=4, record_timestamps=True, ignore_eos=True)
            output = manager.get_result(request_id)
            assert output is not None
            outputs.append(output)
            metrics.observe(output)
        samples = read(metrics)
    finally:
        manager.destroy()
    assert samples["vllm:request_success_total", "length"] == 2
    assert samples["vllm:prompt_tokens_total", ""] == 600
    assert samples["vllm:generation_tokens_total", ""] == 8
    assert samples["vllm:prefix_cache_hits_total", ""] == outputs[1].num_cached_tokens > 0
    steps = [value for (name, _), value in samples.items() if name == "vllm:iteration_tokens_total_bucket"]
    assert steps == [6] + [7] * 6 + [8] * 7, "three tokens each alone, what no cache held of 300, and 300"
    assert samples["vllm:iteration_tokens_total_count", ""] == 8
    assert samples["vllm:iteration_tokens_total_sum", ""] == 608 - outputs[1].num_cached_tokens
    assert samples["vllm:inter_token_latency_seconds_count", ""] == 6
    assert samples["vllm:time_to_first_token_seconds_count", ""] == 2
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert 0 < samples[f"vllm:{name}_seconds_sum", ""] < math.inf
