"""What is refused, and how: always `{"error": {...}}`, with the status that clients act upon and the field's name."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, get_type_hints

import httpx
import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from chairlift.errors import QueueFullError
from chairlift.server import create_app
from tests.server import toy

HELLO = [{"role": "user", "content": "Hello"}]


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error, which has all of its fields."""
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]  # type: ignore[no-any-return]


def http_of(app: Any, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://toy", **options)


CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": HELLO, "top_q": 1}, "top_q"),
    (CHAT, {"messages": HELLO, "reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"messages": HELLO, "store": True}, "store"),
    (CHAT, {"messages": HELLO, "audio": {"voice": "x"}}, "audio"),
    (CHAT, {"messages": HELLO, "modalities": ["audio"]}, "modalities[0]"),
    (CHAT, {"messages": HELLO, "temperature": -1}, "temperature"),
    (CHAT, {"messages": HELLO, "temperature": "1"}, "temperature"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"messages": HELLO, "stream": True, "stream_options": {"x": True}}, "stream_options.x"),
    (CHAT, {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    (CHAT, {"messages": HELLO, "logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT, {"messages": HELLO, "logit_bias": {"9999999": 1}}, "logit_bias"),
    (CHAT, {"messages": HELLO, "stop_token_ids": [-1]}, "stop_token_ids"),
    (CHAT, {"messages": HELLO, "regex": "("}, "regex"),
    (CHAT, {"messages": HELLO, "regex": ""}, "regex"),
    (CHAT, {"messages": HELLO, "grammar": ""}, "grammar"),
    (CHAT, {"messages": HELLO, "grammar": 'start: "a"' + " " * (1 << 14)}, "grammar"),
    (
        CHAT,
        {
            "messages": HELLO,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"multipleOf": 999983}}},
        },
        "response_format",
    ),
    (CHAT, {"messages": HELLO, "regex": "a", "choice": ["a"]}, "choice"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "retrieval"}]}, "tools[0].type"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"tokenizer": 1}}, "chat_template_kwargs"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "", "x": 1}]}]},
        "messages[0].content[0].x",
    ),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        CHAT,
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.name",
    ),
    (CHAT, {"messages": HELLO, "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
    (CHAT, {"messages": HELLO, "logit_bias": {"5": 1000}}, "logit_bias.5"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": [99999]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [3] * 5000}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix"),
    (COMPLETIONS, {"prompt": "x", "best_of": 3}, "best_of"),
    (COMPLETIONS, {"prompt": "x", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "stop": ["", "a"]}, "stop[0]"),
    (COMPLETIONS, {"prompt": "x", "deadline_s": 0}, "deadline_s"),
    (RESPONSES, {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"input": "x", "background": True}, "background"),
    (RESPONSES, {"input": "x", "store": True}, "store"),
    (RESPONSES, {"input": "x", "truncation": "auto"}, "truncation"),
    (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    (RESPONSES, {"input": "x", "include": ["reasoning.encrypted_content"]}, "include[0]"),
    (RESPONSES, {"input": [{"type": "computer_call"}]}, "input[0].type"),
    (RESPONSES, {"input": [[]]}, "input[0]"),
    (RESPONSES, {"input": [{"role": "user"}]}, "input[0].content"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    (RESPONSES, {"input": "x", "text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ("/tokenize", {}, "prompt"),
    ("/detokenize", {"tokens": [-5]}, "tokens"),
    ("/detokenize", {"tokens": "x"}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED, ids=[f"{p}-{i}" for i, (_, _, p) in enumerate(REFUSED)])
async def test_a_bad_field_is_named(http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert (error["param"], error["type"]) == (param, "invalid_request_error"), error
    if path.startswith("/v1"):
        streamed = await http.post(path, json=body | {"stream": True})
        assert streamed.status_code == 400 or param == "stream_options"


PROMETHEUS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


@pytest.mark.parametrize("accept", ["", "*/*", PROMETHEUS, "text/plain;version=1.0.0;escaping=allow-utf-8", ";;q=,"])
async def test_metrics_have_their_names_whatever_is_accepted(http: httpx.AsyncClient, accept: str) -> None:
    answer = await http.get("/metrics", headers={"accept": accept})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert '\nvllm:num_requests_running{engine="0",model_name="toy"}' in answer.text
    assert "vllm_" not in answer.text


async def test_health_is_asked_for_without_a_body(http: httpx.AsyncClient) -> None:
    answer = await http.head("/health")
    assert (answer.status_code, answer.content) == (200, b"")


async def test_half_a_surrogate_pair_is_no_text(http: httpx.AsyncClient) -> None:
    """JSON can spell what UTF-8 cannot."""
    bodies = {
        COMPLETIONS: b'{"prompt": "a\\ud800", "max_tokens": 1}',
        CHAT: b'{"messages": [{"role": "user", "content": "\\udc00"}], "max_tokens": 1}',
        RESPONSES: b'{"input": "\\udc00"}',
        "/tokenize": b'{"prompt": "\\ud83d"}',
    }
    for path, content in bodies.items():
        answer = await http.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        error_of(answer)


async def test_arguments_of_an_earlier_call_may_not_be_nested_without_end(http: httpx.AsyncClient) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    answer = await http.post(CHAT, json={"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}]})
    assert answer.status_code == 400, answer.text
    error_of(answer)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": NaN}', b"[" * 100_000, b'{"a\\ud800": 1}']
)
async def test_a_body_that_is_none(http: httpx.AsyncClient, content: bytes) -> None:
    for path in (CHAT, COMPLETIONS, RESPONSES, "/tokenize", "/detokenize"):
        answer = await http.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        error_of(answer)
    answer = await http.post(CHAT, content=content, headers={"content-type": "text/plain"})
    assert answer.status_code == 400
    error_of(answer)


PATHS: list[tuple[str, Any, dict[str, Any]]] = [
    (CHAT, chat_create_params.CompletionCreateParamsBase, {"messages": HELLO}),
    (COMPLETIONS, completion_create_params.CompletionCreateParamsBase, {"prompt": "x"}),
    (RESPONSES, response_create_params.ResponseCreateParamsBase, {"input": "x"}),
]


@pytest.mark.parametrize(("path", "params", "body"), PATHS, ids=[path for path, _, _ in PATHS])
async def test_every_field_of_openai_may_be_null(
    http: httpx.AsyncClient, path: str, params: Any, body: dict[str, Any]
) -> None:
    """A client that sends all of its fields, most of them null, is served."""
    nulls = dict.fromkeys(get_type_hints(params).keys() - {"instructions"}, None)
    limit = {"max_output_tokens": 2} if path == RESPONSES else {"max_tokens": 2}
    answer = await http.post(path, json=nulls | {"model": "toy"} | limit | body)
    assert answer.status_code == 200, answer.text


async def test_labels_and_neutral_values_are_accepted(http: httpx.AsyncClient) -> None:
    neutral = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "reasoning_effort": None,
        "logprobs": False,
        "modalities": ["text"],
        "n": 1,
        "stream": False,
        "response_format": {"type": "text"},
    }
    answer = await http.post(CHAT, json=neutral | {"messages": HELLO, "max_tokens": 2})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        (COMPLETIONS, "prompt", {"prompt": "fox " * 3000}),
        (COMPLETIONS, "prompt", {"prompt": [[1], [1] * 3000]}),
        (CHAT, "messages", {"messages": [{"role": "user", "content": "fox " * 3000}]}),
        (RESPONSES, "input", {"input": "fox " * 3000}),
    ],
)
async def test_a_prompt_that_is_too_long_is_told_as_openai_tells_it(
    http: httpx.AsyncClient, path: str, field: str, body: dict[str, Any]
) -> None:
    """By a code, and in words, by which clients know that shortening helps."""
    answer = await http.post(path, json=body)
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
    assert "prompt is too long" in error["message"] and "2047 at most" in error["message"]


async def test_an_unknown_model_path_or_method(http: httpx.AsyncClient) -> None:
    answer = await http.post(CHAT, json={"model": "gpt-17", "messages": HELLO})
    assert (answer.status_code, error_of(answer)["code"], error_of(answer)["param"]) == (
        404,
        "model_not_found",
        "model",
    )
    for method, path, status in (("GET", "/v1/models/a/b", 404), ("GET", "/v2", 404), ("GET", CHAT, 405)):
        answer = await http.request(method, path)
        assert answer.status_code == status
        error_of(answer)
    assert (await http.get("/v1/models/toy")).json() == (await http.get("/v1/models")).json()["data"][0]


async def test_keys(engine: tuple[Any, Any]) -> None:
    app = create_app(*engine, model_name="toy", api_keys=["first", "sécond"])
    async with http_of(app) as http:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "first"},
            {"authorization": "Basic first"},
        ):
            for method, path in (
                ("GET", "/v1/models"),
                ("POST", CHAT),
                ("GET", "/metrics"),
                ("GET", "/events"),
                ("GET", "/no"),
            ):
                answer = await http.request(method, path, headers=headers, json={} if method == "POST" else None)
                assert answer.status_code == 401, path
                assert error_of(answer)["type"] == "authentication_error"
                assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/", "/docs", "/openapi.json"):
            assert (await http.get(path)).status_code == 200
        for key in (b"first", "sécond".encode()):
            assert (await http.get("/v1/models", headers={b"authorization": b"Bearer " + key})).status_code == 200


async def test_a_key_is_a_tenant(engine: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    manager, _ = engine
    seen: list[Any] = []
    submit = manager.submit
    monkeypatch.setattr(
        manager, "submit", lambda inputs, sampling, **o: seen.append(sampling) or submit(inputs, sampling, **o)
    )
    app = create_app(*engine, model_name="toy", api_keys=["first", "second"])
    async with http_of(app, headers={"authorization": "Bearer second"}) as http:
        await http.post(COMPLETIONS, json={"prompt": "x", "priority": 3, "deadline_s": 60, "max_tokens": 1})
    assert (seen[0]["tenant"], seen[0]["priority"], seen[0]["deadline_s"]) == ("key-2", 3, 60)


async def test_a_large_body_is_refused(engine: tuple[Any, Any]) -> None:
    app = create_app(*engine, model_name="toy", max_body_bytes=1000)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 100

    async with http_of(app) as http:
        for content in (b"x" * 1001, chunks()):
            answer = await http.post(CHAT, content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 413
            error_of(answer)
        assert (await http.post(CHAT, json={"messages": HELLO, "max_tokens": 1})).status_code == 200


async def test_pages_of_other_origins(engine: tuple[Any, Any]) -> None:
    app = create_app(*engine, model_name="toy", api_keys=["key"], cors_origins=["https://page.test"])
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with http_of(app) as http:
        for origin, allowed in (("https://page.test", "https://page.test"), ("https://other.test", None)):
            answer = await http.options(CHAT, headers=ask | {"origin": origin})
            assert answer.headers.get("access-control-allow-origin") == allowed
            refused = await http.get("/v1/models", headers={"origin": origin})
            assert (refused.status_code, refused.headers.get("access-control-allow-origin")) == (401, allowed)


async def test_a_full_queue(engine: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise QueueFullError("8 requests are waiting and max_queue_size is 8")

    monkeypatch.setattr(engine[0], "submit", full)
    async with http_of(create_app(*engine, model_name="toy")) as http:
        for stream in (False, True):
            answer = await http.post(CHAT, json={"messages": HELLO, "stream": stream})
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) > 0
            assert error_of(answer)["type"] == "rate_limit_error"


async def test_more_answers_than_may_ever_wait() -> None:
    manager, tokenizer = toy.manager(max_queue_size=4)
    async with http_of(create_app(manager, tokenizer, model_name="toy")) as http:
        bodies = [
            ({"prompt": "x", "n": 5}, "n"),
            ({"prompt": ["x", "y", "z"], "n": 2}, "n"),
            ({"prompt": ["x"] * 5}, "prompt"),
        ]
        for body, param in bodies:
            answer = await http.post(COMPLETIONS, json=body)
            assert answer.status_code == 400, answer.text
            assert error_of(answer)["param"] == param
            assert "max_queue_size=4" in error_of(answer)["message"]
        assert (await http.post(COMPLETIONS, json={"prompt": "x", "n": 4})).status_code == 200
    manager.destroy()


@asynccontextmanager
async def broken(how: str) -> AsyncIterator[Any]:
    manager, tokenizer = toy.manager()
    app = create_app(manager, tokenizer, model_name="toy")
    if how == "crashed":
        manager._engine.step = lambda: 1 / 0
        request_id = manager.add_request([1, 2, 3])
        with pytest.raises(RuntimeError):
            manager.get_result(request_id, timeout=60)
    elif how == "stopped":
        manager.stop()
    else:
        manager.destroy()
    async with http_of(app) as http:
        yield http
    manager.destroy()


@pytest.mark.parametrize("how", ["crashed", "stopped", "destroyed"])
async def test_without_an_engine_all_is_503(how: str) -> None:
    async with broken(how) as http:
        bodies: dict[str, Any] = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "x"}, RESPONSES: {"input": "x"}}
        bodies |= {"/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]}}
        for path, body in bodies.items():
            for stream in (False, True) if path.startswith("/v1") else (None,):
                more = {} if stream is None else {"stream": stream}
                answer = await http.post(path, json=body | more)
                assert answer.status_code == 503, path
                assert error_of(answer)["code"] == ("engine_dead" if how == "crashed" else "shutting_down")
        for path in ("/health", "/v1/models", "/v1/models/toy"):
            assert (await http.get(path)).status_code == 503


async def test_a_request_that_fails_alone(engine: tuple[Any, Any], client: openai.AsyncOpenAI) -> None:
    """A fault of one request is its own: 500, or an error in its stream, and the next one is served."""
    manager, _ = engine
    submit = manager.submit

    def with_fault(inputs: Any, sampling: dict[str, Any], **options: Any) -> Any:
        def fail(tokens: list[int], logits: Any) -> Any:
            raise ArithmeticError("a fault that a test asked for")

        return submit(inputs, sampling | {"logits_processor": fail}, **options)

    manager.submit = with_fault
    try:
        with pytest.raises(openai.InternalServerError, match="a test asked for"):
            await client.chat.completions.create(model="toy", messages=HELLO)  # type: ignore[arg-type]
        with pytest.raises(openai.APIError, match="a test asked for"):
            async for _ in await client.chat.completions.create(model="toy", messages=HELLO, stream=True):  # type: ignore[arg-type]
                pass
        with pytest.raises(openai.APIError, match="a test asked for"):
            async for _ in await client.completions.create(model="toy", prompt="x", stream=True):
                pass
        kinds = [event.type async for event in await client.responses.create(model="toy", input="x", stream=True)]
        assert kinds[-1] == "response.failed"
    finally:
        del manager.submit
    assert (await client.completions.create(model="toy", prompt="x", max_tokens=1)).choices


def tangled() -> tuple[str, dict[str, Any]]:
    """A Lark grammar and a JSON schema that compile and allow their first tokens, but soon may mean so many things
    that llguidance gives up."""
    names = [f"r{i}" for i in range(50)]
    lark = "start: r0\n" + "".join(f'{name}: "x" ({" | ".join(names)})?\n' for name in names)
    inner = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    objects = {name: {"type": "object", "properties": {"a": inner}, "required": ["a"]} for name in names}
    return lark, {"type": "object", "properties": {"b": inner}, "required": ["b"], "$defs": objects}


LARK, SCHEMA = tangled()
FUNCTION = {"name": "f", "parameters": SCHEMA}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
LATE: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "grammar": LARK}, "grammar"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 500, "response_format": FORMAT}, "response_format"),
    (CHAT, {"messages": HELLO, "response_format": FORMAT}, "response_format"),
    (
        CHAT,
        {"messages": HELLO, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
        "tools",
    ),
    (RESPONSES, {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}, "text"),
    (RESPONSES, {"input": "x", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}, "tools"),
]


@pytest.mark.parametrize(("path", "body", "param"), LATE)
async def test_a_grammar_that_fails_in_the_middle_of_an_answer(
    engine: tuple[Any, Any], path: str, body: dict[str, Any], param: str
) -> None:
    """It is the client's, by the client's own name for it, whatever has been sent already."""
    app = create_app(*engine, model_name="toy", chat_template=toy.TEMPLATE + "{# tools #}")
    async with http_of(app) as http:
        answer = await http.post(path, json=body)
        streamed = await http.post(path, json=body | {"stream": True})
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["message"].startswith("the grammar cannot be followed further")
    assert streamed.status_code == 200
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    if path == RESPONSES:
        refused = {"code": "invalid_prompt", "param": param, "message": error["message"]}
        assert (events[-1]["type"], events[-1]["response"]["error"]) == ("response.failed", refused)
    else:
        assert events[-1] == {"error": error}
    assert len(events) > 1


async def test_the_schema_is_complete(http: httpx.AsyncClient) -> None:
    schema = (await http.get("/openapi.json")).json()
    assert {CHAT, COMPLETIONS, RESPONSES, "/tokenize", "/detokenize", "/health", "/v1/models"} <= schema["paths"].keys()
    assert "priority" in json.dumps(schema)


async def test_what_is_served_is_counted(engine: tuple[Any, Any]) -> None:
    async with http_of(create_app(*engine, model_name="toy")) as http:
        for _ in range(2):
            await http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 3, "n": 2, "ignore_eos": True})
        answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if line.startswith("vllm:"))
    assert float(lines['vllm:request_success_total{engine="0",finished_reason="length",model_name="toy"}']) == 4
    assert float(lines['vllm:time_to_first_token_seconds_count{engine="0",model_name="toy"}']) == 4
    assert float(lines['vllm:inter_token_latency_seconds_count{engine="0",model_name="toy"}']) == 8


async def test_every_response_is_counted_by_its_route(http: httpx.AsyncClient, app: Any) -> None:
    def told(samples: str) -> dict[str, float]:
        lines = [line for line in samples.splitlines() if line.startswith("http_requests_total")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    before = told((await http.get("/metrics")).text)
    await http.get("/v1/models/a/b")
    await http.get("/v2")
    await http.post(CHAT, json={})
    await http.post(CHAT, json={"messages": HELLO, "max_tokens": 2, "stream": True})
    after = told((await http.get("/metrics")).text)
    new = {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}
    assert new == {
        f'http_requests_total{{handler="{handler}",method="{method}",status="{status}"}}': 1
        for handler, method, status in (
            ("/v1/models/{name:path}", "GET", "4xx"),
            ("none", "GET", "4xx"),
            (CHAT, "POST", "4xx"),
            (CHAT, "POST", "2xx"),
        )
    }
