"""`chairlift serve`: the OpenAI-compatible server over one model."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction

from chairlift.commands.flags import Engine, UsageError, needs, served_name
from chairlift.config import ContinuousBatchingConfig

if TYPE_CHECKING:
    from chairlift.server.tracing import Tracing


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a model over HTTP, as OpenAI's API has it."""

    model: Positional[str | None] = None
    """Folder or Hub name; None: SmolLM2-135M-Instruct."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = 8000
    """0: any free one."""
    served_model_name: str | None = None
    """What clients call the model; None: the last part of its name."""
    api_key: UseAppendAction[tuple[str, ...]] = ()
    """A key that opens the API; without any it is open to all. CHAIRLIFT_API_KEY in the environment is one more."""
    cors_origin: UseAppendAction[tuple[str, ...]] = ()
    """Web pages of this origin may call; * for all."""
    max_body_mib: float = 16.0
    """Larger requests are refused."""
    chat_template: Path | None = None
    """File with a chat template to use instead of the tokenizer's."""
    drain_timeout: float = 60.0
    """Seconds that requests under way have to finish after SIGTERM; a second SIGTERM, or SIGINT, ends them at once."""
    ssl_certfile: Path | None = None
    """TLS certificate; serves HTTPS."""
    ssl_keyfile: Path | None = None
    """Key of the certificate."""
    trace: bool = False
    """Send an OpenTelemetry span of each request to the endpoint that OTEL_EXPORTER_OTLP_ENDPOINT names."""
    log_level: Literal["critical", "error", "warning", "info", "debug"] = "warning"
    """Of the HTTP server."""
    engine: OmitArgPrefixes[Engine] = Engine(  # noqa: RUF009 - it is frozen
        config=ContinuousBatchingConfig(scheduler_type="fair_share")  # fifo, where there is one key and no priority
    )
    """How the model is loaded."""

    def __call__(self) -> int:
        with needs("server"):
            from chairlift.server import create_app, serve

        template = None if self.chat_template is None else _read(self.chat_template)
        tls = {
            name: str(path)
            for name, path in (("ssl_certfile", self.ssl_certfile), ("ssl_keyfile", self.ssl_keyfile))
            if path is not None
        }
        name = self.served_model_name or served_name(self.model)
        keys = self._keys()
        if not 0 <= self.port < 1 << 16:
            raise UsageError(f"--port {self.port} makes no sense: give 0 to 65535")
        if not 0 < self.max_body_mib < 1 << 30:
            raise UsageError(f"--max-body-mib {self.max_body_mib} makes no sense: give a number above 0")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise UsageError("--ssl-keyfile is of no use without --ssl-certfile")
        with self._tracing(name) as tracing, self.engine.open(self.model) as llm:
            app = create_app(
                llm.manager,
                llm.tokenizer,
                model_name=name,
                api_keys=keys,
                cors_origins=self.cors_origin,
                max_body_bytes=int(self.max_body_mib * (1 << 20)),
                chat_template=template,
                tracing=tracing,
            )
            serve(
                app,
                self.host,
                self.port,
                drain_timeout=self.drain_timeout,
                ready=lambda url: print(f"{name} is served at {url}", file=sys.stderr, flush=True),
                log_level=self.log_level,
                **tls,
            )
        return 0

    def _keys(self) -> list[str]:
        """Without white space around them, which no header brings. An empty one would open the API to all."""
        environment = os.environ.get("CHAIRLIFT_API_KEY")
        keys = [key.strip() for key in (*self.api_key, *([environment] if environment else ()))]
        if not all(keys):
            raise UsageError("an API key is empty: give --api-key and CHAIRLIFT_API_KEY a value, or leave them out")
        return keys

    @contextmanager
    def _tracing(self, model_name: str) -> "Iterator[Tracing | None]":
        """Ended only after the engine, whose last requests are told of, too."""
        if not self.trace:
            yield None
            return
        from chairlift.server.tracing import Tracing, connect

        tracing = Tracing(connect(), model_name)
        try:
            yield tracing
        finally:
            tracing.close()


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--chat-template: {error}") from error
