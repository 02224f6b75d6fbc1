"""Whatever the schema allows, and what it forbids: an answer below 500, in time, in the right shape."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from chairlift.server import create_app
from tests.server import toy

EXAMPLES = 40
SECONDS = 60.0  # for one answer: most of them are refusals


@pytest.fixture(scope="module")
def openapi() -> Iterator[Any]:
    """Of an application with room for short answers only, however much is asked for."""
    manager, tokenizer = toy.manager(num_blocks=12, max_queue_size=64)
    yield schemathesis.openapi.from_asgi("/openapi.json", create_app(manager, tokenizer, model_name="toy"))
    stats = manager.stats()
    assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)
    manager.destroy()


OPERATIONS = [
    ("/health", "GET"),
    ("/metrics", "GET"),
    ("/v1/models", "GET"),
    ("/v1/models/{name}", "GET"),
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/v1/responses", "POST"),
    ("/tokenizer_info", "GET"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
]


def test_all_operations_are_tried(openapi: Any) -> None:
    found = {(path, method) for path, methods in openapi.raw_schema["paths"].items() for method in methods}
    assert found == {(path, method.lower()) for path, method in OPERATIONS}


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["allowed", "forbidden"])
@pytest.mark.parametrize(("path", "method"), OPERATIONS, ids=[path for path, _ in OPERATIONS])
def test_anything(openapi: Any, path: str, method: str, mode: GenerationMode) -> None:
    if mode is GenerationMode.NEGATIVE and method == "GET":
        mode = GenerationMode.POSITIVE  # there is nothing to get wrong
    statuses = set()

    @given(case=openapi[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES if method == "POST" else 3, suppress_health_check=list(HealthCheck))
    def check(case: Any) -> None:
        begin = time.monotonic()
        answer = case.call()
        assert time.monotonic() - begin < SECONDS
        statuses.add(answer.status_code)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    check()
    assert statuses
