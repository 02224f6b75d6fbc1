"""Servers that several tests share."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest

from chairlift.server import create_app
from tests.server import toy


@pytest.fixture(scope="session")
def engine() -> Iterator[tuple[Any, Any]]:
    """The toy's manager and tokenizer."""
    manager, tokenizer = toy.manager()
    yield manager, tokenizer
    manager.destroy()


@pytest.fixture(scope="session")
def app(engine: tuple[Any, Any]) -> Any:
    return create_app(*engine, model_name="toy")


@pytest.fixture
async def http(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Plain HTTP, in this process."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://toy") as client:
        yield client


@pytest.fixture
def client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    """The real client, in this process."""
    return openai.AsyncOpenAI(api_key="none", base_url="http://toy/v1", http_client=http, max_retries=0)
