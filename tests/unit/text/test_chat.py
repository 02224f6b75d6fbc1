"""A conversation becomes a prompt by the model's own template, whatever that knows of tools and reasoning."""

import json
from typing import Any

import pytest

from chairlift.errors import InvalidRequestError
from chairlift.params import Grammar, SamplingParams
from chairlift.request import GenerationOutput, RequestStatus
from chairlift.sample.grammar import compile_grammar
from chairlift.text.chat import ChatFormat, Turn, render
from chairlift.text.reasoning import ReasoningTags
from chairlift.text.tools import HERMES, MISTRAL
from tests.unit.text.conftest import byte_tokenizer

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + PLAIN
TOOLED = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
THINKING = (
    TOOLED + "{% if add_generation_prompt and think %}<think>\n{% elif think is defined %}<think></think>{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
HELLO = [{"role": "user", "content": "Hello"}]
HISTORY = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}},
            {"id": "2", "type": "function", "function": {"name": "weather", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
    {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "sun"}]},
    {"role": "assistant", "content": "Both."},
]


def prompt(template: str | None, messages: Any, **asked: Any) -> str:
    tokenizer = byte_tokenizer(template)
    return str(tokenizer.decode(render(tokenizer, messages, **asked)))


def test_the_template_of_the_tokenizer_or_another() -> None:
    assert prompt(PLAIN, HELLO) == "[user]Hello[assistant]"
    assert prompt(PLAIN, HELLO, add_generation_prompt=False) == "[user]Hello"
    assert prompt(PLAIN, HELLO, chat_template="<{{ messages[0].content }}>") == "<Hello>"
    assert prompt(None, HELLO, chat_template="<{{ messages[0].content }}{{ mood }}>", mood="!") == "<Hello!>"


def test_content_in_parts_is_one_text() -> None:
    parts = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
    assert prompt(PLAIN, [{"role": "user", "content": parts}]) == "[user]Hello[assistant]"
    assert prompt(PLAIN, [{"role": "assistant", "content": None}]) == "[assistant][assistant]"


def test_a_developer_is_the_system_where_the_template_knows_none() -> None:
    messages = [{"role": "developer", "content": "Be kind."}]
    assert prompt(PLAIN, messages) == "[system]Be kind.[assistant]"
    assert prompt("{# developer #}" + PLAIN, messages) == "[developer]Be kind.[assistant]"


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (None, HELLO, "no chat template"),
        (PLAIN, [], "empty"),
        (PLAIN, ["Hello"], r"messages\[0\]"),
        (PLAIN, [{"content": "Hello"}], r"messages\[0\]"),
        (PLAIN, [*HELLO, {"role": "user", "content": 3}], r"messages\[1\].content"),
        (PLAIN, [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "image_url"),
        (PLAIN, [{"role": "assistant", "tool_calls": [{"id": "1"}]}], "function.name"),
        (PLAIN, [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "not JSON"),
        (NO_SYSTEM, [{"role": "system", "content": "Hi"}], "System role not supported"),
        ("{{ messages[0].content.nothing.here }}", HELLO, "refuses"),
        ("{% if %}", HELLO, "refuses"),
    ],
)
def test_what_cannot_be_rendered(template: str | None, messages: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        prompt(template, messages)


def test_a_template_that_knows_tools_gets_them() -> None:
    text = prompt(TOOLED, HISTORY, tools=TOOLS)
    assert text.startswith('<tools>[{"type": "function", "function": {"name": "weather"')
    assert '<tool_call>{"city": "Köln"}</tool_call><tool_call>{}</tool_call>[tool]rain[tool]sun' in text
    assert "<tools>" not in prompt(TOOLED, HISTORY)


def test_a_template_that_knows_no_tools_is_told_in_words() -> None:
    text = prompt("{# system #}" + PLAIN, HISTORY, tools=TOOLS)
    assert text.startswith("[system]") and json.dumps(TOOLS[0]["function"]["parameters"]) in text
    assert "<tool_call>" in text.split("[user]")[0], "how to call one"
    called = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    called += '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    results = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
    assert text.endswith(f"[user]Weather?[assistant]{called}[user]{results}[assistant]Both.[assistant]")
    system = [{"role": "system", "content": "Be kind."}, *HELLO]
    told = prompt(PLAIN, system, tools=TOOLS)
    assert told.startswith("[system]Be kind.\n\nYou can call") and told.count("[system]") == 1
    assert prompt(NO_SYSTEM, HELLO, tools=TOOLS).startswith("[user]Hello\n\nYou can call"), "nowhere else to say it"
    assert HISTORY[1]["content"] is None and len(HISTORY[1]["tool_calls"]) == 2, "the caller's messages are its own"


# --- Turns ----------------------------------------------------------------------------------------------------------


def read(turn: Turn, tokenizer: Any, text: str) -> tuple[str, str, list[tuple[str, str]]]:
    answer = turn.answer()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    answer.feed(
        GenerationOutput(request_id="r", generated_tokens=tokens, status=RequestStatus.FINISHED, finish_reason="stop")
    )
    return answer.content, answer.reasoning, [(call.name, call.arguments) for call in answer.tool_calls]


def allows(turn: Turn, tokenizer: Any, text: str) -> bool:
    assert turn.grammar is not None
    params = SamplingParams(eos_token_ids=frozenset([tokenizer.eos_token_id]))
    guided = compile_grammar(turn.grammar, turn.vocabulary).follow([], params)
    for token in [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]:
        if not guided.allowed(len(tokenizer), True)[token]:
            return False
        guided.append(token)
    return True


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def test_a_turn_without_tools_leaves_calls_alone() -> None:
    tokenizer = byte_tokenizer(TOOLED)
    chat = ChatFormat(tokenizer)
    assert (chat.syntax, chat.reasoning) == (HERMES, None)
    for asked in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        turn = chat.turn(HELLO, **asked)
        assert tokenizer.decode(turn.prompt_ids) == "[user]Hello[assistant]"
        assert turn.grammar is None and turn.syntax is None
        assert read(turn, tokenizer, CALL) == (CALL, "", [])


@pytest.mark.parametrize("template", [PLAIN, TOOLED])
def test_a_turn_with_tools(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    chat = ChatFormat(tokenizer)
    turn = chat.turn(HELLO, tools=TOOLS)
    assert "weather" in tokenizer.decode(turn.prompt_ids)
    assert read(turn, tokenizer, f"Look.\n{CALL}") == ("Look.", "", [("weather", '{"city": "Bern"}')])
    assert allows(turn, tokenizer, "Hello.") and allows(turn, tokenizer, CALL)
    must = chat.turn(HELLO, tools=TOOLS, tool_choice="required")
    assert not allows(must, tokenizer, "Hello.") and allows(must, tokenizer, f"{CALL}\n{CALL}")
    one = chat.turn(HELLO, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}})
    assert allows(one, tokenizer, CALL) and not allows(one, tokenizer, f"{CALL}\n{CALL}")
    with pytest.raises(InvalidRequestError, match="fly"):
        chat.turn(HELLO, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "fly"}})


