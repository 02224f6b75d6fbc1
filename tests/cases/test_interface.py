"""The public interface, sentence by sentence, as somebody would who does not believe it."""

import asyncio
import copy
import ctypes
import dataclasses
import inspect
import logging
import math
import pickle
import random
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM as TransformersAuto
from transformers import LlamaForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

import chairlift
from chairlift import (
    AutoModelForCausalLM,
    ChairliftError,
    ConfigError,
    ContinuousBatchingConfig,
    EngineDeadError,
    GenerationConfig,
    GenerationOutput,
    InvalidRequestError,
    QueueFullError,
    RequestStatus,
    UnsupportedModelError,
    WorkloadHints,
    attach,
)
from tests.cases import tiny
from tests.cases.tiny import (
    CONTEXT,
    VOCAB,
    WAIT,
    Steps,
    answer,
    assert_at_rest,
    expected,
    last,
    prompt,
    serving,
    small,
)

METHODS = (
    "generate_batch",
    "init_continuous_batching",
    "continuous_batching_context_manager",
    "destroy_cached_continuous_batching_manager",
)


def batch(model: Any, inputs: Any, **arguments: Any) -> dict[str, GenerationOutput]:
    """`generate_batch` with a small pool."""
    defaults: dict[str, Any] = {"continuous_batching_config": small(), "warmup": False}
    outputs: dict[str, GenerationOutput] = model.generate_batch(inputs, **(defaults | arguments))
    return outputs


def tokens_of(outputs: dict[str, GenerationOutput]) -> list[list[int]]:
    return [output.generated_tokens for output in outputs.values()]


# ------------------------------------------------------------------------------------------- 1: getting a model


def test_a_loaded_model_is_the_transformers_model(tmp_path: Any) -> None:
    tiny.llama().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM) and type(model) is LlamaForCausalLM
    assert all(callable(getattr(model, name)) for name in METHODS)
    plain = TransformersAuto.from_pretrained(tmp_path, dtype=torch.float32)
    assert tokens_of(batch(model, [prompt(5)], max_new_tokens=6)) == [expected(plain, prompt(5), 6)]
    model.save_pretrained(tmp_path / "again")
    again = TransformersAuto.from_pretrained(tmp_path / "again", dtype=torch.float32)
    assert expected(again, prompt(5), 6) == expected(plain, prompt(5), 6)


def test_an_unknown_attention_is_refused_with_those_that_work(tmp_path: Any) -> None:
    tiny.llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'flashy'.*sdpa.*eager"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="flashy")
    for name in ("sdpa", "eager"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name, dtype=torch.float32)
        assert model.config._attn_implementation == name
        assert tokens_of(batch(model, [prompt(5)], max_new_tokens=6)) == [expected(model, prompt(5), 6)]
        assert model.config._attn_implementation == name
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="paged|eager", dtype=torch.float32)
    assert len(tokens_of(batch(model, [prompt(5)], max_new_tokens=6))[0]) == 6


@pytest.mark.parametrize("thing", [None, 3, "gpt2", object(), torch.nn.Linear(2, 2), LlamaForCausalLM])
def test_attach_takes_models_only(thing: Any) -> None:
    with pytest.raises(TypeError, match="attach needs a loaded transformers model"):
        attach(thing)


