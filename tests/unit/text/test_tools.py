"""Calls are read as they were written, in any syntax and any pieces, and the grammar lets nothing else be written."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import InvalidRequestError
from chairlift.params import Grammar, SamplingParams
from chairlift.sample.grammar import compile_grammar
from chairlift.text.reasoning import Piece, ReasoningTags
from chairlift.text.tools import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMES,
    QWEN_CODER,
    Tool,
    ToolParser,
    ToolRequest,
    ToolSyntax,
    after_reasoning,
    tool_grammar,
    tool_request,
    tool_syntax,
    written,
)
from tests.unit.text.conftest import byte_tokenizer, chunked

SYNTAXES = [HERMES, LLAMA, MISTRAL, MISTRAL_NAMES]
ALL = [*SYNTAXES, QWEN_CODER]
NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_-]{0,8}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["}", '"', "{[", "\\", "</"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(st.text(max_size=5), VALUES, max_size=3)), min_size=1, max_size=3)


def read(syntax: ToolSyntax, chunks: Sequence[str], tools: Sequence[Tool] = ()) -> list[Piece]:
    parser, pieces, at = ToolParser(syntax, tools), [], 0
    for chunk in chunks:
        pieces += parser.feed(Piece("content", chunk, at, at + len(chunk)))
        at += len(chunk)
    return pieces + parser.finish()


def calls_of(pieces: list[Piece]) -> list[tuple[str, str]]:
    """Names and arguments. A call's first piece has its name and an id of its own, the others follow in order."""
    calls: list[list[str]] = []
    ids = []
    for piece in pieces:
        if piece.kind == "tool":
            if piece.tool_name is not None:
                assert piece.call == len(calls) and piece.tool_id
                calls.append([piece.tool_name, ""])
                ids.append(piece.tool_id)
            assert piece.call == len(calls) - 1
            calls[-1][1] += piece.text
    assert len(set(ids)) == len(ids)
    return [(name, arguments) for name, arguments in calls]


def content_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == "content")


@pytest.mark.parametrize("syntax", SYNTAXES)
@given(calls=CALLS, indent=st.sampled_from([None, 1]), is_ascii=st.booleans(), data=st.data())
def test_what_is_written_is_read(
    syntax: ToolSyntax, calls: list[tuple[str, Any]], indent: int | None, is_ascii: bool, data: st.DataObject
) -> None:
    spelled = [(name, json.dumps(arguments, indent=indent, ensure_ascii=is_ascii)) for name, arguments in calls]
    text = written(syntax, spelled)
    assert calls_of(read(syntax, [text])) == spelled
    pieces = read(syntax, chunked(text, data))
    assert calls_of(pieces) == spelled
    assert content_of(pieces) == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls_of(pieces)] == calls


@pytest.mark.parametrize("syntax", [HERMES, MISTRAL, MISTRAL_NAMES])
@given(
    content=st.text(alphabet="ab <[{t\n", max_size=8).filter(lambda text: text == text.rstrip()),
    calls=CALLS,
    data=st.data(),
)
def test_content_comes_before_calls(
    syntax: ToolSyntax, content: str, calls: list[tuple[str, Any]], data: st.DataObject
) -> None:
    spelled = [(name, json.dumps(arguments)) for name, arguments in calls]
    pieces = read(syntax, chunked(f"{content}\n{written(syntax, spelled)}", data))
    assert (content_of(pieces), calls_of(pieces)) == (content, spelled)
    assert [piece.kind for piece in pieces] == sorted(piece.kind for piece in pieces), "in this order"


SNIPPETS = [
    *("<tool_call>", "</tool_call>", "<tool", "_call>", '{"name": "f", ', '"arguments": {', '"x": 1', "}", "}}"),
    *("{", '"', " ", "\n", ";", "a", "[TOOL_CALLS]", "[", ",", "]", "f", "[ARGS]", "[CALL_ID]"),
    *("<|python_tag|>", '{"name": "g"}', '{"parameters": {}, "name": "h"}', "{}", '\\"', "[TOOL"),
]
PARTS = st.lists(st.sampled_from(SNIPPETS), max_size=9).map("".join)


