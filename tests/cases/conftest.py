"""Models that several tests share; a test that changes one makes its own."""

from typing import Any

import pytest

from tests.cases import tiny


@pytest.fixture(scope="session")
def llama() -> Any:
    return tiny.llama()


@pytest.fixture(scope="session")
def mistral() -> Any:
    return tiny.mistral(window=4)


@pytest.fixture(scope="session")
def gemma2() -> Any:
    return tiny.gemma2()


@pytest.fixture(params=[False, True], ids=["depth1", "depth2"])
def use_async_batching(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)
