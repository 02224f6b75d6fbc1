"""What goes wrong, as OpenAI's clients read it: `{"error": {message, type, param, code}}` with the right status.

Knows no route and no request.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from chairlift.errors import EngineDeadError, InvalidRequestError, QueueFullError
from chairlift.request import GenerationOutput

RETRY_AFTER_S = 1

# What the engine calls what a request calls otherwise.
_REQUEST_FIELDS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
}
_PLAIN_FIELDS = frozenset({"prompt", "messages", "input", "tools", "stop", "regex", "grammar", "choice"})
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than 200. `param`: the field of the request that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """As OpenAI words it."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer."""
        return json_response(self.body(), self.status, self.headers)


class ClientGoneError(Exception):
    """Nobody reads the answer any more."""


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Pure ASCII, so that half a surrogate pair in what a client sent cannot break the answer about it."""
    content = json.dumps(body, separators=(",", ":")).encode()
    return Response(content, status_code=status, headers=headers, media_type="application/json")


def as_api_error(error: BaseException) -> ApiError:
    """What the client is told about an exception of the engine's side."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return bad_request(str(error))
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(RETRY_AFTER_S)})
        case EngineDeadError():
            return ApiError(503, str(error), code="engine_dead")
    return ApiError(500, f"{type(error).__name__}: {error}", code="internal_error")


def shutting_down() -> ApiError:
    """The server ends, or the manager was stopped under it."""
    return ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})


def failure(output: GenerationOutput, cause: BaseException | None) -> Exception:
    """Why a request came back FAILED; `cause` is what the engine died of, if it did."""
    if cause is not None and output.exception is cause:
        return EngineDeadError(f"the engine stopped on a fault: {cause!r}")
    if isinstance(output.exception, InvalidRequestError):
        return output.exception
    return ApiError(500, f"the request failed: {output.error}", code="request_failed")


def bad_request(message: str, prompt: str = "prompt") -> ApiError:
    """The engine's messages begin with the argument that they are about, by its own name for it. prompt: the field that
    the prompt comes from."""
    fields = _REQUEST_FIELDS | {"input_ids": prompt, "inputs": prompt}
    message = re.sub(r"\w+", lambda word: fields.get(word[0], word[0]), message)
    found = re.match(r"([a-z_]+)(?:=|\b)", message)
    name = found[1] if found else ""
    param = name if "_" in name or name in _PLAIN_FIELDS or f"{name}=" in message else None
    is_too_long = param == prompt and ": the prompt is too long" in message
    return ApiError(400, message, param=param, code="context_length_exceeded" if is_too_long else None)


def from_validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, by the name of its field."""
    errors: Sequence[Any] = error.errors()
    # Of a union's branches the one that came furthest, and in it what says that it is the wrong branch.
    first = max(errors, key=lambda each: (len(each["loc"]), each["loc"][-1] == "type"))
    kind, context = first["type"], first.get("ctx", {})
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {context['error']} at character {first['loc'][-1]}")
    way, field = first["loc"][1:], ""
    if kind == "missing" and way:
        way, field = way[:-1], way[-1]
    elif kind.startswith("union_tag"):
        field = "type"
    param = _joined(_path(way, error.body, first["input"]) or "", field)
    where = param or "the body"
    match kind:
        case "extra_forbidden":
            message = f"{where} is not supported here"
        case "none_required":
            message = f"{where} is not supported here: leave it out"
        case "value_error":
            param = _joined(param, getattr(context["error"], "param", ""))
            message = str(context["error"])
        case "missing" | "union_tag_not_found":
            message = f"{where} is missing"
        case "union_tag_invalid":
            message = f"{where} is not supported here: it can be {context['expected_tags']}"
        case "model_attributes_type" if not param:
            message = "the body must be a JSON object, sent with Content-Type: application/json"
        case "model_attributes_type":
            message = f"{where} must be an object"
        case _:
            message = f"{where}: {first['msg']}"
    return ApiError(400, message, param=param or None)


def _path(loc: Sequence[int | str], body: Any, blamed: object, path: str = "") -> str | None:
    """`("messages", 0, "content", "list[TextPart]", 1, "text")` as `messages[0].content[1].text`: a part that names a
    branch of a union is no step on the way through the body to what is blamed, even if the body has such a field."""
    if not loc:
        return path if body is blamed else None
    part, rest = loc[0], loc[1:]
    if isinstance(part, int):
        return _path(rest, body[part], blamed, f"{path}[{part}]")
    found = None
    if isinstance(body, Mapping) and part in body:
        found = _path(rest, body[part], blamed, _joined(path, part))
    return _path(rest, body, blamed, path) if found is None else found


def _joined(path: str, field: str) -> str:
    return f"{path}.{field}" if path and field else path or field


async def on_error(request: Request, error: Exception) -> Response:
    """The handler of every exception that a route lets through."""
    match error:
        case RequestValidationError():
            return from_validation(error).response()
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers).response()
        case ClientGoneError():
            return Response(status_code=499)
    return as_api_error(error).response()
