"""The OpenAI-compatible HTTP server over a manager: `create_app` makes the application, `serve` runs it."""

from chairlift.server.app import create_app
from chairlift.server.serve import serve

__all__ = ["create_app", "serve"]
