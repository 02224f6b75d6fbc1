"""`chairlift bench`: how fast, of an engine in this process or of any OpenAI-compatible server."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import OmitArgPrefixes, Positional

from chairlift.commands.flags import Engine, UsageError, needs
from chairlift.commands.measure import Endpoint, Http, Load, Offline, Record, random_prompts, summary


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure throughput and latencies, offline or of a server (--url)."""

    model: Positional[str | None] = None
    """Folder or Hub name; None: SmolLM2-135M-Instruct. With --url: the model to ask for; None: the first it has."""
    url: str | None = None
    """Of an OpenAI-compatible server, such as http://127.0.0.1:8000; None: an engine in this process."""
    api_key: str | None = None
    """For the server."""
    endpoint: Endpoint = "chat"
    """Which of the two kinds of requests."""
    num_requests: int = 64
    """How many."""
    prompt_words: int = 128
    """Length of each prompt, in random words of about one token each."""
    shared_words: int = 0
    """So many of them are the same in all prompts."""
    prompts: Path | None = None
    """File with a prompt in each line, taken in order and again from the start, instead of random words."""
    max_tokens: int = 64
    """Length of each answer."""
    ignore_eos: bool = True
    """Every answer has its full length; turn it off for a server that does not know the field."""
    rate: float | None = None
    """Requests per second, at random times (Poisson); None: all at once, or as --concurrency lets them."""
    concurrency: int | None = None
    """Most requests under way; None: no bound."""
    slo_ttft_ms: float | None = None
    """Goodput counts requests whose first token came within this time."""
    slo_itl_ms: float | None = None
    """Goodput counts requests whose other tokens took at most this long on average."""
    load_seed: int | None = None
    """Of the random words and times; None: fresh, so that no run finds the prompts of an earlier one in a cache."""
    json: Path | None = None
    """File for the numbers, and those of each request."""
    plot: Path | None = None
    """File for a plot (.png, .svg, .pdf) of the latencies and of the tokens per second."""
    engine: OmitArgPrefixes[Engine] = Engine()  # noqa: RUF009 - it is frozen
    """How the model is loaded."""

    def __call__(self) -> int:
        seed = random.randrange(1 << 32) if self.load_seed is None else self.load_seed
        prompts = self._prompts(seed)
        if self.plot is not None:
            with needs("bench"):
                import matplotlib  # noqa: F401  # rather now than after the run
        load = Load(
            prompts=prompts,
            max_tokens=self.max_tokens,
            rate=self.rate,
            concurrency=self.concurrency,
            seed=seed,
        )
        name, records = self._online(load) if self.url is not None else self._offline(load)
        result = {"target": name, "load_seed": seed} | summary(records, self.slo_ttft_ms, self.slo_itl_ms)
        print(_table(result))
        if self.json is not None:
            self.json.write_text(json.dumps(result | {"records": [_as_dict(r) for r in records]}, indent=1))
        if self.plot is not None:
            _plot(records, name, self.plot)
        for error in sorted({record.error for record in records if record.error is not None})[:3]:
            print(f"failed: {error:.300}")
        return 1 if result["failed"] == len(records) else 0

    def _prompts(self, seed: int) -> list[str]:
        checks = {
            "num_requests": self.num_requests >= 1,
            "max_tokens": self.max_tokens >= 1,
            "prompt_words": self.prompt_words >= 1,
            "shared_words": 0 <= self.shared_words <= self.prompt_words,
            "rate": self.rate is None or self.rate > 0,
            "concurrency": self.concurrency is None or self.concurrency >= 1,
        }
        for name, is_sane in checks.items():
            if not is_sane:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)} makes no sense")
        if self.prompts is None:
            return random_prompts(self.num_requests, self.prompt_words, self.shared_words, seed)
        try:
            lines = [line for line in self.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
        except OSError as error:
            raise UsageError(f"--prompts: {error}") from error
        if not lines:
            raise UsageError(f"--prompts: {self.prompts} is empty")
        return [lines[i % len(lines)] for i in range(self.num_requests)]

    def _offline(self, load: Load) -> tuple[str, list[Record]]:
        with self.engine.open(self.model) as llm:
            target = Offline(llm, self.endpoint, self.ignore_eos)
            return f"offline, {llm.manager.config.model}", asyncio.run(_measure(target, load))

    def _online(self, load: Load) -> tuple[str, list[Record]]:
        async def measure() -> tuple[str, list[Record]]:
            assert self.url is not None
            with needs("bench"):
                target = Http(self.url, self.model, self.endpoint, self.ignore_eos, self.api_key)
            async with target:
                return f"{self.url}, {target.model}", await _measure(target, load)

        return asyncio.run(measure())


async def _measure(target: Offline | Http, load: Load) -> list[Record]:
    await target.ask("Are you there?", 4)  # what a first request pays for is not what is measured
    return await load.send(target)


def _table(result: dict[str, Any]) -> str:
    rows = [
        f"{result['target']}: {result['requests']} requests, {result['failed']} failed, in {result['seconds']:.2f} s",
        f"  {result['requests_per_second']:.2f} requests/s, {result['generated_tokens_per_second']:.1f} new tokens/s, "
        f"{result['total_tokens_per_second']:.1f} tokens/s in all",
        f"  {result['prompt_tokens']} prompt tokens ({result['cached_tokens']} cached), "
        f"{result['generated_tokens']} new tokens",
    ]
    names = {"ttft_ms": "first token", "itl_ms": "between tokens", "e2e_ms": "whole answer"}
    for key, name in names.items():
        values = "  ".join(f"{share} {value:9.1f}" for share, value in result[key].items())
        rows.append(f"  {name:<14} ms  {values}")
    if "slo" in result:
        rows.append(
            f"  goodput {result['goodput_requests_per_second']:.2f} requests/s ({result['goodput_share']:.0%} of all)"
        )
    return "\n".join(rows)


def _as_dict(record: Record) -> dict[str, Any]:
    return {
        "sent": record.sent,
        "ttft_ms": None if (first := record.first_token) is None else first * 1e3,
        "e2e_ms": (record.ended - record.sent) * 1e3,
        "prompt_tokens": record.num_prompt,
        "generated_tokens": record.num_generated,
        "error": record.error,
    }


def _plot(records: Sequence[Record], title: str, file: Path) -> None:
    """How the latencies are distributed, and the tokens per second over time."""
    from matplotlib.figure import Figure

    good = [record for record in records if record.error is None]
    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(title, fontsize=10)
    shares, rate = figure.subplots(1, 2)
    curves = {
        "first token": [first for record in good if (first := record.first_token) is not None],
        "between tokens": [gap for record in good for gap in record.gaps],
        "whole answer": [record.ended - record.sent for record in good],
    }
    for name, seconds in curves.items():
        if seconds:
            shares.ecdf([1e3 * value for value in seconds], label=name)
    shares.set(xscale="log", xlabel="milliseconds", ylabel="share of them")
    shares.grid(alpha=0.3)
    if good:
        shares.legend()
    start = min(record.sent for record in records)
    stamps = [stamp - start for record in good for stamp in record.stamps]
    span = max(stamps, default=1.0)
    bins = max(1, min(50, int(4 * span)))  # a quarter of a second has several steps
    width = span / bins
    rate.hist(stamps, bins=bins, weights=[1 / width] * len(stamps), histtype="stepfilled", alpha=0.6)
    rate.set(xlabel="seconds", ylabel="new tokens per second")
    rate.grid(alpha=0.3)
    figure.savefig(file)
