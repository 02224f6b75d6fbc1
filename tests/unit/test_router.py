"""Who gets which output, in which order, on which thread, and who is woken for it."""

import asyncio
import logging
import queue
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from chairlift.errors import EngineDeadError
from chairlift.request import GenerationOutput, RequestStatus
from chairlift.router import Router

LONG = 30.0  # seconds that nobody waits unless something is lost


def part(request_id: str, number: int = 0) -> GenerationOutput:
    return GenerationOutput(request_id=request_id, new_tokens=[number], status=RequestStatus.DECODING)


def last(request_id: str, number: int = 0) -> GenerationOutput:
    return GenerationOutput(request_id=request_id, new_tokens=[number], status=RequestStatus.FINISHED)


class CountingRouter(Router):
    """Counts how often a waiter looks for an output."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: Counter[str | None] = Counter()

    def _pop(self, request_id: str | None) -> GenerationOutput | None:
        self.looks[request_id] += 1
        return super()._pop(request_id)


@pytest.fixture
def router() -> Iterator[CountingRouter]:
    router = CountingRouter()
    router.open()
    yield router
    router.shut_down()


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
    """Wait for another thread to get somewhere."""
    pause = threading.Event()
    for _ in range(int(LONG / 0.001)):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("it does not happen")


def wait_until_waiting(router: Router, request_id: str | None, count: int = 1) -> None:
    until(lambda: request_id in router._waiters and router._waiters[request_id].count == count)


def is_empty(router: Router) -> bool:
    return not (router._outputs or router._by_request or router._expected or router._handlers or router._waiters)


# --- Taking ---------------------------------------------------------------------------------------------------------


def test_outputs_come_in_the_order_of_delivery(router: Router) -> None:
    router.expect(["a", "b"])
    outputs = [part("a", 1), part("b", 2), part("a", 3), last("b", 4), last("a", 5)]
    router.deliver(outputs[:3])
    router.deliver(outputs[3:])
    assert [router.take(timeout=0) for _ in outputs] == outputs
    assert is_empty(router)


def test_taking_one_request_leaves_the_order_of_the_others(router: Router) -> None:
    router.expect(["a", "b", "c"])
    router.deliver([part("a", 1), part("b", 2), part("c", 3), last("b", 4), last("a", 5), last("c", 6)])
    taken = [router.take("b"), router.take("b"), router.take("b")]
    assert [output and output.new_tokens for output in taken] == [[2], [4], None]
    assert [router.take(timeout=0).new_tokens for _ in range(4)] == [[1], [3], [5], [6]]  # type: ignore[union-attr]
    assert is_empty(router)


def test_a_poll_does_not_wait(router: Router) -> None:
    router.expect(["a"])
    assert router.take("a", timeout=0) is None and router.take(timeout=0) is None
    router.deliver([last("a")])
    assert router.take("a", timeout=0) is not None and router.take("a", timeout=0) is None
    assert is_empty(router)


def test_a_timeout_ends_the_wait_and_loses_nothing(router: Router) -> None:
    router.expect(["a"])
    assert router.take("a", timeout=0.01) is None and router.take(timeout=0.01) is None
    router.deliver([last("a")])
    assert router.take("a", timeout=0.01) is not None
    assert is_empty(router)


@pytest.mark.parametrize("request_id", ["unknown", "consumed"])
def test_nothing_comes_of_an_unknown_or_consumed_request(router: Router, request_id: str) -> None:
    router.expect(["consumed", "other"])
    router.deliver([last("consumed")])
    router.take("consumed")
    assert router.take(request_id) is None


def test_a_waiter_gets_its_request_and_nothing_else(router: CountingRouter) -> None:
    router.expect(["a", "b"])
    waiter = Waiter(router.take, "b")
    wait_until_waiting(router, "b")
    router.deliver([part("a", 1), last("a", 2)])
    router.deliver([last("b", 3)])
    assert waiter.get().new_tokens == [3]
    assert [router.take(timeout=0).new_tokens for _ in range(2)] == [[1], [2]]  # type: ignore[union-attr]
    assert router.looks["b"] == 2, "it was woken for others"


def test_only_those_are_woken_whose_output_it_is(router: CountingRouter) -> None:
    names = [str(number) for number in range(40)]
    router.expect(names)
    waiters = {name: Waiter(router.take, name) for name in names}
    for name in names:
        wait_until_waiting(router, name)
    for name in reversed(names):
        router.deliver([last(name)])
        assert waiters[name].get().request_id == name
    assert set(router.looks.values()) == {2}
    assert is_empty(router)


def test_of_many_who_take_anything_one_is_woken_for_each_output(router: CountingRouter) -> None:
    router.expect(["a", "b"])
    waiters = [Waiter(router.take) for _ in range(10)]
    wait_until_waiting(router, None, 10)
    router.deliver([part("a", 1)])
    wait_until_waiting(router, None, 9)
    router.deliver([part("a", 2), part("b", 3), part("a", 4)])
    wait_until_waiting(router, None, 6)
    assert router.looks[None] == 14
    router.close()
    results = [waiter.get() for waiter in waiters]
    assert sorted(output.new_tokens[0] for output in results if output) == [1, 2, 3, 4]
    assert is_empty(router) or router._expected == {"a", "b"}


def test_a_waiter_whose_last_output_somebody_else_took_does_not_wait_for_ever(router: Router) -> None:
    router.expect(["a"])
    waiters = [Waiter(router.take, "a") for _ in range(2)]
    wait_until_waiting(router, "a", 2)
    router.deliver([last("a")])
    results = [waiter.get() for waiter in waiters]
    assert sorted(output is None for output in results) == [False, True]


def test_until_idle_ends_when_nothing_is_under_way(router: Router) -> None:
    assert router.take(until_idle=True) is None
    router.expect(["a", "b"])
    router.deliver([last("a")])
    assert router.take(until_idle=True) is not None
    waiters = [Waiter(router.take, until_idle=True) for _ in range(3)]
    wait_until_waiting(router, None, 3)
    router.deliver([last("b")])
    assert sorted(waiter.get() is None for waiter in waiters) == [False, True, True]


def test_until_idle_ends_when_the_last_output_goes_to_a_handler(router: Router) -> None:
    router.expect(["a"])
    router.register("a", lambda output: None)
    waiter = Waiter(router.take, until_idle=True)
    wait_until_waiting(router, None)
    router.deliver([last("a")])
    assert waiter.get() is None


def test_closing_wakes_everybody_and_keeps_what_is_left(router: Router) -> None:
    router.expect(["a", "b"])
    router.deliver([last("b")])
    waiter = Waiter(router.take, "a")
    wait_until_waiting(router, "a")
    router.close()
    assert waiter.get() is None
    assert router.take("a") is None and router.take() is not None and router.take() is None


def test_an_opened_router_goes_on(router: Router) -> None:
    router.close()
    router.expect(["a"])
    router.open()
    waiter = Waiter(router.take)
    wait_until_waiting(router, None)
    router.deliver([last("a")])
    assert waiter.get().request_id == "a"


# --- Ids ------------------------------------------------------------------------------------------------------------


def test_an_id_in_use_is_refused_and_nothing_is_taken(router: Router) -> None:
    router.expect(["a"])
    with pytest.raises(ValueError, match="'a' is in use"):
        router.expect(["b", "a"])
    assert router._expected == {"a"}
    with pytest.raises(ValueError, match="must differ"):
        router.expect(["c", "c"])
    assert router._expected == {"a"}


def test_an_id_is_free_again_after_its_last_output(router: Router) -> None:
    router.expect(["a"])
    router.deliver([part("a")])
    with pytest.raises(ValueError, match="in use"):
        router.expect(["a"])
    router.deliver([last("a", 1)])
    router.expect(["a"])
    router.deliver([last("a", 2)])
    assert [router.take("a").new_tokens for _ in range(3)] == [[0], [1], [2]]  # type: ignore[union-attr]


# --- Handlers on the callback thread --------------------------------------------------------------------------------


def test_a_handler_gets_all_outputs_in_order_beside_the_engine(router: Router) -> None:
    calls: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    router.expect(["a", "b"])
    router.deliver([part("a", 1), part("b", 10), part("a", 2)])
    router.register("a", lambda output: calls.put((output.new_tokens[0], threading.get_ident())))
    router.deliver([part("a", 3), last("a", 4)])
    got = [calls.get(timeout=LONG) for _ in range(4)]
    assert [number for number, _ in got] == [1, 2, 3, 4]
    assert len({ident for _, ident in got} | {threading.get_ident()}) == 2
    assert router.take("a") is None
    assert router.take("b") is not None


def test_a_handler_can_be_there_from_the_start(router: Router) -> None:
    calls: queue.SimpleQueue[GenerationOutput] = queue.SimpleQueue()
    router.expect(["a", "b"], calls.put)
    router.deliver([part("a", 1), last("b", 2), last("a", 3)])
    assert [calls.get(timeout=LONG).new_tokens for _ in range(3)] == [[1], [2], [3]]
    assert is_empty(router)


class NoExceptionError(BaseException):
    """As SystemExit: not an Exception."""


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3), NoExceptionError(), asyncio.CancelledError()])
def test_a_callback_that_raises_harms_nobody(
    router: Router, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    calls: queue.SimpleQueue[str] = queue.SimpleQueue()

    def bad(output: GenerationOutput) -> None:
        calls.put("bad")
        raise error

    router.expect(["a", "b"])
    router.register("a", bad)
    router.register("b", lambda output: calls.put(output.request_id))
    with caplog.at_level(logging.ERROR):
        router.deliver([part("a"), part("b"), last("a"), last("b")])
        assert [calls.get(timeout=LONG) for _ in range(4)] == ["bad", "b", "bad", "b"]
    assert caplog.text.count("'a' raised") == 2


def test_a_slow_callback_delays_no_delivery(router: Router) -> None:
    go_on, reached = threading.Event(), threading.Event()

    def slow(output: GenerationOutput) -> None:
        reached.set()
        assert go_on.wait(LONG)

    router.expect(["slow", "b"])
    router.register("slow", slow)
    router.deliver([last("slow")])
    assert reached.wait(LONG)
    router.deliver([last("b")])
    assert router.take("b", timeout=0) is not None
    go_on.set()


def test_shutting_down_waits_for_the_calls_made_so_far() -> None:
    router = Router()
    seen = []
    router.expect(["a"])
    router.register("a", lambda output: seen.append(output.new_tokens[0]))
    router.deliver([*(part("a", number) for number in range(100)), last("a", 100)])
    router.shut_down()
    assert seen == list(range(101))
    router.shut_down()


def test_shutting_down_from_a_callback_does_not_wait_for_itself() -> None:
    router = Router()
    done = threading.Event()
    router.expect(["a"])
    router.register("a", lambda output: (router.shut_down(), done.set()))
    router.deliver([last("a")])
    assert done.wait(LONG)


# --- Handlers on event loops ----------------------------------------------------------------------------------------


class LoopThread:
    """An event loop in a thread, which counts how often other threads wake it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.wakes = 0
        wake = self.loop.call_soon_threadsafe

        def count(*args: Any, **kwargs: Any) -> asyncio.Handle:
            self.wakes += 1
            return wake(*args, **kwargs)

        self.wake = wake
        self.loop.call_soon_threadsafe = count  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def call(self, function: Callable[[], Any]) -> Any:
        result: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.wake(lambda: result.put(function()))
        return result.get(timeout=LONG)

    def stop(self) -> None:
        self.wake(self.loop.stop)
        self.thread.join(LONG)