def test_a_tag_that_is_a_special_token_shows_to_the_parser_only() -> None:
    template = "{% if tools %}{{ tools | tojson }}{% endif %}{# [TOOL_CALLS] #}" + PLAIN
    tokenizer = byte_tokenizer(template, special=("[TOOL_CALLS]",))
    chat = ChatFormat(tokenizer)
    assert chat.syntax == MISTRAL
    text = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bern"}}]'
    turn = chat.turn(HELLO, tools=TOOLS)
    assert allows(turn, tokenizer, text)
    assert read(turn, tokenizer, text) == ("", "", [("weather", '{"city": "Bern"}')])
    assert read(chat.turn(HELLO), tokenizer, text)[0] == text.removeprefix("[TOOL_CALLS]")
    assert chat.turn(HELLO, tools=TOOLS).vocabulary is turn.vocabulary, "llguidance prepares much for each"


def test_reasoning_may_have_begun_in_the_prompt() -> None:
    tokenizer = byte_tokenizer(THINKING, added=("<think>", "</think>"))
    chat = ChatFormat(tokenizer)
    assert chat.reasoning == ReasoningTags("<think>", "</think>")
    begun = chat.turn(HELLO, think=True)
    assert begun.is_reasoning and read(begun, tokenizer, "Hm.\n</think>\n\nYes.") == ("Yes.", "Hm.", [])
    for turn in (chat.turn(HELLO), chat.turn(HELLO, think=False)):
        assert not turn.is_reasoning and read(turn, tokenizer, "Yes.") == ("Yes.", "", [])
        assert read(turn, tokenizer, "<think>Hm.</think>Yes.") == ("Yes.", "Hm.", [])
    called = chat.turn(HELLO, tools=TOOLS, think=True)
    assert read(called, tokenizer, f"Hm. <tool_call></think>{CALL}") == (
        "",
        "Hm. <tool_call>",
        [("weather", '{"city": "Bern"}')],
    )
    assert allows(called, tokenizer, f"Hm. <tool_call></think>\n{CALL}")


def test_a_grammar_holds_for_what_is_said_not_for_what_is_thought() -> None:
    tokenizer = byte_tokenizer(THINKING, added=("<think>", "</think>"))
    chat = ChatFormat(tokenizer)
    grammar = Grammar("choice", ("yes", "no"))
    begun = chat.turn(HELLO, grammar=grammar, think=True)
    assert allows(begun, tokenizer, "Hm.</think>\n\nyes") and not allows(begun, tokenizer, "yes")
    free = chat.turn(HELLO, grammar=grammar)
    assert allows(free, tokenizer, "yes") and allows(free, tokenizer, "<think>Hm.</think>no")
    either = chat.turn(HELLO, grammar=grammar, tools=TOOLS)
    assert allows(either, tokenizer, "no") and allows(either, tokenizer, CALL) and not allows(either, tokenizer, "Hm.")
    assert ChatFormat(byte_tokenizer(PLAIN)).turn(HELLO, grammar=grammar).grammar is grammar


def test_special_tokens_show_on_request() -> None:
    tokenizer = byte_tokenizer(PLAIN)
    assert read(ChatFormat(tokenizer).turn(HELLO), tokenizer, "a<|end|>")[0] == "a"
    chat = ChatFormat(tokenizer, skip_special_tokens=False)
    assert read(chat.turn(HELLO), tokenizer, "a<|end|>")[0] == "a<|end|>"


@pytest.mark.parametrize("message", [{"content": "a\ud83d"}, {"content": "a", "name": "\udc00"}])
def test_half_a_surrogate_pair_is_called_so(message: dict[str, str]) -> None:
    tokenizer = byte_tokenizer("{% for m in messages %}{{ m.content }}{{ m.name }}{% endfor %}")
    with pytest.raises(InvalidRequestError, match="messages holds half a surrogate pair"):
        ChatFormat(tokenizer).turn([{"role": "user"} | message])
