"""Plan, run, commit: in which order, and how many steps are in flight."""

import pytest

from chairlift.cache.cache import KVCache
from chairlift.cache.layout import LayerSpec, plan_layout
from chairlift.engine import Engine
from chairlift.params import SamplingParams
from chairlift.request import GenerationOutput, Request, RequestStatus
from chairlift.schedule.plan import ScheduledBatch
from chairlift.schedule.policy import Fifo
from chairlift.schedule.scheduler import Sampled, Scheduler
from chairlift.stats import Stats, StepRecorder
from tests.late_device import LateDevice, LateStep

LAYOUT = plan_layout([LayerSpec(index=0, window=None, num_kv_heads=1, head_dim=1)], 4, 1)


class LoggingScheduler(Scheduler):
    """Says what the engine asks of it."""

    log: list[str]

    def schedule(self) -> ScheduledBatch | None:
        plan = super().schedule()
        self.log.append("-" if plan is None else f"plan {plan.step}")
        return plan

    def commit(self, batch: ScheduledBatch, sampled: Sampled) -> list[GenerationOutput]:
        self.log.append(f"commit {batch.step}")
        return super().commit(batch, sampled)


class LoggingDevice(LateDevice):
    log: list[str]

    def launch(self, batch: ScheduledBatch) -> LateStep:
        self.log.append(f"launch {batch.step}")
        return super().launch(batch)


def engine(depth: int, *new_tokens: int) -> tuple[Engine, list[str]]:
    """An engine with requests for so many tokens, and the log of what it does."""
    scheduler = LoggingScheduler(KVCache(LAYOUT, 50), Fifo(), max_batch_tokens=16, max_rows=8, safety_margin=0.0)
    device = LoggingDevice(LAYOUT, 50)
    scheduler.log = device.log = []
    for number, count in enumerate(new_tokens):
        request = Request(
            request_id=str(number), prompt_ids=(1, 0), params=SamplingParams(), max_length=2 + count, seed=0
        )
        scheduler.add(request)
    return Engine(scheduler, device, StepRecorder(), depth), scheduler.log


def snapshot(each: Engine) -> Stats:
    """What was recorded; the rest is not the recorder's."""
    blocks = ("free_blocks", "cached_blocks", "used_blocks", "total_blocks")
    others = ("running", "waiting", "preemptions", "swaps", "prefix_hit_tokens", "prefix_queried_tokens")
    return each.recorder.snapshot(**dict.fromkeys((*blocks, *others), 0))


def test_at_depth_1_a_step_is_committed_before_the_next_is_planned() -> None:
    each, log = engine(1, 2)
    assert each.step() == []
    (output,) = each.step()
    assert output.is_finished()
    assert log == ["plan 1", "launch 1", "commit 1", "plan 2", "launch 2", "commit 2"]
    assert not each.has_work and each.step() == []


def test_at_depth_2_a_step_is_planned_while_the_one_before_runs() -> None:
    each, log = engine(2, 3)
    outputs = []
    while each.has_work:
        outputs.append(each.step())
    assert log == [
        *("plan 1", "launch 1"),
        *("plan 2", "launch 2", "commit 1"),
        *("plan 3", "launch 3", "commit 2"),
        *("-", "commit 3"),
    ]
    assert [len(each) for each in outputs] == [0, 0, 0, 1]


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_no_more_steps_are_in_flight_than_the_depth_says(depth: int) -> None:
    each, log = engine(depth, 20, 3, 9)
    in_flight = most = 0
    while each.has_work:
        each.step()
    for entry in log:
        in_flight += entry.startswith("launch")
        in_flight -= entry.startswith("commit")
        most = max(most, in_flight)
    assert most == depth and in_flight == 0


def test_draining_commits_what_is_in_flight_and_plans_nothing() -> None:
    each, log = engine(3, 20)
    each.step(), each.step()
    log.clear()
    assert list(each.drain()) == [[], []]
    assert log == ["commit 1", "commit 2"]
    assert list(each.drain()) == [] and each.has_work


def test_a_request_that_is_ended_while_draining_is_not_continued() -> None:
    each, _ = engine(3)
    request = Request(request_id="a", prompt_ids=(1, 0), params=SamplingParams(), max_length=20, seed=0, streaming=True)
    each.scheduler.add(request)
    each.step(), each.step()
    drained = each.drain()
    assert len(next(drained)) == 1
    each.scheduler.end("a")
    assert list(drained) == [[]] and not each.has_work


def test_work_is_what_waits_runs_or_is_in_flight() -> None:
    each, _ = engine(2, 5)
    assert each.has_work
    each.step()
    (output,) = each.scheduler.abort("0")
    assert output.status is RequestStatus.CANCELLED
    assert each.has_work, "a step is in flight"
    assert each.step() == [] and not each.has_work


def test_an_engine_that_is_stuck_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    each, _ = engine(1, 5)
    monkeypatch.setattr(each.scheduler, "schedule", lambda: None)
    with pytest.raises(RuntimeError, match="no request can make progress"):
        each.step()


def test_steps_are_recorded() -> None:
    each, log = engine(2, 4, 4)
    while each.has_work:
        each.step()
    stats = snapshot(each)
    assert stats.steps == sum(entry.startswith("commit") for entry in log)
    assert stats.generated_tokens == 8
    assert stats.prompt_tokens == 4
