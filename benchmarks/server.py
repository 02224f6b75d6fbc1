"""The HTTP server against the engine alone: 64 streams, the same requests, the same process; what HTTP costs.

    python -m benchmarks server [--rounds 3] [--requests 128] [--dtype bfloat16] [--json results.jsonl]

A server process answers the requests over HTTP for this process, which does nothing but read, and then offline, through
the same manager; in turns. Told are tokens per second both ways, and how much later than in the engine the first token
is there: from the request's first byte sent until its first event read, less the engine's own time for it. The first 64
requests come all at once, the others one by one as streams end.
"""

import argparse
import json
import random
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STREAMS = 64


@dataclass(frozen=True, slots=True)
class Work:
    """One request: token ids, and how many to add."""

    prompt: list[int]
    count: int


def works(number: int, seed: int) -> list[Work]:
    """Prompts of 16 to 128 random tokens, 16 to 64 new tokens each. No two prompts begin alike."""
    draw = random.Random(seed)
    return [
        Work([draw.randrange(100, 40_000) for _ in range(draw.randint(16, 128))], draw.randint(16, 64))
        for _ in range(number)
    ]


# ---------------------------------------------------------------------- the server's process


def serve(dtype: str) -> None:
    """Print the URL and serve; `/bench/offline` answers requests without HTTP, `/bench/times` tells of the others."""
    from fastapi import FastAPI

    from benchmarks.common import load
    from chairlift import ContinuousBatchingConfig, attach
    from chairlift.model.loader import load_smollm2
    from chairlift.request import GenerationOutput
    from chairlift.server import create_app
    from chairlift.server import serve as run

    _, tokenizer = load_smollm2()
    model = attach(load(dtype))
    config = ContinuousBatchingConfig(max_batch_tokens=512, max_requests_per_batch=STREAMS, allow_block_sharing=False)
    manager = model.init_continuous_batching(continuous_batching_config=config)
    manager.warmup()
    manager.start()
    app: FastAPI = create_app(manager, tokenizer, model_name="smollm2", max_body_bytes=1 << 30)
    ended: list[tuple[list[int], float]] = []
    observe = app.state.service.metrics.observe

    def note(output: GenerationOutput) -> None:
        observe(output)
        if output.timestamps:
            ended.append((output.prompt_ids[:8], output.timestamps[0] - output.created_time))

    app.state.service.metrics.observe = note

    @app.get("/bench/times")
    def times() -> list[tuple[list[int], float]]:
        taken = ended[:]
        ended.clear()
        return taken

    @app.post("/bench/offline")
    def offline(requests: list[tuple[list[int], int]]) -> float:
        begin = time.perf_counter()
        for prompt, count in requests:
            manager.add_request(prompt, max_new_tokens=count, ignore_eos=True, temperature=0)
        assert sum(len(output.generated_tokens) for output in manager) == sum(count for _, count in requests)
        return time.perf_counter() - begin

    run(app, port=0, log_level="warning", ready=lambda url: print(url, flush=True))
    manager.stop(hard_stop=True)


# ---------------------------------------------------------------------- this process


def call(address: tuple[str, int], method: str, path: str, body: Any = None) -> Any:
    """One request on a connection of its own; its whole answer."""
    with socket.create_connection(address) as connection:
        connection.sendall(_request(method, path, body, "Connection: close\r\n"))
        answer = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    return json.loads(answer.split(b"\r\n\r\n", 1)[1])


def _request(method: str, path: str, body: Any, headers: str = "") -> bytes:
    content = json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


class Stream:
    """A connection on which answer follows answer while there is work; it looks at next to nothing of what it reads."""

    def __init__(self, address: tuple[str, int], waiting: list[Work], first: dict[tuple[int, ...], float]) -> None:
        self.connection = socket.create_connection(address)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._waiting = waiting
        self._first = first

    def ask(self) -> bool:
        """Send the next request, if there is one."""
        if not self._waiting:
            self.connection.close()
            return False
        self._work = work = self._waiting.pop(0)
        body = {"prompt": work.prompt, "max_tokens": work.count, "ignore_eos": True, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        self._pieces: list[bytes] = []
        self._is_begun = False
        self._begin = time.perf_counter()
        self.connection.sendall(_request("POST", "/v1/completions", body))
        return True

    def read(self) -> bool:
        """Take what has come; True at the end of the answer."""
        piece = self.connection.recv(1 << 16)
        assert piece, "the server closed the connection"
        self._pieces.append(piece)
        if not self._is_begun and b"data: " in piece:
            self._is_begun = True
            self._first[tuple(self._work.prompt[:8])] = time.perf_counter() - self._begin
        if not piece.endswith(b"\r\n") or not b"".join(self._pieces[-7:]).endswith(b"\r\n0\r\n\r\n"):
            return False
        assert f'"completion_tokens":{self._work.count}'.encode() in b"".join(self._pieces)
        return True


def through_http(address: tuple[str, int], requests: Sequence[Work]) -> tuple[float, list[float]]:
    """Seconds for all requests, and seconds that HTTP added to each one's first token, in order."""
    waiting, first = list(requests), dict[tuple[int, ...], float]()
    begin = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for _ in range(min(STREAMS, len(requests))):
            opened = Stream(address, waiting, first)
            opened.ask()
            selector.register(opened.connection, selectors.EVENT_READ, opened)
        while selector.get_map():
            for key, _ in selector.select():
                if key.data.read():
                    selector.unregister(key.fileobj)
                    if key.data.ask():
                        selector.register(key.fileobj, selectors.EVENT_READ, key.data)
    seconds = time.perf_counter() - begin
    own = {tuple(key): value for key, value in call(address, "GET", "/bench/times")}
    keys = [tuple(work.prompt[:8]) for work in requests]
    return seconds, [first[key] - own[key] for key in keys]


def _quantiles(values: Sequence[float]) -> str:
    cuts = statistics.quantiles(values, n=20)
    return f"median {statistics.median(values) * 1e3:.1f} ms, p95 {cuts[18] * 1e3:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2 * STREAMS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", help="append the result to this file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.dtype)
    command = [sys.executable, "-m", "benchmarks", "server", "--serve", "--dtype", args.dtype]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        host, port = server.stdout.readline().strip().removeprefix("http://").split(":")
        try:
            measure((host, int(port)), args)
        finally:
            server.terminate()


def measure(address: tuple[str, int], args: argparse.Namespace) -> None:
    """Offline and over HTTP in turns; prints and records."""
    results: dict[str, list[float]] = {"offline": [], "http": []}
    burst: list[float] = []
    steady: list[float] = []
    through_http(address, works(8, seed=-1))  # both know the way
    for number in range(args.rounds):
        requests = works(args.requests, seed=number)
        tokens = sum(work.count for work in requests)
        seconds = call(address, "POST", "/bench/offline", [(work.prompt, work.count) for work in requests])
        results["offline"].append(tokens / seconds)
        seconds, added = through_http(address, requests)
        results["http"].append(tokens / seconds)
        burst += added[:STREAMS]
        steady += added[STREAMS:]
        print(
            f"round {number + 1}: {results['offline'][-1]:.1f} offline, {results['http'][-1]:.1f} over HTTP", flush=True
        )
    print(f"added to the first token: {_quantiles(steady)}; of {STREAMS} requests at once: {_quantiles(burst)}")
    from benchmarks.common import report

    report(f"server, {STREAMS} streams, {args.dtype}", results, "new tokens/s", "http", args.json)


if __name__ == "__main__":
    main()