@contextmanager
def loop_threads(count: int) -> Iterator[list[LoopThread]]:
    loops = [LoopThread() for _ in range(count)]
    yield loops
    for each in loops:
        if not each.loop.is_closed():
            each.stop()
            each.loop.close()


def test_each_loop_is_woken_once_for_a_step(router: Router) -> None:
    got: dict[str, list[tuple[int, int]]] = {}

    def handler(output: GenerationOutput) -> None:
        got.setdefault(output.request_id, []).append((output.new_tokens[0], threading.get_ident()))

    with loop_threads(2) as loops:
        names = [str(number) for number in range(20)]
        router.expect(names)
        for name in names:
            loops[int(name) % 2].call(lambda name=name: router.register(name, handler))
        for step in range(3):
            end = last if step == 2 else part
            router.deliver([end(name, step) for name in names])
        for each in loops:
            each.call(lambda: None)
        assert [each.wakes for each in loops] == [3, 3]
        for name in names:
            assert got[name] == [(step, loops[int(name) % 2].thread.ident) for step in range(3)]
    assert is_empty(router)


def test_a_loop_gets_what_waited_before_what_comes(router: Router) -> None:
    got: list[int] = []
    with loop_threads(1) as (each,):
        router.expect(["a"])
        router.deliver([part("a", 1), part("a", 2)])

        def register_and_deliver() -> None:
            router.register("a", lambda output: got.append(output.new_tokens[0]))
            router.deliver([part("a", 3), last("a", 4)])

        each.call(register_and_deliver)
        each.call(lambda: None)
        each.call(lambda: None)
    assert got == [1, 2, 3, 4]


