"""A load of requests, who answers them, and what is measured: for `chairlift bench`.

A target is an engine in this process or any OpenAI-compatible server; both give the same records. Times are
`time.perf_counter()` seconds.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from tqdm import tqdm

from chairlift.text.chat import render

if TYPE_CHECKING:
    from chairlift.llm import LLM

Endpoint = Literal["chat", "completions"]
PERCENTILES = (50, 90, 99)
COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work night point home water room mother area money story "
    "fact month lot right study book eye job word business issue side kind head house service friend father power "
    "hour game line end member law car city name team minute idea body back face door reason"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request, as its sender saw it."""

    sent: float
    ended: float
    stamps: Sequence[float] = ()  # of each piece of the answer; one token each, unless the server joins some
    num_prompt: int = 0  # tokens
    num_cached: int = 0  # of them, as the server says
    num_generated: int = 0  # tokens
    error: str | None = None

    @property
    def first_token(self) -> float | None:
        """Seconds from sending to the first piece."""
        return self.stamps[0] - self.sent if self.stamps else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one piece and the next."""
        return [after - before for before, after in zip(self.stamps, self.stamps[1:], strict=False)]

    @property
    def per_token(self) -> float:
        """Mean seconds per token after the first; 0 for a single one."""
        if len(self.stamps) < 2:
            return 0.0
        return (self.stamps[-1] - self.stamps[0]) / max(self.num_generated - 1, 1)


class Target(Protocol):
    """Who answers."""

    async def ask(self, prompt: str, max_tokens: int) -> Record:
        """Send one request and wait for the end of its answer. A failure is a record, too."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent, and when."""

    prompts: Sequence[str]
    max_tokens: int
    rate: float | None  # requests per second, at random (Poisson); None: as soon as there is room
    concurrency: int | None  # at most so many at once; None: no bound
    seed: int

    async def send(self, target: Target) -> list[Record]:
        """All requests, in order of their sending."""
        room = asyncio.Semaphore(self.concurrency or len(self.prompts))
        clock = random.Random(self.seed)
        due = time.perf_counter()
        with tqdm(total=len(self.prompts), unit="request", disable=None) as bar:

            async def ask(prompt: str) -> Record:
                try:
                    return await target.ask(prompt, self.max_tokens)
                finally:
                    room.release()
                    bar.update()

            tasks = []
            async with asyncio.TaskGroup() as group:
                for prompt in self.prompts:
                    if self.rate is not None:
                        await asyncio.sleep(max(0.0, due - time.perf_counter()))
                        due += clock.expovariate(self.rate)
                    await room.acquire()
                    tasks.append(group.create_task(ask(prompt)))
        return [task.result() for task in tasks]


def random_prompts(count: int, words: int, shared: int, seed: int) -> list[str]:
    """Prompts of `words` random words, about a token each, of which the first `shared` are the same in all."""
    chooser = random.Random(seed)
    known = COMMON_WORDS.split()
    beginning = chooser.choices(known, k=shared)
    return [" ".join(beginning + chooser.choices(known, k=words - shared)) for _ in range(count)]


class Offline:
    """An engine in this process."""

    def __init__(self, llm: "LLM", endpoint: Endpoint, ignore_eos: bool) -> None:
        self._llm = llm
        self._endpoint = endpoint
        self._sampling: dict[str, Any] = {"temperature": 0.0, "ignore_eos": ignore_eos}

    async def ask(self, prompt: str, max_tokens: int) -> Record:
        sent = time.perf_counter()
        tokenizer, manager = self._llm.tokenizer, self._llm.manager
        if self._endpoint == "chat":
            ids = render(tokenizer, [{"role": "user", "content": prompt}])
        else:
            ids = tokenizer(prompt)["input_ids"]
        request_id = manager.add_request(ids, max_new_tokens=max_tokens, record_timestamps=True, **self._sampling)
        assert request_id is not None, "nobody stops this manager"
        outputs = [output async for output in manager.stream(request_id)]
        output = outputs[-1]
        return Record(
            sent=sent,
            ended=output.lifespan[1],
            stamps=output.timestamps or (),
            num_prompt=len(ids),
            num_cached=output.num_cached_tokens,
            num_generated=len(output.generated_tokens),
            error=output.error,
        )


