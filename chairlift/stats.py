"""What the engine counts: a ring of step records, and the frozen snapshot that `manager.stats()` hands out.

The engine's thread records, any thread may take a snapshot; there is no lock. This module refuses to know who owns the
other numbers: queue lengths, blocks and preemptions come in with the call that takes the snapshot.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

RECENT_SECONDS = 10.0  # `tokens_per_second` looks no further back, so an engine at rest reads 0
STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens by which steps are told apart


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
    prompt_tokens: int  # computed: prefix hits are not among them, what is computed again after a preemption is
    generated_tokens: int
    step_sizes: tuple[int, ...]  # steps by their tokens, prompts' and generated: up to 1, up to 8, ..., above the last

    tokens_per_second: float  # generated, over the recorded steps of the last `RECENT_SECONDS`
    step_seconds: StepTimes  # schedule + device + commit
    schedule_seconds: StepTimes
    device_seconds: StepTimes  # launching and waiting for the device
    commit_seconds: StepTimes

    paths: Mapping[str, str] = field(default_factory=dict)  # which part of the model is computed how, and why

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
            f"{self.steps} steps: {self.prompt_tokens} prompt and {self.generated_tokens} generated tokens, "
            f"{self.tokens_per_second:.1f} tokens/s, {self.step_seconds.p50 * 1e3:.1f} ms per step "
            f"(p95 {self.step_seconds.p95 * 1e3:.1f} ms)"
        )


class RowView(NamedTuple):
    """A running request."""

    request_id: str
    tenant: str | None
    num_prompt: int  # tokens, as all below
    num_computed: int  # of prompt and answer, steps in flight included
    num_generated: int
    max_length: int  # of prompt and answer together
    num_cached: int  # of the prompt, found in the cache
    status: str  # "PREFILLING" or "DECODING"
    age_s: float  # since it was submitted
    first_token_s: float | None = None  # from then to its first token; None: not yet, or nobody asked for timestamps


class WaitingView(NamedTuple):
    """A request in the queue."""

    request_id: str
    num_prompt: int  # tokens
    age_s: float  # since it was submitted


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """The engine between two steps, for whoever watches it live. Every number is of one and the same moment."""

    time: float  # `time.perf_counter()` seconds
    step: int  # steps so far
    running: tuple[RowView, ...]  # in the order in which they are continued
    num_waiting: int
    waiting: tuple[WaitingView, ...]  # the first 50, in queue order, which need not be that of the policy
    blocks: bytes  # a cell per block, 0 free, 1 used, 2 shared by several requests, 3 cached; see `cells`
    batch_rows: int  # of the last step, as `batch_tokens`; 0 at rest
    batch_tokens: int
    tokens_per_second: float
    preemptions: int
    prefix_hit_tokens: int


MOST_CELLS = 4096
_BY_WEIGHT = (0, 3, 1, 2)  # block states, the one that says most last


def cells(states: bytes) -> bytes:
    """Block states for display: themselves up to `MOST_CELLS`, else one cell for several neighbours, which then shows
    the most telling of their states: shared before used before cached before free."""
    size = -(-len(states) // MOST_CELLS)
    if size <= 1:
        return states
    weights = states.translate(bytes(_BY_WEIGHT.index(state) for state in range(4)) + bytes(252))
    return bytes(_BY_WEIGHT[max(weights[at : at + size])] for at in range(0, len(states), size))


class _Step(NamedTuple):
    """One step. It carries the totals up to itself, so that a reader who holds a record holds a consistent state."""

    number: int  # 1, 2, ...
    ended: float
    prompt_tokens: int  # in total
    generated_tokens: int  # in total
    sizes: tuple[int, ...]  # in total, as in `Stats.step_sizes`
    new_tokens: int  # generated by this step
    schedule: float
    device: float
    commit: float

    @property
    def seconds(self) -> float:
        return self.schedule + self.device + self.commit


_NO_STEP = _Step(0, 0.0, 0, 0, (0,) * (len(STEP_SIZES) + 1), 0, 0.0, 0.0, 0.0)


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
        prompt_tokens: int,
        generated_tokens: int,
        schedule: float,
        device: float,
        commit: float,
    ) -> None:
        """Note a step that has just ended: its tokens, and the seconds of its three parts."""
        last = self._last
        number = last.number + 1
        sizes = list(last.sizes)
        sizes[bisect_left(STEP_SIZES, prompt_tokens + generated_tokens)] += 1
        self._last = self._ring[number % len(self._ring)] = _Step(
            number,
            self._clock(),
            last.prompt_tokens + prompt_tokens,
            last.generated_tokens + generated_tokens,
            tuple(sizes),
            generated_tokens,
            schedule,
            device,
            commit,
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
        paths: Mapping[str, str] | None = None,
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
            prompt_tokens=last.prompt_tokens,
            generated_tokens=last.generated_tokens,
            step_sizes=last.sizes,
            tokens_per_second=self._rate(steps),
            step_seconds=StepTimes.of([step.seconds for step in steps]),
            schedule_seconds=StepTimes.of([step.schedule for step in steps]),
            device_seconds=StepTimes.of([step.device for step in steps]),
            commit_seconds=StepTimes.of([step.commit for step in steps]),
            paths=dict(paths or {}),
        )

    @property
    def num_steps(self) -> int:
        """Steps recorded so far."""
        return self._last.number

    @property
    def tokens_per_second(self) -> float:
        """Generated, over the recorded steps of the last `RECENT_SECONDS`."""
        return self._rate(sorted(step for step in tuple(self._ring) if step.number))

    def _rate(self, steps: Sequence[_Step]) -> float:
        """Generated tokens per second, from the start of the first recent step until now."""
        now = self._clock()
        recent = [step for step in steps if now - step.ended <= RECENT_SECONDS]
        if not recent:
            return 0.0
        elapsed = now - (recent[0].ended - recent[0].seconds)
        return sum(step.new_tokens for step in recent) / elapsed if elapsed > 0 else 0.0