@pytest.mark.parametrize("error", [ValueError("mine"), asyncio.CancelledError()])
def test_a_callback_that_raises_on_a_loop_harms_nobody(
    router: Router, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[str] = []

    def bad(output: GenerationOutput) -> None:
        raise error

    with loop_threads(1) as (each,), caplog.at_level(logging.ERROR):
        router.expect(["a", "b"])
        each.call(lambda: router.register("a", bad))
        each.call(lambda: router.register("b", lambda output: got.append(output.request_id)))
        router.deliver([last("a"), last("b")])
        each.call(lambda: None)
    assert got == ["b"] and "'a' raised" in caplog.text


def test_a_closed_loop_is_nobodys_business(router: Router, caplog: pytest.LogCaptureFixture) -> None:
    with loop_threads(1) as (each,):
        router.expect(["a", "b"])
        each.call(lambda: router.register("a", lambda output: None))
        each.stop()
        each.loop.close()
        with caplog.at_level(logging.WARNING):
            router.deliver([last("a"), last("b")])
        assert router.take("b", timeout=0) is not None
    assert "closed" in caplog.text


# --- Streams --------------------------------------------------------------------------------------------------------


async def numbers(router: Router, request_id: str) -> list[int]:
    return [output.new_tokens[0] async for output in router.stream(request_id)]


async def test_a_stream_ends_after_the_last_output(router: Router) -> None:
    router.expect(["a", "b"])
    router.deliver([part("a", 1)])
    stream = asyncio.ensure_future(numbers(router, "a"))
    await asyncio.sleep(0)
    await asyncio.to_thread(router.deliver, [part("a", 2), part("b", 7)])
    await asyncio.to_thread(router.deliver, [last("a", 3)])
    assert await asyncio.wait_for(stream, LONG) == [1, 2, 3]
    assert await asyncio.wait_for(numbers(router, "a"), LONG) == []
    assert router._handlers == {}


async def test_a_stream_of_a_finished_request_gives_what_is_left(router: Router) -> None:
    router.expect(["a"])
    router.deliver([part("a", 1), last("a", 2)])
    assert await asyncio.wait_for(numbers(router, "a"), LONG) == [1, 2]
    assert is_empty(router)


async def test_two_streams_at_once(router: Router) -> None:
    router.expect(["a", "b"])
    streams = [asyncio.ensure_future(numbers(router, name)) for name in "ab"]
    await asyncio.sleep(0)
    for number in range(5):
        await asyncio.to_thread(router.deliver, [part("a", number), part("b", number)])
    await asyncio.to_thread(router.deliver, [last("a", 5), last("b", 5)])
    assert await asyncio.wait_for(asyncio.gather(*streams), LONG) == [list(range(6))] * 2


async def test_an_abandoned_stream_gives_its_handler_back(router: Router) -> None:
    router.expect(["a"])
    router.deliver([part("a", 1)])
    stream = router.stream("a")
    assert (await anext(stream)).new_tokens == [1]
    await stream.aclose()  # type: ignore[attr-defined]
    router.deliver([last("a", 2)])
    assert router.take("a", timeout=0).new_tokens == [2]  # type: ignore[union-attr]


async def test_a_stream_that_ends_leaves_a_new_handler_of_the_same_id_alone(router: Router) -> None:
    got: list[int] = []
    router.expect(["a"])
    router.deliver([last("a", 1)])
    async for _ in router.stream("a"):
        router.expect(["a"])
        router.register("a", lambda output: got.append(output.new_tokens[0]))
    router.deliver([last("a", 2)])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert got == [2]


async def test_a_stream_does_not_wait_for_an_output_that_somebody_else_took(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    router.expect(["a"])
    router.deliver([last("a", 1)])
    lock = router._lock

    class Lock:
        """Somebody takes the output as soon as the lock is free."""

        entered = 0

        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *exc: object) -> None:
            lock.release()
            Lock.entered += 1
            if Lock.entered == 1:
                router.take("a", timeout=0)

    monkeypatch.setattr(router, "_lock", Lock())
    assert await asyncio.wait_for(numbers(router, "a"), LONG) in ([], [1])


def test_a_handler_may_be_there_before_its_request(router: Router) -> None:
    handled: queue.SimpleQueue[GenerationOutput] = queue.SimpleQueue()
    router.register("a", handled.put)
    router.expect(["a", "b"])
    router.deliver([last("b", 2), last("a", 1)])
    assert handled.get(timeout=LONG).new_tokens == [1]
    assert router.take(timeout=0).new_tokens == [2]  # type: ignore[union-attr]
    router.expect(["a"])
    router.deliver([last("a", 3)])
    assert router.take("a", timeout=0).new_tokens == [3]  # type: ignore[union-attr]  # the handler was for one request


# --- A dead engine --------------------------------------------------------------------------------------------------


def test_a_dead_engine_is_told_to_everyone_who_waits(router: Router) -> None:
    fault = ArithmeticError("broken")
    router.expect(["a", "b", "c"])
    handled: queue.SimpleQueue[GenerationOutput] = queue.SimpleQueue()
    router.register("b", handled.put)
    router.deliver([last("c", 1)])
    waiters = [Waiter(router.take, "a")]
    router.take()
    waiters += [Waiter(router.take), Waiter(router.take, until_idle=True)]
    wait_until_waiting(router, "a")
    wait_until_waiting(router, None, 2)
    router.fail(fault)
    for waiter in waiters:
        error = waiter.get()
        assert isinstance(error, EngineDeadError) and error.__cause__ is fault
    output = handled.get(timeout=LONG)
    assert output.status is RequestStatus.FAILED and output.exception is fault
    with pytest.raises(EngineDeadError):
        router.register("a", handled.put)


def test_what_was_delivered_before_the_death_can_be_taken(router: Router) -> None:
    router.expect(["a", "b"])
    router.deliver([last("a", 1)])
    router.fail(ArithmeticError())
    assert router.take("a", timeout=0).new_tokens == [1]  # type: ignore[union-attr]
    for request_id in ("a", "b", None, "unknown"):
        with pytest.raises(EngineDeadError, match="ArithmeticError"):
            router.take(request_id, timeout=0)


async def test_a_stream_raises_when_the_engine_dies(router: Router) -> None:
    router.expect(["a", "b"])
    router.deliver([part("a", 1)])
    got = []

    async def read() -> None:
        async for output in router.stream("a"):
            got.append(output.new_tokens[0])

    reader = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    await asyncio.to_thread(router.fail, ArithmeticError())
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(reader, LONG)
    assert got == [1]
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(numbers(router, "b"), LONG)


# --- All at once ----------------------------------------------------------------------------------------------------


def test_many_threads_lose_nothing_and_reorder_nothing(router: Router) -> None:
    """Readers of one request, readers of any, handlers and an engine, with threads that switch all the time."""
    num_outputs, names = 15, [str(number) for number in range(36)]
    own, handled, shared = names[:12], names[12:24], names[24:]
    got: dict[str, list[int]] = {name: [] for name in names}
    lock = threading.Lock()

    def note(output: GenerationOutput) -> None:
        with lock:
            got[output.request_id].append(output.new_tokens[0])

    def read(name: str) -> None:
        while (output := router.take(name)) is not None:
            note(output)

    def read_any(stop: threading.Event) -> None:
        while not stop.is_set():
            if (output := router.take(timeout=0.01)) is not None:
                note(output)

    def engine(mine: list[str]) -> None:
        rng = random.Random(mine[0])
        left = {name: 0 for name in mine}
        while left:
            step = []
            for name in rng.sample(sorted(left), max(1, len(left) // 2)):
                left[name] += 1
                step.append((last if left[name] == num_outputs else part)(name, left[name]))
                if left[name] == num_outputs:
                    del left[name]
            router.deliver(step)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        router.expect(names)
        for name in handled:
            router.register(name, note)
        stop = threading.Event()
        readers = [Waiter(read, name) for name in own]
        engines = [Waiter(engine, each) for each in (own, handled, shared)]
        for each in (*engines, *readers):
            assert each.get() is None
        anyone = [Waiter(read_any, stop) for _ in range(4)]
        until(lambda: not router._outputs)
        stop.set()
        for each in anyone:
            assert each.get() is None
        router.shut_down()
    finally:
        sys.setswitchinterval(interval)
    for name in (*own, *handled):
        assert got[name] == list(range(1, num_outputs + 1))
    for name in shared:
        assert sorted(got[name]) == list(range(1, num_outputs + 1))
    assert is_empty(router)
