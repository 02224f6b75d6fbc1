"""Whatever the schema allows, and what it forbids: an answer below 500, in time, in the right shape."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case

from chairlift.server import create_app
from tests.server import toy

SECONDS = 20.0  # for one answer: most of them are refusals


@pytest.fixture(scope="module")
def openapi() -> Iterator[Any]:
    """Of an application with room for short answers only, however much is asked for."""
    manager, tokenizer = toy.manager(num_blocks=12, max_queue_size=64)
    yield schemathesis.openapi.from_asgi("/openapi.json", create_app(manager, tokenizer, model_name="toy"))
    stats = manager.stats()
    assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)
    manager.destroy()


schema = schemathesis.pytest.from_fixture("openapi")


@schema.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_anything_that_the_schema_allows(case: Case) -> None:
    begin = time.monotonic()
    answer = case.call()
    assert time.monotonic() - begin < SECONDS
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    elif "text/event-stream" not in answer.headers["content-type"][0]:
        assert answer.json()
