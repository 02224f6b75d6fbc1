"""A server in a process of its own, and clients that come, wait, leave and are killed."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.server.toy import WAIT, Live, live

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
LONG = {"model": "toy", "prompt": "The quick brown fox", "max_tokens": 1900, "ignore_eos": True, "temperature": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live() as started:
        yield started
        assert started.end() == 0
        assert started.process.stdout is not None
        assert set(json.loads(started.process.stdout.read()).values()) == {0}


@pytest.fixture(scope="module")
def slow_server() -> Iterator[Live]:
    """Whose answers are never done before a test wants something else."""
    with live("--slow", "0.01") as started:
        yield started


def client_of(server: Live, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0, timeout=WAIT, **options)


def state_of(server: Live) -> dict[str, int]:
    state: dict[str, int] = httpx.get(f"{server.url}/test/state", timeout=WAIT).json()
    return state


def assert_nothing_is_left(server: Live) -> None:
    """Soon nothing runs, waits, is held or expected."""
    until = time.monotonic() + WAIT
    while any((state := state_of(server)).values()):
        assert time.monotonic() < until, state
        time.sleep(0.05)


def wait_for(server: Live, **wanted: int) -> None:
    """Until the server is in this state."""
    until = time.monotonic() + WAIT
    while not wanted.items() <= (state := state_of(server)).items():
        assert time.monotonic() < until, state
        time.sleep(0.01)


def test_what_is_loaded_is_no_garbage(server: Live) -> None:
    """Looking through it would stop the server for a quarter of a second."""
    assert httpx.get(f"{server.url}/test/frozen", timeout=WAIT).json() > 100_000


def test_the_real_clients(server: Live) -> None:
    client = client_of(server)
    assert [model.id for model in client.models.list()] == ["toy"]
    body: dict[str, Any] = {"model": "toy", "messages": HELLO, "temperature": 0, "max_tokens": 30}
    whole = client.chat.completions.create(**body).choices[0].message.content
    chunks = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**body, stream=True)]
    assert "".join(chunks) == whole
    assert len(chunks) > 10, "not streamed"

    async def asynchronous() -> str:
        async with openai.AsyncOpenAI(api_key="none", base_url=f"{server.url}/v1", timeout=WAIT) as client:
            stream = await client.chat.completions.create(**body, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(asynchronous()) == whole
    assert client.responses.create(model="toy", input="Hello", temperature=0, max_output_tokens=30).output_text == whole


async def test_64_streams_equal_their_solo_answers(server: Live) -> None:
    prompts = [f"{number} foxes and {number * 7} dogs" * (1 + number % 5) for number in range(64)]
    async with openai.AsyncOpenAI(api_key="none", base_url=f"{server.url}/v1", timeout=WAIT) as client:

        async def solo(prompt: str) -> str:
            body: dict[str, Any] = {"model": "toy", "prompt": prompt, "temperature": 0, "max_tokens": 40}
            return (await client.completions.create(**body)).choices[0].text

        async def streamed(prompt: str) -> str:
            body: dict[str, Any] = {
                "model": "toy",
                "prompt": prompt,
                "temperature": 0,
                "max_tokens": 40,
                "stream": True,
            }
            return "".join([c.choices[0].text async for c in await client.completions.create(**body)])

        alone = [await solo(prompt) for prompt in prompts]
        together = await asyncio.gather(*map(streamed, prompts))
    assert list(together) == alone
    assert len(set(alone)) > 32


def raw_request(server: Live, body: dict[str, Any]) -> socket.socket:
    """A connection on which this completion has been asked for."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=WAIT)
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    connection.sendall(f"{head}\r\n\r\n".encode() + content)
    return connection


def leave(server: Live, number: int) -> None:
    """Come and go: before anything was read, in the middle of a stream, while waiting for an answer."""
    stream = number % 3 != 2
    connection = raw_request(server, LONG | {"stream": stream, "prompt": f"{number % 50} foxes", "n": 1 + number % 2})
    if number % 3 == 1:
        while b"data: " not in connection.recv(4096):
            pass
    if number % 2:  # a reset instead of an orderly end
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()


def test_a_thousand_who_leave(server: Live) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: leave(server, number), range(1000)))
    assert_nothing_is_left(server)
    assert client_of(server).completions.create(model="toy", prompt="x", max_tokens=1).choices


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_is_cancelled_at_once(slow_server: Live, stream: bool) -> None:
    connection = raw_request(slow_server, LONG | {"stream": stream, "n": 3})
    wait_for(slow_server, running=3, calls=1)
    connection.close()
    assert_nothing_is_left(slow_server)  # the answer would take 19 seconds


