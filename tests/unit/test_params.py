"""What a request's arguments and the generation configs resolve to, and what is refused."""

import pickle

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from chairlift.errors import InvalidRequestError
from chairlift.params import SAMPLING_ARGUMENTS, SamplingDefaults, SamplingParams, child_seed, fold_seed

VOCAB = 97


def resolve(overrides=None, config=None, model=None, **kwargs):
    return SamplingDefaults(config, model, vocab_size=VOCAB, **kwargs).resolve(overrides or {})


def test_nothing_said_is_greedy_without_limits():
    assert resolve() == SamplingParams()
    assert resolve({}, GenerationConfig(), GenerationConfig()) == SamplingParams()
    assert not resolve().needs_host_tokens


# --- whether to sample ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "config", "samples"),
    [
        ({}, {}, False),
        ({}, {"do_sample": True}, True),
        ({}, {"do_sample": False}, False),
        ({}, {"temperature": 0.7}, False),  # as in `generate`: temperature alone does not turn sampling on
        ({"do_sample": True}, {}, True),
        ({"do_sample": True}, {"do_sample": False}, True),
        ({"do_sample": False}, {"do_sample": True}, False),
        ({"do_sample": False, "temperature": 1.0}, {}, False),
        ({"temperature": 0.5}, {}, True),
        ({"temperature": 0.5}, {"do_sample": False}, True),
        ({"temperature": 0}, {"do_sample": True}, False),
        ({"temperature": 0.0, "do_sample": True}, {}, False),
        ({"temperature": 0, "top_p": 0.5, "seed": 1}, {}, False),
        ({"top_k": 5}, {}, True),
        ({"top_p": 0.5}, {}, True),
        ({"min_p": 0.1}, {}, True),
        ({"typical_p": 0.5}, {}, True),
        ({"seed": 0}, {}, True),
        ({"top_k": 0}, {}, False),  # "off" asks for nothing
        ({"top_k": None, "top_p": 1.0, "min_p": 0, "seed": None}, {}, False),
        ({"top_k": 5, "seed": 3}, {"do_sample": False}, False),
        ({"presence_penalty": 1.0, "repetition_penalty": 2}, {}, False),
    ],
)
def test_do_sample(request_, config, samples):
    assert resolve(request_, GenerationConfig(**config)).do_sample is samples


@pytest.mark.parametrize("request_", [{"temperature": 0}, {"temperature": 0.0}, {"do_sample": False}])
def test_greedy_drops_what_only_sampling_uses(request_):
    config = GenerationConfig(do_sample=True, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, typical_p=0.5)
    assert resolve(request_, config) == SamplingParams()


def test_the_request_goes_before_the_config():
    config = GenerationConfig(do_sample=True, temperature=0.5, top_k=3, top_p=0.5, max_new_tokens=9)
    params = resolve({"top_p": 0.25, "max_new_tokens": 4}, config)
    assert (params.temperature, params.top_k, params.top_p, params.max_new_tokens) == (0.5, 3, 0.25, 4)
    assert resolve({"top_k": None}, config).top_k == 0
    assert resolve({"top_k": 0, "top_p": 1.0}, config) == resolve(
        {}, GenerationConfig(do_sample=True, temperature=0.5, max_new_tokens=9)
    )
    assert resolve({"temperature": None, "max_new_tokens": None}, config) == resolve({}, config)


def test_without_a_config_the_models_own_is_the_default():
    own = GenerationConfig(do_sample=True, temperature=0.6, top_k=20, eos_token_id=5)
    assert resolve({}, None, own).top_k == 20
    assert resolve({}, GenerationConfig(), own) == SamplingParams(eos_token_ids=frozenset({5}))


