"""Plan each step and make its result true.

The scheduler knows requests, budgets and the bookkeeping of the cache. It knows no tensor, no thread, no text, and not
when or where a plan is executed: `schedule()` may be called again before the result of the last plan is known.
"""

import time
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import Protocol

from chairlift.cache.cache import KVCache
from chairlift.cache.table import BlockCopy
from chairlift.request import GenerationOutput, Outgoing, Request, RequestStatus, Sequence
from chairlift.schedule.plan import PROMPT_LOGPROB_TOKENS, ScheduledBatch, ScheduledRow, Seat, TableUpdate
from chairlift.schedule.policy import Policy


class Sampled(Protocol):
    """What a step produced, on the host. Row i below counts the plan's rows with `samples`, in order."""

    @property
    def tokens(self) -> list[int]:
        """One per row."""
        ...

    @property
    def logprobs(self) -> list[float] | None:
        """One per row; None when no row asked."""
        ...

    @property
    def top_logprobs(self) -> dict[int, dict[int, float]]:
        """By row."""
        ...

    @property
    def prompt_logprobs(self) -> dict[int, list[tuple[float, dict[int, float]]]]:
        """By index in `batch.rows`: of the known token after each of the row's tokens."""
        ...

    @property
    def faults(self) -> dict[int, Exception]:
        """By row: what one request's own doing raised."""
        ...


