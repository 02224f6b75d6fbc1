"""Inputs that broke others: what comes out (rows 1, 2, 6, 7, 12 to 17, 22 and 23 of the list)."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from chairlift import RequestStatus
from tests.cases.tiny import (
    CONTEXT,
    VOCAB,
    Steps,
    answer,
    assert_at_rest,
    expected,
    last,
    prompt,
    scripted,
    serving,
    small,
)
from tests.cases.tiny import (
    llama as new_llama,
)

# ---------------------------------------------------------------------------------------------- 1: empty prompts


@pytest.mark.parametrize(
    ("inputs", "where"),
    [([[1, 2, 3], []], r"inputs\[1\]"), ([[]], "input_ids"), ([[], [1]], r"inputs\[0\]"), ([(), [1]], r"inputs\[0\]")],
)
def test_case_01_empty_prompt_in_generate_batch(llama: Any, inputs: Any, where: str) -> None:
    with pytest.raises(ValueError, match=f"{where} is empty"):
        llama.generate_batch(inputs, max_new_tokens=2, continuous_batching_config=small(), warmup=False)


def test_case_01_empty_prompt_in_the_manager(llama: Any) -> None:
    with serving(llama) as manager:
        with pytest.raises(ValueError, match="empty"):
            manager.add_request([])
        with pytest.raises(ValueError, match=r"inputs\[2\] is empty"):
            manager.add_requests([[1], [2], []])
        with pytest.raises(ValueError, match="empty"):
            manager.add_request(torch.zeros(0, dtype=torch.long))
        assert manager.stats().waiting == manager.stats().running == 0  # all or none
        assert answer(manager, [1, 2, 3], 4).generated_tokens == expected(llama, [1, 2, 3], 4)


# ------------------------------------------------------------------------- 2: several answers to a one-token prompt


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("length", [1, 2, 4, 5])
def test_case_02_several_answers_to_a_short_prompt(
    llama: Any, length: int, sharing: bool, use_async_batching: bool
) -> None:
    tokens = prompt(length)
    with serving(llama, allow_block_sharing=sharing, use_async_batching=use_async_batching) as manager:
        request_id = manager.add_request(tokens, max_new_tokens=6, num_return_sequences=3)
        names = [request_id, f"{request_id}__child#0", f"{request_id}__child#1"]
        assert [last(manager, name).generated_tokens for name in names] == [expected(llama, tokens, 6)] * 3
        assert_at_rest(manager)


def test_case_02_several_answers_through_generate_batch(llama: Any) -> None:
    outputs = llama.generate_batch(
        [[7], [8]],
        max_new_tokens=5,
        num_return_sequences=3,
        do_sample=True,
        seed=3,
        continuous_batching_config=small(),
        warmup=False,
    )
    assert len(outputs) == 6
    assert [output.prompt_ids for output in outputs.values()] == [[7]] * 3 + [[8]] * 3
    assert len({tuple(output.generated_tokens) for output in list(outputs.values())[:3]}) == 3


# ------------------------------------------------------------------------------------ 6: limits on a model without EOS


@pytest.mark.parametrize("length", [1, 5, CONTEXT - 1])
def test_case_06_no_new_tokens_need_no_forward(llama: Any, length: int) -> None:
    with serving(llama) as manager, Steps(llama, held=False) as steps:
        output = answer(manager, prompt(length), 0)
        assert (output.generated_tokens, output.finish_reason) == ([], "length")
        assert output.status is RequestStatus.FINISHED
        assert steps.sizes == []
        assert_at_rest(manager)


def test_case_06_one_new_token(llama: Any, use_async_batching: bool) -> None:
    with serving(llama, use_async_batching=use_async_batching) as manager, Steps(llama, held=False) as steps:
        for length in (1, 4, 9):
            output = answer(manager, prompt(length), 1)
            assert output.generated_tokens == expected(llama, prompt(length), 1)
            assert output.finish_reason == "length"
        assert len(steps.sizes) == 3


@pytest.mark.parametrize("limit", [None, 10_000])
@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT - 2, 40])
def test_case_06_without_a_limit_it_ends_at_the_context_length(
    llama: Any, length: int, limit: int | None, use_async_batching: bool
) -> None:
    with serving(llama, use_async_batching=use_async_batching) as manager:
        output = answer(manager, prompt(length), limit)
    assert output.finish_reason == "length"
    assert output.generated_tokens == expected(llama, prompt(length), CONTEXT - length)


# ---------------------------------------------------------------------------------------------------------- 7: EOS


def _eos(model: Any, tokens: list[int], place: int) -> tuple[int, list[int]]:
    """A token that greedy decoding meets first as its `place`-th, and the answer that ends with it."""
    full = expected(model, tokens, 20)
    eos = next(t for i, t in enumerate(full) if i >= place and t not in full[:i])
    return eos, full[: full.index(eos) + 1]


@pytest.mark.parametrize("kind", ["int", "list", "set", "tensor", "stop_token_ids"])
def test_case_07_eos_as_int_or_list(llama: Any, kind: str, use_async_batching: bool) -> None:
    tokens = prompt(5)
    eos, wanted = _eos(llama, tokens, 3)
    never = next(t for t in range(VOCAB) if t not in wanted)
    given: dict[str, Any] = {
        "int": {"eos_token_id": eos},
        "list": {"eos_token_id": [never, eos]},
        "set": {"eos_token_id": {never, eos}},
        "tensor": {"eos_token_id": torch.tensor([never, eos])},
        "stop_token_ids": {"stop_token_ids": [eos]},
    }[kind]
    assert expected(llama, tokens, 20, eos_token_id=[never, eos]) == wanted
    with serving(llama, use_async_batching=use_async_batching) as manager:
        output = answer(manager, tokens, 20, **given)
        assert (output.generated_tokens, output.finish_reason, output.stop_reason) == (wanted, "stop", eos)
        assert_at_rest(manager)


@pytest.mark.parametrize("as_list", [False, True])
def test_case_07_eos_only_in_the_models_config(as_list: bool) -> None:
    model = new_llama()
    tokens = prompt(5)
    eos, wanted = _eos(model, tokens, 3)
    model.generation_config.eos_token_id = [96, eos] if as_list else eos
    assert expected(model, tokens, 20) == wanted
    for generation_config in (None, GenerationConfig(max_new_tokens=20)):
        outputs = model.generate_batch(
            [tokens],
            generation_config=generation_config,
            max_new_tokens=20,
            continuous_batching_config=small(),
            warmup=False,
        )
        (output,) = outputs.values()
        assert (output.generated_tokens, output.finish_reason, output.stop_reason) == (wanted, "stop", eos)


def test_case_07_the_request_wins_over_the_config_and_the_config_over_the_model() -> None:
    model = new_llama()
    tokens = prompt(5)
    first, short = _eos(model, tokens, 2)
    second, longer = _eos(model, tokens, 6)
    model.generation_config.eos_token_id = first
    generation_config = GenerationConfig(max_new_tokens=20, eos_token_id=second)
    with model.continuous_batching_context_manager(
        generation_config, continuous_batching_config=small(), warmup=False
    ) as manager:
        assert answer(manager, tokens).generated_tokens == longer
        assert answer(manager, tokens, eos_token_id=first).generated_tokens == short
        ignoring = answer(manager, tokens, ignore_eos=True)
        assert (len(ignoring.generated_tokens), ignoring.finish_reason) == (20, "length")
        assert answer(manager, tokens, eos_token_id=-1).finish_reason == "length"


def test_case_07_eos_as_the_last_allowed_token(llama: Any, use_async_batching: bool) -> None:
    tokens = prompt(5)
    eos, wanted = _eos(llama, tokens, 3)
    with serving(llama, use_async_batching=use_async_batching) as manager:
        output = answer(manager, tokens, len(wanted), eos_token_id=eos)
        assert (output.generated_tokens, output.finish_reason) == (wanted, "stop")
        output = answer(manager, tokens, len(wanted) - 1, eos_token_id=eos)
        assert (output.generated_tokens, output.finish_reason) == (wanted[:-1], "length")


def test_case_07_min_new_tokens_holds_eos_back(llama: Any) -> None:
    tokens = prompt(5)
    eos, wanted = _eos(llama, tokens, 3)
    with serving(llama) as manager:
        output = answer(manager, tokens, 15, eos_token_id=eos, min_new_tokens=len(wanted) + 2)
    assert output.generated_tokens == expected(llama, tokens, 15, eos_token_id=eos, min_new_tokens=len(wanted) + 2)


# ---------------------------------------------------------------------------------------- 12: odd sampling values


def test_case_12_temperatures_of_all_sizes_in_one_batch(llama: Any, use_async_batching: bool) -> None:
    tokens = prompt(6)
    greedy = expected(llama, tokens, 8)
    temperatures = [0, 0.0, 1e-6, 1e-30, 1, 1.0, 100]
    with serving(llama, use_async_batching=use_async_batching) as manager:
        ids = [
            manager.add_request(tokens, max_new_tokens=8, temperature=t, seed=5, logprobs=True) for t in temperatures
        ]
        outputs = [last(manager, request_id) for request_id in ids]
    for output in outputs:
        assert output.error is None and len(output.generated_tokens) == 8
        assert torch.tensor(output.logprobs).isfinite().all()
    assert [output.generated_tokens for output in outputs[:4]] == [greedy] * 4
    assert outputs[4].generated_tokens == outputs[5].generated_tokens  # 1 is 1.0
    assert outputs[6].generated_tokens != greedy


def test_case_12_zero_and_one_mean_off(llama: Any) -> None:
    tokens = prompt(6)
    with serving(llama) as manager:
        plain = answer(manager, tokens, 12, temperature=1.0, seed=5)
        for off in ({"top_k": 0}, {"top_p": 1.0}, {"top_p": 1}, {"min_p": 0}, {"typical_p": 1.0}, {"top_k": 10**9}):
            assert (
                answer(manager, tokens, 12, temperature=1.0, seed=5, **off).generated_tokens == plain.generated_tokens
            )
        narrow = answer(manager, tokens, 12, temperature=1.0, seed=5, top_k=1)
        assert narrow.generated_tokens == expected(llama, tokens, 12)
        assert answer(manager, tokens, 12, temperature=1.0, seed=5, top_p=0).generated_tokens == narrow.generated_tokens


# ------------------------------------------------------------------------ 13: a penalty touches nobody else


@pytest.mark.parametrize(
    "setting", [{"repetition_penalty": 1.5}, {"repetition_penalty": 0.7}, {"no_repeat_ngram_size": 1}]
)
def test_case_13_a_penalty_beside_a_request_without(
    llama: Any, setting: dict[str, Any], use_async_batching: bool
) -> None:
    tokens = prompt(7)
    with serving(llama, use_async_batching=use_async_batching) as manager:
        first = manager.add_request(tokens, max_new_tokens=16, **setting)
        second = manager.add_request(tokens, max_new_tokens=16)
        changed, plain = last(manager, first).generated_tokens, last(manager, second).generated_tokens
    assert plain == expected(llama, tokens, 16)
    assert changed == expected(llama, tokens, 16, **setting)
    assert changed != plain


def test_case_13_a_penalty_through_a_small_pool_and_chunks(llama: Any) -> None:
    """Preempted and prefilled in pieces: the tokens that count are the same."""
    tokens = [prompt(9, seed) for seed in range(3)]
    with serving(llama, num_blocks=9, max_batch_tokens=4) as manager:
        ids = [manager.add_request(each, max_new_tokens=14, repetition_penalty=1.5) for each in tokens]
        answers = [last(manager, request_id).generated_tokens for request_id in ids]
        assert manager.stats().preemptions > 0
    assert answers == [expected(llama, each, 14, repetition_penalty=1.5) for each in tokens]


# ------------------------------------------------------------------------------------------ 14: several, seeded


@pytest.mark.parametrize("sharing", [True, False])
def test_case_14_four_seeded_answers_alone_and_in_company(llama: Any, sharing: bool, use_async_batching: bool) -> None:
    tokens = prompt(6)

    def ask(company: int) -> list[list[int]]:
        with serving(llama, allow_block_sharing=sharing, use_async_batching=use_async_batching) as manager:
            for other in range(company):
                manager.add_request(prompt(5 + other, 3), max_new_tokens=9, temperature=1.0)
            request_id = manager.add_request(tokens, max_new_tokens=10, num_return_sequences=4, seed=0, do_sample=True)
            names = [request_id, *(f"{request_id}__child#{i}" for i in range(3))]
            return [last(manager, name).generated_tokens for name in names]

    alone = ask(0)
    assert len({tuple(each) for each in alone}) == 4
    assert ask(5) == alone
    outputs = llama.generate_batch(
        [tokens],
        max_new_tokens=10,
        num_return_sequences=4,
        seed=0,
        do_sample=True,
        continuous_batching_config=small(),
        warmup=False,
    )
    assert [output.generated_tokens for output in outputs.values()] == alone


# ------------------------------------------------------------------------------- 15: token ids outside the vocabulary


@pytest.mark.parametrize(
    "bad",
    [
        {"logit_bias": {999999: 1}},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {VOCAB: 1}},
        {"stop_token_ids": [VOCAB]},
        {"stop_token_ids": [3, -2]},
        {"eos_token_id": VOCAB},
        {"eos_token_id": [1, 10**20]},
        {"bad_words_ids": [[1, VOCAB]]},
        {"bad_words_ids": [[]]},
        {"logit_bias": {1: 1e300}},
        {"logit_bias": {1: float("nan")}},
    ],
)
def test_case_15_ids_outside_the_vocabulary(llama: Any, bad: dict[str, Any]) -> None:
    (name,) = bad
    with serving(llama) as manager:
        with pytest.raises(ValueError, match=name):
            manager.add_request([1, 2], **bad)
        with pytest.raises(ValueError, match=name):
            manager.add_requests([[1, 2], [3]], **bad)
        assert answer(manager, [1, 2, 3], 3).generated_tokens == expected(llama, [1, 2, 3], 3)


def test_case_15_a_bias_counts(llama: Any) -> None:
    with serving(llama) as manager:
        assert answer(manager, [1, 2, 3], 3, logit_bias={5: 1e4}).generated_tokens == [5, 5, 5]
        greedy = expected(llama, [1, 2, 3], 3)
        without = answer(manager, [1, 2, 3], 1, logit_bias={greedy[0]: -1e4}).generated_tokens
        assert without == expected(llama, [1, 2, 3], 1, suppress_tokens=[greedy[0]])


# ------------------------------------------------------------------------------ 16 and 17: windows and soft caps


@pytest.mark.parametrize("chunk", [8, 3])
def test_case_16_sliding_window(mistral: Any, chunk: int, use_async_batching: bool) -> None:
    lengths = [3, 4, 5, 9, 1, 17]
    with serving(mistral, max_batch_tokens=chunk, use_async_batching=use_async_batching) as manager:
        for _ in range(2):  # the second time with prefix hits
            ids = [manager.add_request(prompt(length), max_new_tokens=20) for length in lengths]
            for length, request_id in zip(lengths, ids, strict=True):
                assert last(manager, request_id).generated_tokens == expected(mistral, prompt(length), 20), length
        assert manager.stats().prefix_hit_tokens > 0
        assert_at_rest(manager)


@pytest.mark.parametrize("page_size", [4, 5, 16])
@pytest.mark.parametrize("sharing", [True, False])
def test_case_17_soft_cap_and_alternating_layers(
    gemma2: Any, page_size: int, sharing: bool, use_async_batching: bool
) -> None:
    lengths = [3, 4, 5, 9, 21]
    with serving(
        gemma2,
        page_size=page_size,
        max_batch_tokens=8,
        allow_block_sharing=sharing,
        use_async_batching=use_async_batching,
    ) as manager:
        for _ in range(2):
            ids = [manager.add_request(prompt(length), max_new_tokens=20) for length in lengths]
            for length, request_id in zip(lengths, ids, strict=True):
                assert last(manager, request_id).generated_tokens == expected(gemma2, prompt(length), 20), length
        assert_at_rest(manager)


def test_case_17_the_soft_cap_matters(gemma2: Any) -> None:
    """The test above would not see a cap that is dropped if it changed nothing."""
    call = gemma2.model.layers[0].self_attn
    cap, call.attn_logit_softcapping = call.attn_logit_softcapping, None
    other = call.config.attn_logit_softcapping
    assert cap == other == 5.0
    with torch.no_grad():
        ids = torch.tensor([prompt(9)])
        without = gemma2(ids).logits
        call.attn_logit_softcapping = cap
        assert not torch.allclose(without, gemma2(ids).logits, atol=1e-3)


# --------------------------------------------------------------------------------------------------- 22: logprobs


def _dense(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("model_name", ["llama", "gemma2"])
@pytest.mark.parametrize("chunk", [256, 4])
def test_case_22_logprobs_after_hits_and_chunks(
    request: pytest.FixtureRequest, model_name: str, chunk: int, use_async_batching: bool
) -> None:
    model = request.getfixturevalue(model_name)
    tokens = prompt(18)
    with serving(model, max_batch_tokens=chunk, use_async_batching=use_async_batching) as manager:
        first = answer(manager, tokens, 6, logprobs=3, prompt_logprobs=2)
        again = answer(manager, tokens, 6, logprobs=3)
        scored = answer(manager, tokens, 0, prompt_logprobs=True)
    assert again.num_cached_tokens > 0
    assert (again.generated_tokens, again.logprobs) == (first.generated_tokens, first.logprobs)  # the same bits
    assert again.top_logprobs == first.top_logprobs
    dense = _dense(model, tokens + first.generated_tokens)
    for place, (token, logprob) in enumerate(zip(first.generated_tokens, first.logprobs, strict=True)):
        row = dense[len(tokens) + place - 1]
        assert logprob == pytest.approx(float(row[token]), abs=1e-4)
        best = row.topk(3)
        assert list(first.top_logprobs[place]) == best.indices.tolist()
        assert list(first.top_logprobs[place].values()) == pytest.approx(best.values.tolist(), abs=1e-4)
    assert first.prompt_logprobs[0] is None and len(first.prompt_logprobs) == len(tokens)
    for place in range(1, len(tokens)):
        row = dense[place - 1]
        assert first.prompt_logprobs[place] == pytest.approx(float(row[tokens[place]]), abs=1e-4)
        best = row.topk(2).indices.tolist()
        assert [t for t in first.prompt_top_logprobs[place] or {} if t in best] == best
    assert scored.prompt_logprobs == first.prompt_logprobs
    assert scored.prompt_top_logprobs == [] and scored.generated_tokens == []


@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_case_22_raw_and_processed_logprobs(llama: Any, mode: str) -> None:
    tokens = prompt(8)
    with serving(llama, logprobs_mode=mode, return_logprobs=True) as manager:
        plain = answer(manager, tokens, 4)
        processed = answer(manager, tokens, 4, logit_bias={7: 1e4})
    dense = _dense(llama, tokens + processed.generated_tokens)
    raw = [float(dense[len(tokens) + i - 1][7]) for i in range(4)]
    assert processed.generated_tokens == [7] * 4
    assert processed.logprobs == pytest.approx(raw if mode == "raw" else [0.0] * 4, abs=1e-4)
    assert len(plain.logprobs) == 4 and plain.top_logprobs == []


# ------------------------------------------------------------------------------------------------- 23: stop strings

TEXT = "the cat sat on the mat and the dog sat on the log . b x "


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Trained here, byte-level, so that a stop string can lie across tokens in many ways."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted({piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(TEXT + "é") for piece in piece})
    trainer = trainers.BpeTrainer(vocab_size=60, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT, "é"], trainer)
    assert tokenizer.get_vocab_size() <= VOCAB
    return tokenizer


def _pieces(tokenizer: Any, *texts: str) -> list[int]:
    """Token ids of these texts, each encoded for itself: the borders are ours."""
    return [token for text in texts for token in tokenizer.encode(text).ids]


@pytest.fixture(scope="module", params=[False, True], ids=["depth1", "depth2"])
def manager(request: pytest.FixtureRequest, llama: Any) -> Iterator[Any]:
    with serving(llama, use_async_batching=request.param) as manager:
        yield manager


STOPS = [
    # pieces of the answer, stop strings, the text that remains, the stop that was found
    (["the", " ", "c", "a", "t", " sat"], ["cat"], "the ", "cat"),  # over three tokens
    (["the", " c", "a", "t sat"], ["cat"], "the ", "cat"),  # begins and ends inside tokens
    (["a", "b", "c", "d", "."], ["bcd", "cd"], "a", "bcd"),  # overlapping: the one that begins first
    (["a", "b", "c", "d", "."], ["cdx", "bc"], "a", "bc"),  # a false start that ends as another
    (["a", "a", "b", "."], ["ab"], "a", "ab"),
    (["s", "s", "s", "t", "."], ["sst"], "s", "sst"),  # a start inside a start
    (["the"], ["the"], "", "the"),  # all of it
    (["c", "d", "é", "o", "g"], ["do"], "cdé", None),  # never
    (["c", "é", "d", "o", "g"], ["do"], "cé", "do"),
    (["d", "c", "é", "d"], ["é"], "dc", "é"),  # a stop of two bytes, two tokens
]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("pieces", "stops", "kept", "found"), STOPS)
def test_case_23_stop_strings(
    manager: Any,
    tokenizer: Any,
    pieces: list[str],
    stops: list[str],
    kept: str,
    found: str | None,
    streaming: bool,
) -> None:
    script = _pieces(tokenizer, *pieces)
    tail = _pieces(tokenizer, "l", "n", "l", "n")
    whole = tokenizer.decode(script)
    text = kept if found else tokenizer.decode(script + tail)
    request_id = manager.add_request(
        [1, 2, 3],
        max_new_tokens=len(script + tail),
        streaming=streaming,
        stop_strings=stops,
        tokenizer=tokenizer,
        logits_processor=scripted(script + tail, 3),
        logprobs=True,
    )
    outputs = list(manager.request_id_iter(request_id))
    assert_at_rest(manager)
    final = outputs[-1]
    assert final.text == text
    assert (final.finish_reason, final.stop_reason) == (("stop", found) if found else ("length", None))
    assert final.status is RequestStatus.FINISHED
    count = len(script + tail)
    if found:
        assert whole.startswith(kept + found)
        count = max(n for n in range(len(script) + 1) if len(tokenizer.decode(script[:n])) <= len(kept))
        while count and "�" in tokenizer.decode(script[:count]):
            count -= 1
    assert final.generated_tokens == (script + tail)[:count]
    assert len(final.logprobs) == len(final.generated_tokens)
    assert [t for output in outputs for t in output.new_tokens] == final.generated_tokens
    assert streaming or len(outputs) == 1
    for output in outputs:
        assert text.startswith(output.text)
        assert all(stop not in output.text for stop in stops) or not found
    if streaming and found is None:
        assert len(outputs) > 3  # what is safe is shown at once


def test_case_23_stop_strings_with_a_real_answer(llama: Any, tokenizer: Any) -> None:
    """No script: the stop string is what the model says in the middle of its answer; with a transformers tokenizer."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    size = tokenizer.get_vocab_size()
    keep = {token: -1e4 for token in range(size, VOCAB)}  # what the tokenizer does not know
    with serving(llama) as manager:
        full = answer(manager, [1, 2, 3], 20, logit_bias=keep, repetition_penalty=1.5).generated_tokens
        text = fast.decode(full)
        stop = fast.decode(full[8:11])
        output = answer(
            manager, [1, 2, 3], 20, logit_bias=keep, repetition_penalty=1.5, stop_strings=stop, tokenizer=fast
        )
    at = text.index(stop)
    assert (output.text, output.finish_reason, output.stop_reason) == (text[:at], "stop", stop)
    assert output.generated_tokens == full[: len(output.generated_tokens)]
    assert len(fast.decode(output.generated_tokens)) <= at < len(fast.decode(full[: len(output.generated_tokens) + 1]))


