"""The page and its feed: `GET /` is one static file, `GET /events` the engine's views as server-sent events.

The engine is watched only while somebody listens, once for all who do. A listener holds no queue: it is told that
there is news and takes the latest view, so a slow one skips views and delays nobody. Nothing here knows conversations,
keys or the OpenAI routes; the page itself calls those.
"""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from chairlift.stats import EngineView

INTERVAL_S = 0.2  # between two views
ALIVE_S = 5.0  # a comment this often while nothing happens, so that proxies keep the stream
MAX_ROWS = 1024  # running requests in one event; `num_running` counts all


class Watched(Protocol):
    """What the feed asks of the manager."""

    @property
    def is_usable(self) -> bool:
        """Neither destroyed nor crashed."""
        ...

    def check(self) -> None:
        """Raise EngineDeadError after a crash, RuntimeError after `destroy()`."""
        ...

    def watch(self, callback: Callable[[EngineView], object], interval_s: float = 0.1) -> Callable[[], None]:
        """Call back with views, from the engine's thread, until the returned function is called."""
        ...


class Feed:
    """The engine's views for any number of listeners, all on one event loop."""

    def __init__(self, manager: Watched) -> None:
        self._manager = manager
        self._listeners: set[asyncio.Event] = set()
        self._unwatch: Callable[[], None] | None = None
        self._view: EngineView | None = None
        self._message: bytes | None = None  # `_view`, encoded when the first listener takes it
        self._closed = False

    @contextmanager
    def joined(self) -> Iterator[asyncio.Event]:
        """Listen inside. The event is set whenever there is news; whoever hears clears it."""
        news = asyncio.Event()
        self._listeners.add(news)
        try:
            if self._unwatch is None:
                loop = asyncio.get_running_loop()
                self._unwatch = self._manager.watch(
                    lambda view: loop.call_soon_threadsafe(self._publish, view), INTERVAL_S
                )
            elif self._view is not None:
                news.set()
            yield news
        finally:
            self._listeners.discard(news)
            if not self._listeners and self._unwatch is not None:
                self._unwatch()
                self._unwatch = self._view = self._message = None

    def _publish(self, view: EngineView) -> None:
        self._view, self._message = view, None
        self._tell()

    def _tell(self) -> None:
        for news in self._listeners:
            news.set()

    async def messages(self, news: asyncio.Event) -> AsyncIterator[bytes]:
        """Server-sent events for one listener until the server shuts down or the engine dies; `bye` is the last."""
        while not self._closed and self._manager.is_usable:
            try:
                async with asyncio.timeout(ALIVE_S):
                    await news.wait()
            except TimeoutError:
                yield b": alive\n\n"
                continue
            news.clear()
            if self._view is not None:
                self._message = self._message or encode(self._view)
                yield self._message
        yield b"event: bye\ndata: {}\n\n"

    def close(self) -> None:
        """End all streams, and those to come: the server shuts down."""
        self._closed = True
        self._tell()


class _Stream(StreamingResponse):
    """Leaves the feed the moment its client is gone, wherever the stream stands."""

    def __init__(self, feed: Feed) -> None:
        super().__init__((), media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.joined() as news:
            self.body_iterator = self._feed.messages(news)
            await super().__call__(scope, receive, send)


class PageRouter(APIRouter):
    """The two routes. Call `close()` when the server is told to shut down: open streams would hold it up."""

    def __init__(self, manager: Watched) -> None:
        super().__init__(include_in_schema=False)
        feed = Feed(manager)
        self.close = feed.close
        html = (files("chairlift.server") / "static" / "index.html").read_bytes()
        headers = page_headers(html)

        @self.get("/")
        async def page(request: Request) -> Response:
            if request.headers.get("if-none-match") == headers["etag"]:
                return Response(status_code=304, headers=headers)
            return Response(html, media_type="text/html", headers=headers)

        @self.get("/events")
        async def events() -> Response:
            manager.check()
            return _Stream(feed)


def router(manager: Watched) -> PageRouter:
    """`GET /` and `GET /events`; whether a key is needed for them is the application's to say.

    The page knows its own requests among the rows by the `id` of a chat completion's chunks: that must be the engine's
    `request_id`.
    """
    return PageRouter(manager)


def encode(view: EngineView) -> bytes:
    """A view as one event of compact JSON; rows are arrays, and `blocks` is base64, a byte per cell.

    `running`: [id, prompt, computed, generated, max_length, cached, status, age_s, first_token_s or null];
    `waiting`: [id, prompt, age_s].
    The tenant stays here: who holds a key need not learn who holds another.
    """
    fields: dict[str, Any] = {
        "time": view.time,
        "step": view.step,
        "num_running": len(view.running),
        "running": [
            [
                row.request_id,
                row.num_prompt,
                row.num_computed,
                row.num_generated,
                row.max_length,
                row.num_cached,
                row.status.lower(),
                round(row.age_s, 3),
                None if row.first_token_s is None else round(row.first_token_s, 4),
            ]
            for row in view.running[:MAX_ROWS]
        ],
        "num_waiting": view.num_waiting,
        "waiting": [[row.request_id, row.num_prompt, round(row.age_s, 3)] for row in view.waiting],
        "blocks": base64.b64encode(view.blocks).decode(),
        "batch_rows": view.batch_rows,
        "batch_tokens": view.batch_tokens,
        "tokens_per_second": round(view.tokens_per_second, 2),
        "preemptions": view.preemptions,
        "prefix_hit_tokens": view.prefix_hit_tokens,
    }
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


def page_headers(html: bytes) -> dict[str, str]:
    """No script but the page's own, no style but its own, and no connection but to this server."""

    def hashed(element: str) -> str:
        bodies = re.findall(rf"<{element}>(.*?)</{element}>".encode(), html, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(body).digest()).decode() for body in bodies)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return {
        "content-security-policy": (
            f"default-src 'none'; script-src {hashed('script')}; style-src {hashed('style')}; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "etag": f'"{hashlib.sha256(html).hexdigest()[:32]}"',
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
