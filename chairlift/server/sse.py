"""Server-sent events: how one looks, and the response that sends a call's events as they are made."""

import asyncio
import json
from collections.abc import Callable
from typing import Protocol

import orjson
from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

from chairlift.request import GenerationOutput
from chairlift.server.call import Call
from chairlift.server.errors import ApiError, ClientGoneError

DONE = b"data: [DONE]\n\n"
# In the scope: `send` as the application was given it. Once an answer has begun, what stands between it and the routes
# only passes on, and would cost every token several calls.
SHORT_CUT = "chairlift.send"


def _encode(data: object) -> bytes:
    try:
        return orjson.dumps(data)
    except TypeError:  # half a surrogate pair in what a client sent, which only escapes can spell
        return json.dumps(data, separators=(",", ":")).encode()


def event(data: object, name: str | None = None) -> bytes:
    """One event."""
    head = b"event: %s\n" % name.encode() if name else b""
    return b"%sdata: %s\n\n" % (head, _encode(data))


class EventMaker:
    """Events that have most in common: what never changes is encoded once."""

    def __init__(self, before: dict[str, object], key: str, after: dict[str, object]) -> None:
        """Each event is `before`, then `key` with a value of its own, then `after`."""
        self._head = b"data: %s,%s:" % (_encode(before)[:-1], _encode(key))
        self._tail = b",%s\n\n" % _encode(after)[1:] if after else b"}\n\n"

    def __call__(self, value: object) -> bytes:
        """One event."""
        return b"%s%s%s" % (self._head, _encode(value), self._tail)


class Streamed(Protocol):
    """How one kind of answer looks as events. `chunk` is called on the manager's callback thread."""

    def opening(self) -> bytes:
        """Before the first token."""
        ...

    def chunk(self, choice: int, output: GenerationOutput) -> bytes:
        """What `output` adds to one of the answers; may be nothing."""
        ...

    def closing(self) -> bytes:
        """After all answers have ended."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """Instead of whatever was still to come."""
        ...


class EventStream(Response):
    """Sends the events of one call, all that have come at once, and closes the call however it ends."""

    def __init__(
        self, call: Call[bytes], shape: Streamed, opening: bytes, explain: Callable[[Exception], ApiError]
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._call = call
        self._shape = shape
        self._opening = opening
        self._explain = explain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            # A task of its own: each event resumes two frames, not the dozen between here and the server's task.
            await asyncio.create_task(self._send_all(scope.get(SHORT_CUT, send)))
        finally:
            self._call.close()

    async def _send_all(self, send: Send) -> None:
        try:
            await send(_body(self._opening))
            async for chunks in self._call:
                if data := b"".join(chunks):
                    await send(_body(data))
            await send(_body(self._shape.closing(), more=False))
        except ClientGoneError:
            return
        except Exception as error:
            await send(_body(self._shape.failed(self._explain(error)), more=False))


def _body(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