def test_attach_twice_changes_nothing() -> None:
    model = tiny.llama()
    assert attach(model) is model and attach(attach(model)) is model
    assert tokens_of(batch(model, [[1, 2, 3]], max_new_tokens=4)) == [expected(model, [1, 2, 3], 4)]
    assert isinstance(model, PreTrainedModel)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_serves_itself(duplicate: Callable[[Any], Any]) -> None:
    model = tiny.llama()
    other = duplicate(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(-1)
    mine, others = expected(model, prompt(5), 6), expected(other, prompt(5), 6)
    assert mine != others
    assert tokens_of(batch(model, [prompt(5)], max_new_tokens=6)) == [mine]
    assert tokens_of(batch(other, [prompt(5)], max_new_tokens=6)) == [others]


def test_a_copy_made_while_an_engine_runs(llama: Any) -> None:
    with serving(llama) as manager:
        answer(manager, [1, 2, 3], 3)
        other = copy.deepcopy(llama)
        assert pickle.loads(pickle.dumps(llama)).config.vocab_size == VOCAB
    assert tokens_of(batch(other, [[1, 2, 3]], max_new_tokens=3)) == [expected(llama, [1, 2, 3], 3)]


def test_the_methods_say_what_they_take(llama: Any) -> None:
    parameters = inspect.signature(llama.generate_batch).parameters
    assert list(parameters) == [
        "inputs",
        "generation_config",
        "continuous_batching_config",
        "record_timestamps",
        "progress_bar",
        "persistent_manager",
        "warmup",
        "max_new_tokens",
        "sampling",
    ]
    assert all("manager" in (getattr(llama, name).__doc__ or "") for name in METHODS[1:])


def test_nothing_of_the_callers_changes() -> None:
    model = tiny.llama()
    model.train()
    model.model.layers[0].eval()
    generation_config = GenerationConfig(max_new_tokens=5, do_sample=True, temperature=0.7, top_k=10)
    before = generation_config.to_dict(), model.generation_config.to_dict(), model.config.to_dict()
    modes = [module.training for module in model.modules()]
    keys = set(model.state_dict()), set(dict(model.named_modules()))
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    batch(model, [[1, 2, 3], [4]], generation_config=generation_config)
    batch(model, [[1, 2, 3], [4]], max_new_tokens=3, temperature=1.0, seed=4)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert (generation_config.to_dict(), model.generation_config.to_dict(), model.config.to_dict()) == before
    assert [module.training for module in model.modules()] == modes
    assert (set(model.state_dict()), set(dict(model.named_modules()))) == keys


def test_a_hook_of_the_user_fires_in_the_engine_too() -> None:
    model = tiny.llama()
    with serving(model) as manager:
        plain = answer(manager, [1, 2, 3], 5).generated_tokens
        hook = model.model.layers[1].register_forward_hook(lambda module, args, output: output * -1)
        manager.reset_prefix_cache()
        hooked = answer(manager, [1, 2, 3], 5).generated_tokens
        assert hooked == expected(model, [1, 2, 3], 5) != plain
        hook.remove()
        manager.reset_prefix_cache()
        assert answer(manager, [1, 2, 3], 5).generated_tokens == plain


def test_what_is_exported() -> None:
    for name in (
        "AutoModelForCausalLM",
        "attach",
        "ContinuousBatchingConfig",
        "ContinuousBatchingManager",
        "WorkloadHints",
        "GenerationOutput",
        "RequestStatus",
        "GenerationConfig",
        "CompileConfig",
    ):
        assert hasattr(chairlift, name), name


def test_the_rival_is_never_imported() -> None:
    """Transformers loads its own continuous batching; nothing here does."""
    sources = [path.read_text() for path in Path(chairlift.__file__).parent.rglob("*.py")]
    assert len(sources) > 20
    assert not any("transformers.generation" in source for source in sources)


def test_what_cannot_be_served_is_refused_by_name() -> None:
    encoder_decoder = T5ForConditionalGeneration(
        T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration is an encoder-decoder"):
        attach(encoder_decoder).generate_batch([[1, 2]], max_new_tokens=1)
    headless = tiny.llama().model
    with pytest.raises(UnsupportedModelError, match="no language-model head"):
        attach(headless).generate_batch([[1, 2]], max_new_tokens=1)


def test_a_type_without_operators_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM.*float64"):
        tiny.llama().to(torch.float64).generate_batch([[1, 2]], max_new_tokens=1)


def test_inside_inference_mode() -> None:
    """Whatever is made there is used by another thread, which is not."""
    with torch.inference_mode():
        model = tiny.llama()
    wanted = expected(model, prompt(9), 6)
    for _ in range(2):
        with torch.inference_mode():
            assert tokens_of(batch(model, [prompt(9)], max_new_tokens=6, warmup=True)) == [wanted]
    with torch.inference_mode():
        manager = model.init_continuous_batching(continuous_batching_config=small())
        manager.warmup()
    manager.start()
    assert answer(manager, prompt(9), 6).generated_tokens == wanted
    with torch.inference_mode(), manager.pause(weights_changed=True):
        pass
    assert answer(manager, prompt(9), 6).generated_tokens == wanted
    manager.destroy()


CHANGES_OF_KIND: list[Callable[[Any], Any]] = [
    lambda model: model.to(torch.bfloat16),
    lambda model: model.resize_token_embeddings(VOCAB + 7, mean_resizing=False),
    lambda model: setattr(model.model.layers[0].mlp, "up_proj", copy.deepcopy(model.model.layers[0].mlp.up_proj)),
]


@pytest.mark.parametrize("change", CHANGES_OF_KIND)
def test_another_model_under_the_engine_is_noticed(change: Callable[[Any], Any]) -> None:
    """Never old weights, nor memory that is no longer the model's: an engine of its own answers for the new one."""
    model = tiny.llama()
    kept: dict[str, Any] = dict(max_new_tokens=6, persistent_manager=True)
    assert tokens_of(batch(model, [prompt(9)], **kept)) == [expected(model, prompt(9), 6)]
    with serving(model, num_blocks=32) as manager:
        answer(manager, prompt(9), 6)
        change(model)
        with pytest.raises(EngineDeadError, match="make a new one"):
            answer(manager, prompt(9), 6)
    assert tokens_of(batch(model, [prompt(9)], **kept)) == [expected(model, prompt(9), 6)]
    model.destroy_cached_continuous_batching_manager()


def test_weights_that_are_moved_are_followed() -> None:
    """`parameter.data = ...` frees what was there before, and leaves no version."""
    model = tiny.llama()
    with serving(model) as manager:
        for factor in (1.0, -1.5, 2.0):
            for parameter in model.parameters():
                parameter.data = parameter.data * factor
            assert answer(manager, prompt(9), 6).generated_tokens == expected(model, prompt(9), 6)


# ------------------------------------------------------------------------------------------- 2: generate_batch


def test_no_inputs_give_no_outputs(llama: Any) -> None:
    assert llama.generate_batch([]) == llama.generate_batch(inputs=()) == {}


def test_outputs_come_in_the_order_of_inputs(llama: Any, use_async_batching: bool) -> None:
    inputs = [prompt(9), prompt(2), [3, 4, 5], prompt(2), [3, 4, 6], [96]]
    config = small(use_async_batching=use_async_batching)
    outputs = batch(llama, inputs, max_new_tokens=5, num_return_sequences=2, continuous_batching_config=config)
    assert [output.prompt_ids for output in outputs.values()] == [tokens for tokens in inputs for _ in range(2)]
    assert [name == output.request_id for name, output in outputs.items()] == [True] * 12
    names = list(outputs)
    assert names[1::2] == [f"{name}__child#0" for name in names[::2]]
    assert tokens_of(outputs)[::2] == [expected(llama, tokens, 5) for tokens in inputs]


@pytest.mark.parametrize("name", ["temprature", "streaming", "request_id", "handler", "foo", "max_length", "self"])
def test_an_unknown_keyword_is_a_type_error(llama: Any, name: str) -> None:
    with pytest.raises(TypeError, match=name):
        batch(llama, [[1]], **{name: 1})
    if name not in ("streaming", "request_id", "self"):
        with serving(llama) as manager, pytest.raises(TypeError, match=name):
            manager.add_request([1], **{name: 1})
    if name not in ("streaming", "self"):
        with serving(llama) as manager, pytest.raises(TypeError, match=name):
            manager.add_requests([[1]], **{name: 1})


BAD_PROMPTS: list[tuple[Any, type[Exception]]] = [
    ([VOCAB], ValueError),
    ([1, -1], ValueError),
    ([10**30], ValueError),
    ([1.0], TypeError),
    ([1, None], TypeError),
    (["1"], TypeError),
    ([True], TypeError),
    ([[1, 2]], TypeError),
    ("12", TypeError),
    (b"12", TypeError),
    (7, TypeError),
    (None, TypeError),
    ({1: 2}, TypeError),
    (torch.tensor([[1, 2]]), TypeError),
    (torch.tensor([1.5]), TypeError),
    (torch.tensor(1), TypeError),
    (torch.tensor([True]), TypeError),
    (np.array([1.0]), TypeError),
    ([torch.tensor(1.5)], TypeError),
    ([torch.tensor([1, 2])], TypeError),
    (prompt(CONTEXT + 1), ValueError),
    (prompt(CONTEXT), ValueError),
    ([], ValueError),
]


@pytest.mark.parametrize(("bad", "error"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused_before_anything_runs(llama: Any, bad: Any, error: type[Exception]) -> None:
    with Steps(llama, held=False) as steps:
        with pytest.raises(error, match=r"inputs\[1\]"):
            batch(llama, [[1, 2], bad, [3]], max_new_tokens=2)
        with serving(llama) as manager:
            with pytest.raises(error, match=r"inputs\[0\]"):
                manager.add_requests([bad, [3]], max_new_tokens=2)
            with pytest.raises(error, match="input_ids"):
                manager.add_request(bad, max_new_tokens=2)
            assert not list(manager)
        assert steps.sizes == []


@pytest.mark.parametrize("inputs", [None, 3, "abc", [1, 2, 3], {"a": [1]}, [None], [[1], None]])
def test_inputs_of_other_kinds_are_type_errors(llama: Any, inputs: Any) -> None:
    with pytest.raises(TypeError):
        batch(llama, inputs, max_new_tokens=1)


@pytest.mark.parametrize(
    "kind", [tuple, torch.tensor, np.array, lambda t: np.array(t, np.int32), lambda t: [np.int64(x) for x in t]]
)
def test_arrays_and_tensors_are_prompts_too(llama: Any, kind: Callable[[list[int]], Any]) -> None:
    (output,) = batch(llama, [kind(prompt(5))], max_new_tokens=4).values()
    assert output.generated_tokens == expected(llama, prompt(5), 4)
    assert output.prompt_ids == prompt(5)
    assert all(type(token) is int for token in output.prompt_ids + output.generated_tokens)


def test_a_two_dimensional_tensor_is_a_batch(llama: Any) -> None:
    inputs = torch.tensor([prompt(5, 1), prompt(5, 2)])
    assert tokens_of(batch(llama, inputs, max_new_tokens=4)) == [expected(llama, prompt(5, n), 4) for n in (1, 2)]


def test_the_longest_prompt_and_the_longest_answer(llama: Any) -> None:
    outputs = batch(llama, [prompt(CONTEXT - 1), [1]])
    assert [len(tokens) for tokens in tokens_of(outputs)] == [1, CONTEXT - 1]
    assert [output.finish_reason for output in outputs.values()] == ["length"] * 2
    with pytest.raises(ValueError, match=f"{CONTEXT} tokens.*shorten it"):
        batch(llama, [prompt(CONTEXT)], max_new_tokens=1)
    (scored,) = batch(llama, [prompt(CONTEXT)], max_new_tokens=0, prompt_logprobs=True).values()
    assert len(scored.prompt_logprobs) == CONTEXT


def test_timestamps_and_times(llama: Any, use_async_batching: bool) -> None:
    config = small(use_async_batching=use_async_batching)
    begin = time.perf_counter()
    (output,) = batch(
        llama, [[1, 2]], max_new_tokens=6, record_timestamps=True, continuous_batching_config=config
    ).values()
    end = time.perf_counter()
    assert output.timestamps is not None and len(output.timestamps) == 6
    times = [begin, output.created_time, output.lifespan[0], *output.timestamps, output.lifespan[1], end]
    assert times == sorted(times)
    (output,) = batch(llama, [[1, 2]], max_new_tokens=2).values()
    assert output.timestamps is None


def test_the_progress_bar_counts_requests(llama: Any, capsys: pytest.CaptureFixture[str]) -> None:
    batch(llama, [[1], [2], [3]], max_new_tokens=2, progress_bar=True)
    shown = capsys.readouterr().err
    assert "3/3" in shown and "tok/s" in shown
    batch(llama, [[1], [2], [3]], max_new_tokens=2)
    assert capsys.readouterr().err == ""


def test_more_prompts_than_a_queue_holds(llama: Any) -> None:
    """Who waits for all answers is not told to come back later."""
    config = small(max_queue_size=2, max_requests_per_batch=2)
    outputs = batch(llama, [[n, 2] for n in range(9)], max_new_tokens=2, continuous_batching_config=config)
    assert len(outputs) == 9


def test_warmup_changes_no_answer(llama: Any) -> None:
    for _ in range(2):
        assert tokens_of(batch(llama, [prompt(5)], max_new_tokens=4, warmup=True)) == [expected(llama, prompt(5), 4)]


# --- persistent managers


def _renewed(model: Any, config: ContinuousBatchingConfig, **arguments: Any) -> Any:
    with model.continuous_batching_context_manager(
        continuous_batching_config=config, persistent_manager=True, **arguments
    ) as manager:
        return manager


def test_a_kept_manager_comes_back_for_equal_configs_only() -> None:
    model = tiny.llama()
    first = _renewed(model, small())
    assert not first.is_running() and first.is_usable
    assert _renewed(model, small()) is first
    assert _renewed(model, small(), generation_config=model.generation_config) is first
    other = _renewed(model, small(num_blocks=40))
    assert other is not first and not first.is_usable  # rebuilt
    third = _renewed(model, small(num_blocks=40), generation_config=GenerationConfig(max_new_tokens=3))
    assert third is not other
    model.generation_config.eos_token_id = 5
    fourth = _renewed(model, small(num_blocks=40), generation_config=GenerationConfig(max_new_tokens=3))
    assert fourth is not third  # it would not know the new EOS token
    model.destroy_cached_continuous_batching_manager()
    model.destroy_cached_continuous_batching_manager()
    assert not fourth.is_usable
    assert _renewed(model, small(num_blocks=40)) is not fourth
    model.destroy_cached_continuous_batching_manager()


def test_a_kept_manager_keeps_its_cache_and_its_answers(llama: Any) -> None:
    """Also with the warm-up that each call asks for."""
    tokens = prompt(21)
    for number in range(4):
        (output,) = llama.generate_batch(
            [tokens], max_new_tokens=6, continuous_batching_config=small(), persistent_manager=True
        ).values()
        assert output.generated_tokens == expected(llama, tokens, 6), number
        assert output.num_cached_tokens == (20 if number else 0)
    llama.destroy_cached_continuous_batching_manager()


def test_warming_up_again_leaves_the_cache_alone(llama: Any) -> None:
    manager = llama.init_continuous_batching(continuous_batching_config=small())
    for number in range(3):
        manager.warmup()
        manager.start()
        manager.warmup()
        output = answer(manager, prompt(21), 6)
        assert output.generated_tokens == expected(llama, prompt(21), 6), number
        manager.stop()
    assert output.num_cached_tokens == 20
    manager.destroy()


def test_a_call_that_does_not_keep_ends_what_was_kept(llama: Any) -> None:
    kept = _renewed(llama, small())
    with llama.continuous_batching_context_manager(continuous_batching_config=small()) as manager:
        assert manager is kept
    assert not kept.is_usable


def test_threads_share_a_kept_manager(llama: Any) -> None:
    wanted = {n: expected(llama, prompt(4 + n), 8) for n in range(6)}
    got: dict[int, list[int]] = {}
    managers = set()
    begin = threading.active_count()

    def ask(number: int) -> None:
        for _ in range(4):
            (output,) = batch(llama, [prompt(4 + number)], max_new_tokens=8, persistent_manager=True).values()
            got[number] = output.generated_tokens

    with llama.continuous_batching_context_manager(
        continuous_batching_config=small(), persistent_manager=True
    ) as manager:
        threads = [threading.Thread(target=ask, args=(number,)) for number in wanted]
        for thread in threads:
            thread.start()
        mine = manager.add_request(prompt(30), max_new_tokens=20)
        outputs = list(manager)
        for thread in threads:
            thread.join(WAIT)
        assert [output.request_id for output in outputs] == [mine]  # nobody sees the answers of another
        managers.add(manager)
    assert got == wanted
    assert _renewed(llama, small()) in managers
    assert_at_rest(manager)
    llama.destroy_cached_continuous_batching_manager()
    assert threading.active_count() == begin


def test_threads_that_keep_nothing(llama: Any) -> None:
    wanted = {n: expected(llama, prompt(4 + n), 6) for n in range(4)}
    got: dict[int, list[int]] = {}
    begin = threading.active_count()

    def ask(number: int) -> None:
        (output,) = batch(llama, [prompt(4 + number)], max_new_tokens=6, persistent_manager=number % 2 > 0).values()
        got[number] = output.generated_tokens

    for _ in range(2):
        threads = [threading.Thread(target=ask, args=(number,)) for number in wanted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        assert got == wanted
    llama.destroy_cached_continuous_batching_manager()
    assert threading.active_count() == begin


def test_two_managers_and_two_models_at_once(llama: Any, mistral: Any) -> None:
    with serving(llama) as first, serving(llama, page_size=8) as second, serving(mistral) as third:
        ids = [(m, m.add_request(prompt(9), max_new_tokens=20)) for m in (first, second, third)]
        answers = [last(manager, request_id).generated_tokens for manager, request_id in ids]
        assert tokens_of(batch(llama, [prompt(9)], max_new_tokens=20)) == [answers[0]]
    assert answers == [expected(llama, prompt(9), 20)] * 2 + [expected(mistral, prompt(9), 20)]


def _raise_in(thread: threading.Thread, exception: type[BaseException]) -> None:
    """The next time it runs Python code, this thread raises."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(exception))


def test_an_interrupt_does_not_wait_for_the_answers(llama: Any) -> None:
    """Ctrl-C in `generate_batch`: what it had asked for is cancelled, a kept manager goes on."""
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            batch(llama, [[n, 7] for n in range(4)], max_new_tokens=60, persistent_manager=True)
        except BaseException as error:
            raised.append(error)

    with Steps(llama) as steps:
        thread = threading.Thread(target=ask)
        thread.start()
        steps.at(2)
        _raise_in(thread, KeyboardInterrupt)
        with llama.continuous_batching_context_manager(
            continuous_batching_config=small(), persistent_manager=True
        ) as manager:
            assert manager.stats().running == 4
            manager.cancel_request("req_0")  # wakes the thread, which then sees the interrupt
            steps.let_go_to(3)
            thread.join(WAIT)
            assert not thread.is_alive()
            steps.release()
            assert not list(manager)
            assert_at_rest(manager)
            assert len(steps.sizes) < 8
    assert [type(error) for error in raised] == [KeyboardInterrupt]
    llama.destroy_cached_continuous_batching_manager()


# ------------------------------------------------------------------------------------------- 3: the manager


def test_starting_and_stopping(llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    manager = llama.init_continuous_batching(continuous_batching_config=small())
    assert not manager.is_running()
    manager.start()
    assert manager.is_running()
    caplog.clear()
    manager.start()
    assert "running already" in caplog.text
    first = manager.add_request(prompt(3), max_new_tokens=20)
    second = manager.add_request(prompt(4), max_new_tokens=20)
    manager.stop()
    assert not manager.is_running()
    assert last(manager, second).generated_tokens == expected(llama, prompt(4), 20)
    assert last(manager, first).generated_tokens == expected(llama, prompt(3), 20)
    assert manager.get_result() is None
    caplog.clear()
    assert manager.add_request([1]) is None
    assert manager.add_requests([[1], [2]]) == []
    assert caplog.text.count("stopped") == 2
    manager.start()
    assert answer(manager, prompt(3), 4).generated_tokens == expected(llama, prompt(3), 4)
    manager.destroy()


def test_stopping_hard(llama: Any, use_async_batching: bool) -> None:
    config = small(max_requests_per_batch=2, use_async_batching=use_async_batching)
    manager = llama.init_continuous_batching(continuous_batching_config=config)
    with Steps(llama) as steps:
        manager.start()
        ids = [manager.add_request(prompt(3 + n), max_new_tokens=40) for n in range(4)]
        steps.at(4)
        manager.stop(block=False, hard_stop=True)
        assert manager.add_request([1]) is None
        steps.release()
        outputs = list(manager)
    assert {output.request_id for output in outputs} == set(ids)
    for output in outputs:
        assert output.status is RequestStatus.FAILED and output.finish_reason == "error"
        assert isinstance(output.exception, RuntimeError) and output.error and "hard_stop" in output.error
    assert max(len(output.generated_tokens) for output in outputs) >= 2
    assert len(steps.sizes) <= 6
    manager.start()
    assert_at_rest(manager)
    assert answer(manager, prompt(3), 4).generated_tokens == expected(llama, prompt(3), 4)
    manager.destroy()


def test_stop_waits_no_longer_than_it_is_told(llama: Any) -> None:
    manager = llama.init_continuous_batching(continuous_batching_config=small())
    with Steps(llama) as steps:
        manager.start()
        request_id = manager.add_request(prompt(3), max_new_tokens=5)
        steps.at(2)
        manager.stop(timeout=0.01)
        assert manager.is_running()
        manager.stop(block=False)
        assert manager.is_running()
        steps.release()
        assert last(manager, request_id).generated_tokens == expected(llama, prompt(3), 5)
    manager.start()  # waits for the end of the one that was told to stop
    assert manager.is_running()
    assert answer(manager, prompt(3), 4).generated_tokens == expected(llama, prompt(3), 4)
    manager.stop(keep_for_next_session=True)
    manager.start()
    assert answer(manager, prompt(9), 4).generated_tokens == expected(llama, prompt(9), 4)
    manager.destroy()


def test_starting_and_stopping_many_times(llama: Any) -> None:
    manager = llama.init_continuous_batching(continuous_batching_config=small())
    for number in range(30):
        manager.start()
        request_id = manager.add_request([5, 6, 7], max_new_tokens=2)
        manager.stop(block=number % 2 == 0)
        assert last(manager, request_id).generated_tokens == expected(llama, [5, 6, 7], 2)
    manager.destroy()


def test_after_destroy(llama: Any) -> None:
    manager = llama.init_continuous_batching(continuous_batching_config=small())
    manager.start()
    request_id = manager.add_request([1, 2, 3], max_new_tokens=40)
    manager.destroy()
    manager.destroy()
    output = manager.get_result(request_id)
    assert output is not None and output.is_finished()
    for call in (manager.start, manager.warmup, lambda: manager.add_request([1]), lambda: manager.add_requests([[1]])):
        with pytest.raises(RuntimeError, match="destroyed"):
            call()
    assert manager.get_result() is None and manager.get_result("x") is None and list(manager) == []
    assert list(manager.request_id_iter("x")) == []
    manager.cancel_request("x")
    manager.reset_prefix_cache()
    manager.stop()
    manager.stop(hard_stop=True)
    assert not manager.is_running()
    with manager.pause():
        pass
    assert str(manager.stats())


def test_destroying_one_that_was_never_started(llama: Any) -> None:
    manager = llama.init_continuous_batching(continuous_batching_config=small())
    request_id = manager.add_request([1, 2], max_new_tokens=2)
    manager.destroy()
    output = manager.get_result(request_id)
    assert output is not None and output.status is RequestStatus.FAILED
    assert isinstance(output.exception, RuntimeError)


def test_before_the_start(llama: Any) -> None:
    """Requests may be queued; who asks for results is not left hanging."""
    manager = llama.init_continuous_batching(continuous_batching_config=small())
    request_id = manager.add_request([1, 2, 3], max_new_tokens=3)
    assert manager.get_result() is None and list(manager) == []
    manager.start()
    assert last(manager, request_id).generated_tokens == expected(llama, [1, 2, 3], 3)
    manager.destroy()


def test_leaving_the_context_finishes_what_was_queued(llama: Any) -> None:
    with serving(llama) as manager:
        ids = manager.add_requests([prompt(3), prompt(4)], max_new_tokens=10)
    assert [last(manager, i).generated_tokens for i in ids] == [expected(llama, prompt(n), 10) for n in (3, 4)]
    with pytest.raises(RuntimeError, match="destroyed"):
        manager.start()
    with pytest.raises(KeyError), serving(llama) as manager:
        raise KeyError
    assert not manager.is_running()


@pytest.mark.parametrize("number", [1, 3])
def test_ids_come_in_the_order_of_inputs(llama: Any, number: int) -> None:
    inputs = [[9, 9, 9, 9, 9, n] for n in range(5)] + [[1, 2], [9, 9]]
    with serving(llama) as manager:
        ids = manager.add_requests(inputs, max_new_tokens=3, num_return_sequences=number)
        assert len(set(ids)) == len(inputs)
        for request_id, tokens in zip(ids, inputs, strict=True):
            output = last(manager, request_id)
            assert output.prompt_ids == tokens
            for child in range(number - 1):
                assert last(manager, f"{request_id}__child#{child}").prompt_ids == tokens
        assert manager.get_result(timeout=0) is None


def test_all_requests_are_checked_before_one_is_queued(llama: Any) -> None:
    with Steps(llama) as steps, serving(llama, max_queue_size=3, max_requests_per_batch=1) as manager:
        with pytest.raises(ValueError, match=r"inputs\[1\]"):
            manager.add_requests([[1], [VOCAB]])
        running = manager.add_request([1], max_new_tokens=2)
        steps.at(1)
        with pytest.raises(InvalidRequestError, match="max_queue_size=3"):
            manager.add_requests([[1]] * 4)
        ids = manager.add_requests([[1]] * 3, max_new_tokens=1)
        with pytest.raises(QueueFullError, match="3 requests are waiting"):
            manager.add_request([1])
        assert manager.stats().waiting == 3
        steps.release()
        for request_id in (running, *ids):
            assert last(manager, request_id).finish_reason == "length"
        assert answer(manager, [1], 1).finish_reason == "length"  # there is room again


def test_getting_results(llama: Any) -> None:
    with serving(llama) as manager:
        assert manager.get_result(timeout=0) is None
        assert manager.get_result("nobody") is None  # does not wait for what cannot come
        assert manager.get_result(timeout=-1) is None
        request_id = manager.add_request([1, 2, 3], max_new_tokens=2)
        output = manager.get_result(timeout=WAIT)
        assert output is not None and output.request_id == request_id and output.is_finished()
        assert manager.get_result(request_id) is None  # consumed
        assert manager.get_result(timeout=0) is None


@pytest.mark.parametrize("streaming", [False, True])
def test_iterating_ends_when_nothing_is_left(llama: Any, streaming: bool, use_async_batching: bool) -> None:
    with serving(llama, use_async_batching=use_async_batching) as manager:
        assert list(manager) == []
        for _ in range(2):
            ids = manager.add_requests([prompt(3), prompt(4)], max_new_tokens=4, streaming=streaming)
            outputs = list(manager)
            assert len(outputs) == (8 if streaming else 2)
            assert {output.request_id for output in outputs if output.is_finished()} == set(ids)


@pytest.mark.parametrize("end", ["finish", "cancel", "fail", "hard_stop", "unknown"])
def test_the_outputs_of_one_request_end(llama: Any, end: str) -> None:
    def fail(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(token_ids) > 5:
            raise KeyError("mine")
        return logits

    manager = llama.init_continuous_batching(continuous_batching_config=small())
    with Steps(llama) as steps:
        manager.start()
        request_id = manager.add_request(
            [1, 2, 3], max_new_tokens=6, streaming=True, logits_processor=fail if end == "fail" else None
        )
        steps.at(3)
        if end == "cancel":
            manager.cancel_request(request_id)
        elif end == "hard_stop":
            manager.stop(block=False, hard_stop=True)
        steps.release()
        outputs = list(manager.request_id_iter("who" if end == "unknown" else request_id))
    status = {
        "finish": RequestStatus.FINISHED,
        "cancel": RequestStatus.CANCELLED,
        "fail": RequestStatus.FAILED,
        "hard_stop": RequestStatus.FAILED,
    }
    if end == "unknown":
        assert outputs == []
    else:
        assert outputs[-1].status is status[end]
        assert [output.is_finished() for output in outputs[:-1]] == [False] * (len(outputs) - 1)
        assert all(output.finish_reason is None for output in outputs[:-1])
        assert [t for output in outputs for t in output.new_tokens] == outputs[-1].generated_tokens
        assert list(manager.request_id_iter(request_id)) == []
    manager.destroy()


def test_a_callback_that_raises_harms_nobody(llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[GenerationOutput] = []
    done = threading.Event()

    def good(output: GenerationOutput) -> None:
        seen.append(output)
        if output.is_finished():
            done.set()

    def bad(output: GenerationOutput) -> None:
        raise KeyError("mine")

    with Steps(llama) as steps, serving(llama) as manager:
        first = manager.add_request(prompt(3), max_new_tokens=4, streaming=True)
        second = manager.add_request(prompt(4), max_new_tokens=4, streaming=True)
        third = manager.add_request(prompt(5), max_new_tokens=4)
        manager.register_result_handler(first, bad)
        manager.register_result_handler(second, good)
        manager.register_result_handler("nobody", good)
        steps.release()
        assert last(manager, third).generated_tokens == expected(llama, prompt(5), 4)
        assert done.wait(WAIT)
    assert [t for output in seen for t in output.new_tokens] == expected(llama, prompt(4), 4)
    assert caplog.text.count("KeyError: 'mine'") == 4


def test_a_callback_gets_what_came_before_it(llama: Any) -> None:
    seen: list[GenerationOutput] = []
    with serving(llama) as manager:
        request_id = manager.add_request(prompt(3), max_new_tokens=4, streaming=True)
        answer(manager, prompt(4), 10)  # the other is long done
        manager.register_result_handler(request_id, seen.append)
    assert [t for output in seen for t in output.new_tokens] == expected(llama, prompt(3), 4)


async def test_a_callback_runs_on_the_loop_that_registered_it(llama: Any) -> None:
    loop_thread = threading.get_ident()
    seen: list[int] = []
    done = asyncio.Event()

    def note(output: GenerationOutput) -> None:
        seen.append(threading.get_ident())
        if output.is_finished():
            done.set()

    with serving(llama) as manager:
        request_id = manager.add_request(prompt(3), max_new_tokens=4, streaming=True)
        manager.register_result_handler(request_id, note)
        await asyncio.wait_for(done.wait(), WAIT)
        assert seen == [loop_thread] * 4

        streamed = [
            output async for output in manager.stream(manager.add_request(prompt(3), max_new_tokens=4, streaming=True))
        ]
        assert [output.new_tokens for output in streamed] == [[t] for t in expected(llama, prompt(3), 4)]
        assert [output async for output in manager.stream("nobody")] == []
        request_id = manager.add_request(prompt(3), max_new_tokens=40, streaming=True)
        async for _ in manager.stream(request_id):
            manager.cancel_request(request_id)


async def test_a_stream_that_is_left_early(llama: Any) -> None:
    with serving(llama) as manager:
        request_id = manager.add_request(prompt(3), max_new_tokens=6, streaming=True)
        stream = manager.stream(request_id)
        first = await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        rest = [t for output in manager.request_id_iter(request_id) for t in output.new_tokens]
        wanted = expected(llama, prompt(3), 6)
        assert first.new_tokens == wanted[:1]
        assert rest == wanted[len(wanted) - len(rest) :]


def test_a_loop_that_was_closed_harms_nobody(llama: Any) -> None:
    with Steps(llama) as steps, serving(llama) as manager:
        first = manager.add_request(prompt(3), max_new_tokens=4)
        second = manager.add_request(prompt(4), max_new_tokens=8)

        async def register() -> None:
            manager.register_result_handler(first, print)

        asyncio.run(register())
        steps.release()
        assert last(manager, second).generated_tokens == expected(llama, prompt(4), 8)


def test_pausing(llama: Any) -> None:
    with Steps(llama, held=False) as steps, serving(llama) as manager:
        request_id = manager.add_request(prompt(3), max_new_tokens=50)
        with manager.pause():
            count = len(steps.sizes)
            more = manager.add_request(prompt(4), max_new_tokens=3)
            with manager.pause():
                time.sleep(0.02)
            time.sleep(0.02)
            assert len(steps.sizes) == count
            with pytest.raises(RuntimeError, match="inside pause"):
                manager.stop()
            with pytest.raises(RuntimeError, match="inside pause"):
                manager.destroy()
            assert manager.is_running()
        assert last(manager, request_id).generated_tokens == expected(llama, prompt(3), 50)
        assert last(manager, more) is not None


def test_an_exception_inside_a_pause_ends_it(llama: Any) -> None:
    with serving(llama) as manager:
        with pytest.raises(KeyError), manager.pause():
            raise KeyError
        assert answer(manager, prompt(3), 5).generated_tokens == expected(llama, prompt(3), 5)


def test_resetting_the_prefix_cache(llama: Any) -> None:
    with serving(llama) as manager:
        answer(manager, prompt(20), 2)
        assert answer(manager, prompt(20), 2).num_cached_tokens == 19
        manager.reset_prefix_cache()
        output = answer(manager, prompt(20), 2)
        assert output.num_cached_tokens == 0
        assert output.generated_tokens == expected(llama, prompt(20), 2)
        assert_at_rest(manager)


def test_stats_are_a_frozen_snapshot(llama: Any) -> None:
    with Steps(llama) as steps, serving(llama, max_requests_per_batch=1) as manager:
        ids = [manager.add_request(prompt(5), max_new_tokens=3) for _ in range(3)]
        steps.at(2)
        stats = manager.stats()
        assert (stats.running, stats.waiting) == (1, 2)
        assert stats.used_blocks == 2 and stats.total_blocks == 64
        with pytest.raises(dataclasses.FrozenInstanceError):
            stats.running = 0  # type: ignore[misc]
        steps.release()
        for request_id in ids:
            last(manager, request_id)
        assert (stats.running, stats.waiting) == (1, 2)
        after = manager.stats()
        assert after.generated_tokens == 9 and after.prefix_hit_tokens == 8 and after.steps == len(steps.sizes)
        assert after.tokens_per_second > 0 and after.step_seconds.mean > 0


def test_a_killed_thread_is_noticed(llama: Any) -> None:
    manager = llama.init_continuous_batching(continuous_batching_config=small())
    manager.start()
    answer(manager, [1, 2], 2)
    _raise_in(manager._thread, SystemExit)
    request_id = manager.add_request([1, 2], max_new_tokens=2)
    with pytest.raises(EngineDeadError):
        manager.get_result(request_id, timeout=WAIT)
    assert not manager.is_running()
    with pytest.raises(EngineDeadError):
        manager.add_request([1])
    manager.destroy()


def test_an_output_is_frozen_and_says_all(llama: Any) -> None:
    with serving(llama) as manager:
        output = answer(manager, [1, 2, 3], 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        output.status = RequestStatus.FAILED
    assert (output.prompt_ids, output.new_tokens) == ([1, 2, 3], output.generated_tokens)
    assert (output.logprobs, output.top_logprobs, output.prompt_logprobs) == ([], [], [])
    assert (output.status, output.finish_reason) == (RequestStatus.FINISHED, "length")
    assert (output.stop_reason, output.error, output.exception, output.timestamps) == (None, None, None, None)
    assert [status.name for status in RequestStatus] == [
        "PENDING",
        "PREFILLING",
        "DECODING",
        "FINISHED",
        "FAILED",
        "CANCELLED",
    ]
    assert [GenerationOutput(request_id="x", status=status).is_finished() for status in RequestStatus] == (
        [False] * 3 + [True] * 3
    )
    assert pickle.loads(pickle.dumps(output)) == output


# ------------------------------------------------------------------------------------------- 4: sampling

BAD_SAMPLING: list[tuple[str, Any, type[Exception]]] = [
    ("temperature", -0.1, ValueError),
    ("temperature", math.nan, ValueError),
    ("temperature", math.inf, ValueError),
    ("temperature", 1e300, ValueError),
    ("temperature", "hot", TypeError),
    ("top_k", -1, ValueError),
    ("top_k", 1.5, TypeError),
    ("top_p", 1.01, ValueError),
    ("top_p", -0.01, ValueError),
    ("min_p", 2, ValueError),
    ("typical_p", 0, ValueError),
    ("repetition_penalty", 0, ValueError),
    ("repetition_penalty", -1.0, ValueError),
    ("presence_penalty", 2.1, ValueError),
    ("frequency_penalty", -2.1, ValueError),
    ("no_repeat_ngram_size", -1, ValueError),
    ("logit_bias", [1], TypeError),
    ("logit_bias", {1: math.inf}, ValueError),
    ("bad_words_ids", [1], TypeError),
    ("min_new_tokens", -1, ValueError),
    ("max_new_tokens", -1, ValueError),
    ("max_new_tokens", 2.5, TypeError),
    ("max_new_tokens", True, TypeError),
    ("eos_token_id", "eos", TypeError),
    ("eos_token_id", -2, ValueError),
    ("ignore_eos", 1, TypeError),
    ("stop_token_ids", [1.5], TypeError),
    ("seed", 1.5, TypeError),
    ("seed", "x", TypeError),
    ("do_sample", "yes", TypeError),
    ("num_return_sequences", 0, ValueError),
    ("num_return_sequences", -1, ValueError),
    ("num_return_sequences", 1.5, TypeError),
    ("logprobs", -1, ValueError),
    ("logprobs", VOCAB + 1, ValueError),
    ("logprobs", "all", TypeError),
    ("prompt_logprobs", -1, ValueError),
    ("logits_processor", 3, TypeError),
]


@pytest.fixture(scope="module")
def running(llama: Any) -> Any:
    with serving(llama) as manager:
        yield manager


@pytest.mark.parametrize(("name", "value", "error"), BAD_SAMPLING)
def test_a_nonsense_value_is_refused_by_name(running: Any, name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        running.add_request([1, 2], **{name: value})
    with pytest.raises(error, match=name):
        running.add_requests([[1, 2], [3]], **{name: value})
    assert len(answer(running, [1, 2], 2).generated_tokens) == 2


@pytest.mark.parametrize("value", [0, -1, 2.5, "three"])
def test_a_nonsense_number_of_answers_in_generate_batch(llama: Any, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="num_return_sequences"):
        batch(llama, [[1]], num_return_sequences=value)


def test_request_ids_of_other_kinds(running: Any) -> None:
    for bad in (3, b"x", ["x"]):
        with pytest.raises(TypeError, match="request_id"):
            running.add_request([1], request_id=bad)
    with pytest.raises(ValueError, match="request_id is empty"):
        running.add_request([1], request_id="")


def test_a_logits_processor_that_misbehaves_fails_its_request_only(llama: Any, running: Any) -> None:
    def raising(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    processors: list[Callable[..., Any]] = [
        raising,
        lambda token_ids, logits: None,
        lambda token_ids, logits: logits[:3],
        lambda token_ids, logits: logits * math.nan,
        lambda token_ids, logits: logits - math.inf,
        lambda token_ids: token_ids,
    ]
    ids = [running.add_request([1, 2, 3], max_new_tokens=4, logits_processor=p) for p in processors]
    good = running.add_request([1, 2, 3], max_new_tokens=4)
    for request_id in ids:
        output = last(running, request_id)
        assert output.status is RequestStatus.FAILED and output.finish_reason == "error"
        assert output.exception is not None and output.error and output.generated_tokens == []
    assert last(running, good).generated_tokens == expected(llama, [1, 2, 3], 4)
    assert_at_rest(running)


def test_a_logits_processor_sees_tokens_and_logits(llama: Any, running: Any) -> None:
    seen: list[list[int]] = []

    def note(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert logits.shape == (VOCAB,)
        seen.append(list(token_ids))
        token_ids.append(0)  # its own copy
        logits.zero_()  # its own, too
        return logits + torch.nn.functional.one_hot(torch.tensor(len(seen)), VOCAB)

    output = answer(running, [1, 2, 3], 3, logits_processor=note)
    assert output.generated_tokens == [1, 2, 3]
    assert seen == [[1, 2, 3], [1, 2, 3, 1], [1, 2, 3, 1, 2]]
    assert answer(running, [1, 2, 3], 3).generated_tokens == expected(llama, [1, 2, 3], 3)


def test_a_seed_gives_the_same_tokens_everywhere(llama: Any, use_async_batching: bool) -> None:
    sampling: dict[str, Any] = dict(max_new_tokens=12, temperature=0.9, top_p=0.95, top_k=50, seed=11, logprobs=2)
    tokens = prompt(11)
    (alone,) = batch(llama, [tokens], **sampling).values()
    with (
        Steps(llama) as steps,
        serving(llama, num_blocks=12, max_batch_tokens=5, use_async_batching=use_async_batching) as manager,
    ):  # chunked, preempted, after a hit
        others = [manager.add_request(prompt(8, n), max_new_tokens=12, temperature=1.0) for n in range(3)]
        ids = [manager.add_request(tokens, **sampling) for _ in range(3)]
        steps.release()
        for request_id in ids:
            output = last(manager, request_id)
            assert output.generated_tokens == alone.generated_tokens
            assert (output.logprobs, output.top_logprobs) == (alone.logprobs, alone.top_logprobs)
        for request_id in others:
            last(manager, request_id)
        assert manager.stats().preemptions > 0


def test_the_configured_seed_makes_requests_without_one_reproducible(llama: Any) -> None:
    def ask(seed: int | None) -> list[list[int]]:
        config = small(seed=seed)
        return tokens_of(
            batch(llama, [prompt(5)] * 3, max_new_tokens=8, do_sample=True, continuous_batching_config=config)
        )

    first = ask(7)
    assert ask(7) == first
    assert len({tuple(tokens) for tokens in first}) == 3  # each request draws for itself
    assert ask(8) != first
    assert ask(None) != ask(None)


def test_defaults_come_from_the_generation_config(llama: Any) -> None:
    generation_config = GenerationConfig(max_new_tokens=7, repetition_penalty=1.5)
    generation_config.num_return_sequences = 2  # the constructor refuses it for greedy answers
    outputs = batch(llama, [prompt(5)], generation_config=generation_config)
    assert tokens_of(outputs) == [expected(llama, prompt(5), 7, repetition_penalty=1.5)] * 2
    outputs = batch(
        llama,
        [prompt(5)],
        generation_config=generation_config,
        max_new_tokens=5,
        repetition_penalty=1.0,
        num_return_sequences=1,
    )
    assert tokens_of(outputs) == [expected(llama, prompt(5), 5)]
    with pytest.raises(ValueError, match=r"generation_config.num_beams=3 is not supported"):
        batch(llama, [[1]], generation_config=GenerationConfig(num_beams=3))


# ------------------------------------------------------------------------------------------- 5: the config

BAD_CONFIG: list[tuple[str, Any]] = [
    ("page_size", 3),
    ("page_size", 0),
    ("page_size", "big"),
    ("page_size", 16.0),
    ("num_blocks", 0),
    ("num_blocks", -5),
    ("max_memory_percent", 0),
    ("max_memory_percent", 1.1),
    ("max_batch_tokens", 0),
    ("max_requests_per_batch", 0),
    ("scheduler_type", "lifo"),
    ("safety_margin", -0.1),
    ("safety_margin", 1.1),
    ("safety_margin", math.nan),
    ("allow_block_sharing", "yes"),
    ("logprobs_mode", "cooked"),
    ("use_cuda_graph", (True,)),
    ("use_cuda_graph", 3),
    ("q_padding_interval_size", -1),
    ("use_async_batching", "no"),
    ("default_compile_level", 4),
    ("max_blocks_per_request", -1),
    ("cpu_offload_space", -1.0),
    ("cpu_offload_space_safety_threshold", 1.5),
    ("cpu_group_timeout", 0),
    ("max_queue_size", -1),
    ("seed", 1.5),
]


@pytest.mark.parametrize(("name", "value"), BAD_CONFIG)
def test_a_config_that_makes_no_sense(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        ContinuousBatchingConfig(**{name: value})
    assert isinstance(caught.value, ValueError)


def test_configs_are_frozen_and_comparable() -> None:
    config = small()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.page_size = 8  # type: ignore[misc]
    assert config == small() != small(page_size=8)
    with pytest.warns(FutureWarning, match="block_size"):
        assert ContinuousBatchingConfig(block_size=32) == ContinuousBatchingConfig(page_size=32)
    with pytest.raises(TypeError, match="pagesize"):
        ContinuousBatchingConfig(pagesize=8)  # type: ignore[call-arg]


def test_a_config_inside_a_generation_config(llama: Any) -> None:
    with pytest.warns(FutureWarning, match="continuous_batching_config"):
        generation_config = GenerationConfig(max_new_tokens=3, continuous_batching_config=small(page_size=8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager = llama.init_continuous_batching(generation_config)
        assert manager.config.page_size == 8
        manager.destroy()
        manager = llama.init_continuous_batching(generation_config, small(page_size=16))  # wins
        assert manager.config.page_size == 16
        manager.destroy()
        (output,) = llama.generate_batch([[1, 2, 3]], generation_config).values()
    assert output.generated_tokens == expected(llama, [1, 2, 3], 3)


@pytest.mark.parametrize("config", [{"page_size": 8}, 3, "small", object()])
def test_a_config_of_another_kind(llama: Any, config: Any) -> None:
    with pytest.raises(TypeError, match="continuous_batching_config"):
        llama.generate_batch([[1]], continuous_batching_config=config)


def test_a_pool_too_small_for_anything(llama: Any) -> None:
    hints = WorkloadHints(max_prompt_length=30, max_generated_length=10)
    with pytest.raises(ConfigError, match=r"num_blocks=2 is too small.*at least 10"):
        llama.init_continuous_batching(continuous_batching_config=small(num_blocks=2), workload_hints=hints)
    with pytest.raises(ConfigError, match="exceed"):
        llama.init_continuous_batching(continuous_batching_config=small(num_blocks=1 << 50))


@pytest.mark.parametrize(
    "change",
    [
        {"scheduler_type": "prefill_first"},
        {"max_batch_tokens": 1},
        {"max_requests_per_batch": 1},
        {"safety_margin": 1.0},
        {"use_cuda_graph": True},
        {"use_cuda_graph": (False, True)},
        {"default_compile_level": 3},
        {"per_request_processors": True},
        {"max_blocks_per_request": 0},
        {"cpu_offload_space": None},
        {"cpu_group_timeout": None},
        {"auto_switch_to_flash": False},
        {"max_memory_percent": 0.5, "num_blocks": None},
        {"q_padding_interval_size": 64, "kv_padding_interval_size": 64},
        {"page_size": 256, "num_blocks": None},
        {"use_async_batching": True, "max_batch_tokens": 2, "num_blocks": 9},
    ],
)
def test_every_setting_gives_the_same_tokens(
    llama: Any, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    inputs = [prompt(3), prompt(9), prompt(9), prompt(14)]
    outputs = batch(llama, inputs, max_new_tokens=8, continuous_batching_config=small(**change))
    assert tokens_of(outputs) == [expected(llama, tokens, 8) for tokens in inputs]


def test_what_was_resolved_can_be_printed(llama: Any) -> None:
    manager = llama.init_continuous_batching()
    text = str(manager.config)
    assert "LlamaForCausalLM" in text and "num_blocks" in text
    assert None not in {
        getattr(manager.config, field.name)
        for field in dataclasses.fields(manager.config)
        if field.name not in ("seed", "cpu_group_timeout")
    }
    manager.destroy()


# ------------------------------------------------------------------------------------------- 7: errors


def test_the_tree_of_errors() -> None:
    for error in (UnsupportedModelError, ConfigError, InvalidRequestError, QueueFullError, EngineDeadError):
        assert issubclass(error, ChairliftError)
    assert issubclass(ConfigError, ValueError) and issubclass(InvalidRequestError, ValueError)
    assert issubclass(EngineDeadError, RuntimeError)
    assert EngineDeadError("x").partial == {}
