"""Greedy and drawn tokens, logprobs, faults and state, row by row."""

import gc
import math
import weakref

import pytest
import torch

from chairlift.errors import ChairliftError
from chairlift.kernels.native import native
from chairlift.params import SamplingDefaults
from chairlift.sample import Sampler, filters
from chairlift.sample import sampler as sampler_module

VOCAB = 97


def params(vocab=VOCAB, logprobs_mode="processed", **overrides):
    return SamplingDefaults(None, None, vocab_size=vocab, logprobs_mode=logprobs_mode).resolve(overrides)


def seated(requests, vocab=VOCAB, tokens=(5, 6, 7)):
    sampler = Sampler(vocab, len(requests))
    for slot, request in enumerate(requests):
        sampler.seat(slot, tokens, len(tokens), request, slot)
    return sampler


def sample(logits, requests, tokens=(5, 6, 7)):
    sampler = seated(requests, logits.shape[1], tokens)
    return sampler.sample(logits, list(range(len(requests))), [len(tokens)] * len(requests)).to_host()


def rows(num_rows, vocab=VOCAB, dtype=torch.float32, seed=0):
    return (torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


# --- greedy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab", [16, 97, 5003])
def test_greedy_is_the_first_of_the_largest(dtype, vocab):
    logits = rows(9, vocab, dtype)
    logits[:, [3, 11]] = logits.amax() + 1
    before = logits.clone()
    host = sample(logits, [params(vocab)] * 9)
    assert host.tokens == [3] * 9
    assert host.logprobs is None
    assert host.top_logprobs == {}
    assert host.faults == {}
    assert torch.equal(logits, before)


def test_rows_whose_best_is_known_give_the_same():
    logits = rows(4)
    logits[1, 5], logits[2] = torch.nan, -torch.inf
    known = logits.argmax(-1).numpy(), logits.max(-1).values.numpy()
    for requests in ([params()] * 4, [params(), params(), params(), params(logit_bias={3: 100.0})]):
        args = [0, 1, 2, 3], [3] * 4
        with_best = seated(requests).sample(logits, *args, known).to_host()
        without = seated(requests).sample(logits, *args).to_host()
        assert with_best.faults.keys() == without.faults.keys() == {1, 2}
        assert [with_best.tokens[i] for i in (0, 3)] == [without.tokens[i] for i in (0, 3)]
    assert with_best.tokens[3] == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_change_nothing(dtype):
    vocab, count = 5003, 24
    logits = rows(count, vocab, dtype)
    logits[::3] = logits[::3].round()  # ties, also at the edge of the shortlist
    logits[4, 9], logits[5], logits[6, 20:], logits[7] = torch.nan, -torch.inf, -torch.inf, 1.0
    requests = [
        params(vocab, temperature=0.7, top_k=(1, 20, 50, 64, 200, 0)[i % 6], seed=i, logprobs=3) for i in range(count)
    ]
    results = []
    for kernels in (None, native()):
        sampler = Sampler(vocab, count, "cpu", kernels)
        for slot, request in enumerate(requests):
            sampler.seat(slot, (5, 6, 7), 3, request, slot)
        results.append(sampler.sample(logits, list(range(count)), [3] * count).to_host())
    expected, got = results
    assert got.faults.keys() == expected.faults.keys() == {4, 5}
    for row in set(range(count)) - {4, 5}:
        assert got.tokens[row] == expected.tokens[row]
        assert math.isclose(got.logprobs[row], expected.logprobs[row], rel_tol=1e-5)  # which equals go beyond the edge


def test_temperatures_of_all_kinds_in_one_batch():
    logits = rows(6)
    requests = [
        params(temperature=0),
        params(temperature=1e-6, logprobs=True),
        params(temperature=1e-60, logprobs=True),
        params(temperature=1),
        params(temperature=1.0),
        params(temperature=1e30, logprobs=True),
    ]
    host = sample(logits, requests)
    assert host.faults == {}
    assert host.tokens[:3] == logits[:3].argmax(-1).tolist()
    assert host.logprobs[1:3] == [0.0, 0.0]
    assert host.logprobs[5] == pytest.approx(-math.log(VOCAB))


def test_values_at_the_edges_of_float32_and_beyond_int64():
    logits = rows(8)
    requests = [
        params(temperature=3e38, bad_words_ids=[[3]]),
        params(temperature=1e-300, repetition_penalty=3e38),
        params(temperature=1.0, repetition_penalty=1e-300, logit_bias={5: -3e38}),
        params(temperature=1.0, logit_bias={9: 3e38, 8: -3e38}),
        params(temperature=1.0, top_k=2**80),
        params(min_new_tokens=2**80, stop_token_ids=[1]),
        params(no_repeat_ngram_size=2**80),
        params(temperature=1.0, min_p=1e-320, top_p=1e-320, typical_p=1e-320),
    ]
    host = sample(logits, requests)
    assert sorted(host.faults) == []
    assert host.tokens[3] == 9
    assert host.tokens[7] == logits[7].argmax().item()


def test_off_is_off():
    logits = rows(4)
    base = {"temperature": 0.9, "logprobs": VOCAB}
    requests = [
        params(**base),
        params(**base, top_k=0),
        params(**base, top_p=1.0),
        params(**base, min_p=0, typical_p=1),
    ]
    sampler = Sampler(VOCAB, 4)
    for slot, request in enumerate(requests):
        sampler.seat(slot, [1], 1, request, 7)
    host = sampler.sample(logits[:1].expand(4, -1), [0, 1, 2, 3], [1] * 4).to_host()
    assert len(set(host.tokens)) == 1
    assert len(host.top_logprobs[0]) == VOCAB
    assert all(host.top_logprobs[row] == host.top_logprobs[0] for row in range(4))


def test_the_random_generators_of_others_are_left_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    sample(rows(3), [params(temperature=1.0, top_p=0.9), params(seed=3), params(typical_p=0.5)])
    assert torch.equal(torch.get_rng_state(), state)


# --- seeds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**64 - 1, 2**64, -(2**200)])
def test_a_seed_decides(seed):
    logits = rows(1).expand(40, -1)
    positions = list(range(3, 43))
    drawn = []
    for _ in range(2):
        sampler = Sampler(VOCAB, 2)
        sampler.seat(1, [5, 6, 7], 3, params(temperature=1.5), seed)
        drawn.append(sampler.sample(logits, [1] * 40, positions).to_host().tokens)
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 5  # the position matters


def test_seeds_differ():
    answers = set()
    for seed in [*range(20), -1, -2, 2**64, 2**64 + 1]:
        sampler = Sampler(VOCAB, 1)
        sampler.seat(0, [5], 1, params(temperature=1.5), seed)
        answers.add(tuple(sampler.sample(rows(1).expand(20, -1), [0] * 20, list(range(20))).to_host().tokens))
    assert len(answers) == 24


def test_a_shortlist_changes_no_token(monkeypatch):
    """Rows with a small top_k are drawn among few candidates: the same tokens as among all."""
    vocab = 1031
    logits = rows(200, vocab)
    requests = [params(vocab, temperature=2.0, top_k=2 + row, top_p=(0.9, 1.0)[row % 2]) for row in range(200)]
    drawn = sample(logits, requests).tokens
    monkeypatch.setattr(filters, "_SHORTLISTS", ())
    assert sample(logits, requests).tokens == drawn


# --- logprobs -------------------------------------------------------------------------------------------------------


def test_logprobs_of_those_who_ask():
    logits = rows(5)
    requests = [params(), params(logprobs=True), params(logprobs=2), params(logprobs=4), params(temperature=1.0)]
    host = sample(logits, requests)
    dense = logits.log_softmax(-1)
    assert [math.isnan(logprob) for logprob in host.logprobs] == [True, False, False, False, True]
    for row in (1, 2, 3):
        assert host.logprobs[row] == dense[row, host.tokens[row]].item()
    assert sorted(host.top_logprobs) == [2, 3]
    assert list(host.top_logprobs[3].values()) == dense[3].topk(4).values.tolist()
    assert list(host.top_logprobs[3]) == dense[3].topk(4).indices.tolist()


def test_raw_logprobs_are_those_of_the_model():
    logits = rows(3)
    changes = {"temperature": 0.5, "top_k": 3, "repetition_penalty": 2.0, "logit_bias": {9: 5.0}}
    host = sample(
        logits,
        [
            params(logprobs_mode="raw", logprobs=5, **changes),
            params(logprobs_mode="processed", logprobs=5, **changes),
            params(logprobs_mode="raw", logprobs=5),
        ],
    )
    dense = logits.log_softmax(-1)
    for row in (0, 2):
        assert host.logprobs[row] == dense[row, host.tokens[row]].item()
        assert list(host.top_logprobs[row].values()) == dense[row].topk(5).values.tolist()
    assert len(host.top_logprobs[1]) == 3  # what was filtered out has no logprob
    assert sum(math.exp(value) for value in host.top_logprobs[1].values()) == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompt_logprobs(dtype):
    logits = rows(150, dtype=dtype)
    targets = torch.arange(150) % VOCAB
    dense = logits.float().log_softmax(-1)
    for num_top in (0, 3):
        parts = Sampler(VOCAB, 1).prompt_logprobs(logits, targets, num_top)
        scored = [each for part in parts for each in part.to_host()]
        assert [logprob for logprob, _ in scored] == dense.gather(1, targets[:, None])[:, 0].tolist()
        assert [list(top) for _, top in scored] == dense.topk(num_top).indices.tolist()


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"logprobs": 2},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_p": 0.5},
        {"typical_p": 0.4},
        {"top_k": 4},
        {"repetition_penalty": 1.5},
        {"min_p": 0.2, "no_repeat_ngram_size": 2},
    ],
    ids=str,
)
def test_a_row_with_nan_fails_alone(kwargs):
    logits = rows(4)
    good = sample(logits, [params(**kwargs)] * 4)
    broken = logits.clone()
    broken[1, 50] = math.nan
    broken[3] = math.nan
    host = sample(broken, [params(**kwargs)] * 4)
    assert sorted(host.faults) == [1, 3]
    assert all(isinstance(fault, ChairliftError) for fault in host.faults.values())
    for row in (0, 2):
        assert host.tokens[row] == good.tokens[row]
        assert host.logprobs is None or host.logprobs[row] == good.logprobs[row]


