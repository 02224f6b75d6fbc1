"""`chairlift plan` says what an engine would be, without its weights."""

import json
from pathlib import Path

import pytest

from chairlift import LLM
from chairlift.cli import main


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-requests-per-batch", "4"],  # or the cache is what is free at the moment
        ["--num-blocks", "512", "--page-size", "16", "--max-batch-tokens", "512", "--dtype", "bfloat16"],
    ],
)
def test_the_plan_is_what_the_engine_becomes(folder: str, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    dtype = given.pop("--dtype", "auto")
    config = {name[2:].replace("-", "_"): int(value) for name, value in given.items()}
    with LLM(folder, dtype=dtype, **config) as llm:
        engine = llm.manager.config
    assert main(["plan", folder, *flags]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{engine}\n")
    assert "2 layers: 2 with full attention" in text


def test_only_the_config_is_read(folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((Path(folder) / "config.json").read_text())
    assert main(["plan", str(tmp_path), "--json", "--num-blocks", "64", "--page-size", "8"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["resolved"]["num_blocks"] == 64
    assert plan["resolved"]["cache_bytes"] == 64 * plan["resolved"]["block_bytes"]
    assert plan["resolved"]["max_sequence_length"] == 64 * 8
    assert plan["model"]["layers"] == [[None, 2, 8]] * 2


def test_hints_bound_the_cache(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for count in ("1", "1000"):
        flags = ["--num-requests", count, "--max-prompt-length", "30000", "--max-generated-length", "30000"]
        assert main(["plan", folder, "--json", *flags]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["resolved"]["num_blocks"])
    assert sizes[0] < sizes[1]


def test_the_default_model_is_smollm2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json"]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert (model["dtype"], model["vocab_size"], len(model["layers"])) == ("bfloat16", 49152, 30)
    assert model["parameter_bytes"] == 2 * 134515008


NONSENSE: list[tuple[dict[str, object], str]] = [
    ({"num_attention_heads": 0}, "ZeroDivisionError"),
    ({"num_key_value_heads": 0}, "ZeroDivisionError"),
    ({"num_attention_heads": -4}, "negative"),
    ({"hidden_size": "large"}, "'hidden_size' expected int, got str"),
    ({"hidden_size": None}, "'hidden_size' expected int"),
    ({"num_hidden_layers": 0}, "num_layers=0"),
    ({"max_position_embeddings": 0}, "max_model_length=0"),
    ({"hidden_act": "magic"}, "magic"),
    ({"dtype": "float7"}, "float7"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "factor"),
    ({"quantization_config": 5}, "to_dict"),
    ({"model_type": "t5"}, "'t5' is not a kind of causal language model"),
    ({"model_type": 7}, "model type `7`"),
]


@pytest.mark.parametrize(("changes", "words"), NONSENSE, ids=[words for _, words in NONSENSE])
def test_a_config_that_makes_no_sense_is_refused_in_one_line(
    folder: str, changes: dict[str, object], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = json.loads((Path(folder) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    capsys.readouterr()
    assert main(["plan", str(tmp_path)]) in (1, 2)
    shown = capsys.readouterr()
    assert shown.out == ""
    *_, line = shown.err.splitlines()
    assert line.startswith("chairlift: ") and words in line and len(line) < 1000