class Scheduler:
    """Queues, budgets, admission, preemption, commit."""

    def __init__(
        self, cache: KVCache, policy: Policy, *, max_batch_tokens: int, max_rows: int, safety_margin: float
    ) -> None:
        self.cache = cache
        self.policy = policy
        self.max_batch_tokens = max_batch_tokens
        self.max_rows = min(max_rows, max_batch_tokens)  # so that every decoding sequence gets its token in every step
        self.safety_margin = safety_margin
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()  # by serial
        self.running: list[Sequence] = []  # by the policy's rank
        self.num_preemptions = 0
        self.num_swaps = 0
        self._live: dict[int, Sequence] = {}  # by serial
        self._by_id: dict[str, Sequence] = {}
        self._families: dict[str, dict[int, Sequence]] = {}  # a request and its children, by the parent's id
        self._free_slots = list(range(self.max_rows - 1, -1, -1))
        self._step = 0
        self._arrivals = 0
        self._turns = 0  # sequences that were ever seated
        self._deadlines: list[tuple[float, int]] = []  # a heap: (deadline, serial); some have ended before
        self._clear_plan()

    def _clear_plan(self) -> None:
        self._rows: list[ScheduledRow] = []
        self._seats: list[Seat] = []
        self._updates: list[TableUpdate] = []
        self._copies: list[BlockCopy] = []
        self._budget = self.max_batch_tokens
        self._logit_budget = PROMPT_LOGPROB_TOKENS
        self._num_decode_tokens = 0

    # ------------------------------------------------------------------ requests in and out

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._live)

    def add(self, request: Request) -> list[GenerationOutput]:
        """Queue a request. Returns its terminal output at once when there is nothing to compute, else nothing."""
        sequence = Sequence(request, self._arrivals, self.cache.new(request.salt))
        self._arrivals += 1
        if sequence.num_prompt >= sequence.max_length and not sequence.wants_prompt_logprobs:
            now = time.perf_counter()
            return [sequence.output(status=RequestStatus.FINISHED, finish_reason="length", now=now)]
        self._live[sequence.serial] = self._by_id[request.request_id] = sequence
        self._families.setdefault(request.parent_id or request.request_id, {})[sequence.serial] = sequence
        self.policy.waits(sequence, self.waiting)
        self.waiting[sequence.serial] = sequence
        if request.deadline is not None:
            self._await_deadline(request.deadline, sequence.serial)
        return []

    def _await_deadline(self, deadline: float, serial: int) -> None:
        heappush(self._deadlines, (deadline, serial))
        if len(self._deadlines) > 2 * len(self._live) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._live]
            heapify(self._deadlines)

    @property
    def next_deadline(self) -> float | None:
        """When `expire` should be asked, on the clock of `Request.deadline`; None: there is no need."""
        while self._deadlines and self._deadlines[0][1] not in self._live:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expire(self, now: float) -> list[GenerationOutput]:
        """End the requests whose deadline has passed; their blocks are free at once."""
        outputs = []
        while (deadline := self.next_deadline) is not None and deadline <= now:
            overdue = self._live[heappop(self._deadlines)[1]]
            outputs.append(self._finish(overdue, RequestStatus.CANCELLED, "timeout"))
        return outputs

    def abort(self, request_id: str) -> list[GenerationOutput]:
        """End a request and its children; their blocks are free at once. Unknown ids are ignored."""
        doomed = [*self._families.get(request_id, {}).values()]
        if not doomed and request_id in self._by_id:
            doomed = [self._by_id[request_id]]
        return [self._finish(seq, RequestStatus.CANCELLED, "cancelled") for seq in doomed]

    def end(self, request_id: str) -> None:
        """Drop a request without an output: someone else has ended it (a stop string was found)."""
        if (sequence := self._by_id.get(request_id)) is not None:
            self._discard(sequence)

    def fail_all(self, exception: BaseException) -> list[GenerationOutput]:
        """End every request as failed."""
        return [self._finish(seq, RequestStatus.FAILED, "error", exception=exception) for seq in [*self._live.values()]]

    def recompute_all(self) -> None:
        """Forget all cached KV, of sequences under way too: the weights have changed. Nothing may be in flight."""
        self.cache.forget()
        for seq in self.running[::-1]:
            self._give_up_blocks(seq)
        for seq in self.waiting.values():
            self.cache.release(seq.kv, keep=False)
            seq.num_computed = 0

    # ------------------------------------------------------------------ planning

    def schedule(self) -> ScheduledBatch | None:
        """The next step's plan, or None when nothing can be computed before a step in flight is committed."""
        self._step += 1
        self._clear_plan()
        preempted = self._schedule_running()
        if not preempted:
            self._admit()
        if not (self._rows or self._seats or self._copies):
            return None
        return ScheduledBatch(
            step=self._step,
            seats=tuple(self._seats),
            table_updates=tuple(self._updates),
            copies=tuple(self._copies),
            rows=tuple(self._rows),
            num_tokens=self.max_batch_tokens - self._budget,
            num_decode_tokens=self._num_decode_tokens,
        )

    def _schedule_running(self) -> bool:
        """Continue the running sequences, the one of first rank first so that it always progresses. True if one gave
        way."""
        prefilling = [seq for seq in self.running if seq.is_prefilling]
        decoders_left = 0
        order: Iterable[Sequence] = list(self.running)
        if prefilling:
            decoding = [seq for seq in self.running if not seq.is_prefilling]
            first, second = (decoding, prefilling) if self.policy.decode_first else (prefilling, decoding)
            head = self.running[0]
            order = [head, *(s for s in first if s is not head), *(s for s in second if s is not head)]
            decoders_left = len(decoding) if self.policy.decode_first else 0
        preemptions = self.num_preemptions
        step = self._step
        for seq in order:
            if self._budget <= 0:
                break
            is_prefilling = seq.is_prefilling
            if not is_prefilling:
                decoders_left -= 1
            if seq.slot < 0:
                continue  # gave way to one of earlier rank in this very step
            promised = seq.num_promised
            pending = len(seq.tokens) + promised - seq.num_computed
            if not pending or (promised and self._must_wait(seq)):
                continue  # all there is to compute is in flight, or waits for what is
            count = pending if pending == 1 else self._chunk(seq, pending, max(decoders_left, 0))
            while not self.cache.reserve(seq.kv, seq.num_computed, seq.num_computed + count):
                candidates = [s for s in self.running if s.planned_step != step]
                victim = self.policy.victim(candidates)
                self._preempt(victim)
                if victim is seq:
                    break
            else:
                self._plan(seq, count)
        return self.num_preemptions > preemptions

    def _must_wait(self, seq: Sequence) -> bool:
        """Whether a step in flight must be committed before this sequence can go on."""
        length = len(seq.tokens) + seq.num_promised
        return seq.request.params.needs_host_tokens or length >= seq.max_length or length > seq.restart_length

    def _chunk(self, seq: Sequence, pending: int, kept_for_decoders: int) -> int:
        """How many of the pending tokens this step computes, at least one."""
        count = min(pending, max(self._budget - kept_for_decoders, 1))
        if seq.wants_prompt_logprobs and seq.num_computed < seq.num_prompt:
            count = min(count, max(self._logit_budget, 1))
        return count

    def _admit(self) -> None:
        """Seat waiting sequences while rows, tokens and blocks allow."""
        while self.waiting and self._budget > 0 and self._free_slots:
            free_share = self.cache.num_available / self.cache.num_blocks
            if self.running and free_share < self.safety_margin:
                return
            seq = self.policy.select(self.waiting)
            awaits_step = seq.num_promised or not seq.num_pending  # gave way with its last step in flight
            if awaits_step or not self._take_blocks(seq):
                return

    def _take_blocks(self, seq: Sequence) -> bool:
        """Seat one waiting sequence: swap in or match the prefix, reserve a first chunk. All or nothing."""
        copies: tuple[BlockCopy, ...] = ()
        was_swapped_out = seq.kv.is_swapped_out
        if was_swapped_out:
            swapped = self.cache.swap_in(seq.kv, seq.num_computed, seq.num_computed + 1)
            if swapped is None:
                return False
            copies = swapped
        elif seq.request.match_prefix:
            match = self.cache.match(seq.kv, seq.tokens, self._step)
            if match.wait:
                return False  # a row of this very step computes what this one could share in the next
            seq.num_computed, copies = match.num_tokens, match.copies
        count = self._chunk(seq, seq.num_pending, 0)
        if not self.cache.reserve(seq.kv, seq.num_computed, seq.num_computed + count):
            if not was_swapped_out:
                self.cache.release(seq.kv)
                seq.num_computed = 0
                return False
            count = 1  # `swap_in` has seen to that much
        del self.waiting[seq.serial]
        self._copies += copies
        self._seat(seq)
        self._plan(seq, count)
        return True

    def _seat(self, seq: Sequence) -> None:
        seq.slot = self._free_slots.pop()
        seq.num_synced = 0
        if seq.turn < 0:
            seq.turn = self._turns
            self._turns += 1
            seq.cached_tokens = seq.num_computed
            seq.first_scheduled = time.perf_counter()
        insort(self.running, seq, key=self.policy.rank)
        request = seq.request
        params = request.params
        if params.prompt_logprobs is not None and not seq.wants_prompt_logprobs:
            params = replace(params, prompt_logprobs=None)  # the prompt was scored before a restart
        self._seats.append(Seat(seq.slot, tuple(seq.tokens), seq.num_prompt, params, request.seed))

    def _plan(self, seq: Sequence, count: int) -> None:
        """Add a row, and promise what it will have done."""
        start, known = seq.num_computed, len(seq.tokens)
        end = start + count
        reaches_end = end == known + seq.num_promised
        samples = reaches_end and end < seq.max_length
        num_logits = 1 if samples else 0
        if seq.wants_prompt_logprobs and start < seq.num_prompt:
            num_logits = count
            self._logit_budget -= count
        self._rows.append(ScheduledRow(seq.serial, seq.slot, start, count, num_logits, samples))
        self._budget -= count
        if start >= seq.num_prompt:
            self._num_decode_tokens += count
        self.policy.served(seq, count)
        seq.planned_step = self._step
        seq.num_computed = end
        if samples:
            seq.num_promised += 1
        tables = seq.kv.tables
        if len(tables[0]) != seq.num_synced:
            first = seq.num_synced
            self._updates.append(TableUpdate(seq.slot, first, tuple(tuple(table[first:]) for table in tables)))
            seq.num_synced = len(tables[0])
        self.cache.commit(seq.kv, seq.tokens, min(end, known), self._step, tail=count > 1 and end <= known)

    # ------------------------------------------------------------------ giving way

    def _preempt(self, seq: Sequence) -> None:
        """Take a sequence's blocks: swap its KV to host memory if there is room, else compute it again later."""
        self.num_preemptions += 1
        copies = self.cache.swap_out(seq.kv)
        if copies is None:
            self._give_up_blocks(seq)
            return
        self.num_swaps += 1
        self._copies += copies
        self._unseat(seq)

    def _give_up_blocks(self, seq: Sequence) -> None:
        self.cache.release(seq.kv)
        seq.num_computed = 0
        self._unseat(seq)

    def _restart(self, seq: Sequence) -> None:
        """Compute all KV anew under another salt: with this length the model changes what it makes of every token."""
        assert seq.request.restart is not None
        self.cache.release(seq.kv)
        seq.kv = self.cache.new(seq.request.restart[1])
        seq.num_computed = 0
        seq.restart_length = seq.max_length
        seq.wants_prompt_logprobs = False  # those of the prompt alone hold
        if seq.slot >= 0:
            self._unseat(seq)

    def _unseat(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._free_slots.append(seq.slot)
        seq.slot = -1
        self.policy.waits(seq, self.waiting)
        self.waiting[seq.serial] = seq
        self.waiting.move_to_end(seq.serial, last=False)

    # ------------------------------------------------------------------ results

    def commit(self, batch: ScheduledBatch, sampled: Sampled) -> list[Outgoing]:
        """Append what a step sampled, end what is complete, and return the outputs that are due."""
        outputs: list[Outgoing] = []
        now = time.perf_counter()
        index = -1
        for position, row in enumerate(batch.rows):
            if row.samples:
                index += 1
            seq = self._live.get(row.sequence_id)
            if seq is None:
                continue  # ended while this step was in flight
            if position in sampled.prompt_logprobs:
                scored = seq.prompt_logprobs.copy()  # an output on its way has the others
                scored[row.start + 1 : row.start + 1 + row.num_tokens] = sampled.prompt_logprobs[position]
                seq.prompt_logprobs = scored[: seq.num_prompt]
            if row.samples:
                seq.num_promised -= 1
                if index in sampled.faults:
                    outputs.append(self._finish(seq, RequestStatus.FAILED, "error", exception=sampled.faults[index]))
                    continue
                self._append(seq, sampled, index, now)
                token = seq.tokens[-1]
                if token in seq.stop_ids:
                    outputs.append(self._finish(seq, RequestStatus.FINISHED, "stop", stop_reason=token))
                elif len(seq.tokens) >= seq.max_length:
                    outputs.append(self._finish(seq, RequestStatus.FINISHED, "length"))
                else:
                    if seq.emits_steps:
                        outputs.append(seq.progress())
                    if len(seq.tokens) > seq.restart_length:
                        self._restart(seq)
            elif row.start + row.num_tokens >= seq.max_length:
                outputs.append(self._finish(seq, RequestStatus.FINISHED, "length"))
        return outputs

    def _append(self, seq: Sequence, sampled: Sampled, index: int, now: float) -> None:
        seq.tokens.append(sampled.tokens[index])
        if seq.request.params.logprobs is not None and sampled.logprobs is not None:
            seq.logprobs.append(sampled.logprobs[index])
            if index in sampled.top_logprobs:
                seq.top_logprobs.append(sampled.top_logprobs[index])
        if seq.timestamps is not None:
            seq.timestamps.append(now)

    def _finish(
        self,
        seq: Sequence,
        status: RequestStatus,
        finish_reason: str,
        *,
        stop_reason: int | None = None,
        exception: BaseException | None = None,
    ) -> GenerationOutput:
        self._discard(seq, keep=status is not RequestStatus.FAILED)
        return seq.output(
            status=status,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            exception=exception,
            now=time.perf_counter(),
        )

    def _discard(self, seq: Sequence, keep: bool = True) -> None:
        """Forget a sequence and hand back all it holds; `keep` says whether its KV is worth caching."""
        if seq.slot >= 0:
            computed = min(seq.num_computed, len(seq.tokens))
            self.cache.commit(seq.kv, seq.tokens, computed, self._step, tail=True)
            self.running.remove(seq)
            self._free_slots.append(seq.slot)
            seq.slot = -1
        else:
            self.waiting.pop(seq.serial, None)
        self.cache.release(seq.kv, keep=seq.request.share_prefix and keep)
        del self._live[seq.serial]
        request = seq.request
        del self._by_id[request.request_id]
        family = self._families[request.parent_id or request.request_id]
        del family[seq.serial]
        if not family:
            del self._families[request.parent_id or request.request_id]
