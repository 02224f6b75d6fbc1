"""From the rows of a plan to the index arrays of one forward pass, on the host.

Knows block tables, slots and positions; knows no model and no tensor.

T: tokens of the step, R: its rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from chairlift.schedule.plan import ScheduledRow, Seat, TableUpdate

Ints = NDArray[np.int64]
_FIELDS = len(ScheduledRow._fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Everything about a step's tokens that does not depend on a layer."""

    slots: Ints  # [R]
    starts: Ints  # [R]
    counts: Ints  # [R]
    token_ids: Ints  # [T]; 0 where the device knows the token
    positions: Ints  # [T]
    row_of_token: Ints  # [T]
    carried_tokens: Ints  # index among T of tokens that the device knows: the last sampled ones
    carried_slots: Ints  # of these slots
    last_tokens: Ints  # [R], index among T of each row's last token
    keep: Ints  # index among T of the tokens that get logits
    sampled: Ints  # rows that sample
    sampled_logits: Ints  # index among `keep` of their logits
    sampled_slots: list[int]
    sampled_ends: Ints  # tokens up to and including the row's last one
    max_length: int  # tokens, of the longest row


class SlotState:
    """Per slot: the tokens its sequence was seated with, and its block tables."""

    def __init__(self, num_slots: int, num_groups: int, max_blocks: int) -> None:
        self.tables = [np.zeros((num_slots, max_blocks), np.int32) for _ in range(num_groups)]  # committed when used
        self.num_known = np.zeros(num_slots, np.int64)
        self.num_prompt = np.zeros(num_slots, np.int64)
        self.seats: dict[int, Seat] = {}
        self._numbers = np.arange(num_slots)
        self._last: StepInputs | None = None  # of a step in which every row went on from its last sampled token,
        self._rows: Sequence[ScheduledRow] = ()  # and its rows

    def apply(self, seats: Sequence[Seat], updates: Sequence[TableUpdate]) -> None:
        """A plan's changes of who sits where, and on which blocks."""
        if seats:
            self._last = None
        for seat in seats:
            self.seats[seat.slot] = seat
            self.num_known[seat.slot] = len(seat.tokens)
            self.num_prompt[seat.slot] = seat.num_prompt
        for slot, first, blocks in updates:
            for table, ids in zip(self.tables, blocks, strict=True):
                table[slot, first : first + len(ids)] = ids

    def build(self, rows: Sequence[ScheduledRow]) -> StepInputs:
        """Index arrays for these rows."""
        if self._last is not None and _is_next(rows, self._rows):
            inputs = _next(self._last)
        else:
            inputs = self._built(rows)
        goes_on = (
            len(inputs.carried_tokens) == len(inputs.sampled) == len(inputs.keep) == len(inputs.token_ids) == len(rows)
        )
        self._last = inputs if goes_on else None
        self._rows = rows
        return inputs

    def _built(self, rows: Sequence[ScheduledRow]) -> StepInputs:
        columns = np.fromiter(chain.from_iterable(rows), np.int64, len(rows) * _FIELDS).reshape(-1, _FIELDS).T
        _, slots, starts, counts, num_logits, samples = columns
        ends = np.cumsum(counts)
        num_tokens = int(ends[-1])
        first = ends - counts
        if num_tokens == len(rows):  # one each
            row_of_token, positions = self._numbers[:num_tokens], starts
        else:
            row_of_token = np.repeat(self._numbers[: len(rows)], counts)
            positions = np.arange(num_tokens) + (starts - first)[row_of_token]
        is_carried = starts >= self.num_known[slots]
        token_ids = np.zeros(num_tokens, np.int64)
        for row in np.flatnonzero(~is_carried).tolist():
            begin, count = starts[row], counts[row]
            token_ids[first[row] : ends[row]] = self.seats[int(slots[row])].tokens[begin : begin + count]
        last_tokens = ends - 1
        carried = np.flatnonzero(is_carried)
        logit_ends = np.cumsum(num_logits)
        if logit_ends[-1] == np.count_nonzero(num_logits):  # at most one each, as without prompt logprobs
            keep = last_tokens[num_logits > 0]
        else:
            owner = np.repeat(np.arange(len(rows)), num_logits)
            keep = ends[owner] - logit_ends[owner] + np.arange(logit_ends[-1])
        sampled = np.flatnonzero(samples)
        lengths = starts + counts
        return StepInputs(
            slots=slots,
            starts=starts,
            counts=counts,
            token_ids=token_ids,
            positions=positions,
            row_of_token=row_of_token,
            carried_tokens=last_tokens[carried],
            carried_slots=slots[carried],
            last_tokens=last_tokens,
            keep=keep,
            sampled=sampled,
            sampled_logits=logit_ends[sampled] - 1,
            sampled_slots=slots[sampled].tolist(),
            sampled_ends=lengths[sampled],
            max_length=int(lengths.max()),
        )

    def slot_mapping(self, group: int, inputs: StepInputs, page_size: int) -> Ints:
        """[T]: where each token's KV goes, block * page_size + offset."""
        page, offset = np.divmod(inputs.positions, page_size)
        return self.tables[group][inputs.slots[inputs.row_of_token], page].astype(np.int64) * page_size + offset

    def block_tables(self, group: int, inputs: StepInputs, page_size: int) -> NDArray[np.int32]:
        """[R, blocks], as wide as the longest row needs."""
        width = int((inputs.starts + inputs.counts - 1).max()) // page_size + 1
        return self.tables[group][:, :width][inputs.slots]


def _is_next(rows: Sequence[ScheduledRow], last: Sequence[ScheduledRow]) -> bool:
    """Whether these are the rows of the step before, each one token further. A plain loop, no array: two arrays take
    longer to make than this takes for 64 rows."""
    if len(rows) != len(last):
        return False
    for (sequence, slot, start, num_tokens, num_logits, samples), before in zip(rows, last, strict=True):
        if start != before[2] + 1 or slot != before[1] or sequence != before[0]:
            return False
        if num_tokens != 1 or num_logits != 1 or not samples:
            return False
    return True


def _next(last: StepInputs) -> StepInputs:
    """The same rows one token further. All else stays as it is: a single row costs no more than it must."""
    return replace(
        last,
        starts=last.sampled_ends,
        positions=last.sampled_ends,
        token_ids=np.zeros(len(last.token_ids), np.int64),
        sampled_ends=last.sampled_ends + 1,
        max_length=last.max_length + 1,
    )
