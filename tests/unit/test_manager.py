"""The life of a manager, and who is told what when it ends, over a device that is a list of hashes."""

import asyncio
import gc
import logging
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chairlift.cache.cache import KVCache
from chairlift.cache.layout import CacheLayout, LayerSpec, plan_layout
from chairlift.config import ContinuousBatchingConfig, DeviceFacts, ModelFacts, WorkloadHints, resolve
from chairlift.engine import Engine
from chairlift.errors import EngineDeadError, InvalidRequestError, QueueFullError
from chairlift.manager import ContinuousBatchingManager
from chairlift.params import SamplingDefaults, child_seed
from chairlift.request import GenerationOutput, RequestStatus
from chairlift.schedule.plan import ScheduledBatch
from chairlift.schedule.policy import POLICIES
from chairlift.schedule.scheduler import Scheduler
from chairlift.stats import StepRecorder
from tests.late_device import VOCAB, LateDevice, LateStep, entries_of, token_after

LONG = 30.0  # seconds that nobody waits unless something is lost
CONTEXT = 400  # tokens of the model
MODEL = ModelFacts(
    name="hashes",
    vocab_size=VOCAB,
    max_model_length=CONTEXT,
    layers=((None, 1, 1),),
    hidden_size=1,
    intermediate_size=1,
    dtype="float32",
    itemsize=4,
    parameter_bytes=4,
)
DEVICE = DeviceFacts(
    kind="cpu",
    name="list",
    free_memory=1 << 30,
    total_memory=1 << 30,
    total_system_memory=1 << 30,
    num_cores=1,
    attention=("sdpa",),
)


class ListModel(LateDevice):
    """A `ServedModel` and its `Runner`. Tests hold it at a launch, break it, or look into it."""

    vocab_size = VOCAB
    restart_length = None

    def __init__(self, layout: CacheLayout, num_blocks: int) -> None:
        super().__init__(layout, num_blocks)
        self.on_launch: Callable[[], None] = lambda: None
        self.on_wait: Callable[[], None] = lambda: None
        self.seen_weights = 0
        self.warmups = self.closes = 0
        self._gate = threading.Condition()  # over what follows
        self._is_shut = self._is_held = False
        self._num_let_by = 0  # launches
        self.num_waited = 0
        self.seeds: list[int] = []
        self.prompts: list[tuple[int, ...]] = []

    def hold(self, after: int = 0) -> None:
        """Let the engine come to its next launch, or by so many and to the one after them, and keep it there."""
        with self._gate:
            self._is_shut, self._num_let_by = True, after
            self._gate.notify_all()

    def await_held(self) -> None:
        with self._gate:
            assert self._gate.wait_for(lambda: self._is_held and not self._num_let_by, LONG)

    def go_on(self) -> None:
        with self._gate:
            self._is_shut = False
            self._gate.notify_all()

    def _pass_gate(self) -> None:
        with self._gate:
            self._is_held = True
            self._gate.notify_all()
            assert self._gate.wait_for(lambda: not self._is_shut or self._num_let_by, LONG)
            self._is_held = False
            self._num_let_by -= self._is_shut

    def launch(self, batch: ScheduledBatch) -> LateStep:
        self._pass_gate()
        self.on_launch()
        self.seeds += [seat.seed for seat in batch.seats]
        self.prompts += [seat.tokens for seat in batch.seats]
        return super().launch(batch)

    def run_next(self) -> None:
        self.on_wait()
        self.num_waited += 1
        super().run_next()

    def refresh_weights(self, force: bool = False) -> bool:
        changed, self.seen_weights = self.weights != self.seen_weights, self.weights
        return changed or force

    def prefix_salt(self, num_prompt: int) -> bytes:
        return b""

    @property
    def paths(self) -> dict[str, str]:
        return {"forward pass": "a fake"}

    def warmup(self) -> None:
        self.warmups += 1

    def close(self) -> None:
        self.closes += 1


class Manager(ContinuousBatchingManager):
    """With its model at hand."""

    model: ListModel


def make(depth: int = 2, blocks: int = 1000, defaults: dict[str, Any] | None = None, **settings: Any) -> Manager:
    layout = plan_layout([LayerSpec(index=0, window=None, num_kv_heads=1, head_dim=1)], 4, 4)
    settings = {"page_size": 4, "num_blocks": blocks, "max_batch_tokens": 16} | settings
    config = replace(
        resolve(ContinuousBatchingConfig(**settings), MODEL, DEVICE, WorkloadHints(), layout.block_bytes), depth=depth
    )
    model = ListModel(layout, blocks)
    scheduler = Scheduler(
        KVCache(layout, blocks),
        POLICIES[config.scheduler](),
        max_batch_tokens=config.max_batch_tokens,
        max_rows=config.max_requests_per_batch,
        safety_margin=config.safety_margin,
    )
    manager = Manager(
        Engine(scheduler, model, StepRecorder(), depth),
        model,
        SamplingDefaults(None, None, vocab_size=VOCAB, **(defaults or {})),
        config,
    )
    manager.model = model
    return manager


@contextmanager
def running(depth: int = 2, **settings: Any) -> Iterator[Manager]:
    manager = make(depth, **settings)
    manager.start()
    try:
        yield manager
    finally:
        manager.model.go_on()
        manager.destroy()
        assert not manager.is_running()


