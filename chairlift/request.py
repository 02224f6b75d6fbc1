"""What is asked, what is being made of it, and what is handed out.

`Request` and `GenerationOutput` are frozen values that any thread may hold. A `Sequence` is the mutable state between
them; only the engine's thread touches one. Nothing here knows text, tensors or who is waiting for an output.
"""

import enum
import time
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from chairlift.cache.table import SequenceKV
from chairlift.params import SamplingParams


class RequestStatus(enum.IntEnum):
    """Where a request stands. The last three are terminal."""

    PENDING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    FAILED = 4
    CANCELLED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to be continued once. A call with `num_return_sequences=n` becomes n requests with one `salt`."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_length: int  # tokens of prompt and answer together, at most
    seed: int
    salt: bytes = b""  # requests share cached KV only under equal salts
    restart: tuple[int, bytes] | None = None  # with more tokens than this, all KV is computed anew under this salt
    share_prefix: bool = True  # False: forget the KV at the end; only children of the same call share it
    match_prefix: bool = True  # False: compute every prompt token (prompt logprobs need all logits)
    streaming: bool = False
    record_timestamps: bool = False
    parent_id: str | None = None
    priority: int = 0  # lower is sooner
    tenant: str | None = None  # whom it belongs to
    created_time: float = field(default_factory=time.perf_counter)
    deadline: float | None = None  # on the clock of `created_time`


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOutput:
    """What a request has produced so far; the last one of a request is terminal (`is_finished()`).

    Times are `time.perf_counter()` seconds. `logprobs[i]` belongs to `generated_tokens[i]`; `top_logprobs[i]` maps the
    most likely token ids at that place to their logprobs; `prompt_logprobs[i]` belongs to `prompt_ids[i]` and is None
    for the first token, which nothing predicts.
    """

    request_id: str
    prompt_ids: list[int] = field(default_factory=list)
    generated_tokens: list[int] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_logprobs: list[dict[int, float] | None] = field(default_factory=list)
    status: RequestStatus = RequestStatus.PENDING
    finish_reason: str | None = None  # "stop", "length", "cancelled", "timeout", "error"; None while running
    stop_reason: int | str | None = None  # the token id or the string that ended it
    text: str | None = None  # only for requests with stop strings: the answer's text, cut before the stop string
    error: str | None = None
    exception: BaseException | None = None
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    created_time: float = field(default_factory=time.perf_counter)
    lifespan: tuple[float, float] = (-1.0, -1.0)  # first scheduled, ended
    timestamps: list[float] | None = None  # of each generated token, when asked for

    def is_finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.status >= RequestStatus.FINISHED

    def failed(self, exception: BaseException) -> "GenerationOutput":
        """The same, ended by a fault of the request's own."""
        return replace(
            self,
            status=RequestStatus.FAILED,
            finish_reason="error",
            error=f"{type(exception).__name__}: {exception}",
            exception=exception,
        )