def test_a_row_without_a_token_left_fails_alone():
    everything = [[token] for token in range(VOCAB)]
    host = sample(
        rows(4),
        [params(), params(bad_words_ids=everything), params(bad_words_ids=everything, temperature=1.0), params(seed=1)],
    )
    assert sorted(host.faults) == [1, 2]


def test_infinite_logits():
    """A greedy request takes the infinite one, as `generate` does; nothing can be drawn from such a row."""
    logits = rows(2)
    logits[:, 40] = math.inf
    host = sample(logits, [params(), params(temperature=1.0)])
    assert host.tokens[0] == 40
    assert sorted(host.faults) == [1]


def raises(token_ids, logits):
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("processor", "error"),
    [
        (raises, KeyError),
        (lambda ids, logits: logits[:-1], ValueError),
        (lambda ids, logits: logits[None], ValueError),
        (lambda ids, logits: None, TypeError),
        (lambda ids, logits: logits.tolist(), TypeError),
        (lambda ids, logits: logits * math.nan, ChairliftError),
        (lambda ids, logits: logits.fill_(-math.inf), ChairliftError),
    ],
)
def test_a_logits_processor_at_fault_ends_its_own_row(processor, error):
    logits = rows(3)
    host = sample(logits, [params(), params(logits_processor=processor), params(logits_processor=lambda i, row: row)])
    assert list(host.faults) == [1]
    assert isinstance(host.faults[1], error)
    assert [host.tokens[0], host.tokens[2]] == logits.argmax(-1)[[0, 2]].tolist()