def test_a_client_that_is_killed(slow_server: Live) -> None:
    program = (
        "import sys, openai\n"
        "client = openai.OpenAI(api_key='none', base_url=sys.argv[1])\n"
        "body = dict(model='toy', prompt='x', max_tokens=1900, extra_body={'ignore_eos': True})\n"
        "for chunk in client.completions.create(stream=True, **body): print('chunk', flush=True)\n"
    )
    command = [sys.executable, "-c", program, f"{slow_server.url}/v1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "chunk\n"
        os.kill(client.pid, signal.SIGKILL)
    assert_nothing_is_left(slow_server)


def test_one_that_does_not_read_holds_up_nobody(server: Live) -> None:
    connection = raw_request(server, LONG | {"stream": True, "n": 64, "logprobs": 5})
    try:
        for _ in range(3):
            assert client_of(server).completions.create(model="toy", prompt="x", max_tokens=5).choices
    finally:
        connection.close()
    assert_nothing_is_left(server)


def answer_in_thread(server: Live, pool: ThreadPoolExecutor, count: int, **more: Any) -> Any:
    """The text of one stream in the background, or the error that ended it."""

    def read() -> tuple[int, str | None]:
        number, reason = 0, None
        try:
            body: dict[str, Any] = {"model": "toy", "prompt": "x", "max_tokens": count, "stream": True}
            for chunk in client_of(server).completions.create(**body, extra_body={"ignore_eos": True}):
                number += 1
                reason = chunk.choices[0].finish_reason
        except openai.APIError as error:
            return number, f"error: {error}"
        return number, reason

    return pool.submit(read)


def test_sigterm_drains() -> None:
    with live("--slow", "0.01") as server, ThreadPoolExecutor() as pool:
        answer = answer_in_thread(server, pool, 150)
        wait_for(server, running=1)
        with httpx.stream("GET", f"{server.url}/events", timeout=WAIT) as watching:
            for _ in watching.iter_lines():
                break
            server.process.send_signal(signal.SIGTERM)
            assert answer.result(WAIT)[1] == "length"
        assert server.process.wait(WAIT) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
        assert server.process.stdout is not None
        assert set(json.loads(server.process.stdout.read()).values()) == {0}


@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,)], ids=["twice", "interrupt"])
def test_a_second_signal_ends_now(signals: tuple[int, ...]) -> None:
    with live("--slow", "0.05") as server, ThreadPoolExecutor() as pool:
        answer = answer_in_thread(server, pool, 1900)
        wait_for(server, running=1)
        for each in signals:
            time.sleep(0.3)
            server.process.send_signal(each)
        assert "shutting down" in answer.result(WAIT)[1]
        assert server.process.wait(WAIT) == 0


def test_the_drain_has_an_end() -> None:
    with live("--slow", "0.05", "--drain-timeout", "0.5") as server, ThreadPoolExecutor() as pool:
        answer = answer_in_thread(server, pool, 1900)
        wait_for(server, running=1)
        assert server.end() == 0
        assert "shutting down" in answer.result(WAIT)[1]


def test_half_a_body_does_not_hold_the_drain(capfd: pytest.CaptureFixture[str]) -> None:
    with live("--drain-timeout", "0.5") as server:
        whole = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
        )
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        with contextlib.ExitStack() as connections:
            for part in (whole, whole[:40], b""):
                connections.enter_context(socket.create_connection(address)).sendall(part)
            assert httpx.get(f"{server.url}/health", timeout=WAIT).status_code == 200  # what came before has been read
            assert server.end() == 0
    assert "Traceback" not in capfd.readouterr().err


def test_the_engine_crashes_in_a_stream() -> None:
    with live("--slow", "0.01") as server, ThreadPoolExecutor() as pool:
        streamed = answer_in_thread(server, pool, 1900)
        whole = pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=WAIT)
        wait_for(server, running=2)
        httpx.post(f"{server.url}/test/crash", timeout=WAIT)
        assert "a fault that a test asked for" in streamed.result(WAIT)[1]
        assert whole.result(WAIT).status_code == 503
        assert httpx.get(f"{server.url}/health", timeout=WAIT).status_code == 503
        with pytest.raises(openai.InternalServerError) as raised:
            client_of(server).completions.create(model="toy", prompt="x")
        assert raised.value.status_code == 503
        assert server.end() == 0


def test_a_full_queue_is_told_and_retried() -> None:
    config = json.dumps({"max_queue_size": 1, "max_requests_per_batch": 1})
    with live("--slow", "0.005", "--config", config) as server:
        holding = [raw_request(server, LONG | {"max_tokens": 200})]
        wait_for(server, running=1, waiting=0)
        holding.append(raw_request(server, LONG | {"max_tokens": 200}))
        wait_for(server, running=1, waiting=1)
        with pytest.raises(openai.RateLimitError) as raised:
            client_of(server).completions.create(model="toy", prompt="x")
        assert int(raised.value.response.headers["retry-after"]) >= 1
        patient = openai.OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=30)
        assert patient.completions.create(model="toy", prompt="x", max_tokens=1).choices  # it waits and comes again
        for connection in holding:
            connection.close()
