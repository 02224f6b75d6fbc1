"""Who is next and who gives way: the choices of scheduling, apart from its mechanics.

A policy only looks and counts; it changes no sequence and allocates nothing. One object serves one engine at a time.
"""

from collections.abc import Callable, Collection, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Protocol

from chairlift.request import Sequence

Waiting = Mapping[int, Sequence]  # by serial, in queue order: as they came, and who gave way in front
_FEW = 64  # entries that are not worth tidying up


class Policy(Protocol):
    """What the scheduler asks, and what it tells. `Fifo` has an answer to everything, to be inherited from."""

    decode_first: bool  # whether decoding sequences get their token before prefills share the rest of the budget

    def select(self, waiting: Waiting) -> Sequence:
        """The waiting sequence to seat next. `waiting` is not empty."""
        ...

    def victim(self, candidates: Collection[Sequence]) -> Sequence:
        """The running sequence that gives up its blocks. `candidates` is not empty."""
        ...

    def rank(self, seq: Sequence) -> Any:
        """Running sequences are continued in ascending order of this. It must not change while a sequence runs; the
        first one always progresses, if `victim` spares it."""
        ...

    def waits(self, seq: Sequence, waiting: Waiting) -> None:
        """`seq` is about to join the queue `waiting`: it has come, or it gave way."""
        ...

    def served(self, seq: Sequence, num_tokens: int) -> None:
        """The step being planned computes so many tokens of `seq`."""
        ...


class Fifo:
    """First come, first served; running answers before new prompts."""

    decode_first = True

    def select(self, waiting: Waiting) -> Sequence:
        return next(iter(waiting.values()))

    def victim(self, candidates: Collection[Sequence]) -> Sequence:
        return max(candidates, key=self.rank)

    def rank(self, seq: Sequence) -> Any:
        return seq.serial

    def waits(self, seq: Sequence, waiting: Waiting) -> None:
        pass

    def served(self, seq: Sequence, num_tokens: int) -> None:
        pass


class PrefillFirst(Fifo):
    """First come, first served; new prompts before running answers, to fill the batch sooner."""

    decode_first = False


class Priority(Fifo):
    """The lowest `priority` first, and last to give way; first come, first served within one."""

    def __init__(self) -> None:
        self._queue = _ByPriority()

    def select(self, waiting: Waiting) -> Sequence:
        first = self._queue.first(waiting)
        assert first is not None, "a sequence waits that nobody has told of"
        return first

    def rank(self, seq: Sequence) -> Any:
        return seq.request.priority, seq.serial

    def waits(self, seq: Sequence, waiting: Waiting) -> None:
        if not waiting:
            self._queue = _ByPriority()
        self._queue.add(seq, waiting)


class FairShare(Fifo):
    """The tenant that was served the fewest tokens first; `priority` within a tenant, first come, first served within
    that.

    Served tokens are those that steps compute, prompt or answer alike; a prefix found in the cache is free. What counts
    is the time that a tenant waits: one that comes to wait starts no lower than the least served of those who wait
    already, and when nobody waits all accounts are closed, so that nobody saves up credit while idle, or pays later for
    what was free to take.
    """

    def __init__(self) -> None:
        self._tenants: dict[str | None, _Tenant] = {}
        self._order: list[tuple[int, int, _Tenant]] = []  # a heap: (served once, number, tenant) of all who wait
        self._num_tenants = 0
        self._tidy_at = _FEW

    def select(self, waiting: Waiting) -> Sequence:
        first = self._least_served(waiting)
        assert first is not None, "a sequence waits that nobody has told of"
        return first[1]

    def rank(self, seq: Sequence) -> Any:
        # Not the order of arrival: else who came late from a tenant that waits little gives way to all who come to run
        # after it from one with a long queue, again and again.
        return seq.turn

    def waits(self, seq: Sequence, waiting: Waiting) -> None:
        if not waiting:
            self._tenants.clear()
            self._order.clear()
        least = self._least_served(waiting)
        if len(self._tenants) > self._tidy_at:
            self._tidy(waiting, least[0].served if least else 0)
        tenant = self._tenant(seq)
        if least and not tenant.queue.first(waiting):
            tenant.served = max(tenant.served, least[0].served)
        if not tenant.is_listed:
            tenant.is_listed = True
            heappush(self._order, (tenant.served, tenant.number, tenant))
        tenant.queue.add(seq, waiting)

    def _tidy(self, waiting: Waiting, least: int) -> None:
        """Forget tenants that would start anew with the same account."""
        for tenant in self._tenants.values():
            tenant.is_listed = tenant.queue.first(waiting) is not None
        self._tenants = {
            name: tenant for name, tenant in self._tenants.items() if tenant.is_listed or tenant.served > least
        }
        self._order = [(each.served, each.number, each) for each in self._tenants.values() if each.is_listed]
        heapify(self._order)
        self._tidy_at = max(_FEW, 2 * len(self._tenants))

    def served(self, seq: Sequence, num_tokens: int) -> None:
        self._tenant(seq).served += num_tokens

    def _tenant(self, seq: Sequence) -> "_Tenant":
        name = seq.request.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(self._num_tenants)
            self._num_tenants += 1
        return tenant

    def _least_served(self, waiting: Waiting) -> "tuple[_Tenant, Sequence] | None":
        """Of the tenants that wait, and its next sequence. An entry of the heap may be out of date, but accounts only
        grow: it is brought up to date when it comes to the top."""
        while self._order:
            served, number, tenant = self._order[0]
            seq = tenant.queue.first(waiting)
            if seq is None:
                heappop(self._order)
                tenant.is_listed = False
            elif served < tenant.served:
                heapreplace(self._order, (tenant.served, number, tenant))
            else:
                return tenant, seq
        return None


class _Tenant:
    """An account."""

    __slots__ = ("is_listed", "number", "queue", "served")

    def __init__(self, number: int) -> None:
        self.number = number  # unique
        self.served = 0  # tokens
        self.queue = _ByPriority()
        self.is_listed = False  # in the heap of those who wait


class _ByPriority:
    """A queue by (priority, serial). Who has left is found out when it comes to the top."""

    __slots__ = ("_heap", "_tidy_at")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._tidy_at = _FEW

    def add(self, seq: Sequence, waiting: Waiting) -> None:
        heap = self._heap
        heappush(heap, (seq.request.priority, seq.serial))
        if len(heap) > self._tidy_at:
            heap[:] = {entry for entry in heap if entry[1] in waiting or entry[1] == seq.serial}
            heapify(heap)
            self._tidy_at = max(_FEW, 2 * len(heap))

    def first(self, waiting: Waiting) -> Sequence | None:
        """The one to be seated next, if any waits."""
        heap = self._heap
        while heap and heap[0][1] not in waiting:
            heappop(heap)
        return waiting[heap[0][1]] if heap else None


POLICIES: dict[str, Callable[[], Fifo]] = {
    "fifo": Fifo,
    "prefill_first": PrefillFirst,
    "priority": Priority,
    "fair_share": FairShare,
}
