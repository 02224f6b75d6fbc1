"""The engine against an oracle, on a device that runs as late as the host lets it.

Whatever the depth, the budgets, the pool, the policy, preemptions, swaps, shared prefixes, aborts, deadlines and
pauses: every request gets the tokens that it would get alone. See `tests/late_device.py` for what the device checks by
itself.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chairlift.cache.cache import KVCache
from chairlift.cache.layout import LayerSpec, plan_layout
from chairlift.engine import Engine
from chairlift.params import SamplingParams
from chairlift.request import GenerationOutput, Outgoing, Request, RequestStatus, Sequence, written
from chairlift.schedule.policy import POLICIES
from chairlift.schedule.scheduler import Scheduler
from chairlift.stats import StepRecorder
from tests.late_device import (
    EOS,
    FAULTY_SEED,
    LateDevice,
    entries_of,
    host_tokens_needed,
    score_of,
    token_after,
    way_of,
)

WINDOWS = st.sampled_from([[None], [None], [3], [None, 3], [None, 1, 8], [2, 6]])  # one layer per window
WHICH = st.integers(0, 100)
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class Kind(NamedTuple):
    """What else a request asks for."""

    max_new: int
    children: int
    prompt_logprobs: int | None
    logprobs: int | None
    streaming: bool
    needs_host: bool
    ignore_eos: bool
    faulty: bool
    priority: int
    tenant: str | None
    deadline: int | None  # ticks from submission


KINDS = st.builds(
    Kind,
    max_new=st.sampled_from([30, 30, 5, 1, 0]),
    children=st.sampled_from([1, 1, 3]),
    prompt_logprobs=st.sampled_from([None, None, 0, 2]),
    logprobs=st.sampled_from([None, 0, 2]),
    streaming=st.booleans(),
    needs_host=st.sampled_from([False, False, True]),
    ignore_eos=st.booleans(),
    faulty=st.sampled_from([False] * 7 + [True]),
    priority=st.sampled_from([0, 0, -1, 1]),
    tenant=st.sampled_from([None, "a", "b"]),
    deadline=st.sampled_from([None, None, 1, 3, 20]),
)


@dataclass
class Asked:
    """A request, and what must come of it."""

    request: Request
    weights: list[int]  # those that each answer token was sampled with, as far as the answer is known
    outputs: list[GenerationOutput] = field(default_factory=list)
    outgoing: list[Outgoing] = field(default_factory=list)  # the same, not written out
    cancelled: bool = False
    expired: bool = False
    dropped: bool = False
    restart_length: int | None = None

    @property
    def is_over(self) -> bool:
        return self.dropped or (bool(self.outputs) and self.outputs[-1].is_finished())

    def answer(self, num_tokens: int, weights_now: int) -> list[int]:
        """The first `num_tokens` tokens of the answer, or fewer if it ends before."""
        request = self.request
        tokens = list(request.prompt_ids)
        while len(tokens) < min(request.max_length, len(request.prompt_ids) + num_tokens):
            generated = len(tokens) - len(request.prompt_ids)
            weights = self.weights[generated] if generated < len(self.weights) else weights_now
            tokens.append(token_after(entries_of(tokens, way_of(weights, len(tokens), self.restart_length))[-1]))
            if tokens[-1] in request.params.stop_ids:
                break
        return tokens[len(request.prompt_ids) :]


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        windows=WINDOWS,
        page_size=st.sampled_from([2, 1, 4]),
        longest=st.sampled_from([14, 8, 30]),  # tokens of prompt and answer
        spare=st.sampled_from([0, 0, 1, 3, 9]),  # blocks beyond what one such request needs
        host=st.sampled_from([0, 9, 60]),
        depth=st.sampled_from([2, 1, 4]),
        budget=st.sampled_from([16, 5, 64, 9, 16, 5, 3, 1]),
        rows=st.sampled_from([8, 5, 8, 3, 8, 1]),
        policy=st.sampled_from(sorted(POLICIES)),
        margin=st.sampled_from([0.0, 0.0, 0.0, 0.15, 0.9]),
        sharing=st.booleans(),
        restart_length=st.sampled_from([None, None, 6]),
        first=st.lists(st.tuples(PROMPTS, KINDS), min_size=2, max_size=6),
    )
    def begin(
        self,
        windows: list[int | None],
        page_size: int,
        longest: int,
        spare: int,
        host: int,
        depth: int,
        budget: int,
        rows: int,
        policy: str,
        margin: float,
        sharing: bool,
        restart_length: int | None,
        first: list[tuple[list[int], Kind]],
    ) -> None:
        layers = [LayerSpec(index=i, window=w, num_kv_heads=1, head_dim=1) for i, w in enumerate(windows)]
        layout = plan_layout(layers, page_size, 1)
        num_blocks = layout.blocks_needed(longest - 1, budget) + spare
        self.cache = KVCache(layout, num_blocks, host)
        self.device = LateDevice(layout, num_blocks, host)
        self.device.restart_length = restart_length
        self.scheduler = Scheduler(
            self.cache, POLICIES[policy](), max_batch_tokens=budget, max_rows=rows, safety_margin=margin
        )
        self.engine = Engine(self.scheduler, self.device, StepRecorder(), depth)
        self.longest, self.budget, self.rows, self.depth, self.sharing = longest, budget, rows, depth, sharing
        self.asked: dict[str, Asked] = {}
        self.now = 0  # ticks
        for prompt, kind in first:
            self.submit_family(prompt, kind)

    # What callers do

    @rule(which=WHICH, cut=st.integers(0, 4), ends=st.lists(PROMPTS, min_size=1, max_size=4), kind=KINDS)
    def submit(self, which: int, cut: int, ends: list[list[int]], kind: Kind) -> None:
        """Prompts that go on where an earlier one was, or branch off before its end."""
        asked = [*self.asked.values()]
        earlier = asked[which % len(asked)].request.prompt_ids
        for end in ends:
            self.submit_family([*earlier[: max(0, len(earlier) - cut)], *end], kind)

    def submit_family(self, tokens: list[int], kind: Kind) -> None:
        """As the manager does it."""
        prompt = tuple(tokens[: self.longest - 1])
        params = SamplingParams(
            eos_token_ids=frozenset({EOS}),
            ignore_eos=kind.ignore_eos,
            prompt_logprobs=kind.prompt_logprobs,
            logprobs=kind.logprobs,
            num_return_sequences=kind.children,
            logits_processor=host_tokens_needed if kind.needs_host else None,
        )
        name = f"r{len(self.asked)}"
        own = b"" if self.sharing else name.encode()
        restart_length = self.device.restart_length
        is_long = restart_length is not None and len(prompt) > restart_length
        for child in range(kind.children):
            request = Request(
                request_id=name if child == 0 else f"{name}__child#{child - 1}",
                parent_id=None if child == 0 else name,
                prompt_ids=prompt,
                params=params,
                max_length=min(len(prompt) + kind.max_new, self.longest),
                seed=FAULTY_SEED if kind.faulty else 0,
                salt=b"long" + own if is_long else own,
                restart=None if restart_length is None or is_long else (restart_length, b"long" + own),
                share_prefix=self.sharing,
                match_prefix=kind.prompt_logprobs is None and (self.sharing or kind.children > 1),
                streaming=kind.streaming,
                priority=kind.priority,
                tenant=kind.tenant,
                deadline=None if kind.deadline is None else self.now + kind.deadline,
            )
            self.asked[request.request_id] = Asked(request, [], restart_length=restart_length)
            self.receive(self.scheduler.add(request))

    @precondition(lambda self: self.live)
    @rule(which=WHICH)
    def abort(self, which: int) -> None:
        request_id = sorted(self.live)[which % len(self.live)]
        outputs = self.scheduler.abort(request_id)
        family = [
            asked for asked in self.live.values() if request_id in (asked.request.request_id, asked.request.parent_id)
        ]
        assert {output.request_id for output in outputs} == {asked.request.request_id for asked in family}
        assert all(output.status is RequestStatus.CANCELLED for output in outputs)
        for asked in family:
            asked.cancelled = True
        self.receive(outputs)

    @precondition(lambda self: self.live)
    @rule(which=WHICH)
    def end(self, which: int) -> None:
        """A stop string was found: somebody else ends the request."""
        request_id = sorted(self.live)[which % len(self.live)]
        self.scheduler.end(request_id)
        self.asked[request_id].dropped = True

    @rule(ticks=st.sampled_from([1, 1, 4]))
    def let_time_pass(self, ticks: int) -> None:
        """At any moment between two steps, with others in flight."""
        self.now += ticks
        overdue = {
            request_id
            for request_id, asked in self.live.items()
            if asked.request.deadline is not None and asked.request.deadline <= self.now
        }
        deadlines = [a.request.deadline for a in self.live.values() if a.request.deadline is not None]
        assert self.scheduler.next_deadline == min(deadlines, default=None)
        outputs = self.scheduler.expire(self.now)
        assert {output.request_id for output in outputs} == overdue
        for request_id in overdue:
            self.asked[request_id].expired = True
        self.receive(outputs)
        assert self.scheduler.expire(self.now) == []

    @rule()
    def change_weights(self) -> None:
        self.drain()
        for asked in self.live.values():
            known = self.scheduler._by_id[asked.request.request_id].tokens[len(asked.request.prompt_ids) :]
            asked.weights += [self.device.weights] * (len(known) - len(asked.weights))
        self.device.weights += 1
        self.scheduler.recompute_all()
        assert self.cache.usage.used == self.cache.usage.cached == self.cache.usage.host_used == 0

    @rule(drain=st.booleans())
    def forget_prefixes(self, drain: bool) -> None:
        if drain:
            self.drain()
        self.cache.forget()
        assert self.cache.usage.cached == 0

    @precondition(lambda self: self.live)
    @rule(times=st.sampled_from([1, 3, 10]))
    def step(self, times: int) -> None:
        for _ in range(times):
            if not self.engine.has_work:
                return
            head = self.head()
            nothing_in_flight = not self.engine._in_flight
            self.device.last_plan = None
            outputs = self.engine.step()
            assert len(self.engine._in_flight) < self.depth
            self.check_plan()
            if head is not None and nothing_in_flight:
                plan = self.device.last_plan
                assert plan is not None
                assert head.serial in {row.sequence_id for row in plan.rows}, "the first one did not progress"
            self.receive(outputs)

    # What must hold

    def head(self) -> Sequence | None:
        """The sequence that the policy puts before all others."""
        scheduler = self.scheduler
        if scheduler.running:
            return min(scheduler.running, key=scheduler.policy.rank)
        return scheduler.policy.select(scheduler.waiting) if scheduler.waiting else None

    def drain(self) -> None:
        for outputs in self.engine.drain():
            self.receive(outputs)

    @property
    def live(self) -> dict[str, Asked]:
        return {request_id: asked for request_id, asked in self.asked.items() if not asked.is_over}

    def check_plan(self) -> None:
        if (plan := self.device.last_plan) is None:
            return
        assert plan.num_tokens <= self.budget
        assert len(plan.rows) <= self.rows
        assert all(0 <= row.slot < self.rows for row in plan.rows)

    def receive(self, outputs: Iterable[Outgoing]) -> None:
        for outgoing in outputs:
            output = written(outgoing)
            asked = self.asked[output.request_id]
            assert not asked.is_over, "an output after the last one"
            assert asked.request.streaming or output.is_finished()
            asked.outputs.append(output)
            asked.outgoing.append(outgoing)
            self.check_output(asked, output)

    def check_output(self, asked: Asked, output: GenerationOutput) -> None:
        request, generated = asked.request, output.generated_tokens
        expected = asked.answer(len(generated), self.device.weights)
        assert generated == expected
        assert [token for each in asked.outputs for token in each.new_tokens] == generated
        assert output.prompt_ids == list(request.prompt_ids)
        assert output.num_cached_tokens < len(request.prompt_ids)
        if not self.sharing and request.params.num_return_sequences == 1:
            assert output.num_cached_tokens == 0
        self.check_scores(asked, output)
        match output.status:
            case RequestStatus.FINISHED:
                stopped = bool(generated) and generated[-1] in request.params.stop_ids
                assert output.finish_reason == ("stop" if stopped else "length")
                assert output.stop_reason == (generated[-1] if stopped else None)
                assert stopped or len(request.prompt_ids) + len(generated) == max(
                    request.max_length, len(request.prompt_ids)
                )
            case RequestStatus.CANCELLED:
                assert asked.cancelled != asked.expired
                assert output.finish_reason == ("timeout" if asked.expired else "cancelled")
            case RequestStatus.FAILED:
                assert request.seed == FAULTY_SEED and isinstance(output.exception, ArithmeticError)
                assert len(generated) == 2
            case _:
                assert output.status is RequestStatus.DECODING and output.finish_reason is None

    def check_scores(self, asked: Asked, output: GenerationOutput) -> None:
        request, params = asked.request, asked.request.params
        tokens = [*request.prompt_ids, *output.generated_tokens]
        generated = len(output.generated_tokens)
        if params.logprobs is None:
            assert output.logprobs == output.top_logprobs == []
        else:
            weights = [*asked.weights, *[self.device.weights] * generated]
            scores = [
                score_of(
                    entries_of(tokens[:end], way_of(weights[i], end, asked.restart_length))[-1],
                    tokens[end],
                    params.logprobs,
                )
                for i, end in enumerate(range(len(request.prompt_ids), len(tokens)))
            ]
            assert output.logprobs == [score for score, _ in scores]
            assert output.top_logprobs == ([top for _, top in scores] if params.logprobs else [])
        if params.prompt_logprobs is not None and output.status is RequestStatus.FINISHED and self.device.weights == 0:
            way = way_of(0, len(request.prompt_ids), asked.restart_length)
            entries = entries_of(request.prompt_ids, way)
            pairs = zip(entries, request.prompt_ids[1:], strict=False)
            scores = [score_of(entry, token, params.prompt_logprobs) for entry, token in pairs]
            assert output.prompt_logprobs == [None, *(score for score, _ in scores)]
            if params.prompt_logprobs:
                assert output.prompt_top_logprobs == [None, *(top for _, top in scores)]

    @invariant()
    def is_consistent(self) -> None:
        if not hasattr(self, "asked"):
            return
        scheduler = self.scheduler
        sequences = scheduler._live.values()
        self.cache.check([seq.kv for seq in sequences])
        assert {seq.request.request_id for seq in sequences} == set(self.live) == set(scheduler._by_id)
        assert set(scheduler.waiting) | {seq.serial for seq in scheduler.running} == set(scheduler._live)
        assert len(scheduler.waiting) + len(scheduler.running) == len(scheduler._live)
        ranks = [scheduler.policy.rank(seq) for seq in scheduler.running]
        assert ranks == sorted(set(ranks))
        slots = [seq.slot for seq in scheduler.running]
        assert sorted([*slots, *scheduler._free_slots]) == list(range(scheduler.max_rows))
        assert all(seq.slot == -1 and not seq.kv.tables[0] for seq in scheduler.waiting.values())

    def teardown(self) -> None:
        if not hasattr(self, "asked"):
            return
        bound = 100 + 20 * sum(asked.request.max_length for asked in self.live.values())
        for _ in range(bound):
            if not self.engine.has_work:
                break
            self.step(1)
            self.is_consistent()
        assert not self.engine.has_work, "it does not come to an end"
        assert not self.live
        for asked in self.asked.values():
            assert [written(outgoing) for outgoing in asked.outgoing] == asked.outputs, "written out late it is another"
        self.cache.check([])
        usage = self.cache.usage
        assert usage.used == usage.host_used == 0
        assert self.cache.num_available == self.cache.num_blocks
        assert not scheduler_memory(self.scheduler)


def scheduler_memory(scheduler: Scheduler) -> list[object]:
    """What a scheduler remembers of requests."""
    memory = [scheduler.waiting, scheduler.running, scheduler._live, scheduler._by_id, scheduler._families]
    return [each for each in memory if each]


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", [*range(60), 695, 722])  # the last two have failed
def test_random_workloads(seed: int) -> None:
    """Denser than what hypothesis draws: many requests side by side, in pools that hold few of them."""
    rng = random.Random(seed)
    machine = EngineMachine()

    def prompt() -> list[int]:
        return [rng.randint(0, 1) for _ in range(rng.randint(1, 14))]

    def kind() -> Kind:
        return Kind(
            max_new=rng.choice([0, 1, 5, 30, 30, 30]),
            children=rng.choice([1, 1, 1, 3]),
            prompt_logprobs=rng.choice([None, None, None, 0, 2]),
            logprobs=rng.choice([None, 0, 2]),
            streaming=rng.random() < 0.5,
            needs_host=rng.random() < 0.2,
            ignore_eos=rng.random() < 0.7,
            faulty=rng.random() < 0.05,
            priority=rng.choice([0, 0, -1, 1]),
            tenant=rng.choice([None, "a", "b"]),
            deadline=rng.choice([None, None, None, 3, 20]),
        )

    machine.begin(
        windows=rng.choice([[None], [3], [None, 3], [None, 1, 8], [2, 6]]),
        page_size=rng.choice([1, 2, 4]),
        longest=rng.choice([14, 30]),
        spare=rng.choice([0, 3, 9]),
        host=rng.choice([0, 9, 60]),
        depth=rng.choice([1, 2, 4]),
        budget=rng.choice([1, 3, 8, 16, 64]),
        rows=rng.choice([1, 3, 8]),
        policy=rng.choice(sorted(POLICIES)),
        margin=rng.choice([0.0, 0.0, 0.15, 0.9]),
        sharing=rng.random() < 0.6,
        restart_length=rng.choice([None, None, 6]),
        first=[(prompt(), kind()) for _ in range(rng.randint(1, 8))],
    )
    for _ in range(rng.randint(5, 60)):
        action = rng.random()
        if action < 0.2 and len(machine.live) < 12:
            machine.submit(rng.randint(0, 100), rng.randint(0, 4), [prompt() for _ in range(rng.randint(1, 3))], kind())
        elif action < 0.24 and machine.live:
            machine.abort(rng.randint(0, 100))
        elif action < 0.26 and machine.live:
            machine.end(rng.randint(0, 100))
        elif action < 0.28:
            machine.change_weights()
        elif action < 0.30:
            machine.forget_prefixes(rng.random() < 0.5)
        elif action < 0.34:
            machine.let_time_pass(rng.choice([1, 4]))
        elif machine.live:
            machine.step(1)
        machine.is_consistent()
    machine.teardown()
