"""Greedy answers are those of `model.generate`, whatever the family and the engine's settings.

Every pair of values of two settings is covered by some case, and so is every value with every family.
"""

from collections.abc import Iterator
from itertools import combinations, product
from typing import NamedTuple

import pytest
import torch

from chairlift import ContinuousBatchingConfig
from chairlift.cache.layout import LayerSpec, plan_layout
from chairlift.model.loader import Shadow
from tests.parity.models import FAMILIES, NEW_TOKENS, PROMPTS, answers, served


class Case(NamedTuple):
    family: str
    budget: int  # max_batch_tokens
    page_size: int
    is_tight: bool  # the pool forces preemptions
    scheduler: str
    is_shared: bool  # prompts have beginnings in common
    is_async: bool

    def __str__(self) -> str:
        words = [self.family, f"budget{self.budget}", f"page{self.page_size}", self.scheduler]
        words += [f.removeprefix("is_") for f in self._fields if f.startswith("is_") and getattr(self, f)]
        return "-".join(words)


def pairs(case: Case) -> set[tuple[int, object, int, object]]:
    return {(i, case[i], j, case[j]) for i, j in combinations(range(len(case)), 2)}


def pairwise() -> Iterator[Case]:
    """Greedy and deterministic: always the first case that covers most of the pairs still missing."""
    everything = product(FAMILIES, (8, 512), (4, 16, 256), (True, False), ("fifo", "prefill_first"), (0, 1), (0, 1))
    # Answers end within their first page of 256 tokens: a request that was admitted never needs another.
    candidates = {case: pairs(case) for case in map(Case._make, everything) if not (case[2] == 256 and case[3])}
    missing = set().union(*candidates.values())
    for family in FAMILIES:
        own = {case: covered for case, covered in candidates.items() if case.family == family}
        while missing & set().union(*own.values()):
            best = max(own, key=lambda case: len(own[case] & missing))
            missing -= own[best]
            yield best
    assert not missing


CASES = list(pairwise())


def tight_pool(case: Case) -> int:
    """Blocks for the longest request, and hardly one more."""
    layers = Shadow(served(case.family)).layers
    specs = [
        LayerSpec(index=i, window=call.window, num_kv_heads=call.num_kv_heads, head_dim=call.head_dim)
        for i, call in layers.items()
    ]
    longest = max(map(len, PROMPTS[case.is_shared])) + NEW_TOKENS
    return plan_layout(specs, case.page_size, 4).blocks_needed(longest, case.budget) + 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_answers_are_those_of_generate(case: Case) -> None:
    model = served(case.family)
    wanted = answers(case.family, bool(case.is_shared))
    config = ContinuousBatchingConfig(
        max_batch_tokens=case.budget,
        page_size=case.page_size,
        num_blocks=tight_pool(case) if case.is_tight else 256,
        scheduler_type=case.scheduler,
        safety_margin=0.0,
        allow_block_sharing=bool(case.is_shared),
        use_async_batching=bool(case.is_async),
        return_logprobs=True,
    )
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        ids = manager.add_requests(PROMPTS[case.is_shared], max_new_tokens=NEW_TOKENS, do_sample=False)
        outputs = [manager.get_result(request_id) for request_id in ids]
        stats = manager.stats()
    assert [output.generated_tokens for output in outputs] == [answer.tokens for answer in wanted]
    for output, answer in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(output.logprobs), answer.logprobs, atol=2e-4, rtol=0)
    assert (stats.preemptions > 0) == case.is_tight
    assert (stats.prefix_hit_tokens > 0) == case.is_shared