def test_case_23_two_streams_with_stops_of_their_own(llama: Any, tokenizer: Any) -> None:
    script = _pieces(tokenizer, "the", " cat", " sat", " on", " the", " mat")
    with serving(llama) as manager:
        common: dict[str, Any] = dict(
            max_new_tokens=len(script), streaming=True, tokenizer=tokenizer, logits_processor=scripted(script, 2)
        )
        first = manager.add_request([1, 2], stop_strings=["cat"], **common)
        second = manager.add_request([1, 2], stop_strings=["on the"], **common)
        third = manager.add_request([1, 2], stop_strings=["dog"], **common)
        assert last(manager, first).text == "the "
        assert last(manager, second).text == "the cat sat "
        assert last(manager, third).text == "the cat sat on the mat"


def test_case_23_stop_strings_need_a_tokenizer(llama: Any) -> None:
    with serving(llama) as manager:
        with pytest.raises(ValueError, match="tokenizer"):
            manager.add_request([1], stop_strings=["x"])
        with pytest.raises(ValueError, match="stop_strings"):
            manager.add_request([1], stop_strings=[""])
        with pytest.raises(TypeError, match="stop_strings"):
            manager.add_request([1], stop_strings=[3])


def test_case_23_a_tokenizer_that_raises_fails_its_request_only(llama: Any, tokenizer: Any) -> None:
    class Broken:
        def decode(self, ids: list[int]) -> str:
            raise KeyError("no such token")

    with serving(llama) as manager:
        bad = manager.add_request([1, 2], max_new_tokens=5, stop_strings=["x"], tokenizer=Broken())
        good = manager.add_request([1, 2, 3], max_new_tokens=5)
        output = last(manager, bad)
        assert output.status is RequestStatus.FAILED and isinstance(output.exception, KeyError)
        assert last(manager, good).generated_tokens == expected(llama, [1, 2, 3], 5)
        assert_at_rest(manager)
