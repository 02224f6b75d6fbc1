"""/v1/chat/completions and /v1/responses: the real client, streamed and not."""

import json
from typing import Any

import httpx
import openai
import pytest

from chairlift.server import create_app
from tests.server.toy import CONTEXT, TEMPLATE

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


async def test_the_prompt_is_the_chat_templates(client: openai.AsyncOpenAI, engine: tuple[Any, Any]) -> None:
    manager, tokenizer = engine
    messages: list[Any] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "Good "}, {"type": "text", "text": "day"}]},
        {"role": "assistant", "content": "Hi", "refusal": None},
        {"role": "user", "content": "again"},
    ]
    plain = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "Good day"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "again"},
    ]
    tokens = tokenizer.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    request_id = manager.add_request(tokens, max_new_tokens=20, temperature=0)
    output = manager.get_result(request_id, timeout=60)
    answer = await client.chat.completions.create(model="toy", messages=messages, temperature=0, max_tokens=20)
    message = answer.choices[0].message
    assert message.content == tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
    assert (message.role, answer.object) == ("assistant", "chat.completion")
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens == len(tokens)
    asked, made = usage.prompt_tokens_details, usage.completion_tokens_details
    assert asked is not None and made is not None  # each count, for clients that add them up
    assert (asked.text_tokens, asked.audio_tokens, asked.image_tokens) == (len(tokens), 0, 0)
    assert (made.text_tokens, made.reasoning_tokens, made.audio_tokens) == (usage.completion_tokens, 0, 0)


