"""What a grammar lets through, against what it means, on tokenizers of letters and of pieces."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chairlift.errors import InvalidRequestError
from chairlift.params import Grammar, SamplingParams
from chairlift.sample import grammar as grammars
from chairlift.sample.grammar import Guided, compile_grammar

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("a", "b"), ("ab", "ab"), ("b", "a"), ("{", '"'), ('"', ":"), ("Ġ", "a")]
EOS, STOP = 0, 1
SIZE = 400  # logits: more than tokens


def make_tokenizer() -> Any:
    tokens = ["<eos>", "<stop>", *ALPHABET, *("".join(pair) for pair in MERGES)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    return tokenizer


TOKENIZER = make_tokenizer()
BYTES = [b"", b"", *(TOKENIZER.decode([i]).encode() for i in range(2, len(TOKENIZER)))]
PLAIN = SamplingParams(eos_token_ids=frozenset({EOS}), grammar=Grammar("json_object"))


def guided(grammar: Grammar, text: str = "", params: SamplingParams = PLAIN) -> Guided:
    return compile_grammar(grammar, TOKENIZER).follow(TOKENIZER.encode(text), params)


def allowed(state: Guided, may_stop: bool = True) -> list[int]:
    return np.flatnonzero(state.allowed(SIZE, may_stop)).tolist()


WORDS = st.lists(st.text('ab"\\ \n{é', min_size=1, max_size=6), min_size=1, max_size=4, unique=True)


@settings(max_examples=60)
@given(words=WORDS, data=st.data())
def test_a_choice_lets_through_what_begins_one_of_its_answers(words: list[str], data: st.DataObject) -> None:
    """At every place of a walk: all ways on and no other, the end where an answer is complete."""
    state = guided(Grammar("choice", tuple(words)))
    answers = [word.encode() for word in words]
    text = b""
    for _ in range(20):
        expected = {
            token
            for token in range(2, len(TOKENIZER))
            if is_ascii(token) and any(answer.startswith(text + BYTES[token]) for answer in answers)
        }
        expected |= {EOS} if text in answers else set()
        found = {token for token in allowed(state) if token == EOS or is_ascii(token)}
        # Where there is but one way on, llguidance takes it in the tokens that the text itself has.
        assert found <= expected
        assert {BYTES[token][:1] for token in found} == {BYTES[token][:1] for token in expected}
        choices = [token for token in allowed(state) if token != EOS]
        if not choices:
            assert text in answers
            return
        token = data.draw(st.sampled_from(choices))
        if not is_ascii(token):
            return
        state.append(token)
        text += BYTES[token]
    raise AssertionError("it does not end")


def is_ascii(token: int) -> bool:
    """Whether the token's text says what its bytes are."""
    return token >= 2 and b"\xef\xbf\xbd" not in BYTES[token]


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6))
def test_whatever_is_drawn_from_a_schema_is_valid(seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 999, "minimum": -99}, "b": {"enum": ["x", "y z"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    rng = np.random.default_rng(seed)
    state = guided(Grammar("json_schema", json.dumps(schema)))
    tokens: list[int] = []
    while (token := int(rng.choice(allowed(state)))) != EOS:
        tokens.append(token)
        state.append(token)
    answer = json.loads(TOKENIZER.decode(tokens))
    assert -99 <= answer.pop("a") <= 999 and answer in ({}, {"b": "x"}, {"b": "y z"})


@pytest.mark.parametrize("text", ["", "a", "ab", "abab", "abba"])
def test_a_state_made_anew_goes_on_as_the_one_that_walked(text: str) -> None:
    """As after a preemption."""
    walked = guided(Grammar("regex", "[ab]{0,6}"))
    for token in TOKENIZER.encode(text):
        walked.allowed(SIZE, True)
        walked.append(token)
    assert allowed(walked) == allowed(guided(Grammar("regex", "[ab]{0,6}"), text))


def test_states_of_one_grammar_do_not_disturb_each_other() -> None:
    one, other = guided(Grammar("regex", "ab|ba")), guided(Grammar("regex", "ab|ba"))
    one.append(TOKENIZER.encode("a")[0])
    assert allowed(one) == TOKENIZER.encode("b")
    assert set(TOKENIZER.encode("b")) < set(allowed(other))


def test_the_end() -> None:
    """Each of the request's own stop tokens ends an answer where the grammar may end, and only there."""
    both = SamplingParams(eos_token_ids=frozenset({EOS}), stop_token_ids=frozenset({STOP}), grammar=PLAIN.grammar)
    a, b = TOKENIZER.encode("a") + TOKENIZER.encode("b")
    assert allowed(guided(Grammar("regex", "ab?"), "a", both)) == sorted([EOS, STOP, b])
    assert allowed(guided(Grammar("regex", "a"), "a", both)) == [EOS, STOP]
    assert EOS not in allowed(guided(Grammar("regex", "ab"), "a", both))
    assert allowed(guided(Grammar("regex", "a+"), "a", both), may_stop=False) == [
        token for token in range(len(TOKENIZER)) if BYTES[token] == b"a"
    ]
    assert allowed(guided(Grammar("regex", "a"), "a", both), may_stop=False) == [EOS, STOP], "nothing else is left"
    text_stop = SamplingParams(eos_token_ids=frozenset({EOS}), stop_token_ids=frozenset({b}), grammar=PLAIN.grammar)
    assert allowed(guided(Grammar("regex", "[ab]x"), "", text_stop)) == [a, b], "a stop token may be a part of it"
    assert b not in allowed(guided(Grammar("regex", "a[ac]"), "a", text_stop))


def test_ignore_eos_ends_at_the_last_moment() -> None:
    params = SamplingParams(eos_token_ids=frozenset({EOS}), ignore_eos=True, grammar=PLAIN.grammar)
    assert params.stop_ids == {EOS}
    assert EOS not in allowed(guided(Grammar("regex", "x{1,3}"), "xx", params))
    assert allowed(guided(Grammar("regex", "x{1,3}"), "xxx", params)) == [EOS]


def test_white_space_in_json_is_bounded() -> None:
    state = guided(Grammar("json_object"), '{"a":' + " " * 32)
    assert TOKENIZER.encode(" ")[0] not in allowed(state)
    assert TOKENIZER.encode("1")[0] in allowed(state)


def test_a_lazy_start_leaves_text_free_until_the_tag() -> None:
    lark = r"""
        start: text | text call
        text: /(.|\n)*/
        call: "<call>" %json {"type": "object", "properties": {"a": {"const": 1}}} "</call>"
    """
    state = guided(Grammar("lark", lark), "some text ")
    assert {EOS, *TOKENIZER.encode("abc")} <= set(allowed(state))


BAD = [
    (Grammar("regex", "(a"), "unclosed group"),
    (Grammar("lark", "start: nothing"), "nothing"),
    (Grammar("json_schema", "{"), "EOF"),
    (Grammar("json_schema", "3"), "object"),
    (Grammar("json_schema", '{"type": "objectt"}'), "objectt"),
    (Grammar("json_schema", '{"type": "object", "unevaluatedProperties": 1}'), "unevaluatedProperties"),
]


@pytest.mark.parametrize(("grammar", "words"), BAD)
def test_a_bad_grammar_is_refused_in_words(grammar: Grammar, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(grammar.kind)) as caught:
        compile_grammar(grammar, TOKENIZER)
    assert words in str(caught.value) and "non-verbose" not in str(caught.value)


def test_what_is_no_grammar() -> None:
    with pytest.raises(InvalidRequestError, match="json_schema"):
        Grammar("xml", "a")  # type: ignore[arg-type]
    for kind, source, error in [
        ("choice", "a", TypeError),
        ("choice", (), InvalidRequestError),
        ("choice", ("a", ""), InvalidRequestError),
        ("choice", ("a", 1), TypeError),
        ("regex", "", InvalidRequestError),
        ("json_schema", {"type": "object"}, TypeError),
    ]:
        with pytest.raises(error, match=r"grammar\.source"):
            Grammar(kind, source)  # type: ignore[arg-type]
    assert Grammar("choice", ["a", "b"]) == Grammar("choice", ("a", "b"))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="fast tokenizer"):
        compile_grammar(Grammar("json_object"), object())


def test_a_grammar_is_compiled_once_and_a_tokenizer_that_grew_read_again() -> None:
    tokenizer = make_tokenizer()
    first = compile_grammar(Grammar("regex", "new|old"), tokenizer)
    assert compile_grammar(Grammar("regex", "new|old"), tokenizer) is first
    tokenizer.add_tokens(["new"])
    assert tokenizer.backend_tokenizer.padding is None
    state = compile_grammar(Grammar("regex", "new|old"), tokenizer).follow([], PLAIN)
    assert len(tokenizer) - 1 in allowed(state)


def chain(rule: str, length: int) -> str:
    """Rules, each of which refers to the next."""
    return "\n".join([f"start: {rule}0", *(f"{rule}{i}: {rule}{i + 1}" for i in range(length)), f'{rule}{length}: "a"'])


@pytest.mark.parametrize("rule", ["r", "R"])
def test_a_long_chain_of_references_does_not_overflow_the_stack(rule: str) -> None:
    """The process would end."""
    state = guided(Grammar("lark", chain(rule, 15_000)))
    assert allowed(state) == [TOKENIZER.convert_tokens_to_ids("a")]


@pytest.mark.parametrize("link", ['{"items": {"$ref": "#/$defs/d%d"}}', '{"allOf": [{"$ref": "#/$defs/d%d"}]}'])
def test_a_long_chain_of_schemas_does_not_overflow_the_stack(link: str) -> None:
    size = 1_000
    links = ", ".join(f'"d{i}": {link % (i + 1)}' for i in range(size))
    schema = f'{{"$defs": {{{links}, "d{size}": {{}}}}, "$ref": "#/$defs/d0"}}'
    assert allowed(guided(Grammar("json_schema", schema)))


@pytest.mark.parametrize(
    "grammar", [Grammar("lark", chain("R", 50_000)), Grammar("choice", ("x" * 200_000, "y" * 200_000))]
)
def test_a_source_that_is_too_long_is_refused(grammar: Grammar) -> None:
    with pytest.raises(InvalidRequestError, match="the most"):
        guided(grammar)


LARGE = [
    Grammar("json_schema", json.dumps({"properties": {str(i): {} for i in range(8_000)}})),
    Grammar("json_schema", json.dumps({"const": {str(i): i for i in range(10_000)}})),
    Grammar("lark", "\n".join(["start: T0", *(f"T{i}: T{i + 1} T{i + 1}" for i in range(60)), "T60: /[a-z]+/"])),
]


@pytest.mark.parametrize("grammar", LARGE)
def test_what_would_take_seconds_to_compile_is_refused(grammar: Grammar) -> None:
    with pytest.raises(InvalidRequestError, match="too big"):
        guided(grammar)


def test_a_grammar_that_turns_out_too_large_is_the_requests_fault() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2_000)}}
    state = guided(Grammar("json_schema", json.dumps(schema)), "{")
    with pytest.raises(InvalidRequestError, match="cannot be followed"):
        allowed(state)


