"""Puts the application together: routes, errors, keys, limits."""

import hmac
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import chairlift
from chairlift.errors import ChairliftError
from chairlift.manager import ContinuousBatchingManager
from chairlift.server.errors import ApiError, ClientGoneError, on_error
from chairlift.server.page import router as page_router
from chairlift.server.routes import api_router
from chairlift.server.service import Service
from chairlift.server.sse import SHORT_CUT
from chairlift.server.tracing import Tracing

MAX_BODY_BYTES = 16 << 20
OPEN_PATHS = frozenset({"/", "/health", "/docs", "/docs/oauth2-redirect", "/openapi.json"})  # say nothing of anybody


class Gate:
    """In front of all routes: who may pass (`api_keys`; none: everybody) and how much they may bring.

    Leaves the name of a key, never the key itself, in the scope as `tenant`.
    """

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str], max_body_bytes: int, count: Callable[[str, str, int], None]
    ) -> None:
        self._app = app
        self._count = count  # hears of each response: the path of its route, its method and status
        self._keys = [key.encode() for key in api_keys]
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        scope[SHORT_CUT] = send
        send = self._told(scope, send)
        try:
            scope["tenant"] = self._tenant(headers.get(b"authorization", b""), scope["path"])
            length = headers.get(b"content-length", b"0")
            self._check_size(int(length) if length.isdigit() else 0)
        except ApiError as error:
            return await error.response()(scope, receive, send)
        try:
            await self._app(scope, self._counted(receive), send)
        except Exception:  # which is answered outside of here
            self._tell(scope, 500)
            raise

    def _told(self, scope: Scope, send: Send) -> Send:
        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._tell(scope, message["status"])
            await send(message)

        return told

    def _tell(self, scope: Scope, status: int) -> None:
        self._count(getattr(scope.get("route"), "path", "none"), scope["method"], status)

    def _tenant(self, authorization: bytes, path: str) -> str | None:
        if not self._keys:
            return None
        scheme, _, key = authorization.partition(b" ")
        matches = [hmac.compare_digest(key.strip(), each) for each in self._keys]  # all, so that time tells nothing
        if scheme.lower() == b"bearer" and any(matches):
            return f"key-{matches.index(True) + 1}"
        if path in OPEN_PATHS:
            return None
        raise ApiError(
            401,
            "a valid API key is needed: send the header 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _check_size(self, size: int) -> None:
        if size > self._max_body_bytes:
            raise ApiError(413, f"the body is larger than {self._max_body_bytes} bytes", code="body_too_large")

    def _counted(self, receive: Receive) -> Receive:
        """A body whose length nobody announced is measured as it comes."""
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            try:
                self._check_size(size)
            except ApiError as error:  # the one exception that lets itself through while a body is read
                raise HTTPException(error.status, str(error)) from error
            return message

        return counted


def create_app(
    manager: ContinuousBatchingManager,
    tokenizer: Any,
    *,
    model_name: str,
    api_keys: Sequence[str] = (),
    cors_origins: Sequence[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
    chat_template: str | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The application over a manager, which its owner starts and stops.

    tokenizer: of transformers, of the manager's model. model_name: what clients call the model. api_keys: those that
    open all routes but /health, the page and the documentation; none: everybody may. cors_origins: web pages of these
    origins may call; "*" for all. chat_template: instead of the tokenizer's own. tracing: hears of every
    request; its owner closes it. `app.state.service` is what the
    routes share, `app.state.drain()` ends what would never end by itself, `app.state.end()` everything.
    """
    service = Service(manager, tokenizer, model_name, chat_template, tracing)

    app = FastAPI(
        title="Chairlift",
        summary="An OpenAI-compatible server with continuous batching.",
        version=getattr(chairlift, "__version__", "source"),
        dependencies=[Depends(HTTPBearer(auto_error=False))] if api_keys else [],
    )
    page = page_router(manager)
    app.include_router(api_router(service))
    app.include_router(page)
    for kind in (ApiError, ChairliftError, ClientGoneError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_middleware(Gate, api_keys=api_keys, max_body_bytes=max_body_bytes, count=service.metrics.respond)
    if cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=cors_origins, allow_methods=["*"], allow_headers=["*"])
    app.state.service = service
    app.state.drain = page.close
    app.state.end = service.end
    return app
