"""What the scheduler plans, and what it makes of results: one decision per test, on real cache bookkeeping."""

import gc
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from types import FrameType
from typing import Any

import pytest

from chairlift.cache.cache import KVCache
from chairlift.cache.layout import LayerSpec, plan_layout
from chairlift.engine import Engine
from chairlift.params import SamplingParams
from chairlift.request import GenerationOutput, Request, RequestStatus, Sequence, written
from chairlift.schedule.plan import ScheduledBatch
from chairlift.schedule.policy import Fifo, Policy, PrefillFirst
from chairlift.schedule.scheduler import PROMPT_LOGPROB_TOKENS, Scheduler
from chairlift.stats import StepRecorder
from tests.late_device import EOS, FAULTY_SEED, LateDevice, entries_of, host_tokens_needed, token_after

LAYOUT = plan_layout([LayerSpec(index=0, window=None, num_kv_heads=1, head_dim=1)], 4, 1)
IGNORE_EOS = SamplingParams(ignore_eos=True)


class World:
    """A scheduler with everything under and above it."""

    def __init__(
        self,
        *,
        blocks: int = 100,
        host: int = 0,
        budget: int = 16,
        rows: int = 8,
        margin: float = 0.0,
        policy: Policy | None = None,
        depth: int = 1,
    ) -> None:
        self.cache = KVCache(LAYOUT, blocks, host)
        self.scheduler = Scheduler(
            self.cache, policy or Fifo(), max_batch_tokens=budget, max_rows=rows, safety_margin=margin
        )
        self.device = LateDevice(LAYOUT, blocks, host)
        self.engine = Engine(self.scheduler, self.device, StepRecorder(), depth)

    def add(
        self,
        name: str,
        prompt: int | tuple[int, ...],
        new: int = 5,
        params: SamplingParams = IGNORE_EOS,
        **fields: Any,
    ) -> list[GenerationOutput]:
        """A prompt given by its length alone has nothing in common with those of other names."""
        if isinstance(prompt, int):
            prompt = (*name.encode(), *[0] * prompt)[:prompt]
        fields = {"max_length": len(prompt) + new, "seed": 0} | fields
        return self.scheduler.add(Request(request_id=name, prompt_ids=prompt, params=params, **fields))

    def step(self) -> tuple[dict[str, int], list[GenerationOutput]]:
        """Tokens per request in the step that was planned, and the outputs."""
        names = {seq.serial: seq.request.request_id for seq in self.scheduler._live.values()}
        self.device.last_plan = None
        outputs = [written(output) for output in self.engine.step()]
        plan = self.device.last_plan
        rows = () if plan is None else plan.rows
        return {names[row.sequence_id]: row.num_tokens for row in rows}, outputs

    def finish(self, at_most: int = 1000) -> dict[str, GenerationOutput]:
        """Run to the end."""
        done = {}
        for _ in range(at_most):
            if not self.engine.has_work:
                self.cache.check([])
                assert self.cache.usage.used == self.cache.usage.host_used == 0
                return done
            done.update({output.request_id: output for output in self.step()[1] if output.is_finished()})
        raise AssertionError("it does not come to an end")

    @property
    def plan(self) -> ScheduledBatch:
        assert self.device.last_plan is not None
        return self.device.last_plan


