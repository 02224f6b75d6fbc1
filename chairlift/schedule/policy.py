"""Who is next and who gives way: the choices of scheduling, apart from its mechanics.

A policy only looks; it changes no sequence and allocates nothing.
"""

from collections.abc import Collection, Mapping
from typing import Protocol

from chairlift.request import Sequence


class Policy(Protocol):
    """What the scheduler asks."""

    decode_first: bool  # whether decoding sequences get their token before prefills share the rest of the budget

    def select(self, waiting: Mapping[int, Sequence]) -> Sequence:
        """The waiting sequence to seat next. `waiting` is not empty and in queue order."""
        ...

    def victim(self, candidates: Collection[Sequence]) -> Sequence:
        """The running sequence that gives up its blocks. `candidates` is not empty."""
        ...


class Fifo:
    """First come, first served; running answers before new prompts."""

    decode_first = True

    def select(self, waiting: Mapping[int, Sequence]) -> Sequence:
        return next(iter(waiting.values()))

    def victim(self, candidates: Collection[Sequence]) -> Sequence:
        return max(candidates, key=lambda seq: seq.serial)


class PrefillFirst(Fifo):
    """First come, first served; new prompts before running answers, to fill the batch sooner."""

    decode_first = False


POLICIES: dict[str, type[Fifo]] = {"fifo": Fifo, "prefill_first": PrefillFirst}
