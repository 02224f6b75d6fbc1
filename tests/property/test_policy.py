"""The policies against what they mean, said plainly; what a fair share is worth when one tenant floods the queue."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chairlift.cache.cache import KVCache
from chairlift.cache.layout import LayerSpec, plan_layout
from chairlift.cache.table import SequenceKV
from chairlift.engine import Engine
from chairlift.params import SamplingParams
from chairlift.request import GenerationOutput, Request, Sequence
from chairlift.schedule.policy import FairShare, Policy, Priority
from chairlift.schedule.scheduler import Scheduler
from chairlift.stats import StepRecorder
from tests.late_device import LateDevice

WHICH = st.integers(0, 100)
LAYOUT = plan_layout([LayerSpec(index=0, window=None, num_kv_heads=1, head_dim=1)], 4, 1)


def sequence(serial: int, tenant: str | None = None, priority: int = 0) -> Sequence:
    request = Request(
        request_id=str(serial),
        prompt_ids=(1,),
        params=SamplingParams(),
        max_length=9,
        seed=0,
        tenant=tenant,
        priority=priority,
    )
    return Sequence(request, serial, SequenceKV(salt=b"", version=0, root=b"", tables=[[]], first=[0]))


class PolicyMachine(RuleBasedStateMachine):
    """What a scheduler tells a policy, at random; accounts kept the simple way beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.priority, self.fair = Priority(), FairShare()
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()
        self.running: list[Sequence] = []
        self.served: Counter[str | None] = Counter()
        self.num_arrived = self.num_seated = 0

    def queue(self, seq: Sequence) -> None:
        tenants = {each.request.tenant for each in self.waiting.values()}
        if not tenants:
            self.served.clear()
        elif seq.request.tenant not in tenants:
            least = min(self.served[tenant] for tenant in tenants)
            self.served[seq.request.tenant] = max(self.served[seq.request.tenant], least)
        for policy in (self.priority, self.fair):
            policy.waits(seq, self.waiting)
        self.waiting[seq.serial] = seq

    @rule(tenant=st.sampled_from(["a", "b", "c", None]), priority=st.integers(-1, 1), count=st.sampled_from([1, 1, 30]))
    def arrive(self, tenant: str | None, priority: int, count: int) -> None:
        for _ in range(count):
            self.queue(sequence(self.num_arrived, tenant, priority))
            self.num_arrived += 1

    @precondition(lambda self: self.waiting)
    @rule(by=st.sampled_from(["priority", "fair"]), num_tokens=st.integers(1, 9))
    def seat(self, by: str, num_tokens: int) -> None:
        seq = (self.priority if by == "priority" else self.fair).select(self.waiting)
        del self.waiting[seq.serial]
        if seq.turn < 0:
            seq.turn = self.num_seated
            self.num_seated += 1
        self.running.append(seq)
        self.serve(len(self.running) - 1, num_tokens)

    @precondition(lambda self: self.running)
    @rule(which=WHICH, num_tokens=st.integers(1, 9))
    def serve(self, which: int, num_tokens: int) -> None:
        seq = self.running[which % len(self.running)]
        self.served[seq.request.tenant] += num_tokens
        for policy in (self.priority, self.fair):
            policy.served(seq, num_tokens)

    @precondition(lambda self: self.running)
    @rule(by=st.sampled_from(["priority", "fair"]))
    def preempt(self, by: str) -> None:
        policy = self.priority if by == "priority" else self.fair
        seq = policy.victim(self.running)
        assert policy.rank(seq) == max(policy.rank(each) for each in self.running)
        self.running.remove(seq)
        self.queue(seq)
        self.waiting.move_to_end(seq.serial, last=False)

    @precondition(lambda self: self.running or self.waiting)
    @rule(which=WHICH, waiting=st.booleans(), count=st.sampled_from([1, 1, 25]))
    def end(self, which: int, waiting: bool, count: int) -> None:
        for _ in range(count):
            if waiting and self.waiting:
                del self.waiting[[*self.waiting][which % len(self.waiting)]]
            elif self.running:
                del self.running[which % len(self.running)]

    @invariant()
    def selects_what_it_says(self) -> None:
        if not self.waiting:
            return

        def urgency(seq: Sequence) -> tuple[int, int]:
            return seq.request.priority, seq.serial

        assert self.priority.select(self.waiting) is min(self.waiting.values(), key=urgency)
        seq = self.fair.select(self.waiting)
        own = [each for each in self.waiting.values() if each.request.tenant == seq.request.tenant]
        assert seq is min(own, key=urgency)
        assert self.served[seq.request.tenant] == min(
            self.served[each.request.tenant] for each in self.waiting.values()
        )