def answer(prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(token_after(entries_of(tokens)[-1]))
    return tokens[len(prompt) :]


# --- Whose turn it is -----------------------------------------------------------------------------------------------


def test_long_prompts_do_not_hold_up_answers() -> None:
    world = World(budget=16)
    world.add("a", 3, new=40)
    world.add("b", 3, new=40)
    world.step()
    for number in range(10):
        world.add(f"long{number}", 50)
    for _ in range(30):
        tokens, _ = world.step()
        assert tokens["a"] == tokens["b"] == 1
        assert sum(tokens.values()) == 16, "the rest of the budget goes to the prompts"


def test_an_old_long_prompt_leaves_a_token_to_every_answer() -> None:
    world = World(budget=8)
    world.add("old", 60, new=1)
    world.step()
    world.scheduler.running[0].num_computed = 0  # as after a preemption: the oldest computes its prompt again
    world = World(budget=8)
    world.add("a", 20, new=1)
    assert world.step()[0] == {"a": 8}
    world.add("b", 2)
    assert world.step()[0] == {"a": 8}
    assert world.step()[0] == {"a": 4, "b": 2}


def test_prefill_first_lets_answers_wait_but_never_the_oldest() -> None:
    world = World(budget=8, policy=PrefillFirst())
    world.add("a", 2)
    world.add("b", 2)
    world.step()
    world.add("long", 30)
    assert world.step()[0] == {"a": 1, "b": 1, "long": 6}
    assert world.step()[0] == {"a": 1, "long": 7}
    assert world.step()[0] == {"a": 1, "long": 7}
    assert world.step()[0] == {"a": 1, "long": 7}
    assert world.step()[0] == {"long": 3, "b": 1}


def test_waiting_requests_are_seated_in_the_order_of_arrival() -> None:
    world = World(budget=16, rows=2)
    for name in "abcd":
        world.add(name, 2, new=2)
    seated = []
    while world.engine.has_work:
        seated += [name for name in world.step()[0] if name not in seated]
    assert seated == ["a", "b", "c", "d"]


def test_nobody_overtakes_a_request_that_does_not_fit_yet() -> None:
    world = World(blocks=10, budget=64)
    world.add("a", 20, new=8)  # 7 of 10 blocks in the end
    world.step()
    world.add("big", 30, new=1)
    world.add("small", 1, new=1)
    while "a" in world.scheduler._by_id:
        assert set(world.step()[0]) == {"a"}
    assert set(world.step()[0]) == {"big", "small"}


def test_no_more_rows_than_slots_and_no_more_slots_than_tokens() -> None:
    world = World(rows=3)
    for number in range(7):
        world.add(str(number), 1)
    assert len(world.step()[0]) == 3
    assert World(rows=50, budget=16).scheduler.max_rows == 16


def test_the_safety_margin_is_kept_for_the_running() -> None:
    world = World(blocks=20, budget=64, margin=0.5)
    world.add("first", 60, new=1)  # 15 blocks: alone it may have them
    world.add("second", 1)
    assert set(world.step()[0]) == {"first"}
    assert set(world.step()[0]) == {"second"}
    world = World(blocks=20, budget=64, margin=0.5)
    for name in ("a", "b", "c"):
        world.add(name, 20, new=3)  # 5 blocks each
    assert set(world.step()[0]) == {"a", "b", "c"}, "admitted while half of the cache is free"
    world.add("d", 1)
    assert "d" not in world.step()[0]


def test_a_policy_of_the_users_is_asked() -> None:
    class LastComeFirst(Fifo):
        def select(self, waiting: Mapping[int, Sequence]) -> Sequence:
            return waiting[max(waiting)]

        def victim(self, candidates: Collection[Sequence]) -> Sequence:
            return min(candidates, key=lambda seq: len(seq.tokens))

    world = World(rows=1, policy=LastComeFirst())
    for name in "abc":
        world.add(name, 2, new=1)
    assert [next(iter(world.step()[0])) for _ in range(3)] == ["c", "b", "a"]
    world = World(blocks=9, rows=2, policy=LastComeFirst())
    world.add("short", 3, new=30)
    world.add("long", 12, new=4)
    world.step()
    for _ in range(30):
        world.step()
        if world.scheduler.num_preemptions:
            break
    world.finish()


def test_tokens_of_a_step_are_told_apart() -> None:
    world = World()
    world.add("a", 4)
    world.step()
    assert (world.plan.num_tokens, world.plan.num_decode_tokens) == (4, 0)
    world.add("b", 6)
    world.step()
    assert (world.plan.num_tokens, world.plan.num_decode_tokens) == (7, 1)


# --- Much to do -----------------------------------------------------------------------------------------------------


def count_calls(function: Callable[[], object]) -> int:
    """Calls of functions, those in C among them."""
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # what its callbacks call is not the function's work
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


class Queue(OrderedDict[int, Sequence]):
    """A queue that nobody may walk through."""

    def values(self) -> Any:
        return _first_few(super().values())

    def items(self) -> Any:
        return _first_few(super().items())

    def __iter__(self) -> Iterator[int]:
        return _first_few(super().__iter__())


def _first_few(items: Any) -> Iterator[Any]:
    yield from islice(items, 3)
    raise AssertionError("somebody walks through the queue")


def crowded(num_waiting: int) -> World:
    world = World(rows=4, blocks=12)
    for number in range(num_waiting):
        world.add(str(number), 1 + number % 3, new=30)
    queue = Queue()
    for serial, seq in world.scheduler.waiting.items():
        queue[serial] = seq
    world.scheduler.waiting = queue
    return world


def test_the_work_of_a_step_does_not_grow_with_the_queue() -> None:
    few, many = crowded(100), crowded(50_000)
    for _ in range(40):  # with preemptions: the pool holds 48 tokens of 4 x 33
        assert count_calls(few.step) == count_calls(many.step) < 2000
    assert few.scheduler.num_preemptions == many.scheduler.num_preemptions > 0


def test_the_work_of_an_abort_does_not_grow_with_the_queue() -> None:
    few, many = crowded(100), crowded(50_000)
    few.step(), many.step()
    for name in ("0", "50", "99", "nobody"):
        calls = [count_calls(partial(world.scheduler.abort, name)) for world in (few, many)]
        assert calls[0] == calls[1] < 200


# --- The end of a request -------------------------------------------------------------------------------------------


def test_nothing_to_generate_ends_at_once() -> None:
    world = World()
    (output,) = world.add("a", 4, new=0)
    assert (output.status, output.finish_reason, output.generated_tokens) == (RequestStatus.FINISHED, "length", [])
    assert not world.engine.has_work and world.scheduler.schedule() is None


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_prompt_can_be_scored_without_an_answer(depth: int) -> None:
    world = World(depth=depth, budget=4)
    assert world.add("a", 10, new=0, params=SamplingParams(prompt_logprobs=0)) == []
    world.add("b", 1, new=9)
    done = world.finish()
    assert done["a"].finish_reason == "length" and done["a"].generated_tokens == []
    scores = done["a"].prompt_logprobs
    assert len(scores) == 10 and scores[0] is None and None not in scores[1:]


def test_no_more_prompt_tokens_are_scored_in_a_step_than_fit_in_memory() -> None:
    world = World(budget=2000, blocks=2000)
    for name in "ab":
        world.add(name, 500, new=1, params=SamplingParams(prompt_logprobs=0))
    world.add("c", 500, new=1)
    done: dict[str, GenerationOutput] = {}
    while world.engine.has_work:
        done |= {output.request_id: output for output in world.step()[1]}
        assert sum(row.num_logits for row in world.plan.rows) <= PROMPT_LOGPROB_TOKENS + 3
    assert len(done["a"].prompt_logprobs) == len(done["b"].prompt_logprobs) == 500
    assert None not in done["a"].prompt_logprobs[1:]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_token_ends_the_answer_and_is_its_last_token(depth: int) -> None:
    world = World(depth=depth)
    world.add("a", (0, 1, 0, 1), new=100, params=SamplingParams(eos_token_ids=frozenset({EOS})), max_length=300)
    output = world.finish()["a"]
    assert output.finish_reason == "stop" and output.stop_reason == EOS
    assert output.generated_tokens == answer((0, 1, 0, 1), len(output.generated_tokens))
    assert output.generated_tokens.count(EOS) == 1 and output.generated_tokens[-1] == EOS


def test_only_streaming_requests_give_more_than_one_output() -> None:
    world = World()
    world.add("quiet", 2, new=4)
    world.add("loud", 3, new=4, streaming=True)
    outputs = []
    while world.engine.has_work:
        outputs += world.step()[1]
    assert [len(output.new_tokens) for output in outputs if output.request_id == "loud"] == [1, 1, 1, 1]
    assert [len(output.new_tokens) for output in outputs if output.request_id == "quiet"] == [4]


def test_timestamps_are_as_many_as_tokens() -> None:
    world = World()
    world.add("a", 2, new=4, record_timestamps=True)
    world.add("b", 2, new=4)
    done = world.finish()
    assert done["a"].timestamps == sorted(done["a"].timestamps or []) and len(done["a"].timestamps or []) == 4
    assert done["b"].timestamps is None
    first, last = done["a"].lifespan
    assert done["a"].created_time <= first <= last


def test_the_fault_of_one_request_fails_that_one() -> None:
    world = World(depth=2)
    world.add("bad", 4, new=9, seed=FAULTY_SEED)
    world.add("good", 5, new=9)
    done = world.finish()
    assert done["bad"].status is RequestStatus.FAILED and done["bad"].finish_reason == "error"
    assert isinstance(done["bad"].exception, ArithmeticError) and "own doing" in (done["bad"].error or "")
    assert done["good"].status is RequestStatus.FINISHED and len(done["good"].generated_tokens) == 9


def test_fail_all_ends_everybody() -> None:
    world = World(rows=1, depth=2)
    for name in "abc":
        world.add(name, 2)
    world.step()
    fault = RuntimeError("enough")
    outputs = world.scheduler.fail_all(fault)
    assert [output.request_id for output in outputs] == ["a", "b", "c"]
    assert all(output.status is RequestStatus.FAILED and output.exception is fault for output in outputs)
    assert list(world.engine.drain()) == [[]] and world.finish() == {}


# --- Aborts ---------------------------------------------------------------------------------------------------------


def family(world: World, new: int = 9) -> None:
    params = replace(IGNORE_EOS, num_return_sequences=3)
    world.add("p", (1, 1, 0), new, params)
    world.add("p__child#0", (1, 1, 0), new, params, parent_id="p")
    world.add("p__child#1", (1, 1, 0), new, params, parent_id="p")
    world.add("q", (1, 1, 0), new)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_aborting_a_request_ends_its_children(rows: int) -> None:
    world = World(rows=rows, depth=2)
    family(world)
    world.step()
    outputs = world.scheduler.abort("p")
    assert [output.request_id for output in outputs] == ["p", "p__child#0", "p__child#1"]
    assert all(output.status is RequestStatus.CANCELLED for output in outputs)
    assert world.scheduler.abort("p") == []
    assert set(world.finish()) == {"q"}


def test_aborting_a_child_ends_the_child() -> None:
    world = World()
    family(world)
    world.step()
    assert [output.request_id for output in world.scheduler.abort("p__child#0")] == ["p__child#0"]
    assert set(world.finish()) == {"p", "p__child#1", "q"}


def test_children_of_a_finished_parent_can_be_aborted_by_its_name() -> None:
    world = World(rows=1)
    family(world, new=2)
    while "p" in world.scheduler._by_id:
        world.step()
    assert [output.request_id for output in world.scheduler.abort("p")] == ["p__child#0", "p__child#1"]
    assert set(world.finish()) == {"q"}


def test_an_aborted_request_gives_its_tokens_and_its_blocks_at_once() -> None:
    world = World(depth=2)
    world.add("a", 4, new=50)
    for _ in range(6):
        world.step()
    (output,) = world.scheduler.abort("a")
    assert output.generated_tokens == answer((97, 0, 0, 0), 5), "one sample is still in flight"
    assert world.cache.usage.used == 0
    assert list(world.engine.drain()) == [[]] and not world.engine.has_work


def test_an_ended_request_says_nothing() -> None:
    world = World(depth=2)
    world.add("a", 4, new=50)
    world.step(), world.step()
    world.scheduler.end("a")
    world.scheduler.end("a")
    assert world.finish() == {}


def test_an_id_can_be_used_again_while_its_old_sample_is_in_flight() -> None:
    world = World(depth=2)
    world.add("a", (1, 0), new=3)
    world.step()
    world.scheduler.abort("a")
    world.add("a", (1, 1, 1), new=4)
    assert world.finish()["a"].generated_tokens == answer((1, 1, 1), 4)


def test_unknown_ids_are_ignored() -> None:
    assert World().scheduler.abort("nobody") == []


# --- Steps in flight ------------------------------------------------------------------------------------------------


def test_who_needs_the_last_token_on_the_host_waits_for_it() -> None:
    world = World(depth=2)
    world.add("slow", 2, new=3, params=replace(IGNORE_EOS, logits_processor=host_tokens_needed))
    world.add("fast", 3, new=5)
    planned = [set(world.step()[0]) for _ in range(4)]
    assert planned == [{"slow", "fast"}, {"fast"}, {"slow", "fast"}, {"fast"}]
    assert world.finish()["slow"].generated_tokens == answer((115, 108), 3)


def test_no_token_is_sampled_beyond_the_last() -> None:
    world = World(depth=4)
    world.add("a", 2, new=3)
    world.finish()
    assert world.device.num_launched == 3


def test_a_plan_is_plain_data() -> None:
    world = World(blocks=8, host=8, depth=1)
    world.add("a", 10, new=20, params=replace(IGNORE_EOS, logprobs=3, eos_token_ids=frozenset({EOS})))
    world.add("b", 10, new=20)
    kinds = set()
    while world.engine.has_work:
        world.step()
        kinds |= {copy.kind for copy in world.plan.copies}
        assert pickle.loads(pickle.dumps(world.plan)) == world.plan
        hash(world.plan)
    assert kinds == {"swap_out", "swap_in"}


# --- Giving way -----------------------------------------------------------------------------------------------------


def test_the_newest_gives_way_and_goes_on_later() -> None:
    world = World(blocks=10, budget=64)
    for name in "abc":
        world.add(name, (0, 1, 1, *name.encode()), new=20)
    seen: list[set[str]] = []
    while not world.scheduler.num_preemptions:
        seen.append(set(world.step()[0]))
    assert seen[0] == {"a", "b", "c"}
    assert [seq.request.request_id for seq in world.scheduler.waiting.values()] == ["c"]
    done = world.finish()
    for name in "abc":
        assert done[name].generated_tokens == answer((0, 1, 1, *name.encode()), 20)


def test_who_gave_way_goes_before_those_who_never_ran() -> None:
    world = World(blocks=10, budget=64, rows=3)
    for name in "abcd":
        world.add(name, (0, 1, 1, *name.encode()), new=20)
    while world.scheduler.num_preemptions < 2:
        world.step()
    assert [seq.request.request_id for seq in world.scheduler.waiting.values()] == ["b", "c", "d"]
    world.finish()


def test_nobody_is_seated_in_a_step_in_which_somebody_gave_way() -> None:
    """Not even who gave way, though its first few tokens would fit again."""
    world = World(blocks=9, budget=4, rows=2)
    world.add("a", 16, new=20, match_prefix=False)
    world.add("b", 16, new=20, match_prefix=False)
    for _ in range(20):
        world.step()
        if world.scheduler.num_preemptions:
            break
    assert world.cache.num_available > 0 and world.plan.num_tokens < 4
    assert not world.plan.seats
    world.finish()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_swap_goes_out_before_its_blocks_are_used_and_comes_back_whole(depth: int) -> None:
    world = World(blocks=8, host=8, budget=64, depth=depth)
    world.add("a", 12, new=12)
    world.add("b", 11, new=12)
    while not world.scheduler.num_swaps:
        world.step()
    out = world.plan.copies
    assert {copy.kind for copy in out} == {"swap_out"}
    victim = world.scheduler._by_id["b"]
    assert victim.kv.is_swapped_out and world.cache.usage.host_used == len(out)
    computed = victim.num_computed
    while victim.kv.is_swapped_out:
        world.step()
    back = world.plan.copies
    assert [copy.source for copy in back] == [copy.target for copy in out]
    (seat,) = world.plan.seats
    (row,) = (row for row in world.plan.rows if row.slot == seat.slot)
    assert row.start == computed, "nothing is computed again"
    assert len(seat.tokens) == computed + 1 and seat.num_prompt == 11
    assert world.finish()["b"].generated_tokens == answer((98, *[0] * 10), 12)


def test_without_room_on_the_host_it_is_computed_again() -> None:
    world = World(blocks=8, host=2, budget=64)
    world.add("a", 12, new=12)
    world.add("b", 11, new=12)
    world.finish()
    assert world.scheduler.num_preemptions and not world.scheduler.num_swaps


def test_aborting_a_swapped_out_request_frees_the_host() -> None:
    world = World(blocks=8, host=8, budget=64)
    world.add("a", 12, new=12)
    world.add("b", 11, new=12)
    while not world.scheduler.num_swaps:
        world.step()
    (output,) = world.scheduler.abort("b")
    assert output.generated_tokens and world.cache.usage.host_used == 0
    world.finish()


# --- Sharing --------------------------------------------------------------------------------------------------------


def test_a_prompt_that_was_answered_is_not_computed_again() -> None:
    world = World()
    world.add("a", (1,) * 10, new=1)
    world.finish()
    world.add("b", (1,) * 10, new=1)
    assert world.step()[0] == {"b": 1}
    world.add("c", (1,) * 10, new=1, match_prefix=False)
    assert world.step()[0] == {"c": 10}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_answer_that_was_given_is_not_computed_again(depth: int) -> None:
    world = World(depth=depth)
    world.add("a", (1, 0), new=20)
    output = world.finish()["a"]
    world.add("b", (1, 0, *output.generated_tokens), new=1)
    assert world.step()[0] == {"b": 1}, "all but the last sampled token has KV"


def test_without_sharing_nothing_stays_cached() -> None:
    world = World(blocks=12, budget=64)
    for number in range(3):
        params = replace(IGNORE_EOS, num_return_sequences=2)
        salt = b"%d" % number
        for name in (f"{number}", f"{number}__child#0"):
            parent = None if name == str(number) else str(number)
            world.add(name, (1,) * 10, 6, params, parent_id=parent, salt=salt, share_prefix=False, match_prefix=True)
    done = world.finish()
    assert all(output.generated_tokens == answer((1,) * 10, 6) for output in done.values())
    assert {name: output.num_cached_tokens for name, output in done.items() if "child" not in name} == {
        "0": 0,
        "1": 0,
        "2": 0,
    }
    assert all(output.num_cached_tokens == 8 for name, output in done.items() if "child" in name)
    assert world.cache.usage.cached == 0


def test_new_weights_make_everybody_start_again_in_the_order_of_arrival() -> None:
    world = World(rows=3, budget=64)
    for name in "abcd":
        world.add(name, (0, 1, 1, *name.encode()), new=20)
    world.step(), world.step()
    list(world.engine.drain())
    world.scheduler.recompute_all()
    assert [seq.request.request_id for seq in world.scheduler.waiting.values()] == ["a", "b", "c", "d"]
    assert world.cache.num_available == world.cache.num_blocks
    assert world.step()[0] == {"a": 6, "b": 6, "c": 6}
