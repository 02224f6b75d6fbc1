"""A device that stores what every position was computed from, and runs a plan only when somebody waits for it.

It knows nothing but the plans: who sits where, which block holds what, which tokens were sampled. An entry of its KV
is a hash of all tokens up to its position, so that a block shared under a wrong prefix, copied too early, handed out
too soon or swapped to the wrong place is seen by the first row that reads it. All rows write before any reads, as in
the forward pass of a layer.
"""

import pickle
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from chairlift.cache.layout import CacheLayout
from chairlift.cache.table import NULL_BLOCK
from chairlift.params import SamplingParams
from chairlift.schedule.plan import ScheduledBatch, ScheduledRow, Seat

EOS, VOCAB = 2, 3  # few tokens, so that prompts and answers have beginnings in common
FAULTY_SEED = 13  # a sequence with this seed faults when its third token is sampled

Score = tuple[float, dict[int, float]]


def entries_of(tokens: Sequence[int], weights: int = 0) -> list[int]:
    """What the device computes for each position."""
    entries: list[int] = []
    for token in tokens:
        entries.append(hash((entries[-1] if entries else -1, token, weights)))
    return entries


def way_of(weights: int, length: int, restart_length: int | None) -> int:
    """What `entries_of` takes for a sequence of that length: as models whose RoPE depends on it."""
    return weights + 1000 * (restart_length is not None and length > restart_length)


def token_after(entry: int) -> int:
    """The next token; one in sixteen ends the sequence."""
    drawn = hash((entry, 5)) % 16
    return EOS if drawn == 15 else drawn % 2


def score_of(entry: int, token: int, alternatives: int) -> Score:
    """A logprob of `token` after `entry`, and those of the alternatives asked for."""
    scores = [-(hash((entry, each)) % 997) / 100 for each in range(VOCAB)]
    best = sorted(range(VOCAB), key=lambda each: -scores[each])[:alternatives]
    return scores[token], {each: scores[each] for each in best}


def host_tokens_needed(token_ids: list[int], logits: object) -> object:
    """A logits processor that can be pickled."""
    return logits


@dataclass
class Result:
    """See `schedule.scheduler.Sampled`."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    top_logprobs: dict[int, dict[int, float]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[Score]] = field(default_factory=dict)
    faults: dict[int, Exception] = field(default_factory=dict)


@dataclass
class Seated:
    """A slot's state on the device."""

    seat: Seat
    tokens: list[int]  # those of the seat, and those sampled since
    tables: list[list[int]]
    owner: int = -1  # sequence id of its rows

    @property
    def params(self) -> SamplingParams:
        return self.seat.params


@dataclass(eq=False)
class LateStep:
    device: "LateDevice"
    batch: ScheduledBatch
    seatings: list[tuple[int, int]]  # (slot, how often it was taken), by row
    result: Result | None = None

    def wait(self) -> Result:
        while self.result is None:
            self.device.run_next()
        return self.result


