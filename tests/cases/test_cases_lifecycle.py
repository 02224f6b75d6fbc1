"""Inputs that broke others: ids, cancelling, reading, crashing, changing (rows 8 to 11, 18 and 19 of the list)."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from chairlift import EngineDeadError, RequestStatus
from tests.cases import tiny
from tests.cases.tiny import WAIT, Steps, answer, assert_at_rest, expected, last, prompt, serving, small

# --------------------------------------------------------------------------------------------------- 8: ids in use


def test_case_08_the_same_id_twice(llama: Any, use_async_batching: bool) -> None:
    with Steps(llama) as steps, serving(llama, use_async_batching=use_async_batching) as manager:
        assert manager.add_request([1, 2, 3], request_id="a", max_new_tokens=4) == "a"
        with pytest.raises(ValueError, match="'a' is in use"):
            manager.add_request([4], request_id="a")
        steps.at(2)
        with pytest.raises(ValueError, match="'a' is in use"):
            manager.add_request([4], request_id="a", max_new_tokens=1)
        steps.release()
        assert last(manager, "a").generated_tokens == expected(llama, [1, 2, 3], 4)
        assert manager.add_request([4, 5], request_id="a", max_new_tokens=3) == "a"
        assert last(manager, "a").generated_tokens == expected(llama, [4, 5], 3)
        manager.add_request([4, 5], request_id="a", max_new_tokens=3)
        manager.cancel_request("a")
        assert last(manager, "a").is_finished()
        assert answer(manager, [1, 2, 3], 4, request_id="a").generated_tokens == expected(llama, [1, 2, 3], 4)


def test_case_08_ids_of_children_are_in_use_too(llama: Any) -> None:
    with Steps(llama) as steps, serving(llama) as manager:
        manager.add_request([1, 2], request_id="p", max_new_tokens=3, num_return_sequences=3)
        for taken in ("p__child#0", "p__child#1"):
            with pytest.raises(ValueError, match="in use"):
                manager.add_request([4], request_id=taken, max_new_tokens=1)
        manager.add_request([4], request_id="q__child#1", max_new_tokens=1)
        with pytest.raises(ValueError, match="in use"):
            manager.add_request([1, 2], request_id="q", max_new_tokens=3, num_return_sequences=3)
        assert manager.add_request([1, 2], request_id="q", max_new_tokens=1) == "q"  # nothing of it was kept
        steps.release()
        for name in ("p", "p__child#0", "p__child#1", "q", "q__child#1"):
            assert last(manager, name).status is RequestStatus.FINISHED


def test_case_08_ids_of_the_manager_avoid_those_of_callers(llama: Any) -> None:
    with serving(llama) as manager:
        manager.add_request([1], request_id="req_0", max_new_tokens=1)
        others = [manager.add_request([1], max_new_tokens=1) for _ in range(3)]
        assert len({"req_0", *others}) == 4
        for name in ("req_0", *others):
            assert last(manager, name).finish_reason == "length"


# --------------------------------------------------------------------------------------------------- 9: cancelling


def _all_outputs(manager: Any, request_id: str) -> list[Any]:
    outputs = [output for output in iter(lambda: manager.get_result(request_id, timeout=WAIT), None)]
    assert manager.get_result(request_id, timeout=0) is None
    return outputs


def test_case_09_before_it_is_scheduled(llama: Any, use_async_batching: bool) -> None:
    with (
        Steps(llama) as steps,
        serving(llama, max_requests_per_batch=1, use_async_batching=use_async_batching) as manager,
    ):
        first = manager.add_request(prompt(5), max_new_tokens=6)
        second = manager.add_request(prompt(6), max_new_tokens=6)
        third = manager.add_request(prompt(7), max_new_tokens=6)
        steps.at(1)
        manager.cancel_request(second)
        steps.release()
        (output,) = _all_outputs(manager, second)
        assert (output.status, output.finish_reason) == (RequestStatus.CANCELLED, "cancelled")
        assert output.generated_tokens == [] and output.prompt_ids == prompt(6)
        assert last(manager, first).generated_tokens == expected(llama, prompt(5), 6)
        assert last(manager, third).generated_tokens == expected(llama, prompt(7), 6)
        assert_at_rest(manager)


def test_case_09_before_the_manager_is_started(llama: Any) -> None:
    manager = llama.init_continuous_batching(continuous_batching_config=small())
    request_id = manager.add_request(prompt(5), max_new_tokens=6)
    manager.cancel_request(request_id)
    manager.start()
    (output,) = _all_outputs(manager, request_id)
    assert output.status is RequestStatus.CANCELLED
    manager.destroy()


@pytest.mark.parametrize("streaming", [False, True])
def test_case_09_in_the_middle_of_a_prefill(llama: Any, streaming: bool, use_async_batching: bool) -> None:
    with Steps(llama) as steps, serving(llama, max_batch_tokens=4, use_async_batching=use_async_batching) as manager:
        request_id = manager.add_request(prompt(30), max_new_tokens=6, streaming=streaming)
        steps.at(3)
        manager.cancel_request(request_id)
        steps.release()
        (output,) = _all_outputs(manager, request_id)
        assert (output.status, output.generated_tokens) == (RequestStatus.CANCELLED, [])
        assert len(steps.sizes) <= 4
        assert_at_rest(manager)
        assert answer(manager, prompt(30), 6).generated_tokens == expected(llama, prompt(30), 6)


@pytest.mark.parametrize("streaming", [False, True])
def test_case_09_while_it_decodes(llama: Any, streaming: bool, use_async_batching: bool) -> None:
    wanted = expected(llama, prompt(5), 12)
    with Steps(llama) as steps, serving(llama, use_async_batching=use_async_batching) as manager:
        before = manager.stats().free_blocks
        request_id = manager.add_request(prompt(5), max_new_tokens=12, streaming=streaming, logprobs=True)
        other = manager.add_request(prompt(6), max_new_tokens=12)
        steps.at(5)
        manager.cancel_request(request_id)
        manager.cancel_request(request_id)
        steps.release()
        outputs = _all_outputs(manager, request_id)
        assert [output.is_finished() for output in outputs] == [False] * (len(outputs) - 1) + [True]
        output = outputs[-1]
        assert output.status is RequestStatus.CANCELLED
        assert 3 <= len(output.generated_tokens) <= 6
        assert output.generated_tokens == wanted[: len(output.generated_tokens)]
        assert len(output.logprobs) == len(output.generated_tokens)
        assert [t for each in outputs for t in each.new_tokens] == output.generated_tokens
        assert last(manager, other).generated_tokens == expected(llama, prompt(6), 12)
        assert_at_rest(manager)
        stats = manager.stats()
        assert stats.free_blocks + stats.cached_blocks == before


def test_case_09_in_the_step_that_ends_it(llama: Any, use_async_batching: bool) -> None:
    tokens = prompt(5)
    wanted = expected(llama, tokens, 6)
    eos = wanted[-1]
    place = wanted.index(eos) + 1
    for streaming in (False, True):
        with Steps(llama) as steps, serving(llama, use_async_batching=use_async_batching) as manager:
            request_id = manager.add_request(tokens, max_new_tokens=12, eos_token_id=eos, streaming=streaming)
            steps.at(place)
            manager.cancel_request(request_id)
            steps.release()
            outputs = _all_outputs(manager, request_id)
            assert sum(output.is_finished() for output in outputs) == 1
            if outputs[-1].status is RequestStatus.FINISHED:
                assert outputs[-1].generated_tokens == wanted[:place]
            else:
                assert outputs[-1].generated_tokens == wanted[: len(outputs[-1].generated_tokens)]
            assert_at_rest(manager)


def test_case_09_a_parent_with_children(llama: Any, use_async_batching: bool) -> None:
    with Steps(llama) as steps, serving(llama, use_async_batching=use_async_batching) as manager:
        family = manager.add_request(prompt(5), request_id="p", max_new_tokens=12, num_return_sequences=3)
        stays = manager.add_request(prompt(5), request_id="p2", max_new_tokens=4)
        steps.at(4)
        manager.cancel_request(family)
        steps.release()
        for name in ("p", "p__child#0", "p__child#1"):
            (output,) = _all_outputs(manager, name)
            assert output.status is RequestStatus.CANCELLED, name
        assert last(manager, stays).generated_tokens == expected(llama, prompt(5), 4)
        assert_at_rest(manager)


def test_case_09_one_child_alone(llama: Any) -> None:
    with Steps(llama) as steps, serving(llama) as manager:
        manager.add_request(prompt(5), request_id="p", max_new_tokens=8, num_return_sequences=3)
        steps.at(4)
        manager.cancel_request("p__child#0")
        steps.release()
        assert last(manager, "p__child#0").status is RequestStatus.CANCELLED
        for name in ("p", "p__child#1"):
            assert last(manager, name).generated_tokens == expected(llama, prompt(5), 8)
        assert_at_rest(manager)


def test_case_09_the_children_of_a_parent_that_is_done(llama: Any) -> None:
    """Cancelling it still ends what is left of its family."""
    with Steps(llama) as steps, serving(llama, max_requests_per_batch=1) as manager:
        manager.add_request(prompt(5), request_id="p", max_new_tokens=2, num_return_sequences=2)
        steps.at(4)  # the parent has its two tokens, the child one
        assert last(manager, "p").status is RequestStatus.FINISHED
        manager.cancel_request("p")
        steps.release()
        (output,) = _all_outputs(manager, "p__child#0")
        assert output.status in (RequestStatus.CANCELLED, RequestStatus.FINISHED)
        assert manager.get_result("p", timeout=0) is None
        assert_at_rest(manager)


def test_case_09_unknown_and_finished_ids(llama: Any) -> None:
    with serving(llama) as manager:
        manager.cancel_request("nobody")
        request_id = manager.add_request([1, 2, 3], max_new_tokens=3)
        assert last(manager, request_id).status is RequestStatus.FINISHED
        manager.cancel_request(request_id)
        assert answer(manager, [1, 2, 3], 3).generated_tokens == expected(llama, [1, 2, 3], 3)
        assert manager.get_result(timeout=0) is None


def test_case_09_while_it_is_preempted(llama: Any) -> None:
    for offload in (0.0, 0.01):
        with (
            Steps(llama) as steps,
            serving(llama, num_blocks=9, cpu_offload_space=offload) as manager,
        ):
            old, new = (manager.add_request(prompt(4, seed=s), max_new_tokens=16) for s in (1, 2))
            number = 1
            while manager.stats().preemptions == 0:
                number += 1
                steps.at(number)
            manager.cancel_request(new)
            steps.release()
            assert last(manager, new).status is RequestStatus.CANCELLED
            assert last(manager, old).generated_tokens == expected(llama, prompt(4, seed=1), 16)
            assert_at_rest(manager)


# ------------------------------------------------------------------------------------------ 10: several readers


def test_case_10_two_streams_read_in_turn_and_one_never(llama: Any, use_async_batching: bool) -> None:
    with serving(llama, use_async_batching=use_async_batching) as manager:
        ids = [manager.add_request(prompt(3 + n), max_new_tokens=10, streaming=True) for n in range(3)]
        seen: dict[str, list[int]] = {ids[0]: [], ids[1]: []}
        for _ in range(10):
            for request_id, tokens in seen.items():
                output = manager.get_result(request_id, timeout=WAIT)
                assert output is not None and output.request_id == request_id
                assert len(output.new_tokens) == 1
                tokens += output.new_tokens
                assert output.generated_tokens == tokens
        assert list(seen.values()) == [expected(llama, prompt(3 + n), 10) for n in range(2)]
        unread = [manager.get_result(timeout=WAIT) for _ in range(10)]
        assert {output and output.request_id for output in unread} == {ids[2]}
        assert [t for output in unread if output for t in output.new_tokens] == expected(llama, prompt(5), 10)
        assert manager.get_result(timeout=0) is None


def test_case_10_waiting_for_one_leaves_the_order_of_the_others(llama: Any) -> None:
    with serving(llama) as manager:
        slow = manager.add_request(prompt(3), max_new_tokens=30)
        quick = [manager.add_request(prompt(4 + n), max_new_tokens=n + 1) for n in range(5)]
        assert last(manager, slow).request_id == slow
        assert [manager.get_result(timeout=WAIT).request_id for _ in quick] == quick
        assert manager.get_result(slow, timeout=0) is None


def test_case_10_threads_and_loops_beside_each_other(llama: Any) -> None:
    wanted = {n: expected(llama, prompt(3 + n), 8) for n in range(9)}
    got: dict[int, list[int]] = {}
    with serving(llama) as manager:
        ids = [manager.add_request(prompt(3 + n), max_new_tokens=8, streaming=True) for n in range(9)]

        def read(number: int) -> None:
            got[number] = [t for output in manager.request_id_iter(ids[number]) for t in output.new_tokens]

        async def listen(number: int) -> None:
            got[number] = [t async for output in manager.stream(ids[number]) for t in output.new_tokens]

        async def listen_to_all() -> None:
            await asyncio.gather(*(listen(number) for number in range(3, 6)))

        handled = threading.Event()

        def handle(number: int, output: Any) -> None:
            got.setdefault(number, []).extend(output.new_tokens)
            if sum(len(got.get(each, [])) for each in (6, 7, 8)) == 24:
                handled.set()

        for number in (6, 7, 8):
            manager.register_result_handler(ids[number], lambda output, number=number: handle(number, output))
        threads = [threading.Thread(target=read, args=(number,)) for number in range(3)]
        threads.append(threading.Thread(target=asyncio.run, args=(listen_to_all(),)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        assert handled.wait(WAIT)
        assert manager.get_result(timeout=0) is None
    assert got == wanted


def test_case_10_who_waits_sleeps(llama: Any) -> None:
    """Processor time of the waiting thread, which a loop that polls would use up."""
    used: list[float] = []
    with Steps(llama) as steps, serving(llama) as manager:
        request_id = manager.add_request(prompt(3), max_new_tokens=2)
        steps.at(1)

        def wait(name: str | None) -> None:
            begin = time.thread_time()
            assert manager.get_result(name, timeout=0.5) is None
            used.append(time.thread_time() - begin)

        threads = [threading.Thread(target=wait, args=(name,)) for name in (request_id, None)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        steps.release()
        last(manager, request_id)
    assert len(used) == 2 and max(used) < 0.1


# --------------------------------------------------------------------------------------- 11: the model raises


class KernelError(Exception):
    """What the model raises here."""


def _failing(model: Any, at: int) -> Any:
    """Make forward pass `at` of the engine raise."""
    count = 0

    def before(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal count
        if threading.current_thread().name == "chairlift-engine":
            count += 1
            if count == at:
                raise KernelError("bad kernel")

    return model.register_forward_pre_hook(before, with_kwargs=True)


def test_case_11_everyone_who_waits_is_told(llama: Any, use_async_batching: bool) -> None:
    told: list[str] = []
    last_words: list[Any] = []
    heard = threading.Event()

    def expect_death(call: Callable[[], Any], name: str) -> None:
        with pytest.raises(EngineDeadError) as caught:
            call()
        if isinstance(caught.value.__cause__, KernelError):
            told.append(name)

    hook = _failing(llama, at=5)
    manager = llama.init_continuous_batching(
        continuous_batching_config=small(max_requests_per_batch=3, use_async_batching=use_async_batching)
    )
    ids = [manager.add_request(prompt(3 + n), max_new_tokens=20) for n in range(6)]  # three run, three wait
    manager.register_result_handler(ids[5], lambda output: (last_words.append(output), heard.set()))

    async def listen() -> None:
        async for _ in manager.stream(ids[4]):
            pass

    calls: dict[str, Callable[[], Any]] = {
        "running": lambda: manager.get_result(ids[0]),
        "iterating": lambda: list(manager.request_id_iter(ids[1])),
        "waiting": lambda: manager.get_result(ids[3]),
        "any": lambda: manager.get_result(),
        "all": lambda: list(manager),
        "asyncio": lambda: asyncio.run(listen()),
    }
    with Steps(llama) as steps:
        manager.start()
        steps.at(1)
        threads = [threading.Thread(target=expect_death, args=(call, name)) for name, call in calls.items()]
        for thread in threads:
            thread.start()
        steps.release()
        for thread in threads:
            thread.join(WAIT)
    hook.remove()
    assert sorted(told) == sorted(calls)
    assert heard.wait(WAIT)
    (output,) = last_words
    assert output.status is RequestStatus.FAILED and isinstance(output.exception, KernelError)
    for call in (lambda: manager.add_request([1]), lambda: manager.add_requests([[1]]), manager.start, manager.warmup):
        with pytest.raises(EngineDeadError, match="bad kernel"):
            call()
    with pytest.raises(EngineDeadError):
        manager.get_result(ids[2], timeout=0)
    assert not manager.is_running()
    manager.stop()
    manager.destroy()
    manager.destroy()


@pytest.mark.parametrize("at", [1, 2, 5])
def test_case_11_generate_batch_hands_over_what_had_finished(llama: Any, at: int, use_async_batching: bool) -> None:
    hook = _failing(llama, at)
    prompts = [prompt(3), prompt(4), prompt(5)]
    config = small(use_async_batching=use_async_batching, max_requests_per_batch=1)
    try:
        with pytest.raises(EngineDeadError, match="bad kernel") as caught:
            llama.generate_batch(prompts, max_new_tokens=2, continuous_batching_config=config, warmup=False)
    finally:
        hook.remove()
    assert isinstance(caught.value.__cause__, KernelError)
    finished = [output.generated_tokens for output in caught.value.partial.values()]
    wanted = [expected(llama, tokens, 2) for tokens in sorted(prompts)]
    assert finished == wanted[: len(finished)]
    assert len(finished) == (at - 1) // 2
    outputs = llama.generate_batch(prompts, max_new_tokens=2, continuous_batching_config=config, warmup=False)
    assert [output.generated_tokens for output in outputs.values()] == [expected(llama, t, 2) for t in prompts]


def test_case_11_a_kept_manager_that_died_is_replaced(llama: Any) -> None:
    config = small()
    common: dict[str, Any] = dict(max_new_tokens=3, continuous_batching_config=config, persistent_manager=True)
    llama.generate_batch([prompt(3)], **common)
    hook = _failing(llama, 2)
    with pytest.raises(EngineDeadError):
        llama.generate_batch([prompt(3)], **common)
    hook.remove()
    (output,) = llama.generate_batch([prompt(3)], **common).values()
    assert output.generated_tokens == expected(llama, prompt(3), 3)
    llama.destroy_cached_continuous_batching_manager()


SCRIPT = """
import threading
from tests.cases.tiny import answer, llama, small
model = llama()
running = model.init_continuous_batching(continuous_batching_config=small())
running.start()
running.add_request([1, 2, 3], streaming=True)  # left alone
dead = model.init_continuous_batching(continuous_batching_config=small())
dead.start()
dead.register_result_handler(dead.add_request([1, 2]), print)
def fail(module, args):
    if threading.current_thread() is dead._thread:
        raise RuntimeError("bad kernel")
