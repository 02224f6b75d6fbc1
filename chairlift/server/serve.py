"""Runs an application under uvicorn until a signal ends it: the first SIGTERM drains, SIGINT or a second one cuts."""

import asyncio
import gc
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

GRACE_S = 0.5  # for the last words to those who are cut off


def serve(
    app: FastAPI,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    drain_timeout: float = 60.0,
    ready: Callable[[str], object] | None = None,
    **uvicorn_options: Any,
) -> None:
    """Serve until told to stop. Run it in the main thread: it takes SIGTERM and SIGINT for itself meanwhile.

    On SIGTERM no new connection is taken, and answers under way have `drain_timeout` seconds to end; whatever is not
    done then, or at SIGINT or a second SIGTERM, is cancelled and ends with an error of status 503. The manager is left
    running. port=0: any free one. `ready` is called with the URL once connections are taken. `uvicorn_options`: as
    `uvicorn.Config` has them (`ssl_certfile`, `ssl_keyfile`, `log_level`, ...).
    """
    options: dict[str, Any] = {"access_log": False, "timeout_keep_alive": 30, "lifespan": "off"} | uvicorn_options
    server = _Server(app, uvicorn.Config(app, host=host, port=port, **options), drain_timeout, ready)
    gc.collect()
    gc.freeze()  # looking through all that is loaded took a quarter of a second every now and then, for nothing
    try:
        server.run()
    finally:
        gc.unfreeze()


class _Server(uvicorn.Server):
    def __init__(
        self, app: FastAPI, config: uvicorn.Config, drain_timeout: float, ready: Callable[[str], object] | None
    ) -> None:
        super().__init__(config)
        self._app = app
        self._drain_timeout = drain_timeout
        self._ready = ready
        self._cut = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._ready is not None and not self.should_exit:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            scheme = "https" if self.config.ssl else "http"
            self._ready(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Instead of uvicorn's, which raises the signal again once it is done."""
        self._cut = self._cut or self.should_exit or sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.drain()
        limit = asyncio.create_task(self._limit_drain())
        await super().shutdown(sockets)
        limit.cancel()

    async def _limit_drain(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._drain_timeout
        while not self._cut and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        self._app.state.end()
        await asyncio.sleep(GRACE_S)
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()
        self.force_exit = True
