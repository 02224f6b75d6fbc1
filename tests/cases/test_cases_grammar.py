"""Grammars on a real model: what they make of an answer, and that nobody beside them notices."""

import json
import re
import sys
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chairlift import ContinuousBatchingManager, GenerationOutput, RequestStatus
from chairlift.errors import InvalidRequestError
from chairlift.params import Grammar
from tests.cases.tiny import VOCAB, answer, assert_at_rest, last, llama, prompt, serving

EOS = 0
LETTERS = [chr(code) for code in range(33, 127)]


@pytest.fixture(scope="module")
def model() -> Any:
    return llama(max_position_embeddings=512)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token for each printable character, and as many as the tiny model has."""
    tokens = ["<eos>", "Ġ", "Ċ", *LETTERS]
    assert len(tokens) == VOCAB
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", "[a-f]{12,30}"),
    Grammar("choice", ("yes", "no, thanks")),
    Grammar("lark", 'start: "<" word+ ">"\nword: /[xy]{3}/ " "'),
]
WAYS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5, "top_k": 20}, {"temperature": 0.8, "seed": 6}]


def ask(manager: ContinuousBatchingManager, tokenizer: Any, i: int, **more: Any) -> str:
    request: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": EOS, "logprobs": 3, "tokenizer": tokenizer}
    request |= {"grammar": GRAMMARS[i % len(GRAMMARS)]} | WAYS[i % len(WAYS)] | more
    request_id = manager.add_request(prompt(9 + i % 3, seed=i % 5), **request)
    assert request_id is not None
    return request_id


def ask_freely(manager: ContinuousBatchingManager, i: int) -> str:
    request_id = manager.add_request(
        prompt(8 + i, seed=i), max_new_tokens=40, logprobs=3, **WAYS[i % len(WAYS)], ignore_eos=True
    )
    assert request_id is not None
    return request_id


def essence(output: GenerationOutput) -> tuple[Any, ...]:
    assert output.status is RequestStatus.FINISHED, output.error
    return output.generated_tokens, output.logprobs, output.top_logprobs, output.finish_reason, output.stop_reason


def check(text: str, grammar: Grammar) -> None:
    match grammar.kind:
        case "json_schema":
            value = json.loads(text)
            assert set(value) == {"n", "ok"} and value["ok"] in (True, False) and 0 <= value["n"] <= 99
        case "choice":
            assert text in grammar.source
        case "regex":
            assert re.fullmatch(str(grammar.source), text)
        case _:
            assert re.fullmatch(r"<([xy]{3} )+>?", text)


def test_answers_have_their_form(model: Any, tokenizer: Any, use_async_batching: bool) -> None:
    with serving(model, use_async_batching=use_async_batching) as manager:
        for i in range(12):
            output = last(manager, ask(manager, tokenizer, i, max_new_tokens=240))
            text = tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
            if output.finish_reason == "stop":
                assert output.stop_reason == output.generated_tokens[-1] == EOS
                check(text, GRAMMARS[i % 4])
            else:
                assert i % 4 == 3, "only this one has no longest answer"
        assert_at_rest(manager)


def test_nobody_notices(model: Any, tokenizer: Any, use_async_batching: bool) -> None:
    """Bit for bit: with a grammar alone and in company, without one beside some; in a pool where all give way, chunked,
    and once their prompts are in the cache."""
    with serving(model, use_async_batching=use_async_batching) as manager:
        alone = [essence(last(manager, ask(manager, tokenizer, i))) for i in range(8)]
        free = [essence(last(manager, ask_freely(manager, i))) for i in range(4)]
    settings: dict[str, Any] = {"num_blocks": 44, "max_batch_tokens": 7, "use_async_batching": use_async_batching}
    with serving(model, **settings) as manager:
        for _ in range(2):
            ids = [(ask(manager, tokenizer, i), alone[i]) for i in range(8)]
            ids += [(ask_freely(manager, i), free[i]) for i in range(4)]
            outputs = [(last(manager, request_id), expected) for request_id, expected in ids]
            for output, expected in outputs:
                assert essence(output) == expected
        assert any(output.num_cached_tokens for output, _ in outputs)
        assert manager.stats().preemptions > 0
        assert_at_rest(manager)


def test_streams_and_children(model: Any, tokenizer: Any) -> None:
    with serving(model) as manager:
        whole = last(manager, ask(manager, tokenizer, 1))
        streamed = ask(manager, tokenizer, 1, streaming=True)
        parts = list(manager.request_id_iter(streamed))
        assert len(parts) == len(whole.generated_tokens)
        assert [token for part in parts for token in part.new_tokens] == whole.generated_tokens
        parent = ask(manager, tokenizer, 1, num_return_sequences=3)
        family = [last(manager, name) for name in (parent, f"{parent}__child#0", f"{parent}__child#1")]
        assert essence(family[0]) == essence(whole)
        texts = [tokenizer.decode(output.generated_tokens, skip_special_tokens=True) for output in family]
        for text in texts:
            check(text, GRAMMARS[1])
        assert len(set(texts)) == 3


@pytest.mark.parametrize(
    ("more", "length"),
    [({"ignore_eos": True}, 5), ({"min_new_tokens": 4}, None), ({"min_new_tokens": 50}, 5), ({"max_new_tokens": 1}, 1)],
)
def test_length(model: Any, tokenizer: Any, more: dict[str, Any], length: int | None) -> None:
    """A grammar has the last word about when an answer is over."""
    with serving(model) as manager:
        output = last(manager, ask(manager, tokenizer, 0, grammar=Grammar("regex", "q{2,5}"), **more))
    letters = tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
    assert set(letters) == {"q"}
    assert len(letters) >= more.get("min_new_tokens", 0) or len(letters) == 5
    assert length is None or len(letters) == length
    assert output.finish_reason == ("length" if "max_new_tokens" in more else "stop")


def test_a_grammar_that_cannot_go_on_fails_its_own_request(model: Any, tokenizer: Any) -> None:
    """This tokenizer has nothing to write an é with."""
    with serving(model) as manager:
        other = ask(manager, tokenizer, 1)
        stuck = ask(manager, tokenizer, 0, grammar=Grammar("regex", "aé"))
        output = last(manager, stuck)
        assert output.status is RequestStatus.FAILED and output.finish_reason == "error"
        assert output.error
        assert last(manager, other).status is RequestStatus.FINISHED
        assert_at_rest(manager)


def test_refusals(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(model) as manager:
        for wrong, message in [
            ({"eos_token_id": -1}, "give eos_token_id"),
            ({"grammar": Grammar("regex", "(")}, "unclosed group"),
        ]:
            with pytest.raises(InvalidRequestError, match=message):
                ask(manager, tokenizer, 1, **wrong)
        with pytest.raises(InvalidRequestError, match="needs tokenizer="):
            ask(manager, None, 1)
        with pytest.raises(TypeError, match="grammar must be"):
            ask(manager, tokenizer, 1, grammar='{"type": "object"}')
        monkeypatch.setitem(sys.modules, "llguidance", None)
        monkeypatch.delitem(sys.modules, "chairlift.sample.grammar")
        with pytest.raises(InvalidRequestError, match=r"pip install 'chairlift\[grammar\]'"):
            ask(manager, tokenizer, 1)
        assert answer(manager, prompt(5), 3).status is RequestStatus.FINISHED
        assert_at_rest(manager)
