"""Drawn tokens follow the processed distribution.

The seeds are fixed, so a test passes or fails for good; by chance a right sampler would fail one in 10 000 times.
"""

import math

import numpy as np
import pytest
import torch

from chairlift.params import SamplingDefaults
from chairlift.sample import Sampler
from chairlift.sample.tensors import uniforms

NUM_DRAWS = 10_000
Z_1_IN_10000 = 3.719  # of the standard normal distribution


def chi_square_limit(freedom):
    """The value that chi-square exceeds with probability 1e-4 (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + Z_1_IN_10000 * math.sqrt(2 / (9 * freedom))) ** 3


def chi_square(counts, probabilities):
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities[probabilities > 0] * counts.sum()
    return float(((counts[probabilities > 0] - expected) ** 2 / expected).sum())


def draws(logits, overrides, by):
    """Counts of each token over many draws, with one seed at many positions or with many seeds at one position."""
    vocab = len(logits)
    params = SamplingDefaults(None, None, vocab_size=vocab).resolve({"temperature": 1.0, **overrides})
    sampler = Sampler(vocab, NUM_DRAWS)
    for slot in range(NUM_DRAWS if by == "seed" else 1):
        sampler.seat(slot, [0], 1, params, slot)
    slots = list(range(NUM_DRAWS)) if by == "seed" else [0] * NUM_DRAWS
    positions = [1] * NUM_DRAWS if by == "seed" else list(range(1, NUM_DRAWS + 1))
    host = sampler.sample(logits.expand(NUM_DRAWS, -1), slots, positions).to_host()
    return np.bincount(host.tokens, minlength=vocab)


@pytest.mark.parametrize("by", ["seed", "position"])
@pytest.mark.parametrize(
    "overrides",
    [{}, {"temperature": 0.6}, {"top_k": 10}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9}],
    ids=str,
)
@pytest.mark.parametrize("vocab", [29, 200])
def test_draws_follow_the_distribution(vocab, overrides, by):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 1.2
    z = logits.double() / overrides.get("temperature", 1.0)
    if "top_k" in overrides:
        z[z < z.sort(descending=True).values[overrides["top_k"] - 1]] = -torch.inf
    if "top_p" in overrides:
        order = z.argsort(descending=True)
        probabilities = z.softmax(-1)[order]
        z[order[(probabilities.cumsum(-1) - probabilities) >= overrides["top_p"]]] = -torch.inf
    if "min_p" in overrides:
        z[z < z.max() + math.log(overrides["min_p"])] = -torch.inf
    probabilities = z.softmax(-1).numpy()
    counts = draws(logits, overrides, by)
    # Bunch the rare ones, for which chi-square is no good approximation.
    rare = (probabilities * NUM_DRAWS < 5) & (probabilities > 0)
    counts = np.append(counts[~rare], counts[rare].sum())
    probabilities = np.append(probabilities[~rare], probabilities[rare].sum())
    assert chi_square(counts, probabilities) < chi_square_limit((probabilities > 0).sum() - 1)


def test_a_wrong_distribution_is_noticed():
    logits = torch.randn(29, generator=torch.Generator().manual_seed(29)) * 1.2
    off_by_little = (logits.double() / 1.1).softmax(-1).numpy()
    assert chi_square(draws(logits, {}, "seed"), off_by_little) > chi_square_limit(28)


@pytest.mark.parametrize("seeds", ["0, 1, 2 ...", "one"])
def test_the_noise_is_uniform_and_without_memory(seeds):
    count = 100_000
    keys = np.arange(count, dtype=np.uint64) if seeds != "one" else np.full(count, 5, np.uint64)
    positions = np.zeros(count, np.int64) if seeds != "one" else np.arange(count)
    noise = uniforms(keys, positions)
    assert noise.min() >= 0
    assert noise.max() < 1
    limit = chi_square_limit(255)
    assert chi_square(np.bincount((noise * 256).astype(int), minlength=256), np.full(256, 1 / 256)) < limit
    for lag in (1, 2, 7):
        pairs = (noise[:-lag] * 16).astype(int) * 16 + (noise[lag:] * 16).astype(int)
        assert chi_square(np.bincount(pairs, minlength=256), np.full(256, 1 / 256)) < limit


def test_the_noise_of_a_pair_does_not_depend_on_its_company():
    keys, positions = np.arange(50, dtype=np.uint64) ** 3, np.arange(50)
    assert [uniforms(keys[i : i + 1], positions[i : i + 1])[0] for i in range(50)] == uniforms(keys, positions).tolist()


def test_neither_end_of_the_vocabulary_is_out_of_reach():
    counts = draws(torch.zeros(257), {}, "seed")
    assert counts.min() > 0
