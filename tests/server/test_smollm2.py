"""A real model behind a real server: sense, JSON of a schema, and tool calls by the real client."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.toy import WAIT, live


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with live("--model", "smollm2") as server:
        yield openai.OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0, timeout=WAIT)


def test_it_knows_a_capital(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="toy", prompt="The capital of France is", temperature=0, max_tokens=4)
    assert "Paris" in answer.choices[0].text
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    chunks = client.chat.completions.create(model="toy", messages=messages, temperature=0, max_tokens=30, stream=True)
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert (
        "Paris" in client.responses.create(model="toy", input=messages, temperature=0, max_output_tokens=30).output_text
    )


def test_an_answer_that_must_be_json(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
    answer = client.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "Anna is 31 years old. Give her name and age as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
        temperature=0,
        max_tokens=60,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert set(json.loads(answer.choices[0].message.content or "")) == {"name", "age"}


def test_a_tool_is_called_and_answered(client: openai.OpenAI) -> None:
    tools: list[Any] = [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "The weather in a city.",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string", "maxLength": 20}},
                    "required": ["city"],
                    "additionalProperties": False,
                },
            },
        }
    ]
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    body: dict[str, Any] = {"model": "toy", "tools": tools, "temperature": 0, "max_tokens": 80}
    answer = client.chat.completions.create(
        messages=messages, tool_choice="required", parallel_tool_calls=False, **body
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert list(json.loads(call.function.arguments)) == ["city"]
    messages += [
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "21 degrees and sunny"},
    ]
    said = client.chat.completions.create(messages=messages, tool_choice="none", **body).choices[0].message.content
    assert said
