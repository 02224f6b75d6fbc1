"""What a manager makes of deadlines, priorities, tenants and salts, and what it shows to whoever watches."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from chairlift.errors import InvalidRequestError
from chairlift.request import GenerationOutput, RequestStatus
from chairlift.stats import MOST_CELLS, EngineView, cells
from tests.unit.test_manager import (
    LONG,
    Manager,
    Waiter,
    answer,
    assert_nothing_remembered,
    make,
    pausing,
    result,
    running,
    until,
)

SOON = 1.0  # seconds; more than a request waits for its first steps


def submit(manager: Manager, prompt: list[int], **more: Any) -> str:
    request_id = manager.add_request(prompt, **({"max_new_tokens": 20} | more))
    assert request_id is not None
    return request_id


def sleep_at(manager: Manager, launch: int) -> None:
    """Let the time pass that is soon over."""
    manager.model.on_launch = lambda: time.sleep(SOON if manager.model.num_launched == launch else 0)


def assert_timeout(output: GenerationOutput) -> None:
    assert output.status is RequestStatus.CANCELLED
    assert output.finish_reason == "timeout" and output.error is None


# --- Deadlines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_a_running_request_ends_at_its_deadline_with_what_it_has(depth: int) -> None:
    with running(depth) as manager:
        sleep_at(manager, 5)
        late = submit(manager, [0, 1], max_new_tokens=390, deadline_s=SOON, streaming=True)
        other = submit(manager, [1, 1, 0], max_new_tokens=300)
        *parts, output = manager.request_id_iter(late)
        assert_timeout(output)
        assert 0 < len(output.generated_tokens) < 390
        assert output.generated_tokens == answer([0, 1], len(output.generated_tokens))
        assert all(not part.is_finished() for part in parts)
        begun, ended = output.lifespan
        assert output.created_time <= begun < output.created_time + SOON <= ended
        assert result(manager, other).generated_tokens == answer([1, 1, 0], 300)
        until(lambda: not manager._engine.has_work)
        assert_nothing_remembered(manager)


def test_a_waiting_request_ends_at_its_deadline() -> None:
    with running(max_requests_per_batch=1) as manager:
        sleep_at(manager, 1)
        manager.model.hold()
        first = submit(manager, [0], max_new_tokens=300)
        manager.model.await_held()
        family = submit(manager, [1], deadline_s=SOON, num_return_sequences=2)
        manager.model.hold(after=5)
        for name in (family, f"{family}__child#0"):
            output = result(manager, name)
            assert_timeout(output)
            assert output.generated_tokens == [] and output.lifespan[0] == -1.0
            assert output.lifespan[1] >= output.created_time + SOON
        assert manager.get_result(first, timeout=0) is None, "the one before it is not done"
        manager.model.go_on()
        assert result(manager, first).status is RequestStatus.FINISHED


def test_a_deadline_is_kept_while_the_engine_is_paused() -> None:
    with running() as manager:
        manager.model.hold()
        request_id = submit(manager, [0, 1], max_new_tokens=300, deadline_s=0.2)
        with pausing(manager):
            assert_timeout(result(manager, request_id))
            unseen = submit(manager, [1], deadline_s=1e-6)
            with manager.pause():
                assert manager.get_result(unseen, timeout=0.05) is None
        assert_timeout(result(manager, unseen))
        assert result(manager, submit(manager, [1, 0])).generated_tokens == answer([1, 0], 20)
        assert_nothing_remembered(manager)


def test_a_deadline_that_is_not_reached_changes_nothing() -> None:
    with running() as manager:
        output = result(manager, submit(manager, [0, 1], deadline_s=LONG))
        assert output.finish_reason == "length" and output.generated_tokens == answer([0, 1], 20)


def test_a_stop_string_gives_the_time_at_which_it_ended() -> None:
    class Letters:
        def decode(self, ids: list[int]) -> str:
            return "".join("ab"[token] if token < 2 else "" for token in ids)

    with running() as manager:
        tokens = answer([0, 1], 20)
        stop = Letters().decode(tokens[3:5])
        output = result(manager, submit(manager, [0, 1], stop_strings=[stop], tokenizer=Letters(), ignore_eos=True))
        assert output.finish_reason == "stop" and output.stop_reason == stop
        assert output.created_time <= output.lifespan[0] <= output.lifespan[1] <= time.perf_counter()


# --- Priorities, tenants, salts -------------------------------------------------------------------------------------


def order_of(manager: Manager, submit_all: Callable[[], list[str]]) -> list[str]:
    """In which order requests end that all wait for one place."""
    ended: list[str] = []
    manager.model.hold()
    blocker = submit(manager, [0])
    manager.model.await_held()
    ids = submit_all()
    done = threading.Event()

    def note(output: GenerationOutput) -> None:
        ended.append(output.request_id)
        if len(ended) == len(ids):
            done.set()

    for request_id in ids:
        manager.register_result_handler(request_id, note)
    manager.model.go_on()
    assert done.wait(LONG)
    result(manager, blocker)
    return ended


def test_the_lowest_priority_is_first() -> None:
    with running(scheduler_type="priority", max_requests_per_batch=1) as manager:
        ids: list[str] = []

        def submit_all() -> list[str]:
            ids.extend(submit(manager, [1], max_new_tokens=2, priority=p) for p in (3, 0, -2, 0, 1))
            return ids

        assert order_of(manager, submit_all) == [ids[i] for i in (2, 1, 3, 4, 0)]


def test_tenants_take_turns() -> None:
    with running(scheduler_type="fair_share", max_requests_per_batch=1) as manager:
        tenants = ["a", "a", "a", "b", "b", "b"]
        ids: list[str] = []

        def submit_all() -> list[str]:
            ids.extend(submit(manager, [1], max_new_tokens=2, tenant=tenant) for tenant in tenants)
            return ids

        order = [tenants[ids.index(request_id)] for request_id in order_of(manager, submit_all)]
        assert order in (["a", "b"] * 3, ["b", "a"] * 3)


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
def test_a_priority_that_nobody_would_look_at_is_refused(scheduler: str) -> None:
    with running(scheduler_type=scheduler) as manager:
        with pytest.raises(InvalidRequestError, match=r"priority=1 .*scheduler_type='priority' or 'fair_share'"):
            submit(manager, [0], priority=1)
        result(manager, submit(manager, [0], priority=0, tenant="a"))
        assert_nothing_remembered(manager)


BAD = [
    ("priority", 1.5, TypeError),
    ("priority", True, TypeError),
    ("deadline_s", 0, ValueError),
    ("deadline_s", -1.0, ValueError),
    ("deadline_s", float("nan"), ValueError),
    ("deadline_s", float("inf"), ValueError),
    ("deadline_s", "1", TypeError),
    ("tenant", 3, TypeError),
    ("tenant", "", ValueError),
    ("cache_salt", b"x", TypeError),
    ("cache_salt", "", ValueError),
]


@pytest.mark.parametrize(("name", "value", "error"), BAD)
def test_values_that_make_no_sense(name: str, value: object, error: type[Exception]) -> None:
    manager = make(scheduler_type="priority")
    with pytest.raises(error, match=name):
        submit(manager, [0], **{name: value})
    with pytest.raises(TypeError, match=f"did you mean '{name}'"):
        submit(manager, [0], **{name + "x": value})
    assert_nothing_remembered(manager)
    manager.destroy()


def test_prefixes_are_shared_under_equal_salts_only() -> None:
    prompt = [0, 1] * 10
    with running() as manager:

        def cached(**more: Any) -> int:
            output = result(manager, submit(manager, prompt, **more))
            assert output.generated_tokens == answer(prompt, 20)
            return output.num_cached_tokens

        assert cached() == cached(cache_salt="a") == cached(cache_salt="b") == 0
        assert cached() == cached(cache_salt="a") == cached(cache_salt="b") == 19
        assert cached(cache_salt="c") == 0


# --- Watching -------------------------------------------------------------------------------------------------------


def test_a_view_holds_together() -> None:
    views: list[EngineView] = []
    with running(depth=1, blocks=40, max_requests_per_batch=2) as manager:
        manager.watch(views.append, interval_s=0.0)
        until(lambda: len(views) == 1)
        assert views[0].running == () and views[0].batch_rows == 0 and set(views[0].blocks) == {0}
        manager.model.hold()
        first = submit(manager, [0, 1] * 6, tenant="me", max_new_tokens=8)
        manager.model.await_held()
        others = [submit(manager, [0, 1] * 6, max_new_tokens=8) for _ in range(2)]
        manager.model.go_on()
        for request_id in (first, *others):
            result(manager, request_id)
        until(lambda: not views[-1].running and views[-1].step == manager.stats().steps)
    assert [view.time for view in views] == sorted(view.time for view in views)
    for view in views:
        assert len(view.blocks) == 40
        assert len(view.running) + view.num_waiting <= 3
        for row in view.running:
            assert row.num_prompt == 12 and row.max_length == 20 and row.age_s > 0
            assert row.num_computed <= row.num_prompt + row.num_generated
            assert row.status == ("DECODING" if row.num_generated else "PREFILLING")
            assert row.tenant == ("me" if row.request_id == first else None)
        assert bool(view.running) or not {1, 2} & set(view.blocks)
    assert any(view.batch_rows == 2 for view in views)
    assert any(2 in view.blocks for view in views), "two of them share the prompt's blocks"
    assert any(view.waiting and view.waiting[0].request_id == others[-1] for view in views)
    assert 3 in views[-1].blocks and views[-1].prefix_hit_tokens > 0 and views[-1].preemptions == 0


def test_who_raises_or_leaves_is_not_called_again(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []

    def breaks(view: EngineView) -> None:
        calls.append("breaks")
        raise ZeroDivisionError

    with running() as manager:
        manager.watch(breaks, 0.0)
        leave = manager.watch(lambda view: calls.append("leaves"), 0.0)
        until(lambda: "leaves" in calls)
        leave()
        leave()
        manager.watch(lambda view: calls.append("stays"), 0.0)
        result(manager, submit(manager, [0]))
        until(lambda: not manager._engine.has_work)
        assert calls.count("breaks") == 1 and calls.count("leaves") == 1 and calls.count("stays") > 5
        assert len(manager._watchers) == 1
    assert "a watcher raised" in caplog.text


def test_views_keep_their_distance_and_the_last_is_at_rest() -> None:
    views: list[EngineView] = []
    with running() as manager:
        manager.watch(views.append, interval_s=LONG)
        result(manager, submit(manager, [0], max_new_tokens=50))
        until(lambda: len(views) == 2)
        assert views[-1].running == () and views[-1].num_waiting == 0


def test_nobody_watches_a_manager_that_stops() -> None:
    manager = make()
    views: list[EngineView] = []
    manager.watch(views.append, 0.0)
    Waiter(manager.start).get()
    result(manager, submit(manager, [1]))
    manager.stop()
    number = len(views)
    assert number > 1
    manager.destroy()
    assert len(views) == number


def test_cells_show_the_most_telling_state_of_several_blocks() -> None:
    assert cells(bytes([0, 1, 2, 3])) == bytes([0, 1, 2, 3])
    many = bytearray(3 * MOST_CELLS)
    many[0:3], many[3:6], many[6:9], many[9:12] = b"\0\3\0", b"\3\1\3", b"\1\2\3", b"\0\0\0"
    shown = cells(bytes(many))
    assert len(shown) == MOST_CELLS and shown[:5] == bytes([3, 1, 2, 0, 0])
    assert len(cells(bytes(MOST_CELLS + 1))) <= MOST_CELLS