# --- end of sequence ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "config", "own", "expected"),
    [
        (None, None, None, set()),
        (None, None, 5, {5}),
        (None, None, [5, 6], {5, 6}),
        (None, 7, 5, {7}),
        (8, 7, 5, {8}),
        ([8, 9], 7, 5, {8, 9}),
        (-1, 7, 5, set()),
        ([-1], 7, 5, set()),
        ([], 7, 5, set()),
        (None, -1, 5, set()),
        (np.int64(8), 7, 5, {8}),
        (torch.tensor(8), 7, 5, {8}),
        (torch.tensor([8, 9]), 7, 5, {8, 9}),
        (None, None, 50256, set()),  # a tiny model with the config of a large one: can never come up
        (None, [50256, 3], None, {3}),
    ],
)
def test_eos(request_, config, own, expected):
    params = resolve(
        {"eos_token_id": request_}, GenerationConfig(eos_token_id=config), GenerationConfig(eos_token_id=own)
    )
    assert params.eos_token_ids == expected
    assert params.stop_ids == expected


def test_stop_ids():
    own = GenerationConfig(eos_token_id=[5])
    assert resolve({"stop_token_ids": [1, 2]}, None, own).stop_ids == {1, 2, 5}
    assert resolve({"stop_token_ids": [1], "ignore_eos": True}, None, own).stop_ids == {1}
    assert resolve({"stop_token_ids": 1, "ignore_eos": False}, None, own).stop_ids == {1, 5}


# --- lengths --------------------------------------------------------------------------------------------------------


def test_max_length_counts_the_prompt():
    params = resolve({}, GenerationConfig(max_length=10, min_length=6))
    assert params.for_prompt(4).max_new_tokens == 6
    assert params.for_prompt(4).min_new_tokens == 2
    assert params.for_prompt(8).min_new_tokens == 0
    with pytest.raises(InvalidRequestError, match=r"max_length=10 leaves no room after a prompt of 10"):
        params.for_prompt(10)


def test_new_tokens_go_before_lengths():
    config = GenerationConfig(max_length=10, min_length=6)
    for params in (
        resolve({"max_new_tokens": 3, "min_new_tokens": 1}, config),
        resolve({}, GenerationConfig(max_length=10, max_new_tokens=3, min_length=6, min_new_tokens=1)),
    ):
        assert params.for_prompt(50) is params
        assert (params.max_new_tokens, params.min_new_tokens) == (3, 1)
    assert resolve({"max_new_tokens": 0}).max_new_tokens == 0


# --- logprobs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("value", "expected"), [(None, None), (False, None), (True, 0), (0, 0), (1, 1), (VOCAB, VOCAB), (np.int32(2), 2)]
)
def test_logprobs(name, value, expected):
    assert getattr(resolve({name: value}), name) == expected


def test_default_logprobs():
    assert resolve({}, default_logprobs=True, logprobs_mode="raw").logprobs == 0
    assert resolve({}, default_logprobs=True, logprobs_mode="raw").logprobs_mode == "raw"
    assert resolve({"logprobs": False}, default_logprobs=True).logprobs is None
    assert resolve({"logprobs": 3}, default_logprobs=True).logprobs == 3


def test_true_and_one_are_not_the_same():
    defaults = SamplingDefaults(None, None, vocab_size=VOCAB)
    assert [defaults.resolve({"logprobs": value}).logprobs for value in (True, 1, True, 1)] == [0, 1, 0, 1]


# --- lists ----------------------------------------------------------------------------------------------------------


def test_bad_words():
    params = resolve({"bad_words_ids": [[1], [2, 3], (4,)]}, None, GenerationConfig(eos_token_id=[4]))
    assert params.bad_words_ids == ((1,), (2, 3))  # as in `generate`, EOS alone is no bad word
    assert params.needs_host_tokens
    assert not resolve({"bad_words_ids": [[1]]}).needs_host_tokens
    assert resolve({"bad_words_ids": []}, GenerationConfig(bad_words_ids=[[1]])).bad_words_ids == ()


def test_suppressed_tokens_of_a_config_are_banned_with_the_bad_words():
    config = GenerationConfig(suppress_tokens=[9, 8], bad_words_ids=[[1]])
    assert resolve({}, config).bad_words_ids == ((1,), (8,), (9,))
    assert resolve({"bad_words_ids": [[2]]}, config).bad_words_ids == ((2,), (8,), (9,))


