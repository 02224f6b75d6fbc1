"""A saved model, and the command in this process and in processes of its own."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server import toy

WAIT = 120.0  # seconds until a test that hangs is called one
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

Start = Callable[..., Any]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The toy, saved. It never ends by itself, and has room for a long answer."""
    path = tmp_path_factory.mktemp("models") / "toy"
    words = toy.tokenizer()
    model = toy.model(len(words))
    model.config.max_position_embeddings = 1 << 16
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    words.save_pretrained(path)
    return str(path)


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "chairlift", *map(str, arguments)]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `chairlift ARGUMENTS` in a process; whatever is left of it at the end is killed."""
    with contextlib.ExitStack() as stack:

        def popen(*arguments: str | Path, **options: Any) -> Any:
            options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
            process = stack.enter_context(subprocess.Popen(command(*arguments), env=ENVIRONMENT, **options))
            stack.callback(process.kill)
            return process

        yield popen
