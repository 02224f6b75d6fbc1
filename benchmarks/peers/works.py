"""What every contender of `benchmarks.compare` is given, and the loop in which it answers.

A contender is a process that loads a model once and then reads lines `WORK ROUND`. It answers each with a line of JSON,
`{"value": ...}` in the unit of the work, and tells what it is in a first line. Runs in the peers' own environments, so
it imports nothing but the standard library.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

BATCH_TOKENS = 512  # per forward pass, for every engine that can be told
CONTEXT = 8000  # tokens; the context length of SmolLM2 is 8192
SHARED, OWN = 1000, 16

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How an engine is to be set up. One engine at a time: another setting replaces it."""

    rows: int = 64
    cached: bool = False  # prefix caching


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Something to measure."""

    title: str
    unit: str
    setting: Setting
    less_is_better: bool = False


WORKS = {  # those with the same setting side by side
    "w64": Work(title="W64", unit="new tokens/s", setting=Setting()),
    "sampling": Work(title="W64, sampled with penalties", unit="new tokens/s", setting=Setting()),
    "one_stream": Work(title="one stream", unit="new tokens/s", setting=Setting()),
    "prefill": Work(title="prefill of 1 024", unit="prompt tokens/s", setting=Setting()),
    "unshared_prefix": Work(title="64 prompts of 1 016, none shared", unit="s", setting=Setting(), less_is_better=True),
    "rows256": Work(title="256 rows", unit="new tokens/s", setting=Setting(rows=256)),
    "shared_prefix": Work(
        title="64 prompts of 1 016, 1 000 shared", unit="s", setting=Setting(cached=True), less_is_better=True
    ),
    "long_context": Work(title="context of 8 000, 1 row", unit="new tokens/s", setting=Setting(cached=True)),
    "long_context_8": Work(title="context of 8 000, 8 rows", unit="new tokens/s", setting=Setting(cached=True)),
}


class Engine(Protocol):
    """A contender that generates token by token what it is asked for."""

    def prepare(self, setting: Setting) -> None:
        """Be ready to generate under `setting`; nothing of this is timed."""

    def generate(self, prompts: Prompts, counts: Sequence[int], sampled: bool) -> int:
        """Give each prompt as many new tokens as its count says, whatever they are; return how many came."""


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int | str) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(100, vocab_size) for _ in range(length)] for length in lengths]


def w64(vocab_size: int = 49152, count: int = 64, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """The W64 workload: prompts of 16 to 256 random tokens, and how many tokens (16 to 128) each is to be given."""
    generator = random.Random(seed)
    prompts = [[generator.randrange(100, vocab_size) for _ in range(generator.randint(16, 256))] for _ in range(count)]
    return prompts, [generator.randint(16, 128) for _ in range(count)]


class Meter:
    """Measures the works on an engine."""

    def __init__(self, engine: Engine, vocab_size: int, is_tiny: bool) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._shrink = 16 if is_tiny else 1
        self._setting: Setting | None = None

    def measure(self, name: str, number: int) -> float:
        """The value of work `name` in round `number`, in its unit."""
        if WORKS[name].setting != self._setting:
            self._setting = WORKS[name].setting
            self._engine.prepare(self._setting)
            self._seconds(self._prompts([BATCH_TOKENS, 32], "warm"), [4, 4])
        return {
            "w64": self._w64,
            "sampling": lambda: self._w64(sampled=True),
            "one_stream": lambda: self._decode([16], 128, f"one {number}"),
            "prefill": lambda: 1024 / self._shrink / self._seconds(self._prompts([1024], f"prefill {number}"), [1]),
            "rows256": self._rows,
            "shared_prefix": lambda: self._prefix(f"shared {number}"),
            "unshared_prefix": lambda: self._prefix(f"unshared {number}"),
            "long_context": lambda: self._decode([CONTEXT], 64, "long"),
            "long_context_8": lambda: self._decode([CONTEXT] * 8, 64, "long"),
        }[name]()

    def _prompts(self, lengths: Sequence[int], seed: str) -> list[list[int]]:
        return random_prompts([max(16, length // self._shrink) for length in lengths], self._vocab_size, seed)

    def _seconds(self, prompts: Prompts, counts: Sequence[int], sampled: bool = False) -> float:
        begin = time.perf_counter()
        done = self._engine.generate(prompts, counts, sampled)
        seconds = time.perf_counter() - begin
        if done != sum(counts):
            raise RuntimeError(f"{done} tokens came where {sum(counts)} were asked for")
        return seconds

    def _w64(self, sampled: bool = False) -> float:
        prompts, counts = w64(self._vocab_size, 64 // self._shrink)
        return sum(counts) / self._seconds(prompts, counts, sampled)

    def _rows(self) -> float:
        rows = 256 // self._shrink
        return rows * 64 / self._seconds(self._prompts([32] * rows, "rows"), [64] * rows)

    def _prefix(self, seed: str) -> float:
        """The first request alone, for engines that share only what is finished, and then the others."""
        (system,) = self._prompts([SHARED], seed)
        prompts = [
            system + own for own in random_prompts([OWN] * (64 // self._shrink), self._vocab_size, f"own {seed}")
        ]
        return self._seconds(prompts[:1], [1]) + self._seconds(prompts[1:], [1] * (len(prompts) - 1))

    def _decode(self, lengths: Sequence[int], steps: int, seed: str) -> float:
        """New tokens per second after the first: what `steps` more tokens take longer than one."""
        prompts = self._prompts(lengths, seed)
        if max(lengths) == CONTEXT:
            self._seconds(prompts, [1] * len(prompts))  # into the prefix cache, if it is not there from the last round
        for _ in range(3):
            first = self._seconds(prompts, [1] * len(prompts))
            rest = self._seconds(prompts, [1 + steps] * len(prompts)) - first
            if rest > 0:  # else something held up the first token alone
                return len(prompts) * steps / rest
        raise RuntimeError(f"three times one token took as long as {1 + steps}")


def arguments() -> argparse.Namespace:
    """What `benchmarks.compare` starts a contender with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True, help="folder with the model in every format")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tiny", action="store_true", help="works of a sixteenth, to see that everything runs")
    return parser.parse_args()


def vocabulary(model: Path) -> int:
    """Tokens that the model knows."""
    return int(json.loads((model / "hf" / "config.json").read_text())["vocab_size"])


class Channel:
    """Lines to `benchmarks.compare`. Whatever else is printed to the standard output goes to the standard error."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def send(self, message: dict[str, Any]) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()


def serve(channel: Channel, hello: dict[str, Any], measure: Callable[[str, int], float | dict[str, float]]) -> None:
    """Say `hello`, then answer lines `WORK ROUND` with what `measure(work, round)` gives, until there are no more."""
    channel.send(hello)
    for line in sys.stdin:
        work, number = line.split()
        answer = measure(work, int(number))
        channel.send(answer if isinstance(answer, dict) else {"value": answer})
