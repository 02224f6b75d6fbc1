"""The parameters of each slot as arrays, their noise, and the ways between host and device.

What a row needs is decided on the host, from these arrays, before anything is enqueued. Knows no logits.
"""

import enum
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chairlift.params import SamplingParams, fold_seed


class Feature(enum.IntFlag):
    """What a row needs beside the largest logit."""

    SAMPLE = enum.auto()
    TOP_K = enum.auto()
    TOP_P = enum.auto()
    MIN_P = enum.auto()
    TYPICAL_P = enum.auto()
    BIAS = enum.auto()
    PENALTY = enum.auto()
    BAN = enum.auto()  # tokens that are never allowed
    NO_STOP = enum.auto()  # stop tokens are not allowed yet
    TRANSCRIPT = enum.auto()  # its tokens are kept on the host: n-grams, words, a logits processor
    GRAMMAR = enum.auto()  # only what it says may follow
    LOGPROBS = enum.auto()
    RAW_LOGPROBS = enum.auto()


EDITS = Feature.BIAS | Feature.PENALTY | Feature.BAN | Feature.NO_STOP | Feature.TRANSCRIPT | Feature.GRAMMAR

_ROW = np.dtype(
    [
        ("features", np.int64),
        ("key", np.uint64),
        ("stops_from", np.int64),  # the first position at which a stop token may be sampled
        ("top_k", np.int64),
        ("top_logprobs", np.int64),
        ("temperature", np.float32),
        ("min_p", np.float32),  # as a logarithm
        ("top_p", np.float64),
        ("typical_p", np.float64),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
    ]
)
_FAR = 1 << 62  # further than any position, and still an int64
_LEAST = 1e-30  # float32 still divides by it


class SlotTable:
    """One record per slot."""

    def __init__(self, num_slots: int) -> None:
        self._rows = np.zeros(num_slots, _ROW)

    def seat(self, slot: int, num_prompt: int, params: SamplingParams, seed: int) -> Feature:
        """Write a slot's record; returns what its rows need."""
        features = features_of(params)
        self._rows[slot] = (
            features.value,
            fold_seed(seed),
            min(num_prompt + params.min_new_tokens, _FAR),
            min(params.top_k, _FAR),
            params.logprobs or 0,
            max(params.temperature, _LEAST),
            math.log(params.min_p) if params.min_p else -math.inf,
            params.top_p,
            params.typical_p,
            max(params.repetition_penalty, _LEAST),
            params.presence_penalty,
            params.frequency_penalty,
        )
        return features

    def rows(self, slots: Sequence[int], positions: NDArray[np.int64]) -> NDArray[Any]:
        """A copy of the records of these slots, with the features that matter at these positions."""
        rows = self._rows[slots]
        rows["features"][positions >= rows["stops_from"]] &= ~Feature.NO_STOP.value
        return rows


def features_of(params: SamplingParams) -> Feature:
    """What rows with these parameters need; a plain greedy row needs nothing."""
    asked = {
        Feature.SAMPLE: params.do_sample,
        Feature.TOP_K: params.do_sample and params.top_k > 0,
        Feature.TOP_P: params.do_sample and params.top_p < 1,
        Feature.MIN_P: params.do_sample and params.min_p > 0,
        Feature.TYPICAL_P: params.do_sample and params.typical_p < 1,
        Feature.BIAS: params.logit_bias,
        Feature.PENALTY: (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0),
        Feature.BAN: any(len(word) == 1 for word in params.bad_words_ids),
        Feature.NO_STOP: params.min_new_tokens and params.stop_ids,
        Feature.TRANSCRIPT: params.needs_transcript,
        Feature.GRAMMAR: params.grammar is not None,
        Feature.LOGPROBS: params.logprobs is not None,
        Feature.RAW_LOGPROBS: params.logprobs is not None and params.logprobs_mode == "raw",
    }
    features = Feature(0)
    for feature, wanted in asked.items():
        if wanted:
            features |= feature
    return features


def having(rows: NDArray[Any], feature: Feature) -> NDArray[np.intp]:
    """Indices of the rows that need (one of) these features."""
    return np.flatnonzero(rows["features"] & feature.value)


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) per row: a function of its key and position alone (SplitMix64, twice)."""
    bits = _mix(
        _mix(keys + np.uint64(0x9E3779B97F4A7C15)) + positions.astype(np.uint64) * np.uint64(0xD1342543DE82EF95)
    )
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def pick(tensor: Tensor, index: NDArray[np.intp]) -> Tensor:
    """`tensor[index]` for sorted distinct indices: the tensor itself when they are all of its rows."""
    if len(index) == len(tensor):
        return tensor
    return tensor.index_select(0, to_device(index, tensor.device))


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of an array's own; the array may change afterwards."""
    return torch.tensor(array, device=device)


class HostCopy:
    """Device tensors on their way to the host; on a GPU their transfer is enqueued at once and not waited for."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._done: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            self._tensors = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            ]
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> list[Tensor]:
        """The tensors, on the host."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensors
