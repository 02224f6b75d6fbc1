"""Inputs that broke others: blocks, budgets and what is left behind (rows 3, 4, 5, 20, 21 and 24 of the list)."""

import gc
import itertools
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from chairlift import RequestStatus
from tests.cases.tiny import WAIT, Steps, answer, assert_at_rest, expected, last, prompt, serving

# ------------------------------------------------------------------------------------------- 3: around a page border


@pytest.mark.parametrize("page_size", [4, 7])
@pytest.mark.parametrize("chunk", [256, 3])
def test_case_03_lengths_around_a_page(llama: Any, page_size: int, chunk: int, use_async_batching: bool) -> None:
    lengths = [pages * page_size + offset for pages in (1, 2) for offset in (-1, 0, 1)]
    common: dict[str, Any] = dict(page_size=page_size, max_batch_tokens=chunk, use_async_batching=use_async_batching)
    with serving(llama, **common) as sharing, serving(llama, allow_block_sharing=False, **common) as alone:
        for length in lengths:
            tokens = [length, *prompt(length - 1)]  # no two of them begin alike
            wanted = expected(llama, tokens, 9)
            first, second = answer(sharing, tokens, 9), answer(sharing, tokens, 9)
            plain = [answer(alone, tokens, 9) for _ in range(2)]
            assert [first.generated_tokens, second.generated_tokens] == [wanted] * 2, length
            assert [output.generated_tokens for output in plain] == [wanted] * 2, length
            assert (first.num_cached_tokens, second.num_cached_tokens) == (0, length - 1), length
            assert [output.num_cached_tokens for output in plain] == [0, 0]
        assert_at_rest(sharing)
        assert_at_rest(alone)
        assert alone.stats().cached_blocks == 0


def test_case_03_a_hit_in_the_middle_of_a_page(llama: Any) -> None:
    base = prompt(20)
    with serving(llama, page_size=8) as manager:
        answer(manager, base, 3)
        for common in (1, 7, 8, 9, 15, 16, 17, 19):
            tokens = [*base[:common], (base[common] + 1) % 97, *prompt(3, seed=common)]
            output = answer(manager, tokens, 6)
            assert output.num_cached_tokens == common
            assert output.generated_tokens == expected(llama, tokens, 6)


def test_case_03_twins_that_arrive_together(llama: Any, use_async_batching: bool) -> None:
    for length in (3, 4, 5, 17):
        with serving(llama, use_async_batching=use_async_batching) as manager:
            ids = manager.add_requests([prompt(length)] * 3, max_new_tokens=7)
            assert [last(manager, i).generated_tokens for i in ids] == [expected(llama, prompt(length), 7)] * 3
            assert_at_rest(manager)


# ------------------------------------------------------------------------------------------ 4: a prompt beyond the pool


@pytest.mark.parametrize("model_name", ["llama", "gemma2"])
def test_case_04_a_prompt_that_never_fits(request: pytest.FixtureRequest, model_name: str) -> None:
    model = request.getfixturevalue(model_name)
    num_blocks = 4 if model_name == "llama" else 10  # two groups of layers, one of them with a window
    with serving(model, num_blocks=num_blocks, max_batch_tokens=4) as manager:
        holds = manager.config.max_sequence_length
        assert holds == 16 or model_name != "llama"
        with pytest.raises(ValueError, match="num_blocks"):
            manager.add_request(prompt(holds + 1), max_new_tokens=1)
        with pytest.raises(ValueError, match=r"inputs\[0\].*num_blocks"):
            manager.add_requests([prompt(holds + 1), prompt(5)], max_new_tokens=1)
        output = answer(manager, prompt(5), 6)
        assert output.generated_tokens == expected(model, prompt(5), 6)
        # As long as it can get: the last token of an answer needs no room.
        output = answer(manager, prompt(5), holds + 1 - 5)
        assert output.generated_tokens == expected(model, prompt(5), holds + 1 - 5)
        with pytest.raises(ValueError, match="lower max_new_tokens or raise num_blocks"):
            manager.add_request(prompt(5), max_new_tokens=holds + 2 - 5)
        assert_at_rest(manager)


