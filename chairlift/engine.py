"""One step of continuous batching: plan, run, commit.

The engine knows no thread, no text and no device. `depth` plans may be in flight: at depth 1 each step is committed
before the next is planned, at depth 2 the host plans a step while the device still runs the one before.
"""

import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from chairlift.request import Outgoing
from chairlift.schedule.plan import ScheduledBatch
from chairlift.schedule.scheduler import Sampled, Scheduler
from chairlift.stats import EngineView, RowView, StepRecorder, WaitingView, cells

MOST_WAITING_SHOWN = 50


class InFlight(Protocol):
    """A launched step."""

    @property
    def batch(self) -> ScheduledBatch:
        """The plan."""
        ...

    def wait(self) -> Sampled:
        """Block until the device has done the step."""
        ...


class Runner(Protocol):
    """Executes plans, in order."""

    def launch(self, batch: ScheduledBatch) -> InFlight:
        """Enqueue a step and return."""
        ...


class Engine:
    """Steps a scheduler and a runner."""

    def __init__(self, scheduler: Scheduler, runner: Runner, recorder: StepRecorder, depth: int = 1) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.recorder = recorder
        self.depth = depth
        self._in_flight: deque[InFlight] = deque()
        self._last: ScheduledBatch | None = None  # committed

    @property
    def has_work(self) -> bool:
        """Whether `step()` has anything to do."""
        return self.scheduler.has_work or bool(self._in_flight)

    def step(self) -> list[Outgoing]:
        """Plan and launch one step, commit the oldest one in flight; returns the outputs that are due."""
        begin = time.perf_counter()
        plan = self.scheduler.schedule()
        planned = time.perf_counter()
        if plan is not None:
            self._in_flight.append(self.runner.launch(plan))
        if not self._in_flight:
            if self.scheduler.has_work:
                raise RuntimeError(
                    "no request can make progress: the scheduler's promise that the oldest can is broken"
                )
            return []
        if plan is not None and len(self._in_flight) < self.depth:
            return []
        return self._commit_oldest(planned - begin, planned)

    def drain(self) -> Iterator[list[Outgoing]]:
        """Commit every step in flight without planning another; one list per step, so that a request that its output
        ends is not continued by the next."""
        while self._in_flight:
            yield self._commit_oldest(0.0, time.perf_counter())

    def _commit_oldest(self, schedule_seconds: float, launched: float) -> list[Outgoing]:
        done = self._in_flight.popleft()
        self._last = done.batch
        sampled = done.wait()
        waited = time.perf_counter()
        outputs = self.scheduler.commit(done.batch, sampled)
        self.recorder.record(
            prompt_tokens=done.batch.num_tokens - done.batch.num_decode_tokens,
            generated_tokens=len(sampled.tokens),
            schedule=schedule_seconds,
            device=waited - launched,
            commit=time.perf_counter() - waited,
        )
        return outputs

    def view(self, num_unseen: int = 0) -> EngineView:
        """The engine as it is now; `num_unseen` more requests wait elsewhere. Call it between steps only."""
        now = time.perf_counter()
        scheduler = self.scheduler
        last = self._last if scheduler.running else None
        return EngineView(
            time=now,
            step=self.recorder.num_steps,
            running=tuple(
                RowView(
                    seq.request.request_id,
                    seq.request.tenant,
                    seq.num_prompt,
                    seq.num_computed,
                    len(seq.tokens) - seq.num_prompt,
                    seq.max_length,
                    max(seq.cached_tokens, 0),
                    seq.status.name,
                    now - seq.request.created_time,
                    seq.timestamps[0] - seq.request.created_time if seq.timestamps else None,
                )
                for seq in scheduler.running
            ),
            num_waiting=len(scheduler.waiting) + num_unseen,
            waiting=tuple(
                WaitingView(seq.request.request_id, seq.num_prompt, now - seq.request.created_time)
                for seq in islice(scheduler.waiting.values(), MOST_WAITING_SHOWN)
            ),
            blocks=cells(scheduler.cache.block_states()),
            batch_rows=0 if last is None else len(last.rows),
            batch_tokens=0 if last is None else last.num_tokens,
            tokens_per_second=self.recorder.tokens_per_second,
            preemptions=scheduler.num_preemptions,
            prefix_hit_tokens=scheduler.cache.usage.hit_tokens,
        )