model.register_forward_pre_hook(fail)
try:
    dead.get_result(dead.add_request([1]))
except RuntimeError as error:
    print(type(error).__name__)
kept = model.generate_batch([[1, 2]], max_new_tokens=2, persistent_manager=True)
print(len(kept), "answer")
"""


def test_case_11_the_process_ends() -> None:
    """With one engine dead, one in the middle of its work and one kept."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "EngineDeadError" in done.stdout and "1 answer" in done.stdout


# ------------------------------------------------------------------------------------------- 18: changed weights


def _double(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(-1.5)
        for parameter in model.model.layers[0].parameters():
            parameter.mul_(1.7)


def _replace(model: Any) -> None:
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach() * -2.0)


def _through_data(model: Any) -> None:
    for parameter in model.model.layers[1].parameters():
        parameter.data.mul_(-1.7)


def _load(model: Any) -> None:
    model.load_state_dict({name: tensor * 1.3 for name, tensor in model.state_dict().items()})


CHANGES = [_double, _replace, _load]


@pytest.mark.parametrize("change", [*CHANGES, _through_data])
@pytest.mark.parametrize("within", ["pause", "idle", "stopped"])
def test_case_18_weights_change_between_two_prompts(change: Callable[[Any], None], within: str) -> None:
    model = tiny.llama()
    tokens = prompt(13)
    silent = change is _through_data  # leaves no trace: it has to be said
    with serving(model) as manager:
        first = answer(manager, tokens, 8).generated_tokens
        assert first == expected(model, tokens, 8)
        if within == "pause":
            with manager.pause(weights_changed=silent):
                change(model)
        elif within == "idle":
            change(model)
            if silent:
                manager.reset_prefix_cache()
        else:
            manager.stop()
            change(model)
            if silent:
                manager.reset_prefix_cache()
            manager.start()
        second = answer(manager, tokens, 8)
        assert second.num_cached_tokens == 0
        assert second.generated_tokens == expected(model, tokens, 8) != first
        assert answer(manager, tokens, 8).num_cached_tokens == len(tokens) - 1