class Http:
    """A server that speaks OpenAI's API. An asynchronous context manager."""

    def __init__(self, url: str, model: str | None, endpoint: Endpoint, ignore_eos: bool, api_key: str | None) -> None:
        import httpx

        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )
        self._failure = httpx.HTTPError
        self._endpoint = endpoint
        self._body: dict[str, Any] = {
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | ({"ignore_eos": True} if ignore_eos else {})
        self.model = model

    async def __aenter__(self) -> Self:
        """Ask for the model's name, unless it was given. Raises OSError if nobody answers."""
        if self.model is None:
            try:
                response = await self._client.get("/v1/models")
                self.model = response.json()["data"][0]["id"]
            except (self._failure, ValueError, LookupError, TypeError) as error:
                await self._client.aclose()
                raise OSError(f"{self._client.base_url} does not say which models it serves: {error!r}") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def ask(self, prompt: str, max_tokens: int) -> Record:
        body = self._body | {"model": self.model, "max_tokens": max_tokens}
        if self._endpoint == "chat":
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": prompt}]
        else:
            path, body["prompt"] = "/v1/completions", prompt
        answer = _Streamed(time.perf_counter())
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    return answer.record(f"{response.status_code}: {(await response.aread()).decode(errors='replace')}")
                async for line in response.aiter_lines():
                    answer.read(line, time.perf_counter())
        except (self._failure, ValueError) as error:
            return answer.record(repr(error))
        return answer.record(answer.error)


@dataclass
class _Streamed:
    """An answer as its events come in."""

    sent: float
    stamps: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def read(self, line: str, now: float) -> None:
        """One line of the stream. Raises ValueError for an event that is not JSON."""
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            return
        event = json.loads(data)
        if event.get("error"):
            self.error = str(event["error"])
        if any(_shows(choice) for choice in event.get("choices") or ()):
            self.stamps.append(now)
        self.usage = event.get("usage") or self.usage

    def record(self, error: str | None) -> Record:
        details = self.usage.get("prompt_tokens_details") or {}
        return Record(
            sent=self.sent,
            ended=time.perf_counter(),
            stamps=self.stamps,
            num_prompt=self.usage.get("prompt_tokens", 0),
            num_cached=details.get("cached_tokens") or 0,
            num_generated=self.usage.get("completion_tokens", len(self.stamps)),
            error=error,
        )


def _shows(choice: dict[str, Any]) -> bool:
    """Whether there is a piece of text in it."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content"))


def summary(records: Sequence[Record], slo_ttft_ms: float | None, slo_itl_ms: float | None) -> dict[str, Any]:
    """The numbers of a run, in tokens, seconds and, for percentiles, milliseconds; what failed is counted only."""
    good = [record for record in records if record.error is None]
    seconds = max(record.ended for record in records) - min(record.sent for record in records)
    generated = sum(record.num_generated for record in good)
    prompt = sum(record.num_prompt for record in good)
    result = {
        "requests": len(records),
        "failed": len(records) - len(good),
        "seconds": seconds,
        "prompt_tokens": prompt,
        "cached_tokens": sum(record.num_cached for record in good),
        "generated_tokens": generated,
        "requests_per_second": len(good) / seconds,
        "generated_tokens_per_second": generated / seconds,
        "total_tokens_per_second": (generated + prompt) / seconds,
        "ttft_ms": _percentiles([first for record in good if (first := record.first_token) is not None]),
        "itl_ms": _percentiles([gap for record in good for gap in record.gaps]),
        "e2e_ms": _percentiles([record.ended - record.sent for record in good]),
    }
    if slo_ttft_ms is not None or slo_itl_ms is not None:
        met = [
            record
            for record in good
            if (record.first_token or 0.0) * 1e3 <= (slo_ttft_ms or math.inf)
            and record.per_token * 1e3 <= (slo_itl_ms or math.inf)
        ]
        result["slo"] = {"ttft_ms": slo_ttft_ms, "itl_ms": slo_itl_ms}
        result["goodput_requests_per_second"] = len(met) / seconds
        result["goodput_share"] = len(met) / len(records)
    return result


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """In milliseconds; each is a value that occurred (nearest rank). Empty without values."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    ranks = {f"p{share}": ordered[math.ceil(share / 100 * len(ordered)) - 1] * 1e3 for share in PERCENTILES}
    return {"mean": math.fsum(ordered) / len(ordered) * 1e3} | ranks
