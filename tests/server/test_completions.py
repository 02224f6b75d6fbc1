"""/v1/completions: the real client gets what the engine says, in every shape it can ask for."""

import json
from typing import Any

import httpx
import openai
import pytest

PROMPT = "The quick brown fox"


def engine_answer(engine: tuple[Any, Any], tokens: list[int], **sampling: Any) -> Any:
    """What the engine itself answers."""
    manager, _ = engine
    request_id = manager.add_request(tokens, **({"temperature": 0} | sampling))
    return manager.get_result(request_id, timeout=60)


async def streamed(client: openai.AsyncOpenAI, **body: Any) -> tuple[list[str], list[str | None], Any]:
    """Text and finish reason of each choice of a stream, and its usage."""
    texts, reasons, usage = [""] * 8, [None] * 8, None
    async for chunk in await client.completions.create(model="toy", stream=True, **body):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert reasons[choice.index] is None, "a choice goes on after its end"
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


async def test_the_answer_is_the_engines(client: openai.AsyncOpenAI, engine: tuple[Any, Any]) -> None:
    _, tokenizer = engine
    output = engine_answer(engine, tokenizer.encode(PROMPT), max_new_tokens=24)
    answer = await client.completions.create(model="toy", prompt=PROMPT, temperature=0, max_tokens=24)
    assert answer.choices[0].text == tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
    assert answer.choices[0].finish_reason == output.finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer.encode(PROMPT))
    assert answer.usage.completion_tokens == len(output.generated_tokens)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")


async def test_without_a_limit_sixteen_tokens(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="toy", prompt=PROMPT, temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


async def test_every_form_of_prompt(client: openai.AsyncOpenAI, engine: tuple[Any, Any]) -> None:
    _, tokenizer = engine
    texts = [PROMPT, "again and again", "x"]
    ids = [tokenizer.encode(text) for text in texts]
    alone = [
        (await client.completions.create(model="toy", prompt=text, temperature=0, max_tokens=8)).choices[0].text
        for text in texts
    ]
    for prompt in (texts, ids):
        answer = await client.completions.create(model="toy", prompt=prompt, temperature=0, max_tokens=8)  # type: ignore[arg-type]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [choice.text for choice in answer.choices] == alone
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    answer = await client.completions.create(model="toy", prompt=ids[1], temperature=0, max_tokens=8)
    assert answer.choices[0].text == alone[1]


async def test_a_stream_adds_up_to_the_whole(client: openai.AsyncOpenAI) -> None:
    """The random model says half characters all the time."""
    for seed in range(8):
        body = {"prompt": [PROMPT, "日本"], "n": 2, "seed": seed, "max_tokens": 40, "temperature": 1.5}
        whole = await client.completions.create(model="toy", **body)
        texts, reasons, _ = await streamed(client, **body)
        assert texts[:4] == [choice.text for choice in whole.choices]
        assert reasons[:4] == [choice.finish_reason for choice in whole.choices]
        assert len(set(texts[:2])) == 2, "two choices of one prompt are alike"


async def test_usage_comes_last_and_only_when_asked_for(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    body = {"model": "toy", "prompt": PROMPT, "max_tokens": 4, "stream": True, "ignore_eos": True}
    events = (await http.post("/v1/completions", json=body)).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event[6:])["choices"] and "usage" not in json.loads(event[6:]) for event in events[:-2])
    asked = body | {"stream_options": {"include_usage": True}}
    events = (await http.post("/v1/completions", json=asked)).text.split("\n\n")
    chunks = [json.loads(event[6:]) for event in events[:-2]]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_is_never_seen(client: openai.AsyncOpenAI, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "temperature": 1.5, "seed": 3, "max_tokens": 60}
    full = (await client.completions.create(model="toy", **body)).choices[0].text
    for begin, size in ((5, 1), (9, 4), (17, 7)):  # over one token and several
        stop = full[begin : begin + size]
        expected = full[: full.index(stop)]
        if stream:
            texts, reasons, _ = await streamed(client, stop=["never said", stop], **body)
            assert (texts[0], reasons[0]) == (expected, "stop")
        else:
            choice = (await client.completions.create(model="toy", stop=stop, **body)).choices[0]
            assert (choice.text, choice.finish_reason) == (expected, "stop")


async def test_logprobs_belong_to_the_text(client: openai.AsyncOpenAI, engine: tuple[Any, Any]) -> None:
    _, tokenizer = engine
    tokens = tokenizer.encode(PROMPT)
    output = engine_answer(engine, tokens, max_new_tokens=6, logprobs=3)
    answer = await client.completions.create(model="toy", prompt=PROMPT, temperature=0, max_tokens=6, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.top_logprobs is not None and logprobs.token_logprobs is not None
    assert logprobs.token_logprobs == pytest.approx(output.logprobs)
    assert len(logprobs.tokens or ()) == len(logprobs.text_offset or ()) == 6
    for logprob, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert max(top.values()) == logprob  # greedy
    only = await client.completions.create(model="toy", prompt=PROMPT, temperature=0, max_tokens=6, logprobs=0)
    assert only.choices[0].logprobs is not None
    assert [len(top) for top in only.choices[0].logprobs.top_logprobs or ()] == [1] * 6


async def test_logprobs_stream_as_they_are(client: openai.AsyncOpenAI) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 30, "logprobs": 2, "echo": True}
    whole = (await client.completions.create(model="toy", **body)).choices[0].logprobs
    parts: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    async for chunk in await client.completions.create(model="toy", stream=True, **body):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                for name, values in parts.items():
                    values += getattr(choice.logprobs, name)
    assert parts == whole.model_dump()  # type: ignore[union-attr]