def test_case_18_in_the_middle_of_an_answer(use_async_batching: bool) -> None:
    """What was cached is computed again; the tokens so far stay."""
    model = tiny.llama()
    tokens = prompt(6)
    before = expected(model, tokens, 14)
    with Steps(model) as steps, serving(model, use_async_batching=use_async_batching) as manager:
        request_id = manager.add_request(tokens, max_new_tokens=14)
        steps.at(5)

        def change() -> None:
            with manager.pause():
                _double(model)

        thread = threading.Thread(target=change)
        thread.start()
        while not manager._pausers:
            time.sleep(0.001)
        steps.release()
        output = last(manager, request_id)
        thread.join(WAIT)
        assert_at_rest(manager)
    answers = [[*before[:count], *expected(model, [*tokens, *before[:count]], 14 - count)] for count in range(3, 8)]
    assert output.generated_tokens in answers
    assert output.generated_tokens != before


def test_case_18_a_kept_manager(use_async_batching: bool) -> None:
    model = tiny.llama()
    common: dict[str, Any] = dict(
        max_new_tokens=6,
        continuous_batching_config=small(use_async_batching=use_async_batching),
        persistent_manager=True,
    )
    tokens = prompt(13)
    for change in (None, *CHANGES):
        if change:
            change(model)
        for _ in range(2):
            (output,) = model.generate_batch([tokens], **common).values()
            assert output.generated_tokens == expected(model, tokens, 6)
    model.destroy_cached_continuous_batching_manager()