class Sequence:
    """A request under way.

    Scheduling makes `num_computed` catch up with `tokens` and the samples promised by steps in flight; chunked
    prefill, prefix hits, recomputing after a preemption and decoding are that one subtraction (`num_pending`).
    """

    __slots__ = (
        "arrival",
        "cached_tokens",
        "emits_steps",
        "first_scheduled",
        "kv",
        "logprobs",
        "max_length",
        "num_computed",
        "num_emitted",
        "num_promised",
        "num_prompt",
        "num_synced",
        "planned_step",
        "prompt_ids",
        "prompt_logprobs",
        "request",
        "restart_length",
        "serial",
        "slot",
        "stop_ids",
        "timestamps",
        "tokens",
        "top_logprobs",
        "turn",
        "wants_prompt_logprobs",
    )

    def __init__(self, request: Request, serial: int, kv: SequenceKV) -> None:
        params = request.params
        self.request = request
        self.serial = serial  # unique in an engine's life, unlike the request id; also the order of arrival
        self.kv = kv
        self.prompt_ids: list[int] | None = None  # as outputs show it; one list for all of them
        self.tokens: list[int] = list(request.prompt_ids)  # the prompt and every sampled token the host has seen
        self.num_prompt = len(self.tokens)
        self.max_length = request.max_length
        self.restart_length = request.max_length if request.restart is None else request.restart[0]
        self.num_computed = 0  # positions whose KV has been enqueued
        self.num_promised = 0  # samples launched but not yet seen by the host
        self.num_emitted = self.num_prompt  # tokens that the last output held
        self.num_synced = 0  # block table entries that the device has
        self.slot = -1  # of the device's per-sequence state; -1 while waiting
        self.planned_step = -1
        self.turn = -1  # how many sequences were seated before it was for the first time; -1: it never was
        self.stop_ids: frozenset[int] = params.stop_ids
        self.emits_steps = request.streaming or bool(params.stop_strings)
        self.cached_tokens = -1  # -1: never seated yet
        self.first_scheduled = -1.0
        self.timestamps: list[float] | None = [] if request.record_timestamps else None
        self.logprobs: list[float] = []
        self.top_logprobs: list[dict[int, float]] = []
        self.wants_prompt_logprobs = params.prompt_logprobs is not None
        self.prompt_logprobs: list[tuple[float, dict[int, float]] | None] = [None] * (
            self.num_prompt if self.wants_prompt_logprobs else 0
        )

    @property
    def num_pending(self) -> int:
        """Tokens that exist, or are promised, and have no KV yet."""
        return len(self.tokens) + self.num_promised - self.num_computed

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far, promised ones included."""
        return len(self.tokens) + self.num_promised - self.num_prompt

    @property
    def is_prefilling(self) -> bool:
        """Whether known tokens beyond the last one still lack KV."""
        return self.num_computed < len(self.tokens) - 1

    @property
    def status(self) -> RequestStatus:
        """Derived, for people."""
        if self.first_scheduled < 0:
            return RequestStatus.PENDING
        return RequestStatus.DECODING if len(self.tokens) > self.num_prompt else RequestStatus.PREFILLING

    def progress(self) -> "Progress":
        """What there is, not yet written out; `new_tokens` counts from the previous call."""
        if self.prompt_ids is None:
            self.prompt_ids = list(self.request.prompt_ids)
        start, self.num_emitted = self.num_emitted, len(self.tokens)
        return Progress(
            self.request,
            self.prompt_ids,
            self.tokens,
            start,
            self.num_emitted,
            self.logprobs,
            self.top_logprobs,
            self.prompt_logprobs,
            self.timestamps,
            self.cached_tokens,
            self.first_scheduled,
        )

    def output(
        self,
        *,
        status: RequestStatus | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        exception: BaseException | None = None,
        now: float = -1.0,
    ) -> GenerationOutput:
        """What there is, written out; `new_tokens` counts from the previous call."""
        return replace(
            self.progress().output(),
            status=self.status if status is None else status,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            error=None if exception is None else f"{type(exception).__name__}: {exception}",
            exception=exception,
            lifespan=(self.first_scheduled, now),
        )


class Progress(NamedTuple):
    """An output of a request that goes on, to be written out by whoever hands it on: a sequence's lists, which only
    grow or are replaced, and how much of them there was. The engine makes one for each streamed token, and while it
    does the device waits."""

    request: Request
    prompt_ids: list[int]
    tokens: list[int]
    start: int  # of tokens, where the new ones begin
    end: int  # of tokens
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    prompt_logprobs: list[tuple[float, dict[int, float]] | None]
    timestamps: list[float] | None
    cached_tokens: int
    first_scheduled: float

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def is_finished(self) -> bool:
        """Never."""
        return False

    def output(self) -> GenerationOutput:
        """Written out. Any thread."""
        params = self.request.params
        num_prompt, count = len(self.prompt_ids), self.end - len(self.prompt_ids)
        return GenerationOutput(
            request_id=self.request.request_id,
            prompt_ids=self.prompt_ids,
            generated_tokens=self.tokens[num_prompt : self.end],
            new_tokens=self.tokens[self.start : self.end],
            logprobs=self.logprobs[:count],
            top_logprobs=self.top_logprobs[:count] if params.logprobs else [],
            prompt_logprobs=[p and p[0] for p in self.prompt_logprobs],
            prompt_top_logprobs=[p and p[1] for p in self.prompt_logprobs] if params.prompt_logprobs else [],
            status=RequestStatus.DECODING,
            num_cached_tokens=max(self.cached_tokens, 0),
            created_time=self.request.created_time,
            lifespan=(self.first_scheduled, -1.0),
            timestamps=None if self.timestamps is None else self.timestamps[:count],
        )


Outgoing = GenerationOutput | Progress


def written(output: Outgoing) -> GenerationOutput:
    """The output itself."""
    return output.output() if isinstance(output, Progress) else output