TestPolicies = PolicyMachine.TestCase
TestPolicies.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


class Unwalked(OrderedDict[int, Sequence]):
    """A queue that may be asked but not walked."""

    num_questions = 0

    def __contains__(self, serial: object) -> bool:
        self.num_questions += 1
        return super().__contains__(serial)

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("somebody walks through all who wait")

    values = items = keys = __iter__  # type: ignore[assignment]


@pytest.mark.parametrize("policy", [Priority(), FairShare()])
def test_the_length_of_the_queue_costs_nothing(policy: Policy) -> None:
    """As seen from the queue: a choice asks of a few of those who wait, whatever their number."""
    waiting = Unwalked()
    for serial in range(20_000):
        seq = sequence(serial, f"t{serial % 3000}", serial * 7919 % 100)
        policy.waits(seq, waiting)
        waiting[serial] = seq
    waiting.num_questions = 0
    for seated in range(1000):
        seq = policy.select(waiting)
        assert policy.select(waiting) is seq
        del waiting[seq.serial]
        policy.served(seq, 1 + seated % 7)
    assert waiting.num_questions < 10 * 1000


def test_those_who_left_unseen_are_forgotten() -> None:
    """Requests that end while they wait behind others, and tenants that come once."""
    for policy in (Priority(), FairShare()):
        waiting: OrderedDict[int, Sequence] = OrderedDict()
        first = sequence(0, "first", -1)
        policy.waits(first, waiting)
        waiting[0] = first
        for serial in range(1, 5000):
            seq = sequence(serial, f"t{serial}" if serial % 2 else "again", serial)
            policy.waits(seq, waiting)
            waiting[serial] = seq
            del waiting[serial]
        assert policy.select(waiting) is first
        assert size_of(policy) < 1000


@pytest.mark.parametrize("policy", [Priority(), FairShare()])
def test_a_policy_may_serve_one_engine_after_another(policy: Policy) -> None:
    """As the object of a config does that is used twice. Serials start over with each engine."""
    for priorities in ([5, 4, 3], [0, 1, 2]):
        waiting: OrderedDict[int, Sequence] = OrderedDict()
        for serial, priority in enumerate(priorities):
            seq = sequence(serial, "t", priority)
            policy.waits(seq, waiting)
            waiting[serial] = seq
        assert policy.select(waiting).request.priority == min(priorities)
        assert policy.select(waiting).serial == priorities.index(min(priorities))


def size_of(policy: Any) -> int:
    if isinstance(policy, Priority):
        return len(policy._queue._heap)
    return len(policy._tenants) + len(policy._order) + sum(len(t.queue._heap) for t in policy._tenants.values())


# --- Between tenants ------------------------------------------------------------------------------------------------