# --------------------------------------------------------------------------------------- 19: training meanwhile


@pytest.mark.parametrize("make", [tiny.llama, tiny.gemma2])
def test_case_19_a_training_step_beside_an_engine(make: Callable[[], Any]) -> None:
    model = make()
    model.train()
    ids = torch.tensor([prompt(9)])

    def step() -> tuple[float, dict[str, torch.Tensor]]:
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        return loss.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    loss, gradients = step()
    asked = [prompt(n) for n in (3, 5, 9)]
    model.eval()
    wanted = [expected(model, tokens, 30) for tokens in asked]
    model.train()
    with serving(model) as manager:
        ids_of = [manager.add_request(tokens, max_new_tokens=30) for tokens in asked]
        for _ in range(3):
            other_loss, other = step()
            assert other_loss == loss
            assert all(torch.equal(other[name], gradient) for name, gradient in gradients.items())
        assert [last(manager, request_id).generated_tokens for request_id in ids_of] == wanted
        assert model.training and all(module.training for module in model.modules())
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_case_19_an_optimizer_step_is_seen() -> None:
    model = tiny.llama()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = prompt(9)
    ids = torch.tensor([tokens])
    with serving(model) as manager:
        for _ in range(3):
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            output = answer(manager, tokens, 6)
            assert output.generated_tokens == expected(model, tokens, 6)


def test_case_19_generate_and_forward_while_it_runs(llama: Any) -> None:
    tokens = prompt(7)
    wanted = expected(llama, tokens, 10)
    implementation = llama.config._attn_implementation
    with torch.no_grad():
        logits = llama(torch.tensor([tokens])).logits
        with Steps(llama) as steps, serving(llama) as manager:
            request_id = manager.add_request(tokens, max_new_tokens=10)
            steps.at(3)
            assert torch.equal(llama(torch.tensor([tokens])).logits, logits)
            assert expected(llama, tokens, 10) == wanted
            assert llama.config._attn_implementation == implementation
            steps.release()
            assert last(manager, request_id).generated_tokens == wanted