async def test_without_a_limit_until_the_context_is_full(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="toy", messages=HELLO, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert (answer.usage.total_tokens, answer.choices[0].finish_reason) == (CONTEXT, "length")


async def test_the_engine_knows_an_answer_by_its_id(
    client: openai.AsyncOpenAI, engine: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the page can tell whose row is whose."""
    manager, _ = engine
    submit, families = manager.submit, []
    monkeypatch.setattr(manager, "submit", lambda *a, **o: families.append(submit(*a, **o)) or families[-1])
    chat = await client.chat.completions.create(model="toy", messages=HELLO, max_tokens=2, n=2)
    made = await client.responses.create(model="toy", input="Hello", max_output_tokens=2)
    assert [family[0][0] for family in families] == [chat.id, made.id]


async def test_both_names_of_the_limit(client: openai.AsyncOpenAI) -> None:
    for limit in ({"max_tokens": 3}, {"max_completion_tokens": 3}):
        answer = await client.chat.completions.create(
            model="toy", messages=HELLO, extra_body={"ignore_eos": True, **limit}
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3


async def test_a_stream_begins_with_the_role_and_adds_up(client: openai.AsyncOpenAI) -> None:
    body: dict[str, Any] = {"model": "toy", "messages": HELLO, "n": 3, "seed": 2, "max_tokens": 40, "temperature": 1.5}
    whole = await client.chat.completions.create(**body, logprobs=True, top_logprobs=2)
    texts, reasons, logprobs = [""] * 3, [None] * 3, [[], [], []]  # type: ignore[var-annotated]
    seen: set[int] = set()
    async for chunk in await client.chat.completions.create(**body, logprobs=True, top_logprobs=2, stream=True):
        for choice in chunk.choices:
            if choice.index not in seen:
                seen.add(choice.index)
                assert (choice.delta.role, choice.delta.content) == ("assistant", "")
            assert reasons[choice.index] is None
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
            if choice.logprobs is not None:
                logprobs[choice.index] += choice.logprobs.content
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert logprobs == [choice.logprobs.content for choice in whole.choices if choice.logprobs]


async def test_bytes_of_logprobs_spell_the_text(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="toy", messages=HELLO, temperature=0, max_tokens=60, logprobs=True, extra_body={"ignore_eos": True}
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    data = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
    assert data.decode(errors="replace") == choice.message.content
    assert all(entry.top_logprobs == [] for entry in choice.logprobs.content)


async def test_json_by_schema(client: openai.AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["fox", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": schema}}
    for seed in range(4):
        answer = await client.chat.completions.create(
            model="toy", messages=HELLO, response_format=form, seed=seed, temperature=1, max_tokens=120
        )
        value = json.loads(answer.choices[0].message.content or "")
        assert value["name"] in ("fox", "dog")
        assert 0 <= value["age"] <= 99


async def test_an_answer_can_be_sent_back(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="toy", messages=HELLO, max_tokens=4)
    messages: list[Any] = [*HELLO, answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
    await client.chat.completions.create(model="toy", messages=messages, max_tokens=4)
    await client.chat.completions.create(model="toy", messages=[*HELLO, answer.choices[0].message], max_tokens=4)  # type: ignore[list-item]


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "what it does",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "trains")
]
CHOICES: list[Any] = ["required", {"type": "function", "function": {"name": "trains"}}]


@pytest.mark.parametrize("tool_choice", CHOICES, ids=["required", "named"])
async def test_tools_get_valid_arguments(client: openai.AsyncOpenAI, tool_choice: Any) -> None:
    body: dict[str, Any] = {
        "model": "toy",
        "messages": HELLO,
        "tools": TOOLS,
        "tool_choice": tool_choice,
        "parallel_tool_calls": False,
        "temperature": 1,
        "seed": 4,
        "max_tokens": 200,
    }
    answer = await client.chat.completions.create(**body)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name in (("weather", "trains") if tool_choice == "required" else ("trains",))
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")

    name, arguments, reason, ids = "", "", None, set()
    async for chunk in await client.chat.completions.create(**body, stream=True):
        reason = chunk.choices[0].finish_reason or reason
        for part in chunk.choices[0].delta.tool_calls or ():
            assert part.index == 0 and part.function is not None
            ids |= {part.id} - {None}
            name += part.function.name or ""
            arguments += part.function.arguments or ""
    assert (name, arguments, reason) == (call.function.name, call.function.arguments, "tool_calls")
    assert len(ids) == 1

    conversation = [*HELLO, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    await client.chat.completions.create(model="toy", messages=conversation, tools=TOOLS, max_tokens=4)


async def test_text_between_tags_streams(engine: tuple[Any, Any]) -> None:
    """As Qwen3-Coder writes an argument; a model that knows nothing never ends it."""
    template = TEMPLATE + "{# tools: <function= <parameter= #}"
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    body = {
        "messages": HELLO,
        "tools": [{"type": "function", "function": {"name": "write", "parameters": parameters}}],
        "tool_choice": "required",
        "seed": 4,
        "max_tokens": 120,
    }
    transport = httpx.ASGITransport(create_app(*engine, model_name="toy", chat_template=template))
    async with httpx.AsyncClient(transport=transport, base_url="http://toy") as http:
        whole = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
        stream = (await http.post("/v1/chat/completions", json=body | {"stream": True})).text
    (call,) = whole["message"]["tool_calls"]
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in stream.splitlines() if line.startswith("data: {")]
    parts = [part["function"]["arguments"] for delta in deltas for part in delta.get("tool_calls", ())]
    assert "".join(parts) == call["function"]["arguments"]
    assert "".join(parts).startswith('{"text": "') and len(parts) > 20
    assert isinstance(json.loads("".join(parts) + '"}')["text"], str)


async def test_tools_not_to_be_called(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="toy", messages=HELLO, tools=TOOLS, tool_choice="none", max_tokens=8, temperature=0
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason in ("stop", "length")


async def test_who_has_no_tokenizer_of_his_own(http: httpx.AsyncClient, engine: tuple[Any, Any]) -> None:
    _, tokenizer = engine
    told = (await http.get("/tokenizer_info")).raise_for_status().json()
    assert (told["eos_token"], told["bos_token"]) == (tokenizer.eos_token, None)
    assert told["chat_template"] == tokenizer.chat_template
    (end,) = (await http.post("/tokenize", json={"prompt": told["eos_token"]})).json()["tokens"]
    assert end == tokenizer.eos_token_id


async def test_tokenize_and_back(http: httpx.AsyncClient, engine: tuple[Any, Any]) -> None:
    _, tokenizer = engine
    text = "Grüße 🙂 <|im_end|>"
    tokens = (await http.post("/tokenize", json={"prompt": text})).json()
    assert tokens == {"tokens": tokenizer.encode(text), "count": len(tokenizer.encode(text)), "max_model_len": CONTEXT}
    assert (await http.post("/detokenize", json={"tokens": tokens["tokens"]})).json() == {"prompt": text}
    rendered = (await http.post("/tokenize", json={"model": "toy", "messages": HELLO})).json()["tokens"]
    assert rendered == tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)


# ---------------------------------------------------------------------- responses


async def test_a_response(client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(
        model="toy",
        messages=[{"role": "system", "content": "be brief"}, *HELLO],
        temperature=0,
        max_tokens=12,
    )
    made = await client.responses.create(
        model="toy", instructions="be brief", input="Hello", temperature=0, max_output_tokens=12, store=False
    )
    assert made.output_text == chat.choices[0].message.content
    assert made.usage is not None and chat.usage is not None
    assert made.usage.output_tokens == chat.usage.completion_tokens
    assert (made.status == "incomplete") is (chat.choices[0].finish_reason == "length")
    again = await client.responses.create(
        model="toy", input=[{"role": "user", "content": "Hello"}, *made.output, {"role": "user", "content": "more"}],  # type: ignore[list-item]
        max_output_tokens=4,
    )  # fmt: skip
    assert again.object == "response"


async def test_a_streamed_response_builds_the_whole_one(client: openai.AsyncOpenAI) -> None:
    body: dict[str, Any] = {
        "model": "toy",
        "input": "Hello",
        "temperature": 0,
        "include": ["message.output_text.logprobs"],
    }
    body |= {"extra_body": {"regex": "[a-f]{9}"}}
    whole = await client.responses.create(**body)
    assert (whole.status, len(whole.output_text)) == ("completed", 9)
    kinds, numbers, text = [], [], ""
    async with client.responses.stream(**body) as stream:
        async for event in stream:
            kinds.append(event.type)
            numbers.append(event.sequence_number)
            if event.type == "response.output_text.delta":
                text += event.delta
                assert event.snapshot == text
        final = await stream.get_final_response()
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert numbers == list(range(len(numbers)))
    assert final.output_text == whole.output_text == text
    (mine,), (theirs,) = final.output, whole.output
    assert mine.content[0].logprobs == theirs.content[0].logprobs != []  # type: ignore[union-attr]


async def test_a_response_by_schema_and_with_tools(client: openai.AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    made = await client.responses.create(model="toy", input="Hello", text=form, max_output_tokens=99)
    assert json.loads(made.output_text) == {"a": "b"}
    tools: list[Any] = [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS]
    body: dict[str, Any] = {
        "model": "toy",
        "input": "Hello",
        "tools": tools,
        "max_output_tokens": 200,
        "temperature": 0,
    }
    body |= {"tool_choice": {"type": "function", "name": "trains"}, "parallel_tool_calls": False}
    made = await client.responses.create(**body)
    (call,) = made.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)["city"] in ("Paris", "Rome")) == ("trains", True)
    async with client.responses.stream(**body) as stream:
        events = [event async for event in stream]
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert arguments == call.arguments
    answered: list[Any] = [
        {"role": "user", "content": "Hello"},
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "none today"},
    ]
    await client.responses.create(model="toy", input=answered, tools=tools, max_output_tokens=4)
