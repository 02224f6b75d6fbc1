"""`chairlift serve` in a process, `chairlift bench` against it and offline."""

import gzip
import json
import re
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest

from chairlift.cli import main
from tests.cli.conftest import ENVIRONMENT, WAIT, Start

ENGINE = ("--page-size", "16", "--num-blocks", "2048")
LOAD = ("--num-requests", "12", "--prompt-words", "20", "--shared-words", "10", "--max-tokens", "7")


class Collector(BaseHTTPRequestHandler):
    """Takes spans, as OTLP over HTTP brings them."""

    bodies: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.bodies.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *message: object) -> None:
        pass


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """What a collector of traces has got, whose address is in the environment."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setitem(ENVIRONMENT, "OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield Collector.bodies
        server.shutdown()
        thread.join()
    Collector.bodies.clear()


@pytest.fixture
def url(start: Start, folder: str) -> Iterator[str]:
    """A server with a key; it ends well when it is told to."""
    process = start("serve", folder, *ENGINE, "--port", "0", "--api-key", "secret", "--served-model-name", "lift")
    yield from serving(process)


@pytest.fixture
def traced_url(start: Start, folder: str, spans: list[bytes]) -> Iterator[str]:
    """A server that sends traces; they are there once it has ended."""
    process = start("serve", folder, *ENGINE, "--port", "0", "--trace", "--served-model-name", "lift")
    yield from serving(process)
    assert any(b"gen_ai.usage.output_tokens" in body and b"chat lift" in body for body in spans)


def serving(process: Any) -> Iterator[str]:
    said = b""
    while not (match := re.search(rb"lift is served at (http://127\.0\.0\.1:\d+)\n", said)):
        line = process.stderr.readline()
        assert line, said
        said += line
    yield match[1].decode()
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT) == 0
    assert b"Traceback" not in process.stderr.read()


def test_a_server_and_a_load_on_it(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
    assert [model.id for model in client.models.list()] == ["lift"]
    answer = client.chat.completions.create(model="lift", messages=[{"role": "user", "content": "Hi"}], max_tokens=5)
    assert answer.usage is not None and answer.usage.completion_tokens == 5
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="guess").models.list()

    for number, extra in enumerate((["--concurrency", "3"], ["--rate", "200", "--endpoint", "completions"])):
        file = tmp_path / f"{number}.json"
        flags = ["--url", url, "--api-key", "secret", "--json", str(file), *LOAD, *extra]
        assert main(["bench", *flags, "--slo-ttft-ms", "60000", "--slo-itl-ms", "60000"]) == 0
        check(json.loads(file.read_text()), 12, 7)
        assert "goodput" in capsys.readouterr().out
        assert json.loads(file.read_text())["goodput_share"] == 1.0

    assert main(["bench", "--url", url, "--api-key", "wrong", "--num-requests", "2"]) == 1
    assert main(["bench", "lift", "--url", url, "--api-key", "wrong", "--num-requests", "2"]) == 1
    assert "failed: 401" in capsys.readouterr().out


def test_a_server_with_traces_and_priorities(traced_url: str) -> None:
    """What is traced is asserted once the server has ended. A priority means something without any flag."""
    client = openai.OpenAI(base_url=f"{traced_url}/v1", api_key="any", max_retries=0)
    answer = client.chat.completions.create(
        model="lift", messages=[{"role": "user", "content": "Hi"}], max_tokens=5, extra_body={"priority": -1}
    )
    assert answer.choices[0].finish_reason == "length"


def check(result: dict[str, Any], requests: int, tokens: int) -> None:
    assert (result["requests"], result["failed"]) == (requests, 0)
    assert result["generated_tokens"] == requests * tokens
    assert result["prompt_tokens"] > 20 * requests
    assert 0 < result["cached_tokens"] < result["prompt_tokens"]
    assert result["generated_tokens_per_second"] == pytest.approx(requests * tokens / result["seconds"])
    for key in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert 0 <= result[key]["p50"] <= result[key]["p90"] <= result[key]["p99"]
    assert result["ttft_ms"]["p50"] <= result["e2e_ms"]["p99"] <= 1e3 * result["seconds"]
    assert len(result["records"]) == requests
    assert all(record["generated_tokens"] == tokens for record in result["records"])


def test_offline(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plot = tmp_path / "numbers.json", tmp_path / "plot.png"
    flags = [*LOAD, "--json", str(file), "--plot", str(plot), "--load-seed", "3", "--slo-ttft-ms", "0.000001"]
    assert main(["bench", folder, *ENGINE, *flags]) == 0
    result = json.loads(file.read_text())
    check(result, 12, 7)
    assert result["load_seed"] == 3
    assert result["goodput_share"] == 0.0
    assert plot.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "12 requests, 0 failed" in out
    assert "first token" in out


def test_prompts_of_a_file(folder: str, tmp_path: Path) -> None:
    prompts, file = tmp_path / "prompts", tmp_path / "numbers.json"
    prompts.write_text("fox\n\nThe quick brown fox jumps over the lazy dog\n")
    flags = ["--prompts", str(prompts), "--num-requests", "5", "--max-tokens", "3", "--endpoint", "completions"]
    assert main(["bench", folder, *ENGINE, *flags, "--json", str(file)]) == 0
    lengths = [record["prompt_tokens"] for record in json.loads(file.read_text())["records"]]
    assert lengths[0] == lengths[2] == lengths[4] < lengths[1] == lengths[3]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--port", "99999"], "65535"),  # sockets take it modulo 65536
        (["--max-body-mib", "nan"], "above 0"),
        (["--ssl-keyfile", "key.pem"], "--ssl-certfile"),
    ],
)
def test_flags_that_make_no_sense(
    folder: str, flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", folder, *ENGINE, *flags]) != 0
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_would_open_the_server_to_all(folder: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", folder, *ENGINE, "--port", "0", "--api-key", key]) != 0
    assert "empty" in capsys.readouterr().err
