"""The draw and the filters at their edges, on rows whose weights are known exactly."""

import numpy as np
import pytest
import torch

from chairlift.sample import filters


def uniform(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("vocab", [1, 7, 128, 256, 300])
def test_equal_weights_share_the_interval(vocab):
    """Token i has [i / vocab, (i + 1) / vocab), in every chunk; powers of two so that the edges are exact."""
    z = torch.full((1, vocab), 0.0)
    size = 1 << vocab.bit_length() if vocab & (vocab - 1) else vocab
    for token in range(vocab):
        inside = (token + 0.5) / vocab
        assert filters.draw(z, uniform(inside)).item() == token
        if size == vocab:
            assert filters.draw(z, uniform(token / vocab)).item() == token
    assert filters.draw(z, uniform(1 - 2.0**-53)).item() == vocab - 1


def test_removed_tokens_are_never_drawn():
    z = torch.full((1, 400), -torch.inf)
    z[0, [5, 130, 383]] = 0.0
    drawn = [filters.draw(z, uniform(u)).item() for u in (0.0, 0.333, 0.334, 0.666, 0.667, 1 - 2.0**-53)]
    assert drawn == [5, 5, 130, 130, 383, 383]


def test_a_token_far_below_the_largest_has_no_weight():
    assert filters.weights(torch.tensor([0.0, -1000.0, -torch.inf])).tolist() == [1 << 40, 0, 0]


@pytest.mark.parametrize("vocab", [7, 300])
def test_rows_of_nan_hurt_nobody(vocab):
    z = torch.zeros(3, vocab)
    z[1] = torch.nan
    for keep, values in (
        (filters.top_k, np.array([3, 3, 300])),
        (filters.top_p, np.array([0.5, 0.5, 0.9])),
        (filters.min_p, np.array([-1, -1, -2], np.float32)),
        (filters.typical_p, np.array([0.5, 0.5, 0.9])),
    ):
        keep(z, values)
    assert filters.draw(z, uniform(0.0, 0.0, 0.9)).tolist()[::2] == filters.draw(z[::2], uniform(0.0, 0.9)).tolist()


def test_typical_moves_the_largest_that_stays_to_0():
    z = filters.centred(torch.tensor([[4.0] + [0.0] * 300]), torch.ones(1))
    filters.typical_p(z, np.array([0.3]))
    assert z[0, 0] == -torch.inf
    assert z.max() == 0