def answer(prompt: list[int], count: int, weights: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(token_after(entries_of(tokens, weights)[-1]))
    return tokens[len(prompt) :]


def result(manager: Manager, request_id: str | None = None) -> GenerationOutput:
    output = manager.get_result(request_id, timeout=LONG)
    assert output is not None
    return output


def assert_nothing_remembered(manager: Manager) -> None:
    router, scheduler = manager._router, manager._engine.scheduler
    for memory in (router._outputs, router._by_request, router._expected, router._handlers, router._waiters):
        assert not memory
    for memory in (scheduler.waiting, scheduler.running, scheduler._live, scheduler._by_id, scheduler._families):
        assert not memory
    assert not manager._filters and not manager._pausers and manager._num_unseen == 0
    assert not manager._engine._in_flight
    scheduler.cache.check([])
    assert scheduler.cache.usage.used == 0


class Waiter(threading.Thread):
    """Calls a function beside the test; what it returned or raised is in `result`."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(daemon=True)
        self.result: Any = None
        self._call = lambda: function(*args, **kwargs)
        self.start()

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:
            self.result = error

    def get(self) -> Any:
        self.join(LONG)
        assert not self.is_alive(), "somebody waits for ever"
        return self.result


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(LONG / 0.001)):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("it does not happen")


@contextmanager
def pausing(manager: Manager, weights_changed: bool = False) -> Iterator[None]:
    """A pause that is asked for while the engine is held at a launch."""
    manager.model.await_held()
    manager.model.on_launch = lambda: until(lambda: bool(manager._pausers))
    manager.model.go_on()
    with manager.pause(weights_changed):
        manager.model.on_launch = lambda: None
        yield


# --- From start to end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_stop_finishes_what_was_accepted(depth: int) -> None:
    manager = make(depth)
    manager.start()
    ids = [manager.add_request([number % 2] * (number + 1), max_new_tokens=10) for number in range(20)]
    manager.stop()
    assert not manager.is_running()
    for number, request_id in enumerate(ids):
        output = result(manager, request_id)
        assert output.status is RequestStatus.FINISHED and output.finish_reason == "length"
        assert output.generated_tokens == answer([number % 2] * (number + 1), 10)
    assert manager.get_result() is None
    manager.destroy()
    assert_nothing_remembered(manager)


def test_it_can_be_started_again_and_keeps_its_cache() -> None:
    manager = make()
    for cached in (0, 8, 8):
        manager.start()
        request_id = manager.add_request([1] * 9, max_new_tokens=2)
        manager.stop()
        assert result(manager, request_id).num_cached_tokens == cached
    manager.destroy()


def test_a_second_start_warns(caplog: pytest.LogCaptureFixture) -> None:
    with running() as manager:
        thread = manager._thread
        manager.start()
        assert "running already" in caplog.text and manager._thread is thread


def test_stopping_what_does_not_run_warns(caplog: pytest.LogCaptureFixture) -> None:
    manager = make()
    manager.stop()
    assert "not running" in caplog.text
    manager.start()
    manager.stop()
    manager.stop()
    manager.destroy()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_hard_stop_fails_what_is_under_way_and_queued(depth: int) -> None:
    manager = make(depth, max_requests_per_batch=1)
    manager.start()
    manager.model.hold(after=7)
    ids = [manager.add_request([0, 1], max_new_tokens=300) for _ in range(3)]
    manager.model.await_held()
    stopper = Waiter(manager.stop, hard_stop=True)
    until(lambda: manager._hard_stopping)
    manager.model.go_on()
    assert stopper.get() is None
    outputs = [result(manager, request_id) for request_id in ids]
    for output in outputs:
        assert output.status is RequestStatus.FAILED and output.finish_reason == "error"
        assert isinstance(output.exception, RuntimeError) and "stopped" in (output.error or "")
        assert output.generated_tokens == answer([0, 1], len(output.generated_tokens))
    assert len(outputs[0].generated_tokens) > 4 and not outputs[2].generated_tokens
    manager.start()
    again = manager.add_request([0, 1], max_new_tokens=3)
    assert result(manager, again).generated_tokens == answer([0, 1], 3)
    manager.destroy()
    assert_nothing_remembered(manager)


def test_a_stop_need_not_wait(caplog: pytest.LogCaptureFixture) -> None:
    with running() as manager:
        manager.model.hold()
        request_id = manager.add_request([1], max_new_tokens=3)
        manager.model.await_held()
        manager.stop(block=False)
        manager.stop(timeout=0.01)
        assert "still finishing" in caplog.text and manager.is_running()
        assert manager.add_request([1]) is None
        manager.model.go_on()
        assert result(manager, request_id).generated_tokens == answer([1], 3)
        manager.stop()
        assert not manager.is_running()


def test_a_start_waits_for_the_end_of_a_stop() -> None:
    with running() as manager:
        manager.model.hold()
        first = manager.add_request([1], max_new_tokens=3)
        manager.model.await_held()
        manager.stop(block=False)
        starter = Waiter(manager.start)
        manager.model.go_on()
        assert starter.get() is None and manager.is_running()
        second = manager.add_request([0], max_new_tokens=3)
        assert {result(manager).request_id, result(manager).request_id} == {first, second}


def test_requests_may_be_queued_before_the_start() -> None:
    manager = make()
    ids = manager.add_requests([[1], [0, 1]], max_new_tokens=3)
    assert manager.get_result(timeout=0) is None
    manager.start()
    assert [result(manager, request_id).generated_tokens for request_id in ids] == [answer([1], 3), answer([0, 1], 3)]
    manager.destroy()


@pytest.mark.parametrize("end", ["stop", "destroy"])
def test_requests_queued_for_a_start_that_never_comes_fail(end: str) -> None:
    manager = make()
    handled: queue.SimpleQueue[GenerationOutput] = queue.SimpleQueue()
    first, second = manager.add_requests([[1], [0, 1]], max_new_tokens=3)
    manager.register_result_handler(second, handled.put)
    getattr(manager, end)()
    assert result(manager, first).status is RequestStatus.FAILED
    assert handled.get(timeout=LONG).status is RequestStatus.FAILED
    manager.destroy()
    assert_nothing_remembered(manager)


def test_destroy_can_be_called_again_and_ends_everything() -> None:
    manager = make()
    manager.start()
    request_id = manager.add_request([1], max_new_tokens=300)
    manager.destroy()
    manager.destroy()
    assert manager.model.closes == 1 and not manager.is_running() and not manager.is_usable
    assert result(manager, request_id).is_finished()
    assert manager.get_result() is None and list(manager) == [] and list(manager.request_id_iter("x")) == []
    manager.cancel_request("x")
    for call in (manager.start, manager.warmup, lambda: manager.add_request([1]), lambda: manager.add_requests([[1]])):
        with pytest.raises(RuntimeError, match="destroyed"):
            call()
    manager.stop()


def test_warmup_comes_once_and_before_the_start() -> None:
    manager = make()
    manager.warmup()
    manager.warmup()
    manager.start()
    manager.warmup()
    assert manager.model.warmups == 1
    manager.destroy()


def test_a_destroyed_manager_is_garbage() -> None:
    manager = make()
    manager.start()
    manager.destroy()
    reference = weakref.ref(manager)
    del manager
    gc.collect()
    assert reference() is None


FORGETFUL = """
from tests.unit.test_manager import make

def fault():
    raise SystemExit(7)

busy, idle, crashed, paused = make(), make(), make(), make()
crashed.model.on_launch = fault
for manager in (busy, idle, crashed, paused):
    manager.start()
for manager in (busy, crashed):
    manager.add_request([1], max_new_tokens=390)
busy.register_result_handler("req_0", print)
pause = paused.pause()
pause.__enter__()
"""


def test_who_forgets_to_stop_can_leave() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Fatal" not in done.stderr and "Exception ignored" not in done.stderr


# --- What a request may say -----------------------------------------------------------------------------------------


class Arraylike:
    def __init__(self, values: Any) -> None:
        self.values = values

    def tolist(self) -> Any:
        return self.values


class Integer:
    def __index__(self) -> int:
        return 1


class FloatTensor:
    """As a tensor of one float: it has the method, and refuses."""

    def __index__(self) -> int:
        raise TypeError("only integer tensors")


@pytest.mark.parametrize("prompt", [[1, 0], (1, 0), Arraylike([1, 0]), [Integer(), 0]])
def test_prompts_come_in_many_kinds(prompt: Any) -> None:
    with running() as manager:
        output = result(manager, manager.add_request(prompt, max_new_tokens=2))
        assert output.prompt_ids == [1, 0] and set(map(type, output.prompt_ids)) == {int}


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], InvalidRequestError, "empty"),
        ([0, VOCAB], InvalidRequestError, f"token id {VOCAB}"),
        ([0, -1], InvalidRequestError, "token id -1"),
        ([1] * CONTEXT, InvalidRequestError, f"{CONTEXT} tokens.* {CONTEXT - 1} at most"),
        ([0, 1.0], TypeError, "1.0"),
        ([0, True], TypeError, "True"),
        ([0, FloatTensor()], TypeError, "FloatTensor"),
        ([[0]], TypeError, "list"),
        ("01", TypeError, "str"),
        (7, TypeError, "int"),
        (Arraylike(7), TypeError, "int"),
        (Arraylike([[1]]), TypeError, "list"),
    ],
)
def test_a_bad_prompt_is_refused_with_the_reason(prompt: Any, error: type[Exception], message: str) -> None:
    manager = make()
    with pytest.raises(error, match=message):
        manager.add_request(prompt)
    with pytest.raises(error, match=r"inputs\[1\].*" + message):
        manager.add_requests([[1], prompt, [1]])
    assert_nothing_remembered(manager)
    assert manager._inbox.empty(), "all or nothing"


def test_bad_arguments_are_refused() -> None:
    manager = make()
    for arguments, error in (
        ({"temperature": -1.0}, InvalidRequestError),
        ({"temprature": 1.0}, TypeError),
        ({"max_new_tokens": -1}, InvalidRequestError),
        ({"request_id": 7}, TypeError),
        ({"request_id": ""}, InvalidRequestError),
        ({"stop_strings": "x"}, InvalidRequestError),
        ({"stop_strings": "x", "tokenizer": object()}, InvalidRequestError),
        ({"num_return_sequences": 0}, InvalidRequestError),
    ):
        with pytest.raises(error):
            manager.add_request([1], **arguments)
    assert_nothing_remembered(manager)


def test_an_answer_without_a_limit_ends_at_the_models_length() -> None:
    with running() as manager:
        output = result(manager, manager.add_request([1] * (CONTEXT - 10)))
        assert len(output.generated_tokens) == 10 and output.finish_reason == "length"
        output = result(manager, manager.add_request([1] * (CONTEXT - 10), max_new_tokens=50))
        assert len(output.generated_tokens) == 10 and output.finish_reason == "length"


def test_what_can_never_fit_in_the_cache_is_refused() -> None:
    with running(blocks=10) as manager:  # 40 tokens; the last token of an answer needs no room
        assert len(result(manager, manager.add_request([1] * 40)).generated_tokens) == 1
        assert len(result(manager, manager.add_request([1] * 30, max_new_tokens=11)).generated_tokens) == 11
        assert len(result(manager, manager.add_request([1] * 30)).generated_tokens) == 11
        for prompt, new in ((41, 1), (30, 12), (41, None)):
            with pytest.raises(InvalidRequestError, match="cache holds 40"):
                manager.add_request([1] * prompt, max_new_tokens=new)


def test_a_scored_prompt_needs_room_for_all_its_tokens() -> None:
    with running(blocks=10) as manager:
        scored = manager.add_request([1] * 40, max_new_tokens=0, prompt_logprobs=True)
        assert len(result(manager, scored).prompt_logprobs) == 40
        with pytest.raises(InvalidRequestError, match="cache holds 40"):
            manager.add_request([1] * 41, max_new_tokens=0, prompt_logprobs=True)
        assert result(manager, manager.add_request([1] * 41, max_new_tokens=0)).finish_reason == "length"


def test_an_empty_answer_comes_at_once() -> None:
    with running() as manager:
        output = result(manager, manager.add_request([1], max_new_tokens=0))
        assert output.status is RequestStatus.FINISHED and output.generated_tokens == []


def test_an_id_in_use_is_refused() -> None:
    with running() as manager:
        manager.model.hold()
        manager.add_request([1], request_id="a", max_new_tokens=1)
        with pytest.raises(ValueError, match="'a' is in use"):
            manager.add_request([1], request_id="a")
        manager.add_request([1], request_id="b__child#0", max_new_tokens=1)
        with pytest.raises(ValueError, match="in use"):
            manager.add_request([1], request_id="b", num_return_sequences=2, max_new_tokens=1)
        manager.add_request([1], request_id="b", max_new_tokens=1)
        manager.model.go_on()
        for _ in range(3):
            result(manager)
        manager.add_request([1], request_id="a", max_new_tokens=1)
        assert result(manager).request_id == "a"
        assert_nothing_remembered(manager)


def test_ids_of_the_managers_own_avoid_those_of_callers() -> None:
    manager = make()
    for number in (0, 1, 3):
        manager.add_request([1], request_id=f"req_{number}")
    assert [manager.add_request([1]) for _ in range(2)] == ["req_2", "req_4"]
    manager.destroy()


def test_an_id_of_the_managers_own_is_not_that_of_an_answer_nobody_has_taken() -> None:
    with running() as manager:
        manager.add_request([0], request_id="req_0", max_new_tokens=1)
        until(lambda: not manager._router._expected)
        assert manager.add_request([1], max_new_tokens=1) == "req_1"


def test_children_share_the_prompt_and_have_seeds_of_their_own() -> None:
    with running(page_size=4) as manager:
        name = manager.add_request([1] * 9, num_return_sequences=3, max_new_tokens=2, seed=5)
        outputs = {output.request_id: output for output in manager}
        assert list(outputs) == [name, f"{name}__child#0", f"{name}__child#1"]
        assert [output.num_cached_tokens for output in outputs.values()] == [0, 8, 8]
        assert manager.model.seeds == [5, child_seed(5, 1), child_seed(5, 2)]


def test_seeds_come_from_the_configured_one() -> None:
    seeds = []
    for _ in range(2):
        with running(seed=7) as manager:
            manager.add_requests([[1], [0], [1, 1]], max_new_tokens=1)
            assert len(list(manager)) == 3
            seeds.append(manager.model.seeds)
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 3
    with running() as manager:
        manager.add_requests([[1], [0], [1, 1]], max_new_tokens=1)
        assert len(list(manager)) == 3
        assert len({*manager.model.seeds, *seeds[0]}) == 6


def test_requests_with_common_beginnings_run_together_but_keep_their_order() -> None:
    manager = make(max_requests_per_batch=1)
    prompts = [[1, 1, 1], [0, 0], [1, 1, 0], [0, 1], [1, 1]]
    ids = manager.add_requests(prompts, max_new_tokens=1)
    manager.start()
    assert [result(manager, request_id).prompt_ids for request_id in ids] == prompts
    assert manager.model.prompts == sorted(tuple(prompt) for prompt in prompts)
    manager.destroy()


def test_the_queue_may_have_a_bound() -> None:
    with running(max_requests_per_batch=1, max_queue_size=2) as manager:
        manager.model.hold()
        manager.add_request([1], max_new_tokens=1)
        manager.model.await_held()
        until(lambda: manager.stats().running == 1)
        with pytest.raises(InvalidRequestError, match=r"inputs asks for 3 answers .* max_queue_size=2"):
            manager.add_requests([[1], [0], [1]], max_new_tokens=1)
        with pytest.raises(InvalidRequestError, match="num_return_sequences=3"):
            manager.add_request([1], max_new_tokens=1, num_return_sequences=3, do_sample=True)
        assert manager.stats().waiting == 0
        manager.add_requests([[1], [0]], max_new_tokens=1)
        with pytest.raises(QueueFullError, match="2 requests are waiting"):
            manager.add_request([1], max_new_tokens=1)
        manager.submit([[1], [0]], {"max_new_tokens": 1}, bounded=False)
        manager.model.go_on()
        assert len(list(manager)) == 5
        manager.add_requests([[1], [0]], max_new_tokens=1)
        assert len(list(manager)) == 2


def test_after_a_stop_nothing_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    manager = make()
    manager.start()
    manager.stop()
    assert manager.add_request([1]) is None
    assert manager.add_requests([[1], [0]]) == []
    assert caplog.text.count("were not accepted") == 2
    with pytest.raises(InvalidRequestError):
        manager.add_request([])
    manager.destroy()
    assert_nothing_remembered(manager)


def test_nothing_asked_is_nothing_queued() -> None:
    with running() as manager:
        assert manager.add_requests([]) == [] and list(manager) == []


# --- Results --------------------------------------------------------------------------------------------------------


def test_results_of_one_request_leave_those_of_others_alone() -> None:
    with running() as manager:
        ids = manager.add_requests([[1], [0], [1, 0]], max_new_tokens=3)
        assert result(manager, ids[2]).prompt_ids == [1, 0]
        assert manager.get_result(ids[2]) is None, "consumed"
        assert manager.get_result("unknown") is None
        assert {result(manager).request_id, result(manager).request_id} == set(ids[:2])
        assert manager.get_result(timeout=0) is None
        assert manager.get_result(timeout=0.01) is None


def test_a_streaming_request_gives_every_token_once() -> None:
    with running() as manager:
        request_id = manager.add_request([1], max_new_tokens=20, streaming=True, logprobs=True)
        assert request_id is not None
        outputs = list(manager.request_id_iter(request_id))
        assert [len(output.generated_tokens) for output in outputs] == list(range(1, 21))
        assert [token for output in outputs for token in output.new_tokens] == answer([1], 20)
        assert [output.is_finished() for output in outputs] == [False] * 19 + [True]
        assert len(outputs[-1].logprobs) == 20


def test_two_streams_can_be_read_alternately_and_a_third_never() -> None:
    with running() as manager:
        a, b, c = (manager.add_request([bit], max_new_tokens=30, streaming=True) for bit in (0, 1, 1))
        assert a and b and c
        pairs = list(zip(manager.request_id_iter(a), manager.request_id_iter(b), strict=True))
        assert [pair[0].new_tokens[0] for pair in pairs] == answer([0], 30)
        assert [pair[1].new_tokens[0] for pair in pairs] == answer([1], 30)
        manager.stop()
        assert [output.new_tokens[0] for output in manager] == answer([1], 30)
        assert manager.get_result() is None


def test_iteration_ends_when_nothing_is_queued_or_running() -> None:
    with running() as manager:
        assert list(manager) == []
        ids = manager.add_requests([[1], [0]], max_new_tokens=3)
        assert sorted(output.request_id for output in manager) == sorted(ids)
        assert list(manager) == []


async def test_streams_for_asyncio() -> None:
    with running() as manager:
        ids = manager.add_requests([[1], [0]], max_new_tokens=10, streaming=True)

        async def read(request_id: str) -> list[int]:
            return [token async for output in manager.stream(request_id) for token in output.new_tokens]

        answers = await asyncio.wait_for(asyncio.gather(*map(read, ids)), LONG)
        assert answers == [answer([1], 10), answer([0], 10)]
        assert_nothing_remembered(manager)


def test_a_callback_that_raises_harms_nobody() -> None:
    with running() as manager:
        seen: queue.SimpleQueue[GenerationOutput] = queue.SimpleQueue()

        def bad(output: GenerationOutput) -> None:
            raise ValueError("mine")

        manager.model.hold()
        ids = manager.add_requests([[1], [0], [1, 1]], max_new_tokens=3)
        manager.register_result_handler(ids[0], bad)
        manager.register_result_handler(ids[1], seen.put)
        manager.model.go_on()
        assert seen.get(timeout=LONG).request_id == ids[1]
        assert result(manager, ids[2]).is_finished() and manager.is_running()


def test_a_callback_may_use_the_manager() -> None:
    with running() as manager:
        done: queue.SimpleQueue[GenerationOutput] = queue.SimpleQueue()

        def again(output: GenerationOutput) -> None:
            with manager.pause():
                manager.submit([[1, 0]], {"max_new_tokens": 2}, handler=done.put)

        manager.submit([[1]], {"max_new_tokens": 2}, handler=again)
        assert done.get(timeout=LONG).prompt_ids == [1, 0]


def test_stats_tell_what_runs_and_what_waits() -> None:
    with running(max_requests_per_batch=2) as manager:
        manager.model.hold()
        manager.add_requests([[1]] * 5, max_new_tokens=3)
        manager.model.await_held()
        until(lambda: manager.stats().running == 2)
        assert manager.stats().waiting == 3
        manager.model.go_on()
        assert len(list(manager)) == 5
        stats = manager.stats()
        assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)
        assert stats.generated_tokens == 15 and stats.steps > 0
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks == 1000


# --- Cancelling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_a_cancelled_request_ends_with_the_tokens_so_far(depth: int) -> None:
    with running(depth) as manager:
        manager.model.hold(after=7)
        request_id = manager.add_request([1], max_new_tokens=390)
        manager.model.await_held()
        manager.cancel_request(str(request_id))
        manager.cancel_request(str(request_id))
        manager.model.go_on()
        output = result(manager, request_id)
        assert output.status is RequestStatus.CANCELLED and output.finish_reason == "cancelled"
        assert output.generated_tokens == answer([1], len(output.generated_tokens))
        assert 4 <= len(output.generated_tokens) < 390
        until(lambda: not manager._engine.has_work)
        assert_nothing_remembered(manager)


def test_a_waiting_request_can_be_cancelled() -> None:
    with running(max_requests_per_batch=1) as manager:
        manager.model.hold()
        running_id, waiting_id = (manager.add_request([1], max_new_tokens=2) for _ in range(2))
        manager.model.await_held()
        manager.cancel_request(str(waiting_id))
        manager.cancel_request("unknown")
        manager.model.go_on()
        output = result(manager, waiting_id)
        assert output.status is RequestStatus.CANCELLED and output.generated_tokens == []
        assert result(manager, running_id).status is RequestStatus.FINISHED
        manager.cancel_request(str(running_id))
        assert manager.get_result(timeout=0.05) is None


def test_a_request_can_be_cancelled_before_the_start() -> None:
    manager = make()
    request_id = manager.add_request([1])
    manager.cancel_request(str(request_id))
    manager.start()
    assert result(manager, request_id).status is RequestStatus.CANCELLED
    manager.destroy()


def test_children_are_cancelled_with_their_parent() -> None:
    with running(max_requests_per_batch=2) as manager:
        manager.model.hold()
        name = manager.add_request([1], num_return_sequences=3, max_new_tokens=390)
        other = manager.add_request([1], max_new_tokens=3)
        manager.cancel_request(str(name))
        manager.model.go_on()
        outputs = {output.request_id: output.status for output in manager}
        assert outputs == {
            name: RequestStatus.CANCELLED,
            f"{name}__child#0": RequestStatus.CANCELLED,
            f"{name}__child#1": RequestStatus.CANCELLED,
            other: RequestStatus.FINISHED,
        }


def test_a_thousand_cancelled_requests_leave_nothing_behind() -> None:
    with running(max_requests_per_batch=4) as manager:
        handled: queue.SimpleQueue[GenerationOutput] = queue.SimpleQueue()
        tokenizer = Letters()

        def let_none_finish() -> None:
            if any(len(sequence.tokens) > 200 for sequence in manager._engine.scheduler.running):
                until(lambda: not manager._inbox.empty())

        manager.model.on_launch = let_none_finish
        for number in range(1000):
            request_id = manager.add_request(
                [number % 2] * (1 + number % 7),
                max_new_tokens=300,
                streaming=number % 3 == 0,
                num_return_sequences=1 + (number % 5 == 0),
                **({"stop_strings": "zz", "tokenizer": tokenizer} if number % 4 == 0 else {}),
            )
            if number % 2:
                manager.register_result_handler(str(request_id), handled.put)
            manager.cancel_request(str(request_id))
        ended = [output for output in manager if output.is_finished()]
        manager.stop()
        manager._router.shut_down()  # after the calls made so far
        while not handled.empty():
            ended += [output for output in [handled.get()] if output.is_finished()]
        assert len(ended) == 1200 and {output.status for output in ended} == {RequestStatus.CANCELLED}
        until(lambda: not manager._engine.has_work)
        assert_nothing_remembered(manager)


# --- Stop strings ---------------------------------------------------------------------------------------------------


class Letters:
    """Token 0 is a, 1 is b, 2 is c."""

    def decode(self, token_ids: list[int], /) -> str:
        return "".join("abc"[token] for token in token_ids)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_stop_string_ends_the_request_and_is_not_shown(depth: int, streaming: bool) -> None:
    text = Letters().decode(answer([1], 40))
    stop = text[10:13]
    at = text.find(stop)
    with running(depth) as manager:
        request_id = manager.add_request(
            [1], max_new_tokens=40, streaming=streaming, stop_strings=[stop], tokenizer=Letters(), logprobs=True
        )
        outputs = list(manager.request_id_iter(str(request_id)))
        assert [output.is_finished() for output in outputs] == [False] * (len(outputs) - 1) + [True]
        final = outputs[-1]
        assert (final.finish_reason, final.stop_reason, final.text) == ("stop", stop, text[:at])
        assert final.generated_tokens == answer([1], at) and len(final.logprobs) == at
        assert [token for output in outputs for token in output.new_tokens] == final.generated_tokens
        assert (len(outputs) > 1) == streaming
        until(lambda: not manager._engine.has_work)
        assert_nothing_remembered(manager)


@pytest.mark.parametrize("depth", [2, 4])
def test_a_stop_string_found_while_steps_are_drained_ends_the_request_once(depth: int) -> None:
    text = Letters().decode(answer([1], 40))
    stop = next(text[at : at + 3] for at in range(40) if text.find(text[at : at + 3]) >= 9)
    with running(depth) as manager:
        found = text.find(stop) + len(stop)
        for number in range(found - 3, found + depth - 1):  # the last is the one that finds it
            manager.model.hold(after=number)
            request_id = manager.add_request(
                [1], max_new_tokens=40, stop_strings=[stop], tokenizer=Letters(), request_id=f"r{number}"
            )
            with pausing(manager):
                pass
            assert result(manager, request_id).stop_reason == stop
        assert list(manager) == []
        until(lambda: not manager._engine.has_work)
        assert_nothing_remembered(manager)


def test_a_tokenizer_that_raises_fails_its_own_request() -> None:
    class Broken:
        def decode(self, token_ids: list[int], /) -> str:
            raise KeyError("no such token")

    with running() as manager:
        bad = manager.add_request([1], max_new_tokens=9, stop_strings="x", tokenizer=Broken())
        good = manager.add_request([1], max_new_tokens=9)
        output = result(manager, bad)
        assert output.status is RequestStatus.FAILED and isinstance(output.exception, KeyError)
        assert result(manager, good).status is RequestStatus.FINISHED
        assert_nothing_remembered(manager)


def test_a_cancelled_request_with_stop_strings_shows_what_was_held_back() -> None:
    with running() as manager:
        stop = Letters().decode(answer([1], 300)) + "a"
        manager.model.hold(after=7)
        request_id = manager.add_request(
            [1], max_new_tokens=300, streaming=True, stop_strings=stop, tokenizer=Letters()
        )
        manager.model.await_held()
        manager.cancel_request(str(request_id))
        manager.model.go_on()
        (output,) = manager.request_id_iter(str(request_id))
        assert output.status is RequestStatus.CANCELLED
        assert output.new_tokens == output.generated_tokens == answer([1], len(output.generated_tokens))
        assert output.text == Letters().decode(output.generated_tokens)


# --- Pauses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_nothing_runs_in_a_pause_and_everything_goes_on_afterwards(depth: int) -> None:
    with running(depth) as manager:
        manager.model.hold(after=4)
        ids = manager.add_requests([[1], [0, 1]], max_new_tokens=200)
        for _ in range(3):
            with pausing(manager):
                launched = manager.model.num_launched
                assert not manager._engine._in_flight and manager.model.num_waited == launched
                assert manager.add_request([1], max_new_tokens=1) is not None
                manager.get_result(timeout=0.02)
                assert manager.model.num_launched == launched
                manager.model.hold(after=10)
        manager.model.go_on()
        assert result(manager, ids[0]).generated_tokens == answer([1], 200)
        assert result(manager, ids[1]).generated_tokens == answer([0, 1], 200)


@pytest.mark.parametrize("said", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_weights_may_change_in_a_pause(depth: int, said: bool) -> None:
    """The device refuses to read what was computed with other weights."""
    with running(depth) as manager:
        manager.model.hold(after=7)
        request_id = manager.add_request([1] * 9, max_new_tokens=200, streaming=True)
        with pausing(manager, weights_changed=said):
            manager.model.weights = 1
            if said:
                manager.model.seen_weights = 1  # nobody can notice
            (live,) = manager._engine.scheduler._live.values()
            known = live.tokens[9:]
        outputs = list(manager.request_id_iter(str(request_id)))
        assert outputs[-1].generated_tokens == known + answer([1] * 9 + known, 200 - len(known), weights=1)
        again = result(manager, manager.add_request([1] * 9, max_new_tokens=3))
        assert again.generated_tokens == answer([1] * 9, 3, weights=1)


def test_weights_may_change_while_nothing_runs() -> None:
    with running() as manager:
        result(manager, manager.add_request([1] * 9, max_new_tokens=3))
        manager.model.weights = 1
        output = result(manager, manager.add_request([1] * 9, max_new_tokens=3))
        assert output.generated_tokens == answer([1] * 9, 3, weights=1) and output.num_cached_tokens == 0
        manager.stop()
        manager.model.weights = 2
        manager.start()
        output = result(manager, manager.add_request([1] * 9, max_new_tokens=3))
        assert output.generated_tokens == answer([1] * 9, 3, weights=2)


def test_pauses_nest_and_overlap() -> None:
    with running() as manager:
        manager.model.hold(after=1)
        request_id = manager.add_request([1], max_new_tokens=100)
        inside, leave = threading.Event(), threading.Event()

        def other() -> None:
            with manager.pause():
                inside.set()
                assert leave.wait(LONG)

        with pausing(manager):
            with manager.pause(), manager.pause(weights_changed=True):
                pass
            launched = manager.model.num_launched
            second = Waiter(other)
            assert inside.wait(LONG)
        assert manager.get_result(timeout=0.05) is None
        assert manager.model.num_launched == launched, "the other one still pauses"
        leave.set()
        assert second.get() is None
        assert result(manager, request_id).generated_tokens == answer([1], 100)
        assert not manager._pausers


def test_an_idle_manager_can_be_paused() -> None:
    with running() as manager:
        for _ in range(20):
            with manager.pause():
                request_id = manager.add_request([1], max_new_tokens=1)
                assert manager.get_result(timeout=0) is None
            assert result(manager).request_id == request_id


def test_a_manager_that_does_not_run_can_be_paused() -> None:
    manager = make()
    request_id = manager.add_request([1], max_new_tokens=1)
    with manager.pause():
        manager.start()
        assert manager.get_result(timeout=0.05) is None and manager.model.num_launched == 0
    assert result(manager).request_id == request_id
    manager.stop()
    with manager.pause():
        pass
    manager.destroy()
    with manager.pause():
        pass


def test_a_stop_inside_a_pause_is_refused() -> None:
    with running() as manager:
        manager.model.hold(after=1)
        request_id = manager.add_request([1], max_new_tokens=300)
        with pausing(manager):
            for call in (manager.stop, manager.destroy, lambda: manager.stop(hard_stop=True)):
                with pytest.raises(RuntimeError, match="inside pause"):
                    call()
            assert manager.is_running()
            manager.stop(block=False)
        assert result(manager, request_id).status is RequestStatus.FINISHED


def test_a_pause_ends_with_its_body() -> None:
    with running() as manager:
        with pytest.raises(KeyError), manager.pause():
            raise KeyError
        assert result(manager, manager.add_request([1], max_new_tokens=1)).is_finished()


def test_an_interrupted_pause_does_not_park_the_engine_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as manager:

        def interrupt(*args: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(manager._pause, "wait_for", interrupt)
            context = manager.pause()
            with pytest.raises(KeyboardInterrupt):
                context.__enter__()
        assert not manager._pausers


def test_a_hard_stop_from_outside_ends_a_paused_engine() -> None:
    with running() as manager:
        manager.model.hold(after=1)
        request_id = manager.add_request([1], max_new_tokens=390)
        with pausing(manager):
            stopper = Waiter(manager.stop, hard_stop=True)
            assert stopper.get() is None
        assert result(manager, request_id).status is RequestStatus.FAILED


def test_who_is_about_to_pause_is_woken_by_a_hard_stop() -> None:
    with running() as manager:
        manager.model.hold()
        manager.add_request([1], max_new_tokens=390)
        manager.model.await_held()

        def pause() -> None:
            with manager.pause():
                pass

        pauser = Waiter(pause)
        until(lambda: bool(manager._pausers))
        manager.stop(block=False, hard_stop=True)
        manager.model.go_on()
        assert pauser.get() is None


def test_the_engine_cannot_pause_itself() -> None:
    with running() as manager:
        errors: list[BaseException] = []

        def pause() -> None:
            manager.model.on_launch = lambda: None
            try:
                with manager.pause():
                    pass
            except RuntimeError as error:
                errors.append(error)

        manager.model.on_launch = pause
        assert result(manager, manager.add_request([1], max_new_tokens=3)).is_finished()
        assert len(errors) == 1 and "would wait for itself" in str(errors[0])


def test_many_threads_pause_and_ask_at_once() -> None:
    with running() as manager:

        def work(number: int) -> None:
            for turn in range(15):
                prompt = [number % 2] * (turn + 1)
                request_id = manager.add_request(prompt, max_new_tokens=5)
                with manager.pause():
                    assert not manager._engine._in_flight
                assert result(manager, request_id).generated_tokens == answer(prompt, 5)

        workers = [Waiter(work, number) for number in range(6)]
        assert [worker.get() for worker in workers] == [None] * 6
        assert_nothing_remembered(manager)


def test_forgotten_prefixes_are_computed_again() -> None:
    with running() as manager:
        for forget, cached in ((False, 0), (False, 8), (True, 0), (False, 8)):
            if forget:
                manager.reset_prefix_cache()
            assert result(manager, manager.add_request([1] * 9, max_new_tokens=1)).num_cached_tokens == cached


# --- Death ----------------------------------------------------------------------------------------------------------


class BareError(BaseException):
    """As SystemExit or KeyboardInterrupt: not an Exception."""


@pytest.mark.parametrize("fault", [ArithmeticError("broken"), SystemExit(3), KeyboardInterrupt(), BareError()])
@pytest.mark.parametrize("where", ["on_launch", "on_wait"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_fault_is_told_to_everybody(
    depth: int, where: str, fault: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    with running(depth) as manager:
        manager.model.hold()
        ids = manager.add_requests([[1], [0], [1, 1], [0, 0]], max_new_tokens=50)
        manager.model.await_held()

        def break_down() -> None:
            if manager.model.num_launched > 10:
                raise fault

        setattr(manager.model, where, break_down)
        handled: queue.SimpleQueue[GenerationOutput] = queue.SimpleQueue()
        manager.register_result_handler(ids[0], handled.put)
        waiters = [
            Waiter(manager.get_result, ids[1]),
            Waiter(manager.get_result),
            Waiter(list, manager),
            Waiter(list, manager.request_id_iter(ids[2])),
            Waiter(asyncio.run, collect(manager, ids[3])),
        ]
        until(lambda: len(manager._router._handlers) == 2)
        manager.model.go_on()
        for waiter in waiters:
            error = waiter.get()
            assert isinstance(error, EngineDeadError) and error.__cause__ is fault
        output = handled.get(timeout=LONG)
        assert output.status is RequestStatus.FAILED and output.exception is fault
        until(lambda: not manager.is_running())
        assert manager.cause is fault and not manager.is_usable
        for call in (
            lambda: manager.add_request([1]),
            lambda: manager.add_requests([[1]]),
            manager.start,
            manager.warmup,
            manager.get_result,
            lambda: manager.get_result("unknown", timeout=0),
            lambda: list(manager),
            lambda: manager.register_result_handler(ids[0], handled.put),
        ):
            with pytest.raises(EngineDeadError) as raised:
                call()
            assert raised.value.__cause__ is fault
        manager.stop()
        with manager.pause():
            pass
        manager.cancel_request(ids[0])
        manager.stats()


async def collect(manager: Manager, request_id: str) -> list[GenerationOutput]:
    return [output async for output in manager.stream(request_id)]


@pytest.mark.parametrize("command", ["refresh_weights", "add", "abort"])
def test_a_fault_between_steps_is_told_too(
    command: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    with running() as manager:

        def break_down(*args: object, **kwargs: object) -> None:
            raise ArithmeticError("broken")

        owner = manager.model if command == "refresh_weights" else manager._engine.scheduler
        monkeypatch.setattr(owner, command, break_down)
        manager.model.hold()
        request_id = manager.add_request([1], max_new_tokens=390)
        if command == "abort":
            manager.cancel_request(str(request_id))
        manager.model.go_on()
        with pytest.raises(EngineDeadError, match="broken"):
            manager.get_result(request_id, timeout=LONG)


def test_a_fault_in_a_hard_stop_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    with running(depth=2) as manager:
        manager.model.hold()
        request_id = manager.add_request([1], max_new_tokens=390)
        manager.model.await_held()
        waiter = Waiter(manager.get_result, request_id)

        def break_down() -> None:
            raise ArithmeticError("broken")

        manager.model.on_wait = break_down
        manager.stop(block=False, hard_stop=True)
        manager.model.go_on()
        assert isinstance(waiter.get(), EngineDeadError)
        until(lambda: not manager.is_running())


def test_who_pauses_is_told_nothing_and_may_go_on_when_the_engine_dies(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    with running() as manager:
        manager.model.hold()
        manager.add_request([1], max_new_tokens=390)
        manager.model.await_held()

        def pause() -> None:
            with manager.pause():
                pass

        def break_down() -> None:
            raise ArithmeticError("broken")

        pauser = Waiter(pause)
        until(lambda: bool(manager._pausers))
        manager.model.on_launch = break_down
        manager.model.go_on()
        assert pauser.get() is None


def test_what_had_finished_before_the_death_can_be_had(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    with running() as manager:
        done = manager.add_request([1], max_new_tokens=2)
        until(lambda: not manager._engine.has_work and not manager._router._expected)

        def break_down() -> None:
            raise ArithmeticError("broken")

        manager.model.on_launch = break_down
        dead = manager.add_request([1, 0], max_new_tokens=2)
        with pytest.raises(EngineDeadError):
            manager.get_result(dead, timeout=LONG)
        assert result(manager, done).generated_tokens == answer([1], 2)
