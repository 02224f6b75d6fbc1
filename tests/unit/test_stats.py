"""The step recorder: totals, a bounded ring, a rate that forgets, and reading while another thread writes."""

import threading
from dataclasses import FrozenInstanceError

import pytest

from chairlift.stats import RECENT_SECONDS, STEP_SIZES, Stats, StepRecorder, StepTimes

OTHERS = {
    "running": 3,
    "waiting": 2,
    "free_blocks": 50,
    "cached_blocks": 20,
    "used_blocks": 30,
    "total_blocks": 100,
    "preemptions": 4,
    "swaps": 1,
    "prefix_hit_tokens": 25,
    "prefix_queried_tokens": 100,
}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def step(recorder: StepRecorder, seconds: float = 0.5, prompt: int = 8, generated: int = 4) -> None:
    recorder.record(
        prompt_tokens=prompt,
        generated_tokens=generated,
        schedule=0.25 * seconds,
        device=0.5 * seconds,
        commit=0.25 * seconds,
    )


def test_before_the_first_step_everything_is_zero() -> None:
    stats = StepRecorder().snapshot(**OTHERS)
    assert (stats.steps, stats.prompt_tokens, stats.generated_tokens, stats.tokens_per_second) == (0, 0, 0, 0.0)
    assert stats.step_seconds == stats.device_seconds == StepTimes(last=0.0, mean=0.0, p50=0.0, p95=0.0)


def test_a_snapshot_carries_what_others_count() -> None:
    stats = StepRecorder().snapshot(**OTHERS)
    assert {name: getattr(stats, name) for name in OTHERS} == OTHERS
    assert stats.cache_usage == 0.3
    assert stats.prefix_hit_rate == 0.25


def test_shares_of_nothing_are_zero() -> None:
    stats = StepRecorder().snapshot(**dict.fromkeys(OTHERS, 0))
    assert stats.cache_usage == 0.0
    assert stats.prefix_hit_rate == 0.0


def test_totals_outlive_the_ring_and_times_do_not() -> None:
    recorder = StepRecorder(size=4)
    for seconds in (100.0, 1.0, 2.0, 4.0, 3.0):
        step(recorder, seconds, prompt=10, generated=2)
    stats = recorder.snapshot(**OTHERS)
    assert (stats.steps, stats.prompt_tokens, stats.generated_tokens) == (5, 50, 10)
    assert stats.step_seconds == StepTimes(last=3.0, mean=2.5, p50=2.0, p95=4.0)


def test_steps_are_told_apart_by_their_tokens() -> None:
    recorder = StepRecorder(size=4)
    for prompt, generated in ((0, 0), (0, 1), (0, 2), (7, 1), (8, 1), (0, 64), (65, 0), (16384, 0), (16384, 1)):
        step(recorder, prompt=prompt, generated=generated)
    sizes = recorder.snapshot(**OTHERS).step_sizes
    assert len(sizes) == len(STEP_SIZES) + 1
    assert sizes == (2, 2, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1)


def test_each_part_of_a_step_is_timed_apart() -> None:
    recorder = StepRecorder()
    recorder.record(prompt_tokens=1, generated_tokens=1, schedule=1.0, device=5.0, commit=2.0)
    stats = recorder.snapshot(**OTHERS)
    assert [
        times.last for times in (stats.schedule_seconds, stats.device_seconds, stats.commit_seconds, stats.step_seconds)
    ] == [1.0, 5.0, 2.0, 8.0]


@pytest.mark.parametrize(
    ("count", "p50", "p95"), [(1, 1.0, 1.0), (2, 1.0, 2.0), (20, 10.0, 19.0), (100, 50.0, 95.0), (256, 128.0, 244.0)]
)
def test_percentiles_are_values_that_occurred(count: int, p50: float, p95: float) -> None:
    times = StepTimes.of([float(value) for value in range(count, 0, -1)])
    assert (times.p50, times.p95) == (p50, p95)
    assert times.last == 1.0


def test_the_rate_runs_from_the_start_of_the_first_recent_step() -> None:
    clock = Clock()
    recorder = StepRecorder(clock=clock)
    for _ in range(3):
        clock.now += 0.5
        step(recorder, seconds=0.5, generated=4)
    assert recorder.snapshot(**OTHERS).tokens_per_second == 12 / 1.5
    clock.now += 1.5
    assert recorder.snapshot(**OTHERS).tokens_per_second == 12 / 3.0


def test_an_idle_engine_has_no_rate_and_starts_afresh() -> None:
    clock = Clock()
    recorder = StepRecorder(clock=clock)
    step(recorder, generated=1000)
    clock.now += RECENT_SECONDS + 1
    assert recorder.snapshot(**OTHERS).tokens_per_second == 0.0
    step(recorder, seconds=0.5, generated=4)
    assert recorder.snapshot(**OTHERS).tokens_per_second == 8.0


def test_one_step_longer_than_the_recent_past_still_counts() -> None:
    clock = Clock()
    recorder = StepRecorder(clock=clock)
    step(recorder, seconds=2 * RECENT_SECONDS, generated=40)
    assert recorder.snapshot(**OTHERS).tokens_per_second == 40 / (2 * RECENT_SECONDS)


def test_no_time_no_rate() -> None:
    recorder = StepRecorder(clock=Clock())
    step(recorder, seconds=0.0)
    assert recorder.snapshot(**OTHERS).tokens_per_second == 0.0


def test_a_snapshot_does_not_change() -> None:
    recorder = StepRecorder()
    before = recorder.snapshot(**OTHERS)
    step(recorder)
    assert before.steps == 0
    with pytest.raises(FrozenInstanceError):
        before.steps = 1  # type: ignore[misc]


def test_a_reader_sees_consistent_totals_while_the_engine_writes() -> None:
    """The totals come from one record, so two counters never disagree, and no step is seen twice or out of order."""
    recorder = StepRecorder(size=8)
    done = threading.Event()
    seen: list[Stats] = []

    def read() -> None:
        while not done.is_set():
            seen.append(recorder.snapshot(**OTHERS))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20_000):
        step(recorder, prompt=10, generated=3)
    done.set()
    reader.join()
    seen.append(recorder.snapshot(**OTHERS))
    assert all((s.prompt_tokens, s.generated_tokens) == (10 * s.steps, 3 * s.steps) for s in seen)
    assert all(s.step_sizes[2] == s.steps for s in seen)
    assert [s.steps for s in seen] == sorted(s.steps for s in seen)
    assert seen[-1].steps == 20_000


def test_it_reads_as_a_line() -> None:
    recorder = StepRecorder()
    step(recorder, seconds=0.5, prompt=8, generated=4)
    text = str(recorder.snapshot(**OTHERS))
    for part in (
        "3 running, 2 waiting",
        "30 used, 20 cached, 50 free",
        "25 of 100 tokens hit",
        "8 prompt and 4 generated tokens",
        "500.0 ms per step",
    ):
        assert part in text
