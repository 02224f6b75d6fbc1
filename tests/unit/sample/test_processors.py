"""The processed distribution of a row equals what the processors of transformers make of the same logits."""

import math

import pytest
import torch
from transformers.generation import logits_process as hf

from chairlift.params import SamplingDefaults
from chairlift.sample import Sampler

PROMPT = [5, 11, 5, 7, 11, 5, 7]
GENERATED = [3, 5, 11, 3, 3, 5, 11]
TOKENS = PROMPT + GENERATED


def processed(logits, overrides, tokens=TOKENS, num_prompt=7):
    """All logprobs of each row, by way of `top_logprobs`: [num_rows, vocab] with -inf for removed tokens."""
    num_rows, vocab = logits.shape
    params = SamplingDefaults(None, None, vocab_size=vocab).resolve({**overrides, "logprobs": vocab})
    sampler = Sampler(vocab, num_rows)
    for slot in range(num_rows):
        sampler.seat(slot, tokens, num_prompt, params, slot)
    host = sampler.sample(logits, list(range(num_rows)), [len(tokens)] * num_rows).to_host()
    assert not host.faults
    result = torch.full((num_rows, vocab), -torch.inf)
    for row, alternatives in host.top_logprobs.items():
        result[row, list(alternatives)] = torch.tensor(list(alternatives.values()))
        assert host.logprobs[row] == alternatives[host.tokens[row]]  # what was sampled is among what was kept
    return result


def expected(logits, processors, tokens=TOKENS):
    ids = torch.tensor([tokens] * len(logits))
    return hf.LogitsProcessorList(processors)(ids, logits.float()).log_softmax(-1)


def assert_same(ours, theirs):
    assert torch.equal(ours > -torch.inf, theirs > -torch.inf), "another set of tokens is kept"
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


def rows(vocab, num_rows=6, scale=3.0, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab, generator=generator) * scale).to(dtype)