class LateDevice:
    """A `Runner`."""

    def __init__(self, layout: CacheLayout, num_blocks: int, num_host_blocks: int = 0) -> None:
        self.weights = 0
        self.restart_length: int | None = None  # longer sequences are computed in another way from the start
        self.num_launched = 0
        self.last_plan: ScheduledBatch | None = None
        self._page = layout.page_size
        self._windows = [group.window for group in layout.groups]
        self._blocks = [[0] * self._page for _ in range(num_blocks + 1)]
        self._host = [[0] * self._page for _ in range(num_host_blocks + 1)]
        self._slots: dict[int, Seated] = {}
        self._queue: deque[LateStep] = deque()
        self._times_taken: Counter[int] = Counter()
        self._unseen: Counter[tuple[int, int]] = Counter()  # samples that the host has not seen, by seating

    # What the host does

    def launch(self, batch: ScheduledBatch) -> LateStep:
        batch = pickle.loads(pickle.dumps(batch))
        self.num_launched += 1
        self.last_plan = batch
        slots = [row.slot for row in batch.rows]
        assert len(set(slots)) == len(slots), "two rows of one slot"
        assert batch.num_tokens == sum(row.num_tokens for row in batch.rows)
        for seat in batch.seats:
            self._times_taken[seat.slot] += 1
        seatings = [(row.slot, self._times_taken[row.slot]) for row in batch.rows]
        for row, seating in zip(batch.rows, seatings, strict=True):
            params = self._params_of(row.slot, batch)
            if row.samples and params.needs_host_tokens:
                assert not self._unseen[seating], "the host does not know the token before"
            self._unseen[seating] += row.samples
        step = LateStep(self, batch, seatings)
        self._queue.append(step)
        return step

    def _params_of(self, slot: int, batch: ScheduledBatch) -> SamplingParams:
        for plan in (batch, *(step.batch for step in reversed(self._queue))):
            for seat in plan.seats:
                if seat.slot == slot:
                    return seat.params
        return self._slots[slot].params

    # What the device does

    def run_next(self) -> None:
        step = self._queue.popleft()
        batch = step.batch
        for seat in batch.seats:
            self._slots[seat.slot] = Seated(seat, list(seat.tokens), [[] for _ in self._windows])
        for slot, first, blocks in batch.table_updates:
            for table, new in zip(self._slots[slot].tables, blocks, strict=True):
                assert first <= len(table), "a table has a gap"
                table[first:] = new
        self._copy(batch)
        written: set[tuple[int, int]] = set()
        for row in batch.rows:
            self._write(row, written)
        for row in batch.rows:
            self._check_read(row)
        step.result = self._sample(batch)
        for row, seating in zip(batch.rows, step.seatings, strict=True):
            self._unseen[seating] -= row.samples

    def _copy(self, batch: ScheduledBatch) -> None:
        for kind, source, target, num_tokens in batch.copies:
            origin = self._host if kind == "swap_in" else self._blocks
            goal = self._host if kind == "swap_out" else self._blocks
            assert source != NULL_BLOCK and target != NULL_BLOCK
            goal[target][:num_tokens] = origin[source][:num_tokens]

    def _write(self, row: ScheduledRow, written: set[tuple[int, int]]) -> None:
        seated = self._slots[row.slot]
        known, end = len(seated.seat.tokens), row.start + row.num_tokens
        assert row.num_tokens > 0, "a row without tokens"
        if seated.owner < 0:
            seated.owner = row.sequence_id
        assert seated.owner == row.sequence_id, "a slot changed hands without a seat"
        if row.start >= known:
            assert row.num_tokens == 1 and end == len(seated.tokens), "only the last sample is on the device"
        else:
            assert end <= known
        entries = self._entries(seated, end)
        for position in range(row.start, end):
            for table in seated.tables:
                index, offset = divmod(position, self._page)
                block = table[index]
                assert block != NULL_BLOCK
                assert (block, offset) not in written, "two rows write in one place"
                written.add((block, offset))
                self._blocks[block][offset] = entries[position]

    def _check_read(self, row: ScheduledRow) -> None:
        """All that the row's tokens see is there, and is what this very sequence would have computed."""
        seated = self._slots[row.slot]
        end = row.start + row.num_tokens
        entries = self._entries(seated, end)
        for window, table in zip(self._windows, seated.tables, strict=True):
            first = 0 if window is None else max(0, row.start - window + 1)
            for position in range(first, end):
                index, offset = divmod(position, self._page)
                assert self._blocks[table[index]][offset] == entries[position], "a block holds something else"

    def _entries(self, seated: Seated, end: int) -> list[int]:
        return entries_of(seated.tokens[:end], way_of(self.weights, len(seated.seat.tokens), self.restart_length))

    def _sample(self, batch: ScheduledBatch) -> Result:
        result = Result()
        logprobs: list[float] = []
        asked = False
        for index, row in enumerate(batch.rows):
            seated = self._slots[row.slot]
            params, num_prompt = seated.params, seated.seat.num_prompt
            scores_prompt = params.prompt_logprobs is not None and row.start < num_prompt
            assert row.num_logits == (row.num_tokens if scores_prompt else int(row.samples))
            end = row.start + row.num_tokens
            entries = self._entries(seated, end)
            if scores_prompt and (targets := seated.seat.tokens[row.start + 1 : end + 1]):
                result.prompt_logprobs[index] = [
                    score_of(entries[row.start + i], token, params.prompt_logprobs) for i, token in enumerate(targets)
                ]
            if not row.samples:
                continue
            assert end == len(seated.tokens), "only the last token is continued"
            token = token_after(entries[-1])
            seated.tokens.append(token)
            score, top = score_of(entries[-1], token, params.logprobs or 0)
            if params.logprobs:
                result.top_logprobs[len(result.tokens)] = top
            if seated.seat.seed == FAULTY_SEED and len(seated.tokens) == num_prompt + 3:
                result.faults[len(result.tokens)] = ArithmeticError("the request's own doing")
            asked |= params.logprobs is not None
            result.tokens.append(token)
            logprobs.append(score)
        result.logprobs = logprobs if asked else None
        return result