def test_case_04_in_generate_batch(llama: Any) -> None:
    from chairlift import ContinuousBatchingConfig

    config = ContinuousBatchingConfig(page_size=4, num_blocks=4)
    with pytest.raises(ValueError, match=r"inputs\[0\].* 20 tokens"):
        llama.generate_batch([prompt(20), prompt(5)], max_new_tokens=2, continuous_batching_config=config)
    (output,) = llama.generate_batch([prompt(5)], max_new_tokens=2, continuous_batching_config=config).values()
    assert output.generated_tokens == expected(llama, prompt(5), 2)


# ---------------------------------------------------------------------------------------------- 5: one block too few


@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("margin", [0.0, 0.15])
def test_case_05_two_decoders_that_need_one_block_more(
    llama: Any, scheduler_type: str, sharing: bool, margin: float, use_async_batching: bool
) -> None:
    prompts = [prompt(4, seed=1), prompt(4, seed=2)]
    with (
        Steps(llama) as steps,
        serving(
            llama,
            num_blocks=9,
            scheduler_type=scheduler_type,
            allow_block_sharing=sharing,
            safety_margin=margin,
            use_async_batching=use_async_batching,
        ) as manager,
    ):
        ids = [manager.add_request(tokens, max_new_tokens=14) for tokens in prompts]  # five blocks each
        steps.release()
        outputs = [manager.get_result(timeout=60) for _ in ids]
        assert [output and output.request_id for output in outputs] == ids  # the oldest first
        stats = manager.stats()
        assert_at_rest(manager)
    for tokens, output in zip(prompts, outputs, strict=True):
        assert output is not None and output.generated_tokens == expected(llama, tokens, 14)
    assert stats.preemptions <= 2
    assert len(steps.sizes) < 40


def test_case_05_many_that_need_far_more_than_there_is(llama: Any, use_async_batching: bool) -> None:
    prompts = [prompt(3 + i % 5, seed=i) for i in range(12)]
    for offload in (0.0, 0.01):
        with serving(
            llama,
            num_blocks=9,
            max_batch_tokens=6,
            cpu_offload_space=offload,
            use_async_batching=use_async_batching,
        ) as manager:
            ids = manager.add_requests(prompts, max_new_tokens=20)
            answers = [last(manager, request_id).generated_tokens for request_id in ids]
            stats = manager.stats()
            assert_at_rest(manager)
        assert answers == [expected(llama, tokens, 20) for tokens in prompts]
        assert stats.preemptions > 0
        assert (stats.swaps > 0) == (offload > 0)


# ----------------------------------------------------------------------------------------- 20: a thousand cancellations


