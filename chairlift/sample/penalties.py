"""What a sequence's own tokens do to its next logits: penalties on the device, bans on the host.

`SeenTokens` keeps, for penalised slots only, the distinct tokens so far and how often each was generated. It lives on
the device because the host learns a sampled token a step later. A `Transcript` is the host's list of the tokens of a
slot whose next step depends on them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chairlift.params import LogitsProcessor, SamplingParams
from chairlift.sample.tensors import to_device


class SeenTokens:
    """Distinct tokens of the penalised slots, in rows of a table that grows as needed.

    ids, counts: [rows, width]; entries from `length[row]` on are void. A count is of generated tokens only.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._row_of: dict[int, int] = {}  # by slot
        self._free: list[int] = []
        self._ids = torch.zeros((0, 1), dtype=torch.int64, device=device)
        self._counts = torch.zeros((0, 1), dtype=torch.float32, device=device)
        self._length = torch.zeros(0, dtype=torch.int64, device=device)
        self._bound = np.zeros(0, np.int64)  # of `length`, as far as the host can tell

    def seat(self, slot: int, tokens: Sequence[int], num_prompt: int) -> None:
        """Start over with the tokens of the sequence that takes this slot."""
        everything = np.asarray(tokens, np.int64)
        ids = np.unique(everything[everything < self._vocab_size])  # a prompt may use ids that have no logit
        generated = everything[num_prompt:]
        counts = np.zeros(len(ids), np.float32)
        np.add.at(counts, np.searchsorted(ids, generated), 1)
        row = self._row_of[slot] if slot in self._row_of else self._new_row(slot)
        self._reserve(len(ids))
        self._ids[row, : len(ids)] = to_device(ids, self._device)
        self._counts[row, : len(ids)] = to_device(counts, self._device)
        self._length[row] = self._bound[row] = len(ids)

    def forget(self, slot: int) -> None:
        """The slot is no longer penalised."""
        row = self._row_of.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def penalise(self, logits: Tensor, index: NDArray[np.intp], slots: Sequence[int], rows: NDArray[Any]) -> None:
        """Change, in place, the logits of seen tokens.

        logits: [num_rows, vocab]; `index`, `slots` and `rows` (the table's records) say which of them are penalised.
        """
        at, width, valid = self._view(slots)
        ids = self._ids[at, :width]
        ids = torch.where(valid, ids, ids[:, :1])
        places = ids + to_device(index * logits.shape[-1], self._device)[:, None]
        flat = logits.view(-1)
        score = flat[places]
        repetition, presence, frequency = (
            to_device(rows[name], self._device)[:, None] for name in ("repetition", "presence", "frequency")
        )
        counts = self._counts[at, :width]
        penalised = torch.where(score < 0, score * repetition, score / repetition)
        penalised = penalised - frequency * counts - presence * (counts > 0)
        penalised = torch.where(valid, penalised, score)
        # Void entries repeat the first one, place and value, so that the order of writing does not matter.
        flat[places] = torch.where(valid, penalised, penalised[:, :1])

    def append(self, slots: Sequence[int], tokens: Tensor) -> None:
        """Count one generated token per slot; tokens: [len(slots)] int64 on the device."""
        at, width, valid = self._view(slots)
        found = (self._ids[at, :width] == tokens[:, None]) & valid
        is_new = ~found.any(-1)
        place = torch.where(is_new, self._length[at], found.to(torch.uint8).argmax(-1))
        rows = [self._row_of[slot] for slot in slots]
        self._bound[rows] += 1
        self._reserve(int(self._bound[rows].max()))
        self._ids[at, place] = tokens
        self._counts[at, place] = torch.where(is_new, 0.0, self._counts[at, place]) + 1.0
        self._length[at] += is_new

    def _view(self, slots: Sequence[int]) -> tuple[Tensor, int, Tensor]:
        """The table rows of these slots, the width that covers them, and which of its entries are valid."""
        rows = [self._row_of[slot] for slot in slots]
        at = torch.tensor(rows, device=self._device)
        width = max(int(self._bound[rows].max()), 1)
        return at, width, torch.arange(width, device=self._device) < self._length[at, None]

    def _new_row(self, slot: int) -> int:
        if not self._free:
            old = len(self._bound)
            new = max(2 * old, 8)
            self._free.extend(range(old, new))
            self._ids = _grown(self._ids, (new, self._ids.shape[1]))
            self._counts = _grown(self._counts, (new, self._counts.shape[1]))
            self._length = _grown(self._length, (new,))
            self._bound = np.concatenate((self._bound, np.zeros(new - old, np.int64)))
        self._row_of[slot] = self._free.pop()
        return self._row_of[slot]

    def _reserve(self, width: int) -> None:
        rows, old = self._ids.shape
        if width > old:
            self._ids = _grown(self._ids, (rows, 2 * width))
            self._counts = _grown(self._counts, (rows, 2 * width))


def _grown(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    grown = tensor.new_zeros(shape)
    grown[tuple(slice(size) for size in tensor.shape)] = tensor
    return grown


class Transcript:
    """The tokens of one sequence on the host, and what they forbid next."""

    def __init__(self, tokens: Iterable[int], params: SamplingParams) -> None:
        self.tokens: list[int] = list(tokens)
        self._processor: LogitsProcessor | None = params.logits_processor
        self._words = [word for word in params.bad_words_ids if len(word) > 1]
        self._ngram_size = params.no_repeat_ngram_size
        self._ends: dict[int, list[int]] = {}  # by hash of an n-gram's first n - 1 tokens: where its last token is
        if self._ngram_size:
            for end in range(self._ngram_size - 1, len(self.tokens)):
                self._index(end)

    def append(self, token: int) -> None:
        """The sequence goes on with this token."""
        self.tokens.append(token)
        if self._ngram_size and len(self.tokens) >= self._ngram_size:
            self._index(len(self.tokens) - 1)

    def banned(self, vocab_size: int) -> NDArray[np.int64]:
        """Tokens that would complete a bad word or repeat an n-gram."""
        tokens, size = self.tokens, self._ngram_size
        banned = [word[-1] for word in self._words if tuple(tokens[1 - len(word) :]) == word[:-1]]
        if size and len(tokens) >= size:
            beginning = tokens[len(tokens) + 1 - size :]
            ends = self._ends.get(hash(tuple(beginning)), ())
            banned += [tokens[end] for end in ends if tokens[end + 1 - size : end] == beginning]
        ids = np.array(banned, np.int64)
        return ids[ids < vocab_size]

    def _index(self, end: int) -> None:
        beginning = tuple(self.tokens[end + 1 - self._ngram_size : end])
        self._ends.setdefault(hash(beginning), []).append(end)

    def process(self, logits: Tensor) -> None:
        """Let the request's own processor have a go at its row, in place; logits: [vocab] float32.

        Raises what the processor raises, and ValueError or TypeError for an answer that is no row of logits.
        """
        if self._processor is None:
            return
        answer = self._processor(list(self.tokens), logits.clone())
        if not isinstance(answer, Tensor):
            raise TypeError(f"logits_processor must return a tensor, not {type(answer).__name__}")
        if answer.shape != logits.shape:
            raise ValueError(f"logits_processor must return shape {tuple(logits.shape)}, not {tuple(answer.shape)}")
        logits.copy_(answer)
