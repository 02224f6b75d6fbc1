"""One answer: streamed or not it is the same, its deltas add up, and nothing of a stop string is ever in one."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.request import GenerationOutput, RequestStatus
from chairlift.text.answer import Answer, Delta, ToolCall
from chairlift.text.reasoning import ReasoningParser, ReasoningTags
from chairlift.text.stopping import StopStringFilter
from chairlift.text.tools import HERMES, MISTRAL, ToolParser
from chairlift.text.vocabulary import Vocabulary
from tests.unit.text.conftest import byte_tokenizer

TAGS = ReasoningTags("<think>", "</think>")
TOKENIZER = byte_tokenizer(None, special=("[TOOL_CALLS]",), added=("<tool_call>", "</tool_call>"))
END = TOKENIZER.eos_token_id
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'


def vocabulary() -> Vocabulary:
    return Vocabulary(TOKENIZER)


def answer(words: Vocabulary, *, opened: bool = False) -> Answer:
    return Answer(words, reasoning=ReasoningParser(TAGS, opened=opened), tools=ToolParser(HERMES))


def outputs(tokens: Sequence[int], sizes: Sequence[int], finish_reason: str = "stop") -> list[GenerationOutput]:
    """As the engine streams them: of so many tokens each, all so far, the last one terminal."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes)) if sum(sizes[: i + 1]) < len(tokens)] + [len(tokens)]
    return [
        GenerationOutput(
            request_id="r",
            generated_tokens=list(tokens[:end]),
            logprobs=[-1.0] * end,
            status=RequestStatus.FINISHED if end == len(tokens) else RequestStatus.DECODING,
            finish_reason=finish_reason if end == len(tokens) else None,
        )
        for end in ends
    ]


def stopped(streamed: list[GenerationOutput], words: Vocabulary, stops: tuple[str, ...]) -> list[GenerationOutput]:
    """As the manager delivers them."""
    stopping = StopStringFilter(words, stops, min_new_tokens=0, streaming=len(streamed) > 1)
    delivered = []
    for output in streamed:
        shown, ended = stopping.apply(output)
        delivered += [] if shown is None else [shown]
        if ended:
            break
    return delivered


def parts(answer: Answer) -> tuple[str, str, list[tuple[str, str]], str | None]:
    calls = [(call.name, call.arguments) for call in answer.tool_calls]
    return answer.content, answer.reasoning, calls, answer.finish_reason


SNIPPETS = ["<think>", "</think>", "é", "🙂", " ", "\n", "a", "stop", "st", CALL, "<tool_call>", "{", "</tool_call>"]
TOKENS = st.lists(
    st.sampled_from(SNIPPETS).map(lambda text: TOKENIZER.encode(text, add_special_tokens=False))
    | st.integers(0, len(TOKENIZER) - 1).map(lambda token: [token]),
    max_size=7,
).map(lambda lists: [token for tokens in lists for token in tokens])


@given(
    TOKENS, st.lists(st.integers(1, 9), max_size=30), st.sampled_from([(), ("stop",), ("op", "\n\n")]), st.booleans()
)
def test_streamed_or_not_it_is_the_same(
    tokens: list[int], sizes: list[int], stops: tuple[str, ...], opened: bool
) -> None:
    words = vocabulary()
    found = []
    for each in (sizes, [1] * len(tokens), []):
        streamed = outputs(tokens, each)
        if stops:
            streamed = stopped(streamed, words, stops)
        read = answer(words, opened=opened)
        deltas = [delta for output in streamed for delta in read.feed(output)]
        check_deltas(deltas, read)
        found.append(parts(read))
        if stops:
            assert not any(stop in read.content or stop in read.reasoning for stop in stops)
        plain = Answer(words)
        for output in streamed:
            plain.feed(output)
        text = words.decode(tokens) if not stops else streamed[-1].text
        assert plain.content == text
    assert found[0] == found[1] == found[2]


