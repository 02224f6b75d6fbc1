"""GET / and GET /events, in process, over a real manager of a tiny model: who listens to what, and when it ends."""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from chairlift import ContinuousBatchingManager
from chairlift.server import page as page_module
from chairlift.server.page import PageRouter, encode, page_headers, router
from chairlift.stats import EngineView, RowView, WaitingView
from tests.cases import tiny

SOON = 60.0  # seconds that nobody waits unless something is lost


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.llama()


@pytest.fixture
def manager(llama: Any) -> Iterator[ContinuousBatchingManager]:
    with tiny.serving(llama) as manager:
        yield manager


@pytest.fixture
def page(manager: ContinuousBatchingManager) -> PageRouter:
    return router(manager)


@pytest.fixture
def app(page: PageRouter) -> FastAPI:
    app = FastAPI()
    app.include_router(page)
    return app


class Listener:
    """One client of /events, that reads as fast as it is told to."""

    def __init__(self) -> None:
        self.status = 0
        self.arrived: list[bytes] = []
        self.ended = False
        self._changed = asyncio.Condition()
        self.reads = asyncio.Event()  # cleared: whoever sends to it waits
        self.reads.set()
        self.leaves = asyncio.Event()
        self._asked = False

    async def receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        async with self._changed:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            elif message["body"]:
                self.arrived.append(message["body"])
            self.ended = self.ended or message.get("more_body") is False
            self._changed.notify_all()
        await self.reads.wait()

    @property
    def views(self) -> list[dict[str, Any]]:
        return [json.loads(data[6:]) for data in self.arrived if data.startswith(b"data: ")]

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(SOON), self._changed:
            await self._changed.wait_for(condition)

    async def until_views(self, number: int) -> None:
        await self.until(lambda: len(self.views) >= number)


@asynccontextmanager
async def listening(app: FastAPI) -> AsyncIterator[Listener]:
    """A client that has got its first view, and leaves at the end."""
    listener = Listener()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "path": "/events",
        "query_string": b"",
        "headers": [],
    }
    handler = asyncio.create_task(app(scope, listener.receive, listener.send))  # type: ignore[arg-type]
    try:
        await listener.until_views(1)
        yield listener
    finally:
        listener.leaves.set()
        listener.reads.set()
        async with asyncio.timeout(SOON):
            await handler


def watchers(manager: ContinuousBatchingManager) -> int:
    return len(manager._watchers)


async def finish(manager: ContinuousBatchingManager, tokens: list[int], count: int, **more: Any) -> Any:
    request_id = manager.add_request(tokens, max_new_tokens=count, streaming=True, **more)
    assert request_id is not None
    async for output in manager.stream(request_id):
        last = output
    return last


async def test_the_engine_is_watched_once_and_only_while_somebody_listens(
    app: FastAPI, manager: ContinuousBatchingManager
) -> None:
    assert watchers(manager) == 0
    async with listening(app):
        assert watchers(manager) == 1
        async with listening(app), listening(app):
            assert watchers(manager) == 1
        assert watchers(manager) == 1
    assert watchers(manager) == 0
    async with listening(app) as again:
        assert watchers(manager) == 1
        assert again.views[0]["running"] == []


async def test_a_request_is_seen_from_its_first_step_to_its_last(
    app: FastAPI, manager: ContinuousBatchingManager, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "INTERVAL_S", 0.0)
    async with listening(app) as listener:
        with tiny.Steps(llama) as steps:
            answer = asyncio.create_task(finish(manager, tiny.prompt(9), 5, request_id="mine"))
            await asyncio.to_thread(steps.at, 3)
            await listener.until(lambda: any(view["running"] for view in listener.views))
            steps.release()
            assert len((await answer).generated_tokens) == 5
        await listener.until(lambda: listener.views[-1]["step"] > 2 and not listener.views[-1]["num_running"])
    seen = [row for view in listener.views for row in view["running"]]
    assert seen and {row[0] for row in seen} == {"mine"}
    assert {(row[1], row[4]) for row in seen} == {(9, 14)}
    generated = [row[3] for row in seen]
    assert generated == sorted(generated) and 0 < generated[0] <= generated[-1] <= 5
    last = listener.views[-1]
    cells = base64.b64decode(last["blocks"])
    assert len(cells) == manager.stats().total_blocks
    assert set(cells) == {0, 3}  # at rest: free or cached
    assert last["batch_rows"] == 0 and last["num_waiting"] == 0


