"""What a scrape reads: real requests counted, under vLLM's names, in Prometheus' own format read by its own parser."""

import math
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse

from chairlift.request import GenerationOutput, RequestStatus
from chairlift.server.metrics import Metrics
from chairlift.stats import Stats, StepRecorder
from tests.server import toy


class Resting:
    """A manager that has done nothing yet."""

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
                assert labels.pop("model_name") == "a model"
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
    assert samples["vllm:request_success_total", "stop"] == 0, "a counter is there before it counts"
    assert samples["vllm:e2e_request_latency_seconds_count", ""] == 0


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


def test_openmetrics_for_who_asks() -> None:
    body, content_type = Metrics(Resting(), "a model").render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    names = {family.name for family in parse_open(body.decode())}
    assert {"vllm:num_requests_running", "vllm:prompt_tokens", "vllm:inter_token_latency_seconds"} <= names


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
    assert samples["vllm:inter_token_latency_seconds_count", ""] == 6
    assert samples["vllm:time_to_first_token_seconds_count", ""] == 2
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert 0 < samples[f"vllm:{name}_seconds_sum", ""] < math.inf
