"""A row's tokens and logprobs are the same bits alone and in any company, and after moving to another slot."""

import random
from functools import cache

import pytest
import torch

from chairlift.params import SamplingDefaults
from chairlift.sample import Sampler
from chairlift.sample import sampler as sampler_module

STEPS = 3

MIXED = [
    {},
    {"logprobs": True},
    {"logprobs": 3},
    {"temperature": 0.7, "logprobs": 2},
    {"temperature": 1e-6, "logprobs": True},
    {"temperature": 1, "logprobs": 5},
    {"temperature": 0.9, "top_k": 7, "logprobs": 5},
    {"temperature": 0.9, "top_k": 400},
    {"temperature": 0.9, "top_p": 0.8, "logprobs": 5},
    {"temperature": 4.0, "top_p": 0.95},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "logprobs": True},
    {"temperature": 1.1, "min_p": 0.1, "logprobs": 1},
    {"temperature": 1.1, "typical_p": 0.6, "logprobs": 4},
    {"repetition_penalty": 1.4, "logprobs": 2},
    {"repetition_penalty": 1.4, "temperature": 0.8, "logprobs": True},
    {"presence_penalty": 0.7, "logprobs": True},
    {"frequency_penalty": 1.5, "presence_penalty": -0.5, "temperature": 0.6, "top_p": 0.7, "logprobs": 3},
    {"no_repeat_ngram_size": 2, "logprobs": True},
    {"no_repeat_ngram_size": 1, "temperature": 1.0},
    {"bad_words_ids": [[3], [4, 5]], "logprobs": 2},
    {"bad_words_ids": [[1]], "temperature": 0.9, "logprobs": True},
    {"logit_bias": {5: 3.0, 6: -2.0}, "logprobs": True},
    {"logit_bias": {9: 1.0}, "repetition_penalty": 1.2, "temperature": 0.9, "top_k": 30, "logprobs": 2},
    {"min_new_tokens": 3, "eos_token_id": [2, 3], "logprobs": True},
    {"min_new_tokens": 2, "stop_token_ids": [8], "temperature": 1.2, "top_p": 0.6},
    {"logits_processor": lambda token_ids, logits: logits / (1 + len(token_ids) % 3), "logprobs": True},
    {"logits_processor": lambda token_ids, logits: logits * 0.5, "temperature": 0.8, "top_p": 0.9, "logprobs": 2},
    {"seed": -5, "logprobs": True},
    {"do_sample": True, "top_k": 1, "logprobs": 1},
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 1.0, "top_p": 0.0, "logprobs": True},
    {"temperature": 1.0, "typical_p": 0.2, "top_k": 50, "repetition_penalty": 0.8},
]


@cache
def requests(vocab):
    """(params, tokens so far, seed) of each row; every second one in raw mode."""
    modes = [SamplingDefaults(None, None, vocab_size=vocab, logprobs_mode=mode) for mode in ("processed", "raw")]
    pick = random.Random(3)
    return [
        (modes[i % 5 == 1].resolve(overrides), [pick.randrange(vocab) for _ in range(2 + i % 9)], 1000 * i - 7)
        for i, overrides in enumerate(MIXED)
    ]


@cache
def logits_of(row, step, vocab, dtype):
    generator = torch.Generator().manual_seed(100 * row + step)
    logits = torch.randn(1, vocab, generator=generator) * (1.0 + row % 4)
    return (logits.round(decimals=1) if row % 3 == 0 else logits).to(dtype)  # some with many equal entries


def run(members, vocab, dtype, *, moves=False):
    """What each member (an index into MIXED) gets in each step, when they run together."""
    everyone = requests(vocab)
    sampler, slots = Sampler(vocab, 64), {member: 63 - i for i, member in enumerate(members)}
    history = {member: list(everyone[member][1]) for member in members}
    for member in members:
        params, tokens, seed = everyone[member]
        sampler.seat(slots[member], tokens, len(tokens), params, seed)
    results = {member: [] for member in members}
    for step in range(STEPS):
        if moves and step:
            other = {slot: member for member, slot in slots.items()}
            if step == 2:
                sampler = Sampler(vocab, 64)
            for slot, member in zip(sorted(other), reversed(members), strict=True):
                params, tokens, seed = everyone[member]
                slots[member] = slot
                sampler.seat(slot, history[member], len(tokens), params, seed)
        logits = torch.cat([logits_of(member, step, vocab, dtype) for member in members])
        sampled = sampler.sample(logits, [slots[member] for member in members], [len(history[m]) for m in members])
        host = sampled.to_host()
        assert not host.faults
        for row, member in enumerate(members):
            history[member].append(host.tokens[row])
            asked = everyone[member][0].logprobs is not None
            results[member].append(
                (host.tokens[row], host.logprobs[row] if asked else None, list(host.top_logprobs.get(row, {}).items()))
            )
    return results


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(97, torch.float32), (97, torch.float16), (1031, torch.bfloat16)],
)
def test_alone_and_among_31_others(vocab, dtype):
    together = run(range(len(MIXED)), vocab, dtype)
    assert len(together) == 32
    for member in range(len(MIXED)):
        assert run([member], vocab, dtype) == {member: together[member]}, MIXED[member]


def test_alone_and_together_with_a_large_vocabulary():
    """Large enough for PyTorch to spread a single row over threads, and for the rows to be taken in parts."""
    members = [0, 2, 5, 8, 10, 12, 16, 18, 26]
    together = run(members, 70000, torch.float32)
    for member in members:
        assert run([member], 70000, torch.float32) == {member: together[member]}, MIXED[member]


def test_in_any_order_and_number():
    together = run(range(len(MIXED)), 1031, torch.bfloat16)
    order = random.Random(1)
    for size in (2, 5, 17, 32):
        members = order.sample(range(len(MIXED)), size)
        assert run(members, 1031, torch.bfloat16) == {member: together[member] for member in members}


def test_however_the_rows_are_split_and_threaded(monkeypatch):
    together = run(range(len(MIXED)), 6000, torch.float32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert run(range(len(MIXED)), 6000, torch.float32) == together
    finally:
        torch.set_num_threads(threads)
    for part in (1, 13000, 1 << 24):
        monkeypatch.setattr(sampler_module, "_CPU_PART", part)
        assert run(range(len(MIXED)), 6000, torch.float32) == together


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_seated_again_in_another_slot(dtype):
    """A preemption: the sequence comes back with its prompt and what it has generated, wherever there is room."""
    stays = run(range(len(MIXED)), 503, dtype)
    assert run(range(len(MIXED)), 503, dtype, moves=True) == stays