async def test_a_slow_reader_skips_to_the_latest_view_and_holds_nobody_up(
    app: FastAPI, manager: ContinuousBatchingManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "INTERVAL_S", 0.0)
    async with listening(app) as slow, listening(app) as fast:
        slow.reads.clear()
        await finish(manager, tiny.prompt(5), 3)
        await slow.until_views(2)  # it takes this one, and is stuck with it
        for i in range(4):
            await finish(manager, tiny.prompt(6 + i), 20)
        await fast.until(lambda: fast.views[-1]["step"] >= 80 and not fast.views[-1]["num_running"])
        assert len(slow.views) == 2
        slow.reads.set()
        await slow.until_views(3)
        assert slow.views[2] == fast.views[-1]
        assert len(slow.views) == 3


async def test_who_comes_later_gets_the_last_view_at_once(app: FastAPI, manager: ContinuousBatchingManager) -> None:
    async with listening(app) as first:
        await finish(manager, tiny.prompt(5), 6)
        await first.until(lambda: first.views[-1]["step"] > 0 and not first.views[-1]["num_running"])
        async with listening(app) as second:
            assert second.views == [first.views[-1]]


async def test_who_leaves_in_the_middle_of_a_send_is_forgotten_at_once(
    app: FastAPI, manager: ContinuousBatchingManager
) -> None:
    async with listening(app) as stuck:
        stuck.reads.clear()
        await finish(manager, tiny.prompt(5), 6)
        await stuck.until_views(2)
        stuck.leaves.set()
        async with asyncio.timeout(SOON):
            while watchers(manager):
                await asyncio.sleep(0.01)


async def test_a_quiet_stream_says_that_it_is_alive(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "ALIVE_S", 0.01)
    async with listening(app) as listener:
        await listener.until(lambda: listener.arrived.count(b": alive\n\n") >= 3)
        assert len(listener.views) == 1


async def test_closing_ends_open_streams_and_those_to_come(
    app: FastAPI, page: PageRouter, manager: ContinuousBatchingManager
) -> None:
    async with listening(app) as one, listening(app) as other:
        page.close()
        for listener in (one, other):
            await listener.until(lambda listener=listener: listener.ended)
            assert listener.arrived[-1] == b"event: bye\ndata: {}\n\n"
    assert watchers(manager) == 0
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://lift") as client:
        assert (await client.get("/events")).text == "event: bye\ndata: {}\n\n"
    assert watchers(manager) == 0


async def test_the_death_of_the_engine_ends_the_streams(
    app: FastAPI, manager: ContinuousBatchingManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "ALIVE_S", 0.05)
    async with listening(app) as listener:

        def burst() -> Any:
            raise RuntimeError("the rope broke")

        monkeypatch.setattr(manager._engine, "step", burst)
        manager.add_request(tiny.prompt(5), max_new_tokens=2)
        await listener.until(lambda: listener.ended)
        assert listener.arrived[-1].startswith(b"event: bye")
    assert watchers(manager) == 0


async def test_the_page_is_its_file_and_may_run_only_what_is_in_it(app: FastAPI) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://lift") as client:
        answer = await client.get("/")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/html")
        again = await client.get("/", headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy and policy.startswith("default-src 'none';")
    for element in ("script", "style"):
        (body,) = re.findall(rf"<{element}>(.*?)</{element}>".encode(), answer.content, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in policy


def test_the_page_needs_nothing_from_elsewhere_and_writes_no_markup() -> None:
    html = (page_module.files("chairlift.server") / "static" / "index.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", html)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", html)
    assert not re.findall(r"\son\w+=|\sstyle=", html)  # the policy would ignore them
    assert set(re.findall(r"https?://[^\s'\"]+", html)) == {"http://www.w3.org/2000/svg"}
    assert page_headers(html.encode())["etag"] != page_headers(html.encode() + b" ")["etag"]


def test_many_rows_are_counted_and_the_first_are_sent() -> None:
    view = EngineView(
        time=1.0,
        step=7,
        running=tuple(
            RowView(f"r{i}", "key-1", 10, 12, 2, 20, 4, "DECODING", 0.5, 0.12345 if i else None) for i in range(3000)
        ),
        num_waiting=90,
        waiting=(WaitingView("w", 5, 1.23456),),
        blocks=bytes([0, 1, 2, 3]),
        batch_rows=3000,
        batch_tokens=3000,
        tokens_per_second=12.3456,
        preemptions=1,
        prefix_hit_tokens=2,
    )
    message = encode(view)
    assert message.startswith(b"data: ") and message.endswith(b"\n\n") and message.count(b"\n") == 2
    assert b"key-1" not in message  # who else holds a key is nobody's business
    fields = json.loads(message[6:])
    assert (fields["num_running"], len(fields["running"])) == (3000, page_module.MAX_ROWS)
    assert fields["running"][0] == ["r0", 10, 12, 2, 20, 4, "decoding", 0.5, None]
    assert fields["running"][1][-1] == 0.1235
    assert fields["waiting"] == [["w", 5, 1.235]]
    assert fields["blocks"] == "AAECAw=="