CASES = {
    "greedy": ({}, lambda: []),
    "temperature": ({"temperature": 0.7}, lambda: [hf.TemperatureLogitsWarper(0.7)]),
    "temperature int": ({"temperature": 2}, lambda: [hf.TemperatureLogitsWarper(2.0)]),
    "top_k 1": ({"temperature": 1.0, "top_k": 1}, lambda: [hf.TopKLogitsWarper(1)]),
    "top_k": ({"temperature": 0.7, "top_k": 9}, lambda: [hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(9)]),
    "top_k beyond the vocabulary": ({"temperature": 1.0, "top_k": 10**6}, lambda: [hf.TopKLogitsWarper(10**6)]),
    "top_p 0": ({"temperature": 1.0, "top_p": 0.0}, lambda: [hf.TopPLogitsWarper(0.0)]),
    "top_p .3": ({"temperature": 1.0, "top_p": 0.3}, lambda: [hf.TopPLogitsWarper(0.3)]),
    "top_p .9": (
        {"temperature": 1.5, "top_p": 0.9},
        lambda: [hf.TemperatureLogitsWarper(1.5), hf.TopPLogitsWarper(0.9)],
    ),
    "top_p .999": (
        {"temperature": 3.0, "top_p": 0.999},
        lambda: [hf.TemperatureLogitsWarper(3.0), hf.TopPLogitsWarper(0.999)],
    ),
    "min_p": (
        {"temperature": 1.2, "min_p": 0.07},
        lambda: [hf.TemperatureLogitsWarper(1.2), hf.MinPLogitsWarper(0.07)],
    ),
    "min_p 1": ({"temperature": 1.0, "min_p": 1.0}, lambda: [hf.MinPLogitsWarper(1.0)]),
    "typical_p .2": ({"temperature": 1.0, "typical_p": 0.2}, lambda: [hf.TypicalLogitsWarper(0.2)]),
    "typical_p .95": ({"temperature": 1.0, "typical_p": 0.95}, lambda: [hf.TypicalLogitsWarper(0.95)]),
    "repetition": ({"repetition_penalty": 1.5}, lambda: [hf.RepetitionPenaltyLogitsProcessor(1.5)]),
    "repetition rewards": ({"repetition_penalty": 0.5}, lambda: [hf.RepetitionPenaltyLogitsProcessor(0.5)]),
    "1-grams": ({"no_repeat_ngram_size": 1}, lambda: [hf.NoRepeatNGramLogitsProcessor(1)]),
    "2-grams": ({"no_repeat_ngram_size": 2}, lambda: [hf.NoRepeatNGramLogitsProcessor(2)]),
    "3-grams": ({"no_repeat_ngram_size": 3}, lambda: [hf.NoRepeatNGramLogitsProcessor(3)]),
    "longer n-grams than tokens": ({"no_repeat_ngram_size": 40}, lambda: [hf.NoRepeatNGramLogitsProcessor(40)]),
    "bad words": (
        {"bad_words_ids": [[9], [11, 20], [5, 11, 21], [4, 22], [5, 23], list(range(30))], "eos_token_id": 1},
        lambda: [hf.NoBadWordsLogitsProcessor([[9], [11, 20], [5, 11, 21], [4, 22], [5, 23], list(range(30))], 1)],
    ),
    "EOS as a bad word": (
        {"bad_words_ids": [[9], [1]], "eos_token_id": 1},
        lambda: [hf.NoBadWordsLogitsProcessor([[9], [1]], 1)],
    ),
    "min_new_tokens": (
        {"min_new_tokens": len(GENERATED) + 1, "eos_token_id": [1, 2]},
        lambda: [hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), len(GENERATED) + 1, [1, 2])],
    ),
    "min_new_tokens reached": (
        {"min_new_tokens": len(GENERATED), "eos_token_id": [1, 2]},
        lambda: [hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), len(GENERATED), [1, 2])],
    ),
    "single biases": (
        {"logit_bias": {3: 2.5, 9: -4.0}},
        lambda: [hf.SequenceBiasLogitsProcessor({(3,): 2.5, (9,): -4.0})],
    ),
    "everything": (
        {
            "logit_bias": {3: 2.5, 9: -4.0},
            "repetition_penalty": 1.3,
            "no_repeat_ngram_size": 3,
            "bad_words_ids": [[9], [5, 11, 21]],
            "min_new_tokens": 20,
            "eos_token_id": [1, 2],
            "temperature": 0.8,
            "top_k": 40,
            "top_p": 0.9,
            "min_p": 0.01,
            "typical_p": 0.8,
        },
        lambda: [
            hf.SequenceBiasLogitsProcessor({(3,): 2.5, (9,): -4.0}),
            hf.RepetitionPenaltyLogitsProcessor(1.3),
            hf.NoRepeatNGramLogitsProcessor(3),
            hf.NoBadWordsLogitsProcessor([[9], [5, 11, 21]], 1),
            hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 20, [1, 2]),
            hf.TemperatureLogitsWarper(0.8),
            hf.TopKLogitsWarper(40),
            hf.TopPLogitsWarper(0.9),
            hf.MinPLogitsWarper(0.01),
            hf.TypicalLogitsWarper(0.8),
        ],
    ),
}


@pytest.mark.parametrize("vocab", [97, 1031])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case, dtype, vocab):
    overrides, make_processors = CASES[case]
    logits = rows(vocab, dtype=dtype)
    if dtype is torch.float16:  # no two alike: where transformers breaks a tie in a sort is nobody's promise
        logits = torch.stack(
            [(torch.randperm(vocab, generator=torch.Generator().manual_seed(i)) - 60.0) / 64 for i in range(6)]
        ).to(dtype)
        assert len(logits[0].unique()) == vocab
    assert_same(processed(logits, overrides), expected(logits, make_processors()))


@pytest.mark.parametrize("vocab", [97, 1031])
@pytest.mark.parametrize("k", [1, 3, 63, 64, 65, 255, 256, 400])
def test_top_k_keeps_ties_as_transformers_does(k, vocab):
    """Some rows have few equals at the k-th place, some hundreds: more than a shortlist holds."""
    logits = rows(vocab)
    for row, grid in enumerate((0.1, 0.5, 1.0, 2.0, 8.0)):
        logits[row] = (logits[row] / grid).round() * grid
    assert_same(processed(logits, {"temperature": 1.0, "top_k": k}), expected(logits, [hf.TopKLogitsWarper(k)]))


