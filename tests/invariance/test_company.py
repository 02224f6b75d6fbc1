"""The same bits in any company: a greedy request, and one with a seed, gives equal tokens and equal logprobs alone,
beside others, in chunks, after a prefix hit, after a preemption or a swap, and with any page size of one kernel."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from chairlift import ContinuousBatchingConfig, ContinuousBatchingManager, attach
from chairlift.cache.layout import LayerSpec, plan_layout
from chairlift.model.loader import Shadow, load_smollm2
from tests.parity.models import build, random_tokens

TINY: dict[str, dict[str, Any]] = {  # heads of 16 are for the C++ kernels, of 8 for those in PyTorch
    "llama": {"head_dim": 16},
    "gemma2": {},
    "gemma3_text": {"head_dim": 16},
    "gpt2": {"hidden_size": 64},
    "mixtral": {"head_dim": 16},
    "gpt_oss": {},
    "deepseek_v3": {},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MODELS = [
    *(f"{family}-{dtype}" for family in ("llama", "gemma3_text", "gpt2", "gpt_oss") for dtype in DTYPES),
    *("gemma2-float32", "mixtral-bfloat16", "deepseek_v3-float32"),
]
REAL = "smollm2-bfloat16"
LENGTH = 41  # of the prompt that is looked at
NEW_TOKENS, MORE_TOKENS = 10, 30
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "seeded": {"do_sample": True, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "seed": 7},
}
PROMPT = random_tokens(0, LENGTH)
OTHERS = [random_tokens(seed, 1 + 37 * seed % 29) for seed in range(1, 32)]


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]


@cache
def model_of(name: str) -> PreTrainedModel:
    family, dtype = name.split("-")
    if family == "smollm2":
        return attach(load_smollm2(DTYPES[dtype])[0])
    return build(family, DTYPES[dtype], **TINY[family])


class Engine:
    """A running manager that answers `PROMPT`, perhaps beside others."""

    def __init__(self, manager: ContinuousBatchingManager) -> None:
        self.manager = manager

    def answer(self, sampling: str, others: Sequence[list[int]] = (), new_tokens: int = NEW_TOKENS) -> Answer:
        half = (len(others) + 1) // 2
        ids = []
        with self.manager.pause():  # so that all start together
            for other in [*others[:half], None, *others[half:]]:
                choices = SAMPLING[sampling] if other is None else {}
                prompt = PROMPT if other is None else other
                ids.append(self.manager.add_request(prompt, max_new_tokens=new_tokens, ignore_eos=True, **choices))
        own = ids[half]
        outputs = {request_id: self.manager.get_result(request_id) for request_id in ids}
        assert len(outputs[own].generated_tokens) == new_tokens
        return Answer(outputs[own].generated_tokens, outputs[own].logprobs)


@contextmanager
def engine(name: str, **settings: Any) -> Iterator[Engine]:
    settings = {"page_size": 16, "max_batch_tokens": 256, "return_logprobs": True, "safety_margin": 0.0} | settings
    settings.setdefault("num_blocks", 4096 // settings["page_size"])
    config = ContinuousBatchingConfig(**settings)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if name.startswith("smollm2") else 1)  # a second one only waits for tiny models
    try:
        with model_of(name).continuous_batching_context_manager(continuous_batching_config=config) as manager:
            yield Engine(manager)
    finally:
        torch.set_num_threads(threads)


@cache
def alone(name: str, sampling: str, page_size: int = 16, new_tokens: int = NEW_TOKENS) -> Answer:
    with engine(name, page_size=page_size) as lonely:
        return lonely.answer(sampling, new_tokens=new_tokens)


each_model = pytest.mark.parametrize("name", MODELS)
each_sampling = pytest.mark.parametrize("sampling", SAMPLING)


@each_model
@each_sampling
def test_among_others(name: str, sampling: str) -> None:
    with engine(name) as busy:
        assert busy.answer(sampling, OTHERS) == alone(name, sampling)


@each_model
@pytest.mark.parametrize("budget", [3, 7, 16])
def test_in_chunks(name: str, budget: int) -> None:
    with engine(name, max_batch_tokens=budget) as narrow:
        assert narrow.answer("greedy", OTHERS[:2]) == alone(name, "greedy")


@each_model
@pytest.mark.parametrize(("page_size", "other"), [(4, 7), (16, 256)])
def test_with_another_page_size(name: str, page_size: int, other: int) -> None:
    """The C++ kernels need pages of a multiple of 16 tokens: smaller ones may have other bits."""
    with engine(name, page_size=other) as paged:
        assert paged.answer("greedy", OTHERS[:2]) == alone(name, "greedy", page_size)


@each_model
@pytest.mark.parametrize(("num_common", "sampling"), [(32, "greedy"), (27, "seeded")])
def test_after_a_prefix_hit(name: str, sampling: str, num_common: int) -> None:
    """Of whole blocks, and by token."""
    with engine(name) as warm:
        related = [*PROMPT[:num_common], 101 - PROMPT[num_common], *range(5, 14)]
        warm.manager.get_result(warm.manager.add_request(related, max_new_tokens=2))
        assert warm.answer(sampling) == alone(name, sampling)
        assert warm.manager.stats().prefix_hit_tokens == num_common


@each_model
@pytest.mark.parametrize(
    ("page_size", "is_swapped", "sampling"), [(4, False, "greedy"), (16, True, "greedy"), (16, False, "seeded")]
)
def test_after_a_preemption(name: str, sampling: str, is_swapped: bool, page_size: int) -> None:
    """Both requests are admitted, but not both find room to the end: the one that came last gives way."""
    settings = {"page_size": page_size, "cpu_offload_space": 0.05 if is_swapped else 0.0, "max_batch_tokens": 4}
    with engine(name, num_blocks=pool(name, page_size), **settings) as tight:
        answer = tight.answer(sampling, [random_tokens(1, LENGTH)], MORE_TOKENS)
        stats = tight.manager.stats()
    assert answer == alone(name, sampling, page_size, MORE_TOKENS)
    assert stats.preemptions > 0
    assert (stats.swaps > 0) == is_swapped


def pool(name: str, page_size: int) -> int:
    """Blocks for one request from beginning to end and the prompt of another."""
    layers = [
        LayerSpec(index=i, window=call.window, num_kv_heads=call.num_kv_heads, head_dim=call.head_dim)
        for i, call in Shadow(model_of(name)).layers.items()
    ]
    layout = plan_layout(layers, page_size, 2)
    return layout.blocks_needed(LENGTH + MORE_TOKENS, 4) + layout.blocks_needed(LENGTH, 4)


@each_sampling
def test_a_real_model(sampling: str) -> None:
    """SmolLM2 with all its layers: among others and in chunks, then after a prefix hit."""
    with engine(REAL, max_batch_tokens=24) as busy:
        assert busy.answer(sampling, OTHERS[:4]) == alone(REAL, sampling)
        assert busy.answer(sampling, OTHERS[:1]) == alone(REAL, sampling)
        assert busy.manager.stats().prefix_hit_tokens > 0


def test_a_real_model_after_a_swap() -> None:
    test_after_a_preemption(REAL, "greedy", True, 16)