def test_logit_bias_is_sorted():
    assert resolve({"logit_bias": {7: 1, np.int64(3): -2.5}}).logit_bias == ((3, -2.5), (7, 1.0))


def test_stop_strings():
    assert resolve({"stop_strings": "end"}).stop_strings == ("end",)
    assert resolve({"stop_strings": ["a", "b"]}).stop_strings == ("a", "b")
    assert resolve({}, GenerationConfig(stop_strings="x")).stop_strings == ("x",)


@pytest.mark.parametrize("overrides", [{"no_repeat_ngram_size": 2}, {"logits_processor": lambda ids, logits: logits}])
def test_needs_host_tokens(overrides):
    assert resolve(overrides).needs_host_tokens


# --- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("top_k", -1),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", 1.5),
        ("typical_p", 0),
        ("typical_p", 1.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("frequency_penalty", float("inf")),
        ("no_repeat_ngram_size", -1),
        ("logit_bias", {999999: 1}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {1: float("nan")}),
        ("bad_words_ids", [[]]),
        ("bad_words_ids", [[VOCAB]]),
        ("min_new_tokens", -1),
        ("max_new_tokens", -1),
        ("eos_token_id", VOCAB),
        ("eos_token_id", [1, -2]),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", -1),
        ("stop_strings", ""),
        ("stop_strings", ["a", ""]),
        ("num_return_sequences", 0),
        ("logprobs", -1),
        ("logprobs", VOCAB + 1),
        ("prompt_logprobs", -1),
    ],
)
def test_out_of_range(name, value):
    with pytest.raises(InvalidRequestError, match=rf"^{name}=") as error:
        resolve({name: value})
    assert "give " in str(error.value)


def test_a_token_outside_the_vocabulary_is_named_with_the_range():
    with pytest.raises(ValueError, match=r"stop_token_ids=500 is out of range: give token ids from 0 to 96"):
        resolve({"stop_token_ids": [1, 500]})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("do_sample", 1),
        ("do_sample", "yes"),
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", 1j),
        ("temperature", [1.0]),
        ("temperature", torch.ones(1)),
        ("top_k", 5.0),
        ("top_k", True),
        ("top_k", np.bool_(True)),
        ("top_k", torch.tensor(5.0)),
        ("top_k", "5"),
        ("top_p", "half"),
        ("seed", 1.5),
        ("seed", True),
        ("max_new_tokens", 3.0),
        ("max_new_tokens", torch.tensor([3])),
        ("ignore_eos", 0),
        ("logit_bias", [1, 2]),
        ("logit_bias", {"5": 1}),
        ("logit_bias", {5: "1"}),
        ("bad_words_ids", [1, 2]),
        ("bad_words_ids", "ab"),
        ("eos_token_id", "</s>"),
        ("eos_token_id", 1.0),
        ("eos_token_id", True),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", {1: 2}),
        ("stop_strings", [1]),
        ("stop_strings", 1),
        ("num_return_sequences", True),
        ("logprobs", "all"),
        ("logprobs", 1.0),
        ("logits_processor", "mine"),
        ("logits_processor", [1]),
    ],
)
def test_wrong_type(name, value):
    with pytest.raises(TypeError, match=rf"^{name} must be"):
        resolve({name: value})


@pytest.mark.parametrize("scalar", [np.float32, np.float64, torch.tensor])
def test_foreign_scalars(scalar):
    assert resolve({"temperature": scalar(0.5)}).temperature == 0.5
    whole = np.int64 if scalar is not torch.tensor else torch.tensor
    params = resolve({"top_k": whole(5), "seed": whole(7), "temperature": whole(1), "max_new_tokens": whole(3)})
    assert (params.top_k, params.seed, params.temperature, params.max_new_tokens) == (5, 7, 1.0, 3)
    assert type(params.top_k) is int
    assert resolve({"do_sample": np.bool_(True)}).do_sample is True


