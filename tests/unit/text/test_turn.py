"""A turn through a real engine: a random model that knows nothing calls tools as they are declared."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from chairlift import ContinuousBatchingManager
from chairlift.params import Grammar
from chairlift.text.answer import Answer
from chairlift.text.chat import ChatFormat, Turn
from tests.server import toy

PARAMETERS = {
    "type": "object",
    "properties": {"sides": {"type": "integer", "minimum": 2, "maximum": 99}, "fair": {"type": "boolean"}},
    "required": ["sides", "fair"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "roll", "parameters": PARAMETERS}}]
ASK = [{"role": "user", "content": "Roll."}]


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[ContinuousBatchingManager, Any]]:
    manager, tokenizer = toy.manager()
    yield manager, tokenizer
    manager.destroy()


def answers(manager: ContinuousBatchingManager, turn: Turn, streaming: bool, **sampling: Any) -> Answer:
    request_id = manager.add_request(
        turn.prompt_ids, streaming=streaming, grammar=turn.grammar, tokenizer=turn.vocabulary, **sampling
    )
    answer = turn.answer()
    assert request_id is not None
    for output in manager.request_id_iter(request_id):
        answer.feed(output)
    return answer


@pytest.mark.parametrize("seed", range(4))
def test_a_random_model_calls_a_tool(engine: tuple[ContinuousBatchingManager, Any], seed: int) -> None:
    manager, tokenizer = engine
    turn = ChatFormat(tokenizer).turn(ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    streamed, whole = (answers(manager, turn, each, seed=seed, max_new_tokens=400) for each in (True, False))
    for answer in (streamed, whole):
        (call,) = answer.tool_calls
        arguments = json.loads(call.arguments)
        assert call.name == "roll" and set(arguments) == {"sides", "fair"} and 2 <= arguments["sides"] <= 99
        assert (answer.content, answer.finish_reason) == ("", "tool_calls")
    assert streamed.tool_calls[0].arguments == whole.tool_calls[0].arguments


@pytest.mark.parametrize("seed", range(4))
def test_a_stop_string_in_a_stream(engine: tuple[ContinuousBatchingManager, Any], seed: int) -> None:
    """What a random model says is often half a character; streamed or not, it is cut in the same place."""
    manager, tokenizer = engine
    turn = ChatFormat(tokenizer).turn(ASK)
    free = answers(manager, turn, False, seed=seed, max_new_tokens=80, ignore_eos=True)
    stop = free.content[len(free.content) // 2 :][:3]
    assert len(stop) == 3
    sampling = {"seed": seed, "max_new_tokens": 80, "ignore_eos": True, "stop_strings": [stop]}
    streamed, whole = (answers(manager, turn, each, **sampling) for each in (True, False))
    assert streamed.content == whole.content == free.content[: free.content.index(stop)]
    assert (streamed.finish_reason, whole.finish_reason) == ("stop", "stop")


def test_an_answer_may_be_a_call_or_what_was_asked_for(engine: tuple[ContinuousBatchingManager, Any]) -> None:
    manager, tokenizer = engine
    turn = ChatFormat(tokenizer).turn(ASK, tools=TOOLS, grammar=Grammar("choice", ("yes", "no")))
    reasons = set()
    for seed in range(4):
        answer = answers(manager, turn, True, seed=seed, max_new_tokens=300)
        reasons.add(answer.finish_reason)
        if answer.finish_reason == "stop":
            assert answer.content in ("yes", "no") and not answer.tool_calls
        elif answer.finish_reason == "tool_calls":
            assert not answer.content and all(json.loads(call.arguments) for call in answer.tool_calls)
    assert reasons & {"stop", "tool_calls"}