def check_deltas(deltas: list[Delta], read: Answer) -> None:
    """They add up, and no token spells two of them."""
    assert "".join(delta.text for delta in deltas if delta.kind == "content") == read.content
    assert "".join(delta.text for delta in deltas if delta.kind == "reasoning") == read.reasoning
    for index, call in enumerate(read.tool_calls):
        mine = [delta for delta in deltas if delta.kind == "tool" and delta.index == index]
        assert (mine[0].tool_id, mine[0].tool_name) == (call.tool_id, call.name)
        assert all(delta.tool_id is None and delta.tool_name is None for delta in mine[1:])
        assert "".join(delta.text for delta in mine) == call.arguments
    positions = [position for delta in deltas for position in delta.positions]
    assert positions == sorted(set(positions))


@given(text=st.text(), sizes=st.lists(st.integers(1, 5), max_size=30))
def test_the_tokens_of_a_delta_spell_its_text(text: str, sizes: list[int]) -> None:
    words = vocabulary()
    tokens = [*text.encode(), END]
    read = Answer(words)
    data = b""
    for output in outputs(tokens, sizes):
        for delta in read.feed(output):
            spelled = b"".join(words.token(tokens[position]).data for position in delta.positions)
            assert spelled.decode() == delta.text
            data += spelled
    assert data == text.encode(), "all but the token that ended it"


def test_tokens_go_to_the_kind_of_text_they_spell() -> None:
    words = vocabulary()
    text = "<think>Hé</think>Yes" + CALL
    tokens = [*TOKENIZER.encode(text, add_special_tokens=False), END]
    found: dict[str, bytes] = {}
    for stops in ((), ("zz",)):
        for sizes in ([1] * len(tokens), []):
            streamed = outputs(tokens, sizes)
            found = {}
            read = answer(words)
            for output in stopped(streamed, words, stops) if stops else streamed:
                for delta in read.feed(output):
                    spelled = b"".join(words.token(tokens[position]).data for position in delta.positions)
                    found[delta.kind] = found.get(delta.kind, b"") + spelled
            assert (found["reasoning"], found["content"]) == ("Hé".encode(), b"Yes")
            assert found["tool"].decode() in CALL and '{"x": "é"}' in found["tool"].decode()


def test_without_logprobs_nobody_counts_positions() -> None:
    read = Answer(vocabulary())
    (output,) = outputs([97, 98], [])
    (delta,) = read.feed(GenerationOutput(request_id="r", generated_tokens=output.generated_tokens))
    assert delta == Delta(kind="content", text="ab")


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        ("Hi", "stop", "stop"),
        (CALL, "stop", "tool_calls"),
        (CALL[:50], "length", "length"),
        (CALL, "cancelled", "cancelled"),
        ("<tool_call>no", "stop", "stop"),
    ],
)
def test_why_an_answer_ended(text: str, reason: str, expected: str) -> None:
    read = answer(vocabulary())
    (output,) = outputs(TOKENIZER.encode(text, add_special_tokens=False), [], reason)
    assert read.finish_reason is None
    read.feed(output)
    assert read.finish_reason == expected


def test_a_tag_that_is_a_special_token_is_seen_and_not_shown() -> None:
    text = 'Well[TOOL_CALLS][{"name": "f", "arguments": {}}]<|end|>'
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    words = vocabulary().showing(["[TOOL_CALLS]"])
    for streamed in (outputs(tokens, [1] * len(tokens)), stopped(outputs(tokens, []), words, ("zz",))):
        read = Answer(words, tools=ToolParser(MISTRAL))
        for output in streamed:
            read.feed(output)
        (call,) = read.tool_calls
        assert call == ToolCall(tool_id=call.tool_id, name="f", arguments="{}")
        assert read.content == "Well"


def test_a_stop_string_of_a_hidden_token_finds_only_what_is_shown() -> None:
    words = vocabulary()
    streamed = outputs([*b"ab", END, *b"cd"], [1] * 5)
    read = Answer(words)
    for output in stopped(streamed, words, ("bc",)):
        read.feed(output)
    assert (read.content, read.finish_reason) == ("a", "stop")


def test_a_failed_request_shows_what_there_was() -> None:
    words: Any = vocabulary()
    first, second = outputs(list(b"abc"), [2])
    read = Answer(words)
    read.feed(first)
    read.feed(second.failed(ArithmeticError()))
    assert (read.content, read.finish_reason) == ("abc", "error")
