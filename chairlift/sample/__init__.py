"""From logits to tokens: each row by its own parameters, and to the same bits whatever the other rows are.

Knows no request, no model and no schedule: only slots, their parameters, and rows of logits.
"""

from chairlift.sample.sampler import HostTokens, SampledTokens, Sampler, TokenLogprobs

__all__ = ["HostTokens", "SampledTokens", "Sampler", "TokenLogprobs"]