@pytest.mark.parametrize("syntax", SYNTAXES)
@given(text=PARTS, data=st.data())
def test_whatever_comes_is_read_the_same_in_any_pieces(syntax: ToolSyntax, text: str, data: st.DataObject) -> None:
    pieces, whole = read(syntax, chunked(text, data)), read(syntax, [text])
    assert content_of(pieces) == content_of(whole)
    assert calls_of(pieces) == calls_of(whole)
    for piece in pieces:
        if piece.kind == "content":
            assert piece.text == text[piece.start : piece.end]


@pytest.mark.parametrize("syntax", ALL)
@given(text=st.text(alphabet="abc .,\n<>", max_size=20))
def test_text_without_calls_is_content(syntax: ToolSyntax, text: str) -> None:
    pieces = read(syntax, list(text))
    assert content_of(pieces) == text and not calls_of(pieces)


CODER = "<tool_call>\n<function={}>\n<parameter={}>\n{}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("syntax", "text", "content", "calls"),
    [
        (HERMES, '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x": 1}')]),
        (HERMES, '<tool_call>\n{"name": "f"}\n</tool_call> Done.', "Done.", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}', "", 2),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": "a', "", [("f", '{"x": "a')]),
        (HERMES, '<tool_call>{"na', "", []),
        (HERMES, "Look: <tool_ca", "Look: <tool_ca", []),
        (HERMES, "<tool_call>no JSON", "no JSON", []),
        (LLAMA, '{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
        (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", 2),
        (LLAMA, '{"answer": [1, 2]} ok', '{"answer": [1, 2]} ok', []),
        (LLAMA, '{"answer": ', '{"answer": ', []),
        (LLAMA, 'Say {"name": "f", "parameters": {}}', 'Say {"name": "f", "parameters": {}}', []),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', "", 2),
        (QWEN_CODER, CODER.format("f", "x", 1), "", [("f", '{"x": 1}')]),
        (QWEN_CODER, "Well.\n" + CODER.format("f", "x", "1 + a\n"), "Well.", [("f", '{"x": "1 + a\\n"}')]),
        (QWEN_CODER, CODER.format("f", "x", 1) + "\n" + CODER.format("g", "x", 1), "", 2),
        (QWEN_CODER, "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [("f", "{}")]),
        (QWEN_CODER, "<tool_call><function=f><parameter=x>[1]</parameter></function>", "", [("f", '{"x": [1]}')]),
        (QWEN_CODER, "<tool_call><function=f>\n<parameter=x>\n1\n</parameter>\n</tool_call>", "", [("f", '{"x": 1}')]),
        (QWEN_CODER, "<tool_call>\n<function=f>\n<parameter=x>\n1\n</para", "", [("f", "")]),
        (QWEN_CODER, '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', "", [("f", '{"x": 1}')]),
        (QWEN_CODER, "<tool_call>\n<func", "", []),
        (QWEN_CODER, "<tool_call>\n<funk>", "<funk>", []),
        (MISTRAL_NAMES, '[TOOL_CALLS]f{"x": 1}[TOOL_CALLS]g[CALL_ID]abc123def[ARGS]{}', "", 2),
    ],
)
def test_ways_of_writing(syntax: ToolSyntax, text: str, content: str, calls: list[tuple[str, str]] | int) -> None:
    for chunks in ([text], list(text)):
        pieces = read(syntax, chunks)
        assert content_of(pieces) == content
        found = calls_of(pieces)
        assert ([name for name, _ in found] == ["f", "g"]) if calls == 2 else (found == calls)


def test_arguments_are_shown_as_they_come() -> None:
    parser = ToolParser(HERMES)
    text = '<tool_call>\n{"name": "f", "arguments": {"city": "Bern"}}'
    shown = [[piece.text for piece in parser.feed(Piece("content", letter, i, i + 1))] for i, letter in enumerate(text)]
    begun = text.index('{"city')
    assert shown[:begun] == [[]] * begun
    assert shown[begun] == ["", "{"] and shown[begun + 1 : -1] == [[letter] for letter in text[begun + 1 : -1]]


def test_ids_are_what_templates_accept() -> None:
    mistral = read(MISTRAL, ['[TOOL_CALLS][{"name": "f", "arguments": {}}]'])[0].tool_id
    assert mistral is not None and len(mistral) == 9 and mistral.isalnum()
    given_id = read(MISTRAL_NAMES, ["[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}"])[0].tool_id
    assert given_id == "abc123def"
    hermes = read(HERMES, ['<tool_call>{"name": "f", "arguments": {}}'])[0].tool_id
    assert hermes is not None and hermes.startswith("call_")


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        ("{% if tools %}<tool_call>{{ tool.parameters }}{% endif %}", HERMES),
        ('{% if tools %}Respond in the format {"name": name, "parameters": dictionary}{% endif %}', LLAMA),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS][{{ call }}]", MISTRAL),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", MISTRAL_NAMES),
        ("{% if tools %}{{ tools | tojson }}{% endif %}", HERMES),
        ("{% if tools %}<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>{% endif %}", QWEN_CODER),
        ("{{ message.content }}", None),
    ],
)
def test_a_template_shows_how_its_model_calls(template: str, syntax: ToolSyntax | None) -> None:
    assert tool_syntax(template) == syntax