async def test_echo_repeats_the_prompt(client: openai.AsyncOpenAI, engine: tuple[Any, Any]) -> None:
    _, tokenizer = engine
    said = (await client.completions.create(model="toy", prompt=PROMPT, temperature=0, max_tokens=5)).choices[0].text
    for prompt in (PROMPT, tokenizer.encode(PROMPT)):
        answer = await client.completions.create(model="toy", prompt=prompt, temperature=0, max_tokens=5, echo=True)
        assert answer.choices[0].text == PROMPT + said
        assert (await streamed(client, prompt=prompt, temperature=0, max_tokens=5, echo=True))[0][0] == PROMPT + said
    nothing = await client.completions.create(model="toy", prompt=PROMPT, max_tokens=0, echo=True)
    assert (nothing.choices[0].text, nothing.choices[0].finish_reason) == (PROMPT, "length")
    assert nothing.usage is not None
    assert nothing.usage.completion_tokens == 0


@pytest.mark.parametrize("token", [-1, 400, 1 << 70])
async def test_what_is_no_token_cannot_be_echoed_either(client: openai.AsyncOpenAI, token: int) -> None:
    with pytest.raises(openai.BadRequestError, match=f"token id {token}, outside the model's vocabulary"):
        await client.completions.create(model="toy", prompt=[token], max_tokens=1, echo=True)


async def test_what_steers_sampling_arrives(client: openai.AsyncOpenAI, engine: tuple[Any, Any]) -> None:
    """Each field changes the answer as the engine's own argument does."""
    _, tokenizer = engine
    tokens = tokenizer.encode(PROMPT)
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"temperature": 0.7, "seed": 5}, {"temperature": 0.7, "seed": 5}),
        ({"temperature": 1, "seed": 5, "top_p": 0.5}, {"temperature": 1, "seed": 5, "top_p": 0.5}),
        ({"temperature": 1, "seed": 6, "top_k": 3}, {"temperature": 1, "seed": 6, "top_k": 3}),
        ({"temperature": 1, "seed": 6, "min_p": 0.3}, {"temperature": 1, "seed": 6, "min_p": 0.3}),
        ({"temperature": 0, "repetition_penalty": 3.0}, {"repetition_penalty": 3.0}),
        ({"temperature": 0, "presence_penalty": 2}, {"presence_penalty": 2}),
        ({"temperature": 0, "frequency_penalty": -2}, {"frequency_penalty": -2}),
        ({"temperature": 0, "logit_bias": {"50": 100}}, {"logit_bias": {50: 100.0}}),
        ({"temperature": 0, "ignore_eos": True, "logit_bias": {"0": 100}},
         {"ignore_eos": True, "logit_bias": {0: 100}}),
        ({"temperature": 0, "min_tokens": 9, "logit_bias": {"0": 100}}, {"min_new_tokens": 9, "logit_bias": {0: 100}}),
        ({"temperature": 0, "stop_token_ids": [60], "logit_bias": {"60": 9}},
         {"stop_token_ids": [60], "logit_bias": {60: 9}}),
    ]  # fmt: skip
    plain = engine_answer(engine, tokens, max_new_tokens=12)
    for fields, sampling in cases:
        output = engine_answer(engine, tokens, max_new_tokens=12, **sampling)
        assert (output.generated_tokens, output.finish_reason) != (plain.generated_tokens, plain.finish_reason), fields
        answer = await client.completions.create(model="toy", prompt=tokens, max_tokens=12, extra_body=fields)
        assert answer.choices[0].text == tokenizer.decode(output.generated_tokens, skip_special_tokens=True), fields
        assert answer.choices[0].finish_reason == output.finish_reason, fields


async def test_special_tokens_show_when_asked_for(client: openai.AsyncOpenAI) -> None:
    body: dict[str, Any] = {
        "model": "toy",
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 2,
        "logit_bias": {"1": 100},
    }
    assert (await client.completions.create(**body)).choices[0].text == ""
    shown = await client.completions.create(**body, extra_body={"skip_special_tokens": False})
    assert shown.choices[0].text == "<|im_start|><|im_start|>"


async def test_a_prefix_that_is_known_is_counted(client: openai.AsyncOpenAI) -> None:
    prompt = "A long beginning that nobody else has, " * 3
    for cached in (False, True):
        answer = await client.completions.create(model="toy", prompt=prompt, max_tokens=1)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert bool(answer.usage.prompt_tokens_details.cached_tokens) is cached
    salted = await client.completions.create(
        model="toy", prompt=prompt, max_tokens=1, extra_body={"cache_salt": "mine"}
    )
    assert salted.usage is not None and salted.usage.prompt_tokens_details is not None
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


async def test_constrained_answers(client: openai.AsyncOpenAI) -> None:
    async def text(**fields: Any) -> str:
        answer = await client.completions.create(
            model="toy", prompt=PROMPT, temperature=1, seed=1, max_tokens=80, extra_body=fields
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].text

    assert await text(choice=["yes", "no"]) in ("yes", "no")
    digits = await text(regex="[0-9]{3}-[ab]+c")
    assert digits[:3].isdigit() and digits[3] == "-" and set(digits[4:-1]) <= set("ab") and digits[-1] == "c"
    assert await text(grammar='start: "left" | "right"') in ("left", "right")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert json.loads(await text(response_format=form))["a"] in (1, 2)


async def test_a_deadline_ends_the_answer(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="toy", prompt=PROMPT, max_tokens=400, extra_body={"deadline_s": 0.02, "ignore_eos": True, "priority": -1}
    )
    assert answer.choices[0].finish_reason == "timeout"
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 400