def test_a_logits_processor_may_answer_in_any_float_type_and_keep_what_it_got():
    kept = []

    def processor(token_ids, logits):
        kept.append(logits)
        token_ids.clear()
        return logits.to(torch.float16)

    logits = rows(2)
    sampler = seated([params(logits_processor=processor, temperature=0.5, logprobs=True)] * 2)
    for position in (3, 4):
        assert sampler.sample(logits, [0, 1], [position, position]).to_host().faults == {}
    assert len(kept) == 4
    assert torch.equal(torch.stack(kept[:2]), logits)


def test_faults_are_found_in_whatever_part_of_the_batch(monkeypatch):
    monkeypatch.setattr(sampler_module, "_CPU_PART", 1)
    logits = rows(5)
    logits[3, 2] = math.nan
    host = sample(logits, [params()] * 4 + [params(logits_processor=raises)])
    assert sorted(host.faults) == [3, 4]
    assert isinstance(host.faults[4], KeyError)
    assert host.tokens[:3] == logits[:3].argmax(-1).tolist()


# --- state ----------------------------------------------------------------------------------------------------------


def test_logit_bias():
    logits = rows(3)
    host = sample(logits, [params(logit_bias={9: 100.0}), params(logit_bias={96: 100, 0: 99.0}), params()])
    assert host.tokens == [9, 96, logits[2].argmax().item()]


