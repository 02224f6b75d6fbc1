"""`chairlift run`: every line answered once, as the server would, whatever happens to the process."""

import fcntl
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM
from chairlift.cli import main
from chairlift.engine import Engine
from tests.cli.conftest import WAIT, Start

DEFAULTS: dict[str, Any] = {"model": "toy", "temperature": 0, "max_tokens": 6}
ENGINE = ("--page-size", "16", "--num-blocks", "2048")


def chat(custom_id: str, content: str, **body: Any) -> dict[str, Any]:
    body = {
        "model": "toy",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 6,
    } | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def completion(custom_id: str, prompt: str, **body: Any) -> dict[str, Any]:
    body = DEFAULTS | {"prompt": prompt} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path) -> dict[str, Any]:
    """The answers by id; each id once."""
    text = path.read_text()
    assert text.endswith("\n")
    answers = [json.loads(line) for line in text.splitlines()]
    by_id = {answer["id"]: answer for answer in answers}
    assert len(by_id) == len(answers)
    return by_id


def run(source: Path, target: Path, folder: str, *flags: str) -> int:
    return main(["run", str(source), "-o", str(target), "-m", folder, *ENGINE, *flags])


def test_answers_are_the_servers(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [chat("a", "Hello fox"), completion("b", "The quick"), completion("c", "The quick", n=2, logprobs=1)]
    source, target = write(tmp_path / "in", lines), tmp_path / "out"
    assert run(source, target, folder) == 0
    answers = read(target)
    assert [answers[f"batch_req_{i}"]["custom_id"] for i in (1, 2, 3)] == ["a", "b", "c"]
    for answer in answers.values():
        assert set(answer) == {"id", "custom_id", "response", "error"}
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["request_id"] == answer["response"]["body"]["id"]
    with LLM(folder, page_size=16, num_blocks=2048) as llm:
        said = llm.chat([{"role": "user", "content": "Hello fox"}], temperature=0, max_new_tokens=6)[0]
        written = llm.generate("The quick", temperature=0, max_new_tokens=6)[0]
    body = answers["batch_req_1"]["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == said.text
    assert body["usage"]["prompt_tokens"] == len(said.output.prompt_ids)
    assert answers["batch_req_2"]["response"]["body"]["choices"][0]["text"] == written.text
    assert len(answers["batch_req_3"]["response"]["body"]["choices"]) == 2
    assert "3 lines answered, 0 of them with an error" in capsys.readouterr().err


def test_a_bad_line_is_its_own_error_only(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad: list[tuple[Any, str]] = [
        ("{not json", "not JSON"),
        ("[1]", "no JSON object"),
        ("[" * 100_000, "not JSON"),
        ('{"custom_id": "\\ud800", "url": "/"}', "url must be one of"),
        ({"method": "POST"}, "custom_id must be a string, got None"),
        (chat("first", "again"), "'first' is that of an earlier line"),
        (chat("m", "x") | {"method": "GET"}, "method must be POST, got 'GET'"),
        (chat("u", "x") | {"url": "/v1/embeddings"}, "url must be one of"),
        (chat("b", "x") | {"body": "x"}, "body must be an object"),
        (chat("s", "x", stream=True), "body.stream is true"),
    ]
    refused = [
        (chat("f", "x", frequency="high"), 400),
        (chat("t", "x", temperature=-1), 400),
        (chat("n", "x", model="other"), 404),
    ]
    lines = [
        chat("first", "Hello"),
        "",
        *(line for line, _ in bad),
        *(line for line, _ in refused),
        chat("last", "Bye"),
    ]
    source, target = write(tmp_path / "in", lines), tmp_path / "out"
    assert run(source, target, folder) == 0
    answers = read(target)
    assert len(answers) == len(lines) - 1, "a blank line is none"
    for number, (_, complaint) in enumerate(bad, start=3):
        answer = answers[f"batch_req_{number}"]
        assert answer["response"] is None
        assert answer["error"]["code"] == "invalid_line"
        assert complaint in answer["error"]["message"]
    for number, (_, status) in enumerate(refused, start=3 + len(bad)):
        response = answers[f"batch_req_{number}"]["response"]
        assert response["status_code"] == status
        assert response["body"]["error"]["message"]
    for number in (1, len(lines)):
        assert answers[f"batch_req_{number}"]["response"]["status_code"] == 200
    assert f"{len(bad) + len(refused)} of them with an error" in capsys.readouterr().err
    before = target.read_bytes()
    assert run(source, target, folder) == 0, "and all of that is remembered"
    assert target.read_bytes() == before


def test_killed_again_and_again_it_loses_and_repeats_nothing(start: Start, folder: str, tmp_path: Path) -> None:
    count = 240
    lines = [completion(f"id-{i}", f"The fox number {i}", max_tokens=40 + i % 7) for i in range(count)]
    source, target = write(tmp_path / "in", lines), tmp_path / "out"
    arguments = ("run", source, "-o", target, "-m", folder, *ENGINE, "--concurrency", "4")
    chance = random.Random(0)
    sizes = []
    for _ in range(2):
        goal = (sizes[-1] if sizes else 0) + chance.randrange(10, 60)
        process = start(*arguments)
        deadline = time.monotonic() + WAIT
        while not target.exists() or target.read_bytes().count(b"\n") < goal:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT)
        sizes.append(target.read_bytes().count(b"\n"))
        assert sizes[-1] < count, "killed too late to show anything"
        with target.open("ab") as file:  # what a crash of the machine leaves of a line
            file.write(b'{"id": "batch_req_239", "custom_id": "id-2')
    assert run(source, target, folder) == 0
    answers = read(target)
    assert [answers[f"batch_req_{i + 1}"]["custom_id"] for i in range(count)] == [f"id-{i}" for i in range(count)]
    with LLM(folder, page_size=16, num_blocks=2048) as llm:
        for i in (0, sizes[0], sizes[1], count - 1):
            (expected,) = llm.generate(f"The fox number {i}", temperature=0, max_new_tokens=40 + i % 7)
            assert answers[f"batch_req_{i + 1}"]["response"]["body"]["choices"][0]["text"] == expected.text


def test_ctrl_c_can_be_resumed(start: Start, folder: str, tmp_path: Path) -> None:
    source, target = (
        write(tmp_path / "in", [completion(f"{i}", "fox", max_tokens=3000) for i in range(40)]),
        tmp_path / "out",
    )
    process = start("run", source, "-o", target, "-m", folder, *ENGINE, "--concurrency", "1")
    deadline = time.monotonic() + WAIT
    while not target.exists() or not target.stat().st_size:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert 0 < len(read(target)) < 40


def test_the_output_of_another_input_is_left_alone(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    assert run(write(tmp_path / "one", [chat("a", "x"), chat("b", "y")]), target, folder) == 0
    before = target.read_bytes()
    capsys.readouterr()
    for lines, complaint in (
        ([chat("a", "x"), chat("c", "y")], "custom_id 'c', its answer 'b'"),
        ([chat("a", "x")], "answers line 2"),
    ):
        assert run(write(tmp_path / "two", lines), target, folder) == 2
        assert complaint in capsys.readouterr().err
    other = tmp_path / "notes"
    for text in ("my notes\nand more", "no end of line"):
        other.write_text(text)
        assert run(tmp_path / "one", other, folder) == 2
        assert "something else than answers" in capsys.readouterr().err
        assert other.read_text() == text
    with target.open("ab") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        assert run(tmp_path / "one", target, folder) == 2
    assert "by another process" in capsys.readouterr().err
    assert target.read_bytes() == before


def test_a_dead_engine_is_no_answer(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it could not answer stays to be answered."""
    source, target = (
        write(tmp_path / "in", [completion(str(i), "fox", max_tokens=20) for i in range(6)]),
        tmp_path / "out",
    )
    step, steps = Engine.step, []

    def fail_later(engine: Any) -> Any:
        steps.append(1)
        if len(steps) > 30:
            raise RuntimeError("a fault that the test asked for")
        return step(engine)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", fail_later)
        assert run(source, target, folder, "--concurrency", "1") == 1
    assert "asked for" in capsys.readouterr().err
    done = len(read(target))
    assert 0 < done < 6
    assert run(source, target, folder) == 0
    assert {answer["response"]["status_code"] for answer in read(target).values()} == {200}


def test_what_is_no_file_is_refused(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The input is read twice, and the output when the command is given again."""
    source = write(tmp_path / "in", [chat("a", "Hello")])
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDWR)
    try:
        assert run(pipe, tmp_path / "out", folder) != 0
    finally:
        os.close(held)
    assert "only once" in capsys.readouterr().err
    assert run(source, Path("/dev/null"), folder) != 0
    assert "is no file" in capsys.readouterr().err
