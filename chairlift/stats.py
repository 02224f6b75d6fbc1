"""What the engine counts: a ring of step records, and the frozen snapshot that `manager.stats()` hands out.

The engine's thread records, any thread may take a snapshot; there is no lock. This module refuses to know who owns the
other numbers: queue lengths, blocks and preemptions come in with the call that takes the snapshot.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

RECENT_SECONDS = 10.0  # `tokens_per_second` looks no further back, so an engine at rest reads 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds per step over the last steps; all 0 before the first."""

    last: float = 0.0
    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """Summarise `seconds`, oldest first. A percentile is a value that occurred (nearest rank)."""
        if not seconds:
            return cls()
        ordered = sorted(seconds)
        p50, p95 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.50, 0.95))
        return cls(last=seconds[-1], mean=math.fsum(seconds) / len(seconds), p50=p50, p95=p95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The engine at one moment. Counters (`preemptions` and below) only grow while an engine lives."""

    running: int  # requests that hold a slot
    waiting: int  # requests in the queue, preempted ones included
    free_blocks: int  # hold nothing
    cached_blocks: int  # hold a prefix that no request uses now; given up when blocks run short
    used_blocks: int  # referenced by a request
    total_blocks: int

    preemptions: int  # requests that gave way, swapped or not
    swaps: int  # preemptions that kept their KV in host memory
    prefix_hit_tokens: int  # prompt tokens found in the cache
    prefix_queried_tokens: int  # prompt tokens looked up in it
    steps: int
    computed_tokens: int  # query tokens of all steps: prompts but for prefix hits, decoding, recomputing
    generated_tokens: int

    tokens_per_second: float  # generated, over the recorded steps of the last `RECENT_SECONDS`
    step_seconds: StepTimes  # schedule + device + commit
    schedule_seconds: StepTimes
    device_seconds: StepTimes  # launching and waiting for the device
    commit_seconds: StepTimes

    @property
    def cache_usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return self.used_blocks / self.total_blocks if self.total_blocks else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the looked-up prompt tokens that were found, 0 to 1."""
        return self.prefix_hit_tokens / self.prefix_queried_tokens if self.prefix_queried_tokens else 0.0

    def __str__(self) -> str:
        return (
            f"{self.running} running, {self.waiting} waiting, {self.preemptions} preempted ({self.swaps} swapped); "
            f"blocks: {self.used_blocks} used, {self.cached_blocks} cached, {self.free_blocks} free; "
            f"prefix: {self.prefix_hit_tokens} of {self.prefix_queried_tokens} tokens hit; "
            f"{self.steps} steps: {self.computed_tokens} tokens computed, {self.generated_tokens} generated, "
            f"{self.tokens_per_second:.1f} tokens/s, {self.step_seconds.p50 * 1e3:.1f} ms per step "
            f"(p95 {self.step_seconds.p95 * 1e3:.1f} ms)"
        )


class _Step(NamedTuple):
    """One step. It carries the totals up to itself, so that a reader who holds a record holds a consistent state."""

    number: int  # 1, 2, ...
    ended: float
    computed_tokens: int  # in total
    generated_tokens: int  # in total
    num_sampled: int  # by this step
    schedule: float
    device: float
    commit: float

    @property
    def seconds(self) -> float:
        return self.schedule + self.device + self.commit


_NO_STEP = _Step(0, 0.0, 0, 0, 0, 0.0, 0.0, 0.0)


class StepRecorder:
    """Totals since the start and the times of the last `size` steps, in fixed memory.

    One thread calls `record`; `snapshot` may run in any other at the same time. A record is immutable and is put in
    place by one assignment, which is why no lock is needed.
    """

    def __init__(self, size: int = 256, clock: Callable[[], float] = time.perf_counter) -> None:
        self._ring: list[_Step] = [_NO_STEP] * size
        self._last = _NO_STEP
        self._clock = clock

    def record(
        self,
        *,
        num_tokens: int,
        num_sampled: int,
        schedule_seconds: float,
        device_seconds: float,
        commit_seconds: float,
    ) -> None:
        """Note a step that has just ended: its query tokens, the tokens it sampled and the times of its three parts."""
        last = self._last
        number = last.number + 1
        self._last = self._ring[number % len(self._ring)] = _Step(
            number,
            self._clock(),
            last.computed_tokens + num_tokens,
            last.generated_tokens + num_sampled,
            num_sampled,
            schedule_seconds,
            device_seconds,
            commit_seconds,
        )

    def snapshot(
        self,
        *,
        running: int,
        waiting: int,
        free_blocks: int,
        cached_blocks: int,
        used_blocks: int,
        total_blocks: int,
        preemptions: int,
        swaps: int,
        prefix_hit_tokens: int,
        prefix_queried_tokens: int,
    ) -> Stats:
        """Freeze what was recorded, together with the numbers that others own."""
        steps = sorted(step for step in tuple(self._ring) if step.number)
        last = steps[-1] if steps else _NO_STEP
        return Stats(
            running=running,
            waiting=waiting,
            free_blocks=free_blocks,
            cached_blocks=cached_blocks,
            used_blocks=used_blocks,
            total_blocks=total_blocks,
            preemptions=preemptions,
            swaps=swaps,
            prefix_hit_tokens=prefix_hit_tokens,
            prefix_queried_tokens=prefix_queried_tokens,
            steps=last.number,
            computed_tokens=last.computed_tokens,
            generated_tokens=last.generated_tokens,
            tokens_per_second=self._rate(steps),
            step_seconds=StepTimes.of([step.seconds for step in steps]),
            schedule_seconds=StepTimes.of([step.schedule for step in steps]),
            device_seconds=StepTimes.of([step.device for step in steps]),
            commit_seconds=StepTimes.of([step.commit for step in steps]),
        )

    def _rate(self, steps: Sequence[_Step]) -> float:
        """Generated tokens per second, from the start of the first recent step until now."""
        now = self._clock()
        recent = [step for step in steps if now - step.ended <= RECENT_SECONDS]
        if not recent:
            return 0.0
        elapsed = now - (recent[0].ended - recent[0].seconds)
        return sum(step.num_sampled for step in recent) / elapsed if elapsed > 0 else 0.0
