"""The plan of one step: what the device shall do, as plain data.

A plan holds no tensor, no sequence and no callable state of the engine; it pickles. It carries every device effect of
the step: sequences that take a slot, block table changes, copies of blocks, and the rows of the forward pass.
"""

from dataclasses import dataclass
from typing import NamedTuple

from chairlift.cache.table import BlockCopy
from chairlift.params import SamplingParams

PROMPT_LOGPROB_TOKENS = 256  # prompt tokens of one step that may get logits: [tokens, vocab] floats must fit in memory


class Seat(NamedTuple):
    """A sequence takes a slot of the device's per-sequence state; whatever the slot held before is forgotten."""

    slot: int
    tokens: tuple[int, ...]  # every token known to the host: prompt, and what was generated before a preemption
    num_prompt: int
    params: SamplingParams
    seed: int  # of this sequence: children of one request have different ones


class TableUpdate(NamedTuple):
    """Entries `first, first + 1, ...` of a slot's block table in every layer group become `blocks[group]`."""

    slot: int
    first: int
    blocks: tuple[tuple[int, ...], ...]  # [group][entry]


class ScheduledRow(NamedTuple):
    """Compute tokens `start ... start + num_tokens - 1` of the sequence in `slot`.

    Tokens the seat does not hold are read from the slot's last sampled token. The last `num_logits` tokens get logits:
    0 for a chunk that does not reach the end, 1 for a row that only samples, `num_tokens` for prompt logprobs.
    """

    sequence_id: int
    slot: int
    start: int
    num_tokens: int
    num_logits: int
    samples: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledBatch:
    """One step of the device."""

    step: int
    seats: tuple[Seat, ...]
    table_updates: tuple[TableUpdate, ...]
    copies: tuple[BlockCopy, ...]
    rows: tuple[ScheduledRow, ...]
    num_tokens: int  # query tokens of all rows
    num_decode_tokens: int  # those of them that were sampled, not given
