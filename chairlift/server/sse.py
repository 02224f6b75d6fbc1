"""Server-sent events: how one looks, and the response that sends a call's events as they are made."""

import json
from typing import Protocol

from fastapi import Response
from starlette.types import Receive, Scope, Send

from chairlift.request import GenerationOutput
from chairlift.server.call import Call
from chairlift.server.errors import ApiError, ClientGoneError, as_api_error

DONE = b"data: [DONE]\n\n"

_encode = json.JSONEncoder(separators=(",", ":")).encode


def event(data: object, name: str | None = None) -> bytes:
    """One event, in pure ASCII."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {_encode(data)}\n\n".encode()


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

    def __init__(self, call: Call[bytes], shape: Streamed, opening: bytes) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._call = call
        self._shape = shape
        self._opening = opening

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await write(self._opening)
            async for chunks in self._call:
                if data := b"".join(chunks):
                    await write(data)
            await write(self._shape.closing(), more=False)
        except ClientGoneError:
            return
        except Exception as error:
            await write(self._shape.failed(as_api_error(error)), more=False)
        finally:
            self._call.close()