def test_unknown_argument():
    with pytest.raises(TypeError, match=r"unknown sampling argument 'temprature'; did you mean 'temperature'\?"):
        resolve({"temprature": 0.5})
    with pytest.raises(TypeError, match=r"unknown sampling argument 'zzz'$"):
        resolve({"zzz": None})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 4),
        ("penalty_alpha", 0.6),
        ("constraints", ["c"]),
        ("force_words_ids", [[1]]),
        ("guidance_scale", 1.5),
        ("sequence_bias", {(1,): 2.0}),
        ("encoder_repetition_penalty", 1.5),
        ("exponential_decay_length_penalty", (5, 1.1)),
        ("epsilon_cutoff", 0.001),
        ("eta_cutoff", 0.001),
        ("top_h", 0.5),
        ("begin_suppress_tokens", [1]),
        ("forced_bos_token_id", 1),
        ("forced_eos_token_id", 1),
        ("remove_invalid_values", True),
        ("token_healing", True),
        ("max_time", 1.0),
        ("prompt_lookup_num_tokens", 3),
        ("dola_layers", "low"),
        ("output_scores", True),
    ],
)
def test_unsupported_settings_of_a_config_are_named(name, value):
    with pytest.raises(InvalidRequestError, match=rf"generation_config\.{name}="):
        SamplingDefaults(GenerationConfig(do_sample=True, **{name: value}), None, vocab_size=VOCAB)


def test_every_default_of_generate_is_accepted():
    config = GenerationConfig(**GenerationConfig._get_default_generation_params())
    config.renormalize_logits = True  # changes nothing here: logprobs are normalised in any case
    params = SamplingDefaults(config, None, vocab_size=VOCAB).resolve({"do_sample": True})
    assert (params.top_k, params.for_prompt(5).max_new_tokens) == (50, 15)


def test_a_config_out_of_range_is_named():
    with pytest.raises(InvalidRequestError, match=r"^generation_config\.top_p=2\.0"):
        SamplingDefaults(GenerationConfig(do_sample=True, top_p=2.0), None, vocab_size=VOCAB)


def test_arguments_of_ours_may_stand_in_a_config():
    params = resolve({}, GenerationConfig(presence_penalty=0.5, stop_token_ids=[3], ignore_eos=True, eos_token_id=1))
    assert params.presence_penalty == 0.5
    assert params.stop_ids == {3}


# --- the value ------------------------------------------------------------------------------------------------------


def test_requests_that_say_the_same_share_one_value():
    defaults = SamplingDefaults(None, None, vocab_size=VOCAB)
    first = defaults.resolve({"temperature": 0.5, "top_k": 3})
    assert defaults.resolve({"temperature": 0.5, "top_k": 3}) is first
    assert defaults.resolve({"temperature": 0.5, "top_k": 4}) is not first


def test_params_are_a_value():
    params = resolve({"logit_bias": {1: 2.0}, "stop_token_ids": [3], "bad_words_ids": [[1, 2]]})
    assert pickle.loads(pickle.dumps(params)) == params
    assert pickle.loads(pickle.dumps(params)).stop_ids == {3}
    assert len({params, resolve({"logit_bias": {1: 2.0}, "stop_token_ids": [3], "bad_words_ids": [[1, 2]]})}) == 1
    with pytest.raises(AttributeError):
        params.top_k = 3


def test_every_argument_is_a_field():
    fields = set(SamplingParams.__dataclass_fields__)
    assert {"eos_token_ids" if name == "eos_token_id" else name for name in SAMPLING_ARGUMENTS} <= fields


def test_seeds_of_any_size_and_sign_differ():
    seeds = [0, 1, -1, 2**63, 2**64 - 1, 2**64, -(2**64), 2**4000, -(2**4000)]
    folded = [fold_seed(seed) for seed in seeds]
    assert all(0 <= seed < 2**64 for seed in folded)
    assert len(set(folded)) == len(seeds)


def test_children_have_seeds_of_their_own():
    seeds = {fold_seed(child_seed(seed, child)) for seed in (0, 1, -1, 2**70) for child in range(50)}
    assert len(seeds) == 200
    assert child_seed(7, 0) == 7
    assert child_seed(7, 3) == child_seed(7, 3)
