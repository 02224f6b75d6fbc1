"""A request that compiles a grammar is behind its like alone: all others are answered meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from chairlift.sample import grammar as grammars
from chairlift.server.service import NUM_THREADS
from tests.server import toy

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TEXT = {"prompt": "x", "max_tokens": 2}
TALK = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
INPUT = {"input": "x", "max_output_tokens": 2}

CONSTRAINED = [
    (COMPLETIONS, TEXT | {"regex": "a+"}),
    (COMPLETIONS, TEXT | {"grammar": 'start: "a"'}),
    (COMPLETIONS, TEXT | {"choice": ["a", "b"]}),
    (COMPLETIONS, TEXT | {"response_format": {"type": "json_object"}}),
    (CHAT, TALK | {"response_format": FORMAT}),
    (CHAT, TALK | {"tools": [{"type": "function", "function": FUNCTION}]}),
    (RESPONSES, INPUT | {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}),
    (RESPONSES, INPUT | {"tools": [{"type": "function", **FUNCTION}]}),
]
PLAIN = [
    (COMPLETIONS, TEXT),
    (COMPLETIONS, TEXT | {"stream": True, "response_format": {"type": "text"}}),
    (CHAT, TALK | {"tools": []}),
    (RESPONSES, INPUT | {"text": {"format": {"type": "text"}}}),
    ("/tokenize", {"prompt": "x"}),
    ("/detokenize", {"tokens": [5]}),
]


@asynccontextmanager
async def compiling(http: httpx.AsyncClient, app: Any, path: str, body: dict[str, Any]) -> AsyncIterator[None]:
    """More requests of this kind than there are threads of any, none of which gets its grammar meanwhile."""
    with grammars._lock:
        held = [asyncio.create_task(http.post(path, json=body)) for _ in range(NUM_THREADS + 1)]
        while app.state.service.num_calls < len(held):  # they are with the threads as soon as they are counted
            await asyncio.sleep(0.01)
        yield
        assert not any(each.done() for each in held)
    for answer in await asyncio.gather(*held):
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("path", "body"), CONSTRAINED)
async def test_whoever_has_no_grammar_waits_for_none(
    http: httpx.AsyncClient, app: Any, path: str, body: dict[str, Any]
) -> None:
    async with compiling(http, app, path, body), asyncio.timeout(toy.WAIT):
        for other, plain in PLAIN:
            answer = await http.post(other, json=plain)
            assert answer.status_code == 200, answer.text
        assert (await http.get("/metrics")).status_code == 200