class Hall:
    """Tenants that send requests to one engine."""

    def __init__(self, *, blocks: int = 200, rows: int = 4, budget: int = 16) -> None:
        cache = KVCache(LAYOUT, blocks)
        self.scheduler = Scheduler(cache, FairShare(), max_batch_tokens=budget, max_rows=rows, safety_margin=0.0)
        self.engine = Engine(self.scheduler, LateDevice(LAYOUT, blocks), StepRecorder())
        self.tokens: Counter[str] = Counter()  # computed, by tenant
        self.num_sent = 0

    def send(self, tenant: str, count: int = 1, *, prompt: int = 4, new: int = 8, **fields: Any) -> None:
        for _ in range(count):
            tokens = tuple(self.num_sent >> bit & 1 for bit in range(prompt))
            request = Request(
                request_id=f"{tenant}{self.num_sent}",
                prompt_ids=tokens,
                params=SamplingParams(ignore_eos=True),
                max_length=prompt + new,
                seed=0,
                tenant=tenant,
                salt=str(self.num_sent).encode(),
                **fields,
            )
            self.num_sent += 1
            assert not self.scheduler.add(request)

    def step(self) -> list[GenerationOutput]:
        tenant_of = {seq.serial: seq.request.tenant for seq in self.scheduler._live.values()}
        launched: list[Any] = []
        launch = self.engine.runner.launch
        self.engine.runner.launch = lambda batch: launched.append(batch) or launch(batch)  # type: ignore[method-assign]
        try:
            outputs = self.engine.step()
        finally:
            self.engine.runner.launch = launch  # type: ignore[method-assign]
        for batch in launched:
            for row in batch.rows:
                self.tokens[str(tenant_of[row.sequence_id])] += row.num_tokens
        return [output for output in outputs if output.is_finished()]

    def steps_until(self, tenant: str) -> int:
        """How many steps until a request of this tenant has ended."""
        for count in range(1, 1000):
            if any(output.request_id.startswith(tenant) for output in self.step()):
                return count
        raise AssertionError(f"{tenant} starves")


def test_ten_thousand_waiting_requests_of_one_tenant_hold_up_no_other() -> None:
    hall = Hall()
    hall.send("flood", 10_000)
    for _ in range(20):
        hall.step()
    for _ in range(10):
        hall.send("quiet")
        assert hall.steps_until("quiet") <= 20, "it takes the next free place: 9 steps to one, 9 of its own"


def test_two_who_flood_are_served_alike_whatever_they_send() -> None:
    hall = Hall()
    hall.send("short", 600, prompt=3, new=3)
    hall.send("long", 600, prompt=12, new=28)
    for _ in range(600):
        hall.step()
        assert abs(hall.tokens["short"] - hall.tokens["long"]) <= 4 * 40, "more apart than what four places hold"
    assert min(hall.tokens.values()) > 500


def test_nobody_saves_up_while_idle_or_pays_for_what_was_free() -> None:
    hall = Hall()
    hall.send("busy", 2000)
    for _ in range(400):
        hall.step()
    hall.send("late", 2000)
    start = Counter(hall.tokens)
    for _ in range(400):
        hall.step()
        since = hall.tokens - start
        assert abs(since["late"] - since["busy"]) <= 5 * 12
    for _ in range(3):  # one that comes and goes gets no more than one that stays
        hall.send("guest", 5)
        before = Counter(hall.tokens)
        for _ in range(30):
            hall.step()
            since = hall.tokens - before
            assert since["guest"] <= since["late"] + 5 * 12


def test_what_was_served_while_nobody_waited_counts_for_nothing() -> None:
    hall = Hall(rows=4)
    hall.send("alone", 2, new=200)
    for _ in range(150):
        hall.step()
    hall.send("new", 40)
    hall.send("alone", 40)
    start = Counter(hall.tokens)
    for _ in range(40):
        hall.step()
        since = hall.tokens - start
    assert since["alone"] >= since["new"] / 2, "300 tokens that nobody else wanted are held against it"


def test_memory_pressure_starves_nobody() -> None:
    """A pool that holds one long request: whoever was seated first goes on, wherever it had stood in the queue."""
    hall = Hall(blocks=11, rows=4)
    hall.send("flood", 400, prompt=4, new=36)
    for _ in range(30):
        hall.step()
    hall.send("quiet", prompt=4, new=36)
    assert hall.steps_until("quiet") <= 150, "357 if it gives way to all who arrived before it"
    assert hall.scheduler.num_preemptions > 0, "the pool is too large for what is meant"


def test_priority_counts_within_a_tenant_only() -> None:
    hall = Hall(rows=1)
    hall.send("pushy", 50, priority=-9)
    hall.send("meek", 1, priority=5)
    hall.send("meek", 1, priority=1)
    ended = [output.request_id for _ in range(60) for output in hall.step()]
    meek = [request_id for request_id in ended if request_id.startswith("meek")]
    assert meek == ["meek51", "meek50"]
    assert ended.index("meek50") <= 4