# --- What is asked for ----------------------------------------------------------------------------------------------

DICE = {
    "name": "roll-dice",
    "parameters": {
        "type": "object",
        "properties": {
            "sides": {"$ref": "#/$defs/count"},
            "colours": {"type": "array", "items": {"enum": ["red", "bläu", 'q"']}, "maxItems": 2},
            "fair": {"type": "boolean"},
        },
        "$defs": {"count": {"type": "integer", "minimum": 2, "maximum": 20}},
        "required": ["sides", "fair"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": DICE}, {"type": "function", "function": {"name": "roll"}}]


def test_the_choice_of_tools() -> None:
    auto = tool_request(TOOLS, None, parallel=True)
    assert auto is not None and [tool.name for tool in auto.tools] == ["roll-dice", "roll"]
    assert (auto.required, auto.parallel) == (False, True)
    required = tool_request(TOOLS, "required", parallel=False)
    assert required is not None and required.required and not required.parallel
    named = tool_request(TOOLS, {"type": "function", "function": {"name": "roll"}}, parallel=True)
    assert named is not None and [tool.name for tool in named.tools] == ["roll"]
    assert named.required and not named.parallel
    assert named == tool_request(TOOLS, {"type": "function", "name": "roll"}, parallel=True), "as in /v1/responses"
    assert tool_request(TOOLS, "none", parallel=True) is None
    assert tool_request([], "auto", parallel=True) is None
    assert tool_request(None, None, parallel=True) is None
    flat = tool_request([{"type": "function", **DICE}], "auto", parallel=True)
    assert flat is not None and flat.tools[0].name == "roll-dice"


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        (TOOLS, "sometimes", "roll-dice"),
        (TOOLS, {"type": "function", "function": {"name": "fly"}}, "fly"),
        (TOOLS, {"type": "function"}, "no such tool"),
        (None, "required", "needs tools"),
        ([], {"type": "function", "function": {"name": "roll"}}, "needs tools"),
        ([TOOLS[0], TOOLS[0]], "auto", "equal names"),
        ([{"type": "function", "function": {"description": "?"}}], "auto", r"tools\[0\] has no name"),
        ([{"type": "web_search"}], "auto", "web_search"),
        ([{"type": "function", "function": "roll"}], "auto", r"tools\[0\]"),
        ([{"type": "function", "function": {"name": "f", "parameters": [1]}}], "auto", "JSON schema"),
    ],
)
def test_a_choice_that_makes_no_sense(tools: Any, choice: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        tool_request(tools, choice, parallel=True)


# --- The grammar ----------------------------------------------------------------------------------------------------

TAGS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>")
TOKENIZERS = {
    "spelled": byte_tokenizer(None),
    "added": byte_tokenizer(None, added=TAGS),
    "special": byte_tokenizer(None, special=TAGS),
}


def request(**changes: Any) -> ToolRequest:
    asked = tool_request(TOOLS, changes.get("choice", "auto"), changes.get("parallel", True))
    assert asked is not None
    return asked


def write(tokenizer: Any, lark: str, begin: str, seed: int, most: int = 4000) -> str:
    """What a model writes that knows nothing but may only write what the grammar allows."""
    rng = random.Random(seed)
    end = tokenizer.eos_token_id
    params = SamplingParams(eos_token_ids=frozenset([end]))
    tokens = tokenizer.encode(begin, add_special_tokens=False)
    guided = compile_grammar(Grammar("lark", lark), tokenizer).follow(tokens, params)
    while len(tokens) < most:
        allowed = guided.allowed(len(tokenizer), True).nonzero()[0].tolist()
        assert allowed, "there is always a way on"
        token = end if end in allowed and rng.random() < 0.7 else rng.choice(allowed)
        if token == end:
            return str(tokenizer.decode(tokens))
        tokens.append(token)
        guided.append(token)
    raise AssertionError(f"no end: {tokenizer.decode(tokens)}")


def check(calls: list[tuple[str, str]]) -> None:
    assert calls
    for name, arguments in calls:
        values = json.loads(arguments)
        if name == "roll":
            assert values == {}
        else:
            assert name == "roll-dice" and set(values) in ({"sides", "fair"}, {"sides", "fair", "colours"})
            assert 2 <= values["sides"] <= 20 and isinstance(values["fair"], bool)
            assert set(values.get("colours", [])) <= {"red", "bläu", 'q"'} and len(values.get("colours", [])) <= 2


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("syntax", ALL)
@settings(max_examples=5)
@given(seed=st.integers(0, 1 << 30))
def test_a_model_that_must_call_calls(syntax: ToolSyntax, kind: str, seed: int) -> None:
    tokenizer = TOKENIZERS[kind]
    lark = tool_grammar(request(choice="required"), syntax, tokenizer.get_added_vocab().get)
    pieces = read(syntax, list(write(tokenizer, lark, "", seed)))
    assert content_of(pieces) == ""
    check(calls_of(pieces))


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("syntax", [HERMES, MISTRAL, MISTRAL_NAMES, QWEN_CODER])
@settings(max_examples=5)
@given(seed=st.integers(0, 1 << 30))
def test_a_model_that_begins_to_call_ends_the_call(syntax: ToolSyntax, kind: str, seed: int) -> None:
    tokenizer = TOKENIZERS[kind]
    lark = tool_grammar(request(), syntax, tokenizer.get_added_vocab().get)
    for begin in ("Let me see.\n", "", "a < b\n\n"):
        pieces = read(syntax, [write(tokenizer, lark, begin + syntax.tag, seed)])
        assert content_of(pieces) == begin.rstrip()
        check(calls_of(pieces))


@settings(max_examples=5)
@given(seed=st.integers(0, 1 << 30))
def test_a_bare_call_begins_with_a_brace(seed: int) -> None:
    tokenizer = TOKENIZERS["special"]
    lark = tool_grammar(request(), LLAMA, tokenizer.get_added_vocab().get)
    for begin in ("{", "<|python_tag|>{"):
        check(calls_of(read(LLAMA, [write(tokenizer, lark, begin, seed)])))


@settings(max_examples=5)
@given(seed=st.integers(0, 1 << 30))
def test_one_call_is_one(seed: int) -> None:
    tokenizer = TOKENIZERS["spelled"]
    lark = tool_grammar(request(choice="required", parallel=False), HERMES, lambda text: None)
    calls = calls_of(read(HERMES, [write(tokenizer, lark, "", seed)]))
    check(calls)
    assert len(calls) == 1


def allows(tokenizer: Any, lark: str, text: str) -> bool:
    """Whether the text is a whole answer."""
    params = SamplingParams(eos_token_ids=frozenset([tokenizer.eos_token_id]))
    guided = compile_grammar(Grammar("lark", lark), tokenizer).follow([], params)
    for token in [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]:
        if not guided.allowed(len(tokenizer), True)[token]:
            return False
        guided.append(token)
    return True


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_what_a_grammar_of_tools_allows(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    token_of = tokenizer.get_added_vocab().get
    roll = ("roll", "{}")
    for syntax in (HERMES, MISTRAL, MISTRAL_NAMES, QWEN_CODER):
        lark = tool_grammar(request(), syntax, token_of)
        assert allows(tokenizer, lark, "No tool is needed.\n{}")
        assert allows(tokenizer, lark, "")
        assert allows(tokenizer, lark, written(syntax, [roll]))
        assert allows(tokenizer, lark, "Well.\n" + written(syntax, [roll, ("roll-dice", '{"sides": 6, "fair": true}')]))
        assert not allows(tokenizer, lark, written(syntax, [("fly", "{}")]))
        assert not allows(tokenizer, lark, written(syntax, [("roll-dice", '{"sides": 1, "fair": true}')]))
        assert not allows(tokenizer, lark, written(syntax, [roll]) + "and more")
        alone = tool_grammar(request(parallel=False), syntax, token_of)
        assert allows(tokenizer, alone, written(syntax, [roll]))
        assert not allows(tokenizer, alone, written(syntax, [roll, roll]))
        required = tool_grammar(request(choice="required"), syntax, token_of)
        assert not allows(tokenizer, required, "No tool is needed.")
        assert not allows(tokenizer, required, "")
    bare = tool_grammar(request(), LLAMA, token_of)
    assert allows(tokenizer, bare, "No tool is needed.") and allows(tokenizer, bare, "")
    assert allows(tokenizer, bare, written(LLAMA, [roll, roll]))
    assert not allows(tokenizer, bare, '{"answer": 1}')


EDIT = {
    "name": "edit",
    "parameters": {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "What to write"},
            "mode": {"type": "string", "enum": ["w", "a+"]},
            "date": {"type": "string", "format": "date"},
            "line": {"$ref": "#/$defs/count"},
            "more": {"type": ["string", "null"]},
        },
        "$defs": {"count": {"type": "integer", "minimum": 2, "maximum": 20}},
        "required": ["text", "mode"],
    },
}


def tagged(name: str, **values: object) -> str:
    return written(QWEN_CODER, [(name, json.dumps(values))])


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_arguments_with_tags_keep_to_their_types(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    asked = tool_request([{"type": "function", "function": EDIT}], "required", parallel=True)
    assert asked is not None
    lark = tool_grammar(asked, QWEN_CODER, tokenizer.get_added_vocab().get)
    for good in (
        tagged("edit", text="1 <b> </p>\n\n{", mode="a+"),
        tagged("edit", text="", mode="w", line=3),
        tagged("edit", text="x", mode="w", date='"2026-11-30"', line=3, more='"y"'),
        tagged("edit", text="x", mode="w", more=None),
    ):
        assert allows(tokenizer, lark, good), good
    for bad in (
        tagged("edit", text="x"),
        tagged("edit", text="x", mode="r"),
        tagged("edit", text="x", mode="w", line=1),
        tagged("edit", text="x", mode="w", more="y"),
        tagged("edit", text="x", mode="w", extra=1),
        tagged("edit", mode="w", text="x"),
        tagged("delete", text="x", mode="w"),
    ):
        assert not allows(tokenizer, lark, bad), bad


EDITOR = [Tool(name="edit", description="", parameters=EDIT["parameters"])]  # type: ignore[arg-type]


@given(text=st.text(max_size=12).filter(lambda text: "</parameter>" not in text), line=st.integers(), data=st.data())
def test_text_between_tags_is_text_whatever_it_looks_like(text: str, line: int, data: st.DataObject) -> None:
    for value in (text, "123", "null", '{"a": 1}', "\n a \n"):
        spelled = tagged("edit", text=value, line=line, more=None)
        [(name, arguments)] = calls_of(read(QWEN_CODER, chunked(spelled, data), EDITOR))
        assert (name, json.loads(arguments)) == ("edit", {"text": value, "line": line, "more": None})


CODER_SNIPPETS = [
    *("<tool_call>", "</tool_call>", "<function=edit>", "<function=f>", "</function>", "<parameter=text>", "\n", "\n"),
    *("<parameter=more>", "<parameter=", "</parameter>", "</parameter>", "\n</para", "meter>", "</parameter", "<", ">"),
    *("1", "null", '"', "\\", "ü🙂", "\t\x00", "\ud800", " ", "a"),
]
CODER_PARTS = st.lists(st.sampled_from(CODER_SNIPPETS), max_size=12).map("".join)
BEGUN = "<tool_call>\n<function=edit>\n<parameter=text>"


@given(begin=st.sampled_from(["", BEGUN, BEGUN + "\n"]), rest=CODER_PARTS, data=st.data())
@settings(max_examples=300)
def test_arguments_with_tags_are_read_the_same_in_any_pieces(begin: str, rest: str, data: st.DataObject) -> None:
    text = begin + rest
    whole, pieces = read(QWEN_CODER, [text], EDITOR), read(QWEN_CODER, chunked(text, data), EDITOR)
    assert calls_of(pieces) == calls_of(whole)
    assert content_of(pieces) == content_of(whole)
    value, end, _ = rest.removeprefix("\n" * (begin == BEGUN)).partition("</parameter>")
    if begin and end:
        told = json.dumps(value.removesuffix("\n"), ensure_ascii=False)
        assert calls_of(whole)[0][1].startswith(f'{{"text": {told}')


def test_text_between_tags_is_shown_as_it_comes() -> None:
    """But for what may be its end, or the line's end before that."""
    value = 'a "b"\n\n</p>\\'
    text = tagged("edit", text=value, line=3)
    begun, end = text.index(value), text.index("\n</parameter>")
    parser, shown, at = ToolParser(QWEN_CODER, EDITOR), "", {}
    for i, letter in enumerate(text):
        shown += "".join(piece.text for piece in parser.feed(Piece("content", letter, i, i + 1)))
        at[i + 1] = shown
    assert at[begun] == '{"text": "'
    for size in range(1, len(value) + 1):
        held = {"\n": 1, "\n\n": 1, "\n<": 2, "\n</": 3, "\n</p": 4}
        safe = size - max([held[tail] for tail in held if value[:size].endswith(tail)], default=0)
        assert at[begun + size] == at[begun] + json.dumps(value[:safe])[1:-1]
    assert at[end + 12] == at[end], "the tag is not shown"
    assert at[end + 13] == at[end] + '"'
    assert shown == json.dumps({"text": value, "line": 3})


GRAMMARS = [
    (Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'), '{"a": 1}', '{"a": "b"}'),
    (Grammar("json_object"), '{"a": "b"}', "[1]"),
    (Grammar("regex", "a/[bc]+"), "a/bcb", "a/"),
    (Grammar("choice", ("yes", 'n"o')), 'n"o', "no"),
    (Grammar("lark", 'start: A A\nA: "x" | "y"'), "xy", "x"),
]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(("grammar", "good", "bad"), GRAMMARS)
def test_reasoning_comes_before_any_grammar(grammar: Grammar, good: str, bad: str, kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    token_of = tokenizer.get_added_vocab().get
    tags = ReasoningTags("<think>", "</think>")
    opened = after_reasoning(grammar, tags, token_of, opened=True)
    assert allows(tokenizer, opened, f"Hm {{ <.</think>\n\n{good}")
    assert not allows(tokenizer, opened, f"Hm.</think>{bad}")
    assert not allows(tokenizer, opened, "Hm.")
    free = after_reasoning(grammar, tags, token_of, opened=False)
    assert allows(tokenizer, free, good) and not allows(tokenizer, free, bad)
    assert allows(tokenizer, free, f"<think>\nHm.\n</think>\n{good}")
    assert not allows(tokenizer, free, f"<think>Hm.</think>{bad}")
    either = tool_grammar(request(), HERMES, token_of, content=grammar)
    assert allows(tokenizer, either, good) and not allows(tokenizer, either, bad)
    assert allows(tokenizer, either, written(HERMES, [("roll", "{}")]))
    assert not allows(tokenizer, either, "Free text.")


@pytest.mark.parametrize(
    ("regex", "good"), [("a/b", "a/b"), (r"a\/b", "a/b"), (r"a\\/b", r"a\/b"), ("a\nb", "a\nb"), ("a\\\nb", "a\nb")]
)
def test_a_regex_within_a_lark_grammar_means_what_it_means_alone(regex: str, good: str) -> None:
    tokenizer = TOKENIZERS["added"]
    tags = ReasoningTags("<think>", "</think>")
    grammar = after_reasoning(Grammar("regex", regex), tags, tokenizer.get_added_vocab().get, opened=False)
    assert allows(tokenizer, grammar, good)
    assert not allows(tokenizer, grammar, good[:1])


@pytest.mark.parametrize("name", [r"\x", "a\nb", r"\u12"])
def test_a_name_that_is_no_json_is_no_call(name: str) -> None:
    parser = ToolParser(HERMES)
    text = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
    pieces = parser.feed(Piece("content", text, 0, len(text))) + parser.finish()
    assert {piece.kind for piece in pieces} <= {"content"}
