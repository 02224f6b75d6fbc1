"""The protocol by which lm-eval's `local-completions` scores and generates, against the model's own forward pass."""

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import torch

CONTEXTS = ["The quick brown fox", "again and", "system user", "The weather in Paris is"]
CONTINUATIONS = [" jumps over", " again", " assistant", " 21 degrees"]
SEED = 1234


async def score(
    http: httpx.AsyncClient, pairs: Sequence[tuple[list[int], list[int]]], max_tokens: int
) -> list[tuple[float, bool]]:
    """Log-likelihood of each continuation after its context, and whether it is what greedy decoding would say."""
    body = {
        "model": "toy",
        "prompt": [context + continuation for context, continuation in pairs],
        "temperature": 0,
        "max_tokens": max_tokens,
        "logprobs": 1,
        "seed": SEED,
        "echo": True,
    }
    answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
    scores = []
    for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
        context, continuation = pairs[choice["index"]]
        span = slice(len(context), len(context) + len(continuation))
        logprobs = choice["logprobs"]["token_logprobs"]
        assert len(logprobs) == len(context) + len(continuation) + max_tokens
        tops = choice["logprobs"]["top_logprobs"][span]
        is_greedy = all(own == max(top.values()) for own, top in zip(logprobs[span], tops, strict=True))
        scores.append((sum(logprobs[span]), is_greedy))
    return scores


def expected(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    with torch.inference_mode():
        logits = model(torch.tensor([context + continuation])).logits[0].float().log_softmax(-1)
    places = range(len(context) - 1, len(context) + len(continuation) - 1)
    total = sum(logits[place, token].item() for place, token in zip(places, continuation, strict=True))
    greedy = all(int(logits[place].argmax()) == token for place, token in zip(places, continuation, strict=True))
    return total, greedy


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_loglikelihoods(http: httpx.AsyncClient, engine: tuple[Any, Any], max_tokens: int) -> None:
    from tests.server import toy

    _, tokenizer = engine
    model = toy.model(len(tokenizer))
    pairs = [(tokenizer.encode(context), tokenizer.encode(each)) for context in CONTEXTS for each in CONTINUATIONS]
    with torch.inference_mode():  # and one that is what greedy decoding says
        greedy = model.generate(torch.tensor([pairs[0][0]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    pairs.append((pairs[0][0], greedy[0, len(pairs[0][0]) :].tolist()))
    scores = await score(http, pairs, max_tokens)
    wanted = [expected(model, *pair) for pair in pairs]
    assert [total for total, _ in scores] == pytest.approx([total for total, _ in wanted], abs=1e-3)
    assert [is_greedy for _, is_greedy in scores] == [is_greedy for _, is_greedy in wanted]
    assert scores[-1][1]
    best = [max(range(4), key=lambda i: scores[4 * row + i][0]) for row in range(4)]
    assert best == [max(range(4), key=lambda i: wanted[4 * row + i][0]) for row in range(4)]


async def test_rolling_and_text_prompts(http: httpx.AsyncClient, engine: tuple[Any, Any]) -> None:
    """Text gives the tokens that its ids give, and offsets that cut the text into its tokens."""
    _, tokenizer = engine
    text = "The quick brown fox jumps. 日本語 🙂 again"
    body = {"model": "toy", "temperature": 0, "max_tokens": 0, "logprobs": 1, "seed": SEED, "echo": True}
    by_text, by_ids = [
        (await http.post("/v1/completions", json=body | {"prompt": prompt})).json()["choices"][0]
        for prompt in (text, tokenizer.encode(text))
    ]
    assert by_text == by_ids
    assert by_text["text"] == text
    assert by_text["logprobs"]["token_logprobs"][0] is None
    assert by_text["logprobs"]["top_logprobs"][0] is None
    ascii_tokens = [
        (token, offset)
        for token, offset in zip(by_text["logprobs"]["tokens"], by_text["logprobs"]["text_offset"], strict=True)
        if offset < text.index("日")
    ]
    assert all(text.startswith(token, offset) for token, offset in ascii_tokens)


async def test_generate_until(http: httpx.AsyncClient, engine: tuple[Any, Any]) -> None:
    """Generation tasks: text prompts, several stop strings, a seed."""
    body = {"model": "toy", "prompt": CONTEXTS, "temperature": 0, "max_tokens": 32, "seed": SEED}
    free = (await http.post("/v1/completions", json=body)).json()["choices"]
    stop = free[0]["text"][4:6]
    cut = (await http.post("/v1/completions", json=body | {"stop": [stop, "\n\n"]})).json()["choices"]
    assert cut[0]["text"] == free[0]["text"][: free[0]["text"].index(stop)]
    for before, after in zip(free, cut, strict=True):
        assert after["text"] == before["text"].split(stop)[0].split("\n\n")[0]