MULTIPLES = [
    '{"type": "integer", "multipleOf": 999983}',
    '{"type": "number", "multipleOf": 9.99983e-1}',
    '{"allOf": [{"multipleOf": 101}, {"multipleOf": 103}, {"multipleOf": 107}]}',
    '{"multipleOf": 10e-2, "anyOf": [{"\\u006dultipleOf": 123457}]}',
]


@pytest.mark.parametrize("schema", MULTIPLES)
def test_a_multiple_that_would_take_minutes_is_refused(schema: str) -> None:
    for grammar in (Grammar("json_schema", schema), Grammar("lark", f"start: %json {schema}")):
        with pytest.raises(InvalidRequestError, match="multipleOf"):
            guided(grammar)


@pytest.mark.parametrize("multiple", ["0.01", "0", "1000000", "1e-5", "7", "65536"])
def test_multiples_in_use(multiple: str) -> None:
    if multiple == "0":
        with pytest.raises(InvalidRequestError):
            guided(Grammar("json_schema", f'{{"type": "number", "multipleOf": {multiple}}}'))
    else:
        assert allowed(guided(Grammar("json_schema", f'{{"type": "number", "multipleOf": {multiple}}}')))


def test_whoever_has_a_small_grammar_does_not_wait_for_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_one, go_on = grammars._Vocabulary._compile, threading.Event()

    def slowly(self: Any, grammar: Grammar) -> Any:
        assert grammar.source != "slow" or go_on.wait(60)
        return compile_one(self, grammar)

    monkeypatch.setattr(grammars._Vocabulary, "_compile", slowly)
    with ThreadPoolExecutor(2) as threads:
        slow = [threads.submit(compile_grammar, Grammar("regex", "slow"), TOKENIZER) for _ in range(2)]
        assert allowed(guided(Grammar("regex", "quick")))
        assert not any(each.done() for each in slow)
        go_on.set()
        assert slow[0].result() is slow[1].result()


def test_what_is_bad_is_not_kept() -> None:
    bad = Grammar("regex", "(not kept")
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="unclosed group") as caught:
            compile_grammar(bad, TOKENIZER)
    assert len(caught.traceback) < 10