def test_sampled_tokens_are_penalised_and_banned_in_later_steps():
    """Flat logits but for a slope, so that each step's choice is the first token that is not held back yet."""
    logits = -torch.arange(VOCAB).float()[None].expand(4, -1) * 0.01 + 1
    requests = [
        params(frequency_penalty=1.0),
        params(no_repeat_ngram_size=1),
        params(repetition_penalty=1e6),
        params(bad_words_ids=[[0, 0], [0, 1, 0], [1, 0]]),
    ]
    sampler = seated(requests, tokens=(5,))
    steps = [sampler.sample(logits, [0, 1, 2, 3], [1 + step] * 4).to_host().tokens for step in range(7)]
    assert [list(answer) for answer in zip(*steps, strict=True)] == [
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 3, 4, 6, 7],
        [0, 1, 2, 3, 4, 6, 7],
        [0, 1, 1, 1, 1, 1, 1],
    ]


def test_a_slot_forgets_its_former_owner():
    logits = rows(1)
    busy = params(
        repetition_penalty=3.0, logit_bias={3: 50.0}, bad_words_ids=[[4], [5, 6]], min_new_tokens=9, stop_token_ids=[7],
        no_repeat_ngram_size=1, temperature=0.8, top_k=5, logprobs=3,
    )  # fmt: skip
    sampler = seated([busy])
    for position in (3, 4, 5):
        sampler.sample(logits, [0], [position])
    sampler.seat(0, [8, 9], 2, params(), 0)
    host = sampler.sample(logits, [0], [2]).to_host()
    assert host.tokens == [logits.argmax().item()]
    assert host.logprobs is None
    penalised = params(repetition_penalty=1.2, frequency_penalty=0.3, logprobs=VOCAB)
    sampler.seat(0, [8, 9], 2, penalised, 0)
    fresh = seated([penalised], tokens=(8, 9))
    for position in range(2, 9):
        assert sampler.sample(logits, [0], [position]).to_host() == fresh.sample(logits, [0], [position]).to_host()


def test_what_a_former_owner_brought_along_is_let_go():
    class Processor:
        def __call__(self, token_ids, logits):
            return logits

    processor = Processor()
    held = weakref.ref(processor)
    sampler = seated([params(logits_processor=processor)])
    del processor
    assert held() is not None
    sampler.seat(0, [8, 9], 2, params(), 0)
    gc.collect()
    assert held() is None


def test_only_penalised_slots_have_penalty_state():
    sampler = Sampler(VOCAB, 1000)
    for slot in range(1000):
        sampler.seat(slot, [1, 2], 2, params(repetition_penalty=1.5), 0)
        sampler.seat(slot, [1, 2], 2, params(), 0)
    assert len(sampler._seen._ids) < 10


def test_min_new_tokens_ends_with_the_position():
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 20] = 5.0, 4.0
    sampler = seated([params(min_new_tokens=2, eos_token_id=7)])
    assert [sampler.sample(logits, [0], [position]).to_host().tokens for position in (3, 4, 5)] == [[20], [20], [7]]


def test_prompts_longer_than_any_before_them_grow_the_state():
    requests = [params(repetition_penalty=1.5, frequency_penalty=0.5, logprobs=VOCAB)] * 20
    sampler = Sampler(VOCAB, 20)
    for slot, request in enumerate(requests):
        sampler.seat(slot, list(range(4 * slot + 1)), 1, request, slot)
    logits = rows(1).expand(20, -1)
    host = sampler.sample(logits, list(range(20)), [4 * slot + 1 for slot in range(20)]).to_host()
    for slot in range(20):
        alone = Sampler(VOCAB, 1)
        alone.seat(0, list(range(4 * slot + 1)), 1, requests[slot], slot)
        expected = alone.sample(logits[:1], [0], [4 * slot + 1]).to_host()
        assert host.top_logprobs[slot] == expected.top_logprobs[0]
