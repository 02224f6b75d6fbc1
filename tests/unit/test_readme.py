"""The README and the examples are run, on tiny random models: what a reader copies must work."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import chairlift.model.loader

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(vocab_size: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def test_readme_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All blocks, in order, as one session. A folder with the model's name stands in for the Hub."""
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    assert MODEL_NAME in blocks[0]
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / MODEL_NAME)
    tiny_model(len(tokenizer)).save_pretrained(tmp_path / MODEL_NAME)
    monkeypatch.chdir(tmp_path)

    session: dict[str, object] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md, python block {number}", "exec"), session)
        assert capsys.readouterr().out, f"block {number} prints nothing"


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_example_runs(example: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer))
    monkeypatch.setattr(chairlift.model.loader, "load_smollm2", lambda *, dtype: (model.to(dtype), tokenizer))
    runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    out = capsys.readouterr().out
    assert out
    if example == "demo.py":
        assert_demo_adds_up(out)


def assert_demo_adds_up(out: str) -> None:
    """The statistics are those of the run that is reported, and the shared system prompt was found in the cache."""
    (tokens,) = re.findall(r"^32 requests, (\d+) tokens in", out, re.MULTILINE)
    (generated,) = re.findall(r"^steps: .* (\d+) tokens$", out, re.MULTILINE)
    assert generated == tokens
    (hits,) = re.findall(r"^prefix hits: (\d+) of \d+ prompt tokens", out, re.MULTILINE)
    assert int(hits) > 0


def test_make_verbs_exist() -> None:
    """Every `make verb` in a code span or block is a target of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md", "docs/structure.md"):
        verbs = set(re.findall(r"(?:^|`)make ([a-z]+)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE))
        assert verbs <= targets, page
    assert {"demo", "test"} <= set(re.findall(r"^make ([a-z]+)", README, re.MULTILINE))


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_example_is_in_the_readme() -> None:
    assert [path.name for path in (ROOT / "examples").glob("*.py") if f"examples/{path.name}" not in README] == []
