"""From rows to index arrays: a step that goes on as the last one did gives what a slot table without a past gives."""

import numpy as np

from chairlift.params import SamplingParams
from chairlift.run.inputs import SlotState, StepInputs
from chairlift.schedule.plan import ScheduledRow, Seat


def seats(*lengths: int) -> list[Seat]:
    return [Seat(slot, tuple(range(length)), length, SamplingParams(), 0) for slot, length in enumerate(lengths)]


def state(*lengths: int) -> SlotState:
    slots = SlotState(8, 1, 4)
    slots.apply(seats(*lengths), [])
    return slots


def decoding(*starts: int) -> list[ScheduledRow]:
    return [ScheduledRow(10 + slot, slot, start, 1, 1, True) for slot, start in enumerate(starts)]


def same(a: StepInputs, b: StepInputs) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in StepInputs.__dataclass_fields__)


def test_steps_that_go_on_are_what_they_are_alone() -> None:
    slots = state(3, 5)
    steps = [
        [ScheduledRow(10, 0, 0, 3, 1, True), ScheduledRow(11, 1, 0, 5, 1, True)],
        *(decoding(3 + i, 5 + i) for i in range(4)),
        decoding(7),
        decoding(8),
        decoding(10),
        decoding(11, 12),
    ]
    for rows in steps:
        inputs = slots.build(rows)
        assert same(inputs, state(3, 5).build(rows))
        inputs.token_ids[:] = 77  # the runner writes what the slot sampled


def test_a_seat_ends_what_goes_on() -> None:
    slots = state(3)
    for start in (3, 4):
        slots.build(decoding(start))
    slots.apply(seats(6), [])  # the same sequence with its tokens so far: the next one is known
    inputs = slots.build(decoding(5))
    assert not len(inputs.carried_tokens)
    assert inputs.token_ids.tolist() == [5]