def nucleus(row, mass):
    """The definition, in words: the likeliest tokens, higher ids first among equals, until they have the mass."""
    probabilities = row.double().softmax(-1)
    kept, total = set(), 0.0
    for token in sorted(range(len(row)), key=lambda token: (-row[token].item(), -token)):
        if kept and total >= mass:
            break
        kept.add(token)
        total += probabilities[token].item()
    return kept


@pytest.mark.parametrize("vocab", [12, 97, 700])
@pytest.mark.parametrize("grid", [0.0, 0.5, 4.0])
def test_top_p_is_the_smallest_nucleus_even_among_equals(vocab, grid):
    """With a grid of 4 most tokens are equal, in bunches larger than what is looked at before sorting the row."""
    logits = rows(vocab)
    if grid:
        logits = (logits / grid).round() * grid
    for mass in (0.1, 0.5, 0.8, 0.97):
        kept = processed(logits, {"temperature": 1.0, "top_p": mass}) > -torch.inf
        for row, row_kept in zip(logits, kept, strict=True):
            assert set(row_kept.nonzero()[:, 0].tolist()) == nucleus(row, mass)


def test_top_p_of_equal_tokens():
    kept = processed(torch.zeros(1, 8), {"temperature": 1.0, "top_p": 0.5})[0]
    assert kept.isfinite().tolist() == [False] * 4 + [True] * 4


def test_presence_and_frequency_count_generated_tokens_only():
    logits = rows(97)
    bias = torch.zeros(97)
    for token in set(GENERATED):
        bias[token] -= 0.5 + 0.25 * GENERATED.count(token)
    assert 7 not in GENERATED  # in the prompt only: not penalised
    ours = processed(logits, {"presence_penalty": 0.5, "frequency_penalty": 0.25})
    torch.testing.assert_close(ours, (logits + bias).log_softmax(-1), rtol=1e-5, atol=2e-5)


def test_penalties_follow_the_bias():
    logits = rows(97)
    biased = logits.clone()
    biased[:, 5] += 3.0
    frequency = torch.zeros(97)
    for token in set(GENERATED):
        frequency[token] = 0.5 * GENERATED.count(token)
    penalised = hf.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([TOKENS] * len(logits)), biased.clone())
    ours = processed(logits, {"logit_bias": {5: 3.0}, "repetition_penalty": 1.7, "frequency_penalty": 0.5})
    torch.testing.assert_close(ours, (penalised - frequency).log_softmax(-1), rtol=1e-5, atol=2e-5)


def test_prompt_tokens_without_a_logit_are_no_hindrance():
    """A prompt may hold ids that only the embedding knows (a multimodal placeholder)."""
    logits = rows(97)
    for tokens in ([500, 5, 500, 7], [500]):
        ours = processed(logits, {"repetition_penalty": 1.5, "no_repeat_ngram_size": 1}, tokens, len(tokens))
        theirs = expected(
            logits, [hf.RepetitionPenaltyLogitsProcessor(1.5), hf.NoRepeatNGramLogitsProcessor(1)], tokens
        )
        assert_same(ours, theirs)


def test_a_logits_processor_comes_after_the_penalties_and_before_temperature():
    logits = rows(97)
    seen = []

    def halve(token_ids, row):
        seen.append((token_ids, row.clone()))
        row[4] = -math.inf
        return row / 2

    ours = processed(logits, {"logits_processor": halve, "repetition_penalty": 1.5, "temperature": 0.5})
    penalised = hf.RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([TOKENS] * len(logits)), logits.clone())
    theirs = penalised / 2 / 0.5
    theirs[:, 4] = -math.inf
    assert_same(ours, theirs.log_softmax(-1))
    assert [ids for ids, _ in seen] == [TOKENS] * len(logits)
    torch.testing.assert_close(torch.stack([row for _, row in seen]), penalised)


def test_stop_tokens_are_masked_with_eos():
    ours = processed(rows(97), {"min_new_tokens": 20, "eos_token_id": 1, "stop_token_ids": [4, 6], "temperature": 1.0})
    assert (ours == -torch.inf).nonzero()[:, 1].unique().tolist() == [1, 4, 6]
    ignoring = processed(rows(97), {"min_new_tokens": 20, "eos_token_id": 1, "ignore_eos": True, "stop_token_ids": [4]})
    assert (ignoring == -torch.inf).nonzero()[:, 1].unique().tolist() == [4]