@pytest.fixture
def _only_new_objects() -> Iterator[None]:
    """The collector neither walks nor counts what was there before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def _count_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.usefixtures("_only_new_objects")
def test_case_20_submit_and_cancel_a_thousand_times(llama: Any) -> None:
    cancelled, num_steps = threading.Event(), 0

    def let_none_finish(*_: object) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 10:
            cancelled.wait(WAIT)

    with llama.register_forward_pre_hook(let_none_finish), serving(llama) as manager:

        def pairs(count: int) -> None:
            nonlocal num_steps
            for number in range(count):
                num_steps = 0
                cancelled.clear()
                request_id = manager.add_request(prompt(9, seed=number), max_new_tokens=20)
                if number % 3:
                    manager.cancel_request(request_id)
                    manager.cancel_request(request_id)
                else:
                    manager.cancel_request("nobody")
                    manager.cancel_request(request_id)
                cancelled.set()
                assert last(manager, request_id).status is RequestStatus.CANCELLED
                assert manager.get_result(request_id, timeout=0) is None

        pairs(200)
        assert_at_rest(manager)
        objects = _count_objects()
        tracemalloc.start()
        pairs(100)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        pairs(700)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert after - before < 20_000, "memory grows with requests that are over"
        assert _count_objects() - objects < 400
        assert_at_rest(manager)


@pytest.mark.usefixtures("_only_new_objects")
@pytest.mark.parametrize("how", ["generate_batch", "streams", "handlers", "stop_strings"])
def test_case_20_other_ways_leave_nothing_either(llama: Any, how: str) -> None:
    class Letters:
        def decode(self, ids: list[int]) -> str:
            return "".join(chr(64 + i) for i in ids)

    with serving(llama) as manager:

        def once(number: int) -> None:
            tokens = [5 + number % 7, 8, 9]
            if how == "generate_batch":
                llama.generate_batch([tokens], max_new_tokens=1, warmup=False)
            elif how == "streams":
                request_id = manager.add_request(tokens, max_new_tokens=3, streaming=True)
                assert len(list(manager.request_id_iter(request_id))) == 3
            elif how == "handlers":
                seen: list[Any] = []
                request_id = manager.add_request(tokens, max_new_tokens=1)
                manager.register_result_handler(request_id, seen.append)
                answer(manager, tokens, 1)
            else:
                answer(manager, tokens, 2, stop_strings=["@"], tokenizer=Letters())

        for _ in range(5):
            answer(manager, [4], 60)  # the ring of step times is full
        count = 6 if how == "generate_batch" else 60
        for number in range(count):
            once(number)
        objects = _count_objects()
        for number in range(count):
            once(number)
        assert _count_objects() - objects < count
        assert_at_rest(manager)


# ------------------------------------------------------------------------------------------ 21: a decoder among prompts


@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
@pytest.mark.parametrize("logprobs", [None, True])
def test_case_21_a_decoder_among_long_prompts(
    llama: Any, scheduler_type: str, logprobs: bool | None, use_async_batching: bool
) -> None:
    """What is computed between two of its tokens is bounded by the budget of a step, whatever waits."""
    budget, depth = 8, 1 + use_async_batching
    marks: list[int] = []  # tokens computed by the engine up to each token of the decoder

    with (
        Steps(llama) as steps,
        serving(
            llama,
            max_batch_tokens=budget,
            num_blocks=200,
            scheduler_type=scheduler_type,
            use_async_batching=use_async_batching,
        ) as manager,
    ):

        def note(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            marks.append(sum(steps.sizes))
            return logits

        decoder = manager.add_request(prompt(3), max_new_tokens=20, logits_processor=note)
        others = [
            manager.add_request(prompt(40, seed=seed), max_new_tokens=1, prompt_logprobs=logprobs) for seed in range(8)
        ]
        steps.release()
        assert last(manager, decoder).generated_tokens == expected(llama, prompt(3), 20)
        for request_id in others:
            assert last(manager, request_id).finish_reason == "length"
    assert max(b - a for a, b in itertools.pairwise(marks)) <= depth * budget
    assert marks[-1] > 100  # prompts ran meanwhile


# -------------------------------------------------------------------------------------------- 24: what is evicted


def test_case_24_a_burst_evicts_no_more_than_it_needs_and_the_oldest_first(llama: Any) -> None:
    system = prompt(16, seed=9)  # four blocks
    old = [prompt(16, seed=seed) for seed in range(3)]
    with serving(llama, num_blocks=20, safety_margin=0.0) as manager:
        for tokens in old:
            answer(manager, tokens, 1)
        answer(manager, [*system, 7], 1)
        stats = manager.stats()
        free, cached = stats.free_blocks, stats.cached_blocks
        assert cached >= 16
        burst = prompt(4 * free + 8, seed=50)  # two blocks more than are free
        answer(manager, burst, 1)
        after = manager.stats()
        assert after.free_blocks == 0
        assert after.cached_blocks == 20
        # The system prompt was used last and is whole; the oldest prompt lost what the burst needed, from its end.
        assert answer(manager, [*system, 8], 1).num_cached_tokens == 16
        lost = [15 - answer(manager, tokens, 1).num_cached_tokens for tokens in reversed(old)]
    assert lost[0] == lost[1] == 0
    assert lost[2] > 0


def test_case_24_a_system_prompt_in_use_survives_any_burst(llama: Any, use_async_batching: bool) -> None:
    system = prompt(16, seed=9)
    with serving(llama, num_blocks=24, use_async_batching=use_async_batching) as manager:
        asked = [[*system, 10 + number] for number in range(10)]
        outputs = [last(manager, i) for i in manager.add_requests(asked, max_new_tokens=4)]
        assert [o.generated_tokens for o in outputs] == [expected(llama, tokens, 4) for tokens in asked]
        assert sum(output.num_cached_tokens >= 16 for output in outputs) == 9
        burst = [prompt(12, seed=seed) for seed in range(8)]
        ids = manager.add_requests([*burst, *asked], max_new_tokens=4)
        answers = [last(manager, request_id).generated_tokens for request_id in ids]
        assert answers == [expected(llama, tokens, 4) for tokens in [*burst, *asked]]
        assert_at_rest(manager)
