"""Flags are the config's fields, and what is typed wrong is one line and exit status 2."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tyro

from chairlift.cli import VERBS, main
from chairlift.commands.flags import registry
from chairlift.config import ContinuousBatchingConfig, WorkloadHints
from tests.cli.conftest import ENVIRONMENT, WAIT, command

OBJECTS = {"varlen_compile_config", "decode_compile_config"}  # cannot be typed


def parsed(*arguments: str) -> Any:
    return tyro.cli(VERBS, prog="chairlift", args=arguments, registry=registry)


def help_of(verb: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        parsed(verb, "--help")
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


OTHER_DEFAULTS = {("serve", "scheduler_type"): "fair_share"}


@pytest.mark.parametrize("verb", ["serve", "chat", "run", "bench", "plan"])
def test_every_field_is_a_flag_with_its_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(verb, capsys)
    for field in dataclasses.fields(ContinuousBatchingConfig):
        flag = f"--{field.name.replace('_', '-')} "
        assert (flag in text.replace(",", " ")) == (field.name not in OBJECTS), flag
        if field.name not in OBJECTS:
            assert field.metadata["help"] in text
            default = OTHER_DEFAULTS.get((verb, field.name), field.default)
            assert f"(default: {default})" in text


@pytest.mark.parametrize("verb", ["serve", "chat", "run", "bench", "plan"])
def test_no_comment_of_the_source_is_taken_for_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "noqa" not in help_of(verb, capsys)


def test_plan_has_the_hints(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("plan", capsys)
    assert [field.metadata["help"] in text for field in dataclasses.fields(WorkloadHints)] == [True] * 3
    assert parsed("plan", "--num-requests", "7").hints == WorkloadHints(num_requests=7)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("", {}),
        ("--page-size 32", {"page_size": 32}),
        ("--num-blocks None", {"num_blocks": None}),
        ("--num-blocks 12", {"num_blocks": 12}),
        ("--max-memory-percent 0.5", {"max_memory_percent": 0.5}),
        ("--no-allow-block-sharing", {"allow_block_sharing": False}),
        ("--return-logprobs --logprobs-mode raw", {"return_logprobs": True, "logprobs_mode": "raw"}),
        ("--use-cuda-graph True", {"use_cuda_graph": True}),
        ("--use-cuda-graph True False", {"use_cuda_graph": (True, False)}),
        ("--use-async-batching False", {"use_async_batching": False}),
        ("--scheduler-type prefill_first", {"scheduler_type": "prefill_first"}),
        ("--cpu-offload-space None --cpu-group-timeout None", {"cpu_offload_space": None, "cpu_group_timeout": None}),
        ("--seed 5", {"seed": 5}),
    ],
)
def test_values_of_every_kind(typed: str, expected: dict[str, Any]) -> None:
    for verb, extra in (("serve", []), ("run", ["in", "-o", "out"])):
        own = {name: value for (where, name), value in OTHER_DEFAULTS.items() if where == verb}
        assert parsed(verb, *extra, *typed.split()).engine.config == ContinuousBatchingConfig(**own | expected)
    assert parsed("plan", *typed.split()).config == ContinuousBatchingConfig(**expected)


def test_places_of_the_model_and_the_files() -> None:
    assert parsed("serve").model is None
    assert parsed("serve", "some/model", "--port", "1").model == "some/model"
    run = parsed("run", "in.jsonl", "-o", "out.jsonl", "-m", "some/model")
    assert (run.input, run.output, run.model) == (Path("in.jsonl"), Path("out.jsonl"), "some/model")
    assert parsed("serve", "--api-key", "a", "--api-key", "b").api_key == ("a", "b")


@pytest.mark.parametrize(
    ("typed", "complaint"),
    [
        ("plan --page-size 2", "page_size=2 makes no sense: give an integer of at least 4"),
        ("chat --scheduler-type lifo", "scheduler_type='lifo' makes no sense"),
        ("serve --safety-margin 1.5", "safety_margin=1.5"),
        ("plan /no/such/folder", "there is no folder /no/such/folder"),
        ("serve /no/such/folder", "there is no folder /no/such/folder"),
        ("chat --attn-implementation fancy", "attn_implementation='fancy' does not work here"),
        ("serve --chat-template /no/such/file", "/no/such/file"),
        ("run /no/such/file -o /dev/null", "/no/such/file"),
        ("bench --num-requests 0", "--num-requests 0 makes no sense"),
        ("bench --rate -1", "--rate -1.0 makes no sense"),
        ("bench --prompts /no/such/file", "/no/such/file"),
    ],
)
def test_what_makes_no_sense_is_one_line(typed: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("chairlift: ") and err.count("\n") == 1
    assert complaint in err


@pytest.mark.parametrize("typed", ["", "fly", "plan --page-size two", "plan --page-sise 8", "plan --seed", "run"])
def test_what_cannot_be_read_is_exit_status_2(typed: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(typed.split())
    assert ended.value.code == 2


def test_a_config_that_does_not_fit_is_one_line_too(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "plan",
                folder,
                "--num-blocks",
                "1",
                "--page-size",
                "4",
                "--num-requests",
                "1",
                "--max-prompt-length",
                "64",
                "--max-generated-length",
                "64",
            ]
        )
        == 2
    )
    err = capsys.readouterr().err
    assert "num_blocks=1 is too small" in err and err.count("\n") == 1


def test_nobody_answers_is_exit_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:9", "--num-requests", "1"]) == 1
    err = capsys.readouterr().err
    assert "127.0.0.1:9" in err and err.count("\n") == 1


def test_the_process_says_the_same() -> None:
    done = subprocess.run(command("plan", "--page-size", "2"), env=ENVIRONMENT, capture_output=True, timeout=WAIT)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"chairlift: page_size=2 makes no sense: give an integer of at least 4\n"


def test_help_does_not_wait_for_pytorch() -> None:
    program = (
        "import sys; from chairlift.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as ended: assert {'torch', 'transformers', 'fastapi'}.isdisjoint(sys.modules), ended"
    )
    for arguments in (["--help"], ["serve", "--help"], ["plan", "--no-such-flag"]):
        subprocess.run([sys.executable, "-c", program, *arguments], check=True, timeout=WAIT, capture_output=True)
