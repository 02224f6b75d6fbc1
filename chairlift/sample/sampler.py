"""The sampler: rows of logits and the slots they belong to become tokens, logprobs and faults.

The host decides from the slots' parameters which rows need what; each feature is one batched operation over the rows
that use it, and a batch in which no row uses any is one argmax. No operation mixes rows and none picks its arithmetic
by the number of rows, so a row's result has the same bits in any batch. PyTorch's random generators are not touched.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chairlift.errors import ChairliftError
from chairlift.kernels import Native
from chairlift.params import SamplingParams
from chairlift.sample import filters
from chairlift.sample.penalties import SeenTokens, Transcript
from chairlift.sample.tensors import EDITS, Feature, HostCopy, SlotTable, having, pick, to_device, uniforms

if TYPE_CHECKING:
    from chairlift.sample.grammar import Guided  # which needs llguidance

# Rows are taken in parts: what is made of them stays in the caches of a CPU, and is small beside a GPU's memory.
_CPU_PART, _GPU_PART = 1 << 18, 1 << 27  # logits: for each thread; at a time
_SHORT_ROWS = 4  # times as many rows where all are soon cut down to a few logits


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTokens:
    """What `Sampler.sample` made, on the host. Rows are those of its logits."""

    tokens: list[int]
    logprobs: list[float] | None  # None when no row asked; NaN for a row that did not
    top_logprobs: dict[int, dict[int, float]]  # by row, most likely first; only of rows that asked for alternatives
    faults: dict[int, Exception]  # by row; its token means nothing


class TokenLogprobs:
    """Logprobs of given tokens and of the most likely ones, on their way to the host."""

    def __init__(self, chosen: Tensor, top: tuple[Tensor, ...]) -> None:
        """chosen: [num_rows]; top: (logprobs, token ids), each [num_rows, num_top], or nothing."""
        self._copy = HostCopy([chosen, *top])

    def to_host(self) -> list[tuple[float, dict[int, float]]]:
        """Per row the token's logprob, and those of the most likely tokens by id, most likely first."""
        chosen, *top = (tensor.tolist() for tensor in self._copy.wait())
        if not top:
            return [(logprob, {}) for logprob in chosen]
        return [
            (logprob, {token: value for token, value in zip(ids, values, strict=True) if value > -math.inf})
            for logprob, values, ids in zip(chosen, *top, strict=True)
        ]


class SampledTokens(Protocol):
    """What `Sampler.sample` enqueued."""

    @property
    def tokens(self) -> "NDArray[np.int64] | list[int]":
        """[num_rows], as the next step is to find them. A row whose logits hold a NaN, or nothing but -inf, is known as
        a fault only by `to_host`."""
        ...

    def to_host(self) -> HostTokens:
        """Wait for the device."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class BestTokens:
    """The best of each row, on the host from the start. Plain lists: after a forward pass the code of PyTorch and NumPy
    is in no cache, and each call of theirs takes several times as long as this."""

    tokens: list[int]
    largest: list[float]  # [num_rows], their logits

    def to_host(self) -> HostTokens:
        faults: dict[int, Exception] = {
            row: ChairliftError(_NO_TOKEN) for row, logit in enumerate(self.largest) if not logit > -math.inf
        }
        return HostTokens(tokens=self.tokens, logprobs=None, top_logprobs={}, faults=faults)


@dataclass(frozen=True, slots=True, eq=False)
class DrawnTokens:
    """What was chosen by each row's own parameters."""

    chosen: Tensor  # [num_rows] int64 on the device
    faults: dict[int, Exception]
    _copy: HostCopy
    _scored: list[tuple[NDArray[np.intp], TokenLogprobs]]

    @property
    def tokens(self) -> NDArray[np.int64]:
        array: NDArray[np.int64] = self.chosen.numpy()
        return array

    def to_host(self) -> HostTokens:
        tokens, valid = self._copy.wait()
        faults = dict(self.faults)
        for row, is_token in enumerate(valid.tolist()):
            if not is_token:
                faults.setdefault(row, ChairliftError(_NO_TOKEN))
        logprobs: list[float] | None = None
        top: dict[int, dict[int, float]] = {}
        if self._scored:
            logprobs = [math.nan] * len(tokens)
            for index, scored in self._scored:
                for row, (logprob, alternatives) in zip(index.tolist(), scored.to_host(), strict=True):
                    logprobs[row] = logprob
                    if alternatives:
                        top[row] = alternatives
        return HostTokens(tokens=tokens.tolist(), logprobs=logprobs, top_logprobs=top, faults=faults)


_NO_TOKEN = "no token can be chosen: the logits hold a NaN or an infinity, or every token has been ruled out"


class Sampler:
    """Samples for up to `num_slots` sequences at a time; each has been given a slot by `seat`."""

    def __init__(
        self, vocab_size: int, num_slots: int, device: torch.device | str = "cpu", kernels: Native | None = None
    ) -> None:
        """`kernels`: for logits on a CPU, where there are any."""
        self._vocab_size = vocab_size
        self._kernels = kernels
        self._device = torch.device(device)
        self._table = SlotTable(num_slots)
        self._special: set[int] = set()  # slots that need more than their largest logit
        self._seen = SeenTokens(vocab_size, self._device)
        self._transcripts: dict[int, Transcript] = {}  # by slot, as the four below
        self._guided: dict[int, Guided] = {}
        self._banned: dict[int, NDArray[np.int64]] = {}
        self._stops: dict[int, NDArray[np.int64]] = {}
        self._bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}

    def seat(self, slot: int, tokens: Sequence[int], num_prompt: int, params: SamplingParams, seed: int) -> None:
        """A sequence takes a slot; what the slot's former owner left is forgotten.

        tokens: all it has so far, the first `num_prompt` of them not generated. Seated again anywhere with its tokens
        so far, a sequence goes on as if it had never left.
        """
        features = self._table.seat(slot, num_prompt, params, seed)
        (self._special.add if features else self._special.discard)(slot)
        if features & Feature.PENALTY:
            self._seen.seat(slot, tokens, num_prompt)
        else:
            self._seen.forget(slot)
        for state in (self._transcripts, self._guided, self._banned, self._stops, self._bias):
            state.pop(slot, None)
        if features & Feature.TRANSCRIPT:
            self._transcripts[slot] = Transcript(tokens, params)
        if params.guide is not None:
            self._guided[slot] = params.guide.follow(tokens[num_prompt:], params)
        if features & Feature.BAN:
            self._banned[slot] = np.array([word[0] for word in params.bad_words_ids if len(word) == 1], np.int64)
        if features & Feature.NO_STOP:
            stops = () if features & Feature.GRAMMAR else sorted(params.stop_ids)  # a grammar sees to it itself
            self._stops[slot] = np.array(stops, np.int64)
        if features & Feature.BIAS:
            ids, bias = zip(*params.logit_bias, strict=True)
            self._bias[slot] = np.array(ids, np.int64), np.array(bias, np.float32)

    def sample(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int] | NDArray[np.int64],
        best: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None,
    ) -> SampledTokens:
        """One token per row, and what its slot's parameters ask for beside it.

        logits: [num_rows, vocab] of any float type, at least one row; left as they are. positions[i]: the position of
        the token to be sampled, which is the number of tokens before it. best: the first of the largest logits of each
        row, [num_rows] int64, and that logit, NaN where a row holds one, [num_rows] float32, if they are known already.
        """
        if best is not None and self._special.isdisjoint(slots):
            return BestTokens(best[0].tolist(), best[1].tolist())
        return self._sample(logits, slots, positions)

    @torch.no_grad()
    def _sample(
        self, logits: Tensor, slots: Sequence[int], positions: Sequence[int] | NDArray[np.int64]
    ) -> SampledTokens:
        where = np.asarray(positions, np.int64)
        rows = self._table.rows(slots, where)
        step = _rows_at_a_time(logits)
        if self._kernels is not None and filters.are_short(rows["top_k"]).all():
            step *= _SHORT_ROWS
        parts = [
            self._sample_part(
                logits[at : at + step], slots[at : at + step], rows[at : at + step], where[at : at + step]
            )
            for at in range(0, len(rows), step)
        ]
        if len(parts) == 1:
            tokens, valid, faults, scored = parts[0]
        else:
            tokens, valid = torch.cat([part.tokens for part in parts]), torch.cat([part.valid for part in parts])
            faults = {i * step + row: error for i, part in enumerate(parts) for row, error in part.faults.items()}
            scored = [(i * step + index, each) for i, part in enumerate(parts) for index, each in part.scored]
        return DrawnTokens(tokens, faults, HostCopy([tokens, valid]), scored)

    @torch.no_grad()
    def prompt_logprobs(self, logits: Tensor, targets: Tensor, num_top: int) -> list[TokenLogprobs]:
        """Logprobs of given tokens under logits as the model made them.

        logits: [num_tokens, vocab]; targets: [num_tokens] int64, the token that follows each; `num_top`: how many of
        the most likely ones come with each. The answer is in parts, to be chained in order.
        """
        step = _rows_at_a_time(logits)
        return [
            _score(_widened(logits[at : at + step]).log_softmax(-1), targets[at : at + step, None], num_top)
            for at in range(0, len(logits), step)
        ]

    def _sample_part(
        self, logits: Tensor, slots: Sequence[int], rows: NDArray[Any], positions: NDArray[np.int64]
    ) -> "_Part":
        faults: dict[int, Exception] = {}
        choices: list[_Choice] = []
        plain, work = np.flatnonzero(rows["features"] == 0), np.flatnonzero(rows["features"])
        if len(plain):
            choices.append(_most_likely(plain, _widened(pick(logits, plain))))
        if len(work):
            edited = self._edited(logits, work, slots, rows[work], faults)
            is_drawn = rows["features"][work] & Feature.SAMPLE.value != 0
            greedy, drawn = np.flatnonzero(~is_drawn), np.flatnonzero(is_drawn)
            if len(greedy):
                choices.append(_most_likely(work[greedy], pick(edited, greedy)))
            if len(drawn):
                index = work[drawn]
                choices += _drawn(index, pick(edited, drawn), rows[index], positions[index], self._kernels)
        tokens, valid = _assembled(choices)
        self._remember(tokens, slots, rows)
        scored = [each for choice in choices for each in _scored(choice, logits, rows)]
        return _Part(tokens, valid, faults, scored)

    def _edited(
        self,
        logits: Tensor,
        work: NDArray[np.intp],
        slots: Sequence[int],
        rows: NDArray[Any],
        faults: dict[int, Exception],
    ) -> Tensor:
        """The logits of the rows in `work` after all that comes before temperature: [len(work), vocab] float32.

        rows: the records of these rows. In the order of `generate`, whose sequence bias, penalties, bans and custom
        processors come in this order too.
        """
        edited = _widened(pick(logits, work))
        if not len(having(rows, EDITS)):
            return edited
        if edited.data_ptr() == logits.data_ptr():
            edited = edited.clone()
        owners = [slots[row] for row in work]
        self._add_bias(edited, having(rows, Feature.BIAS), owners)
        penalised = having(rows, Feature.PENALTY)
        if len(penalised):
            self._seen.penalise(edited, penalised, [owners[i] for i in penalised], rows[penalised])
        kept = having(rows, Feature.TRANSCRIPT)
        self._forbid(
            edited,
            [(i, self._banned[owners[i]]) for i in having(rows, Feature.BAN)]
            + [(i, self._stops[owners[i]]) for i in having(rows, Feature.NO_STOP)]
            + [(i, self._transcripts[owners[i]].banned(edited.shape[-1])) for i in kept],
        )
        for i in kept:
            try:
                self._transcripts[owners[i]].process(edited[i])
            except Exception as error:  # the request's own code: whatever it raises is the end of that request only
                faults[int(work[i])] = error
        self._obey_grammars(edited, having(rows, Feature.GRAMMAR), owners, rows, work, faults)
        return edited

    def _obey_grammars(
        self,
        logits: Tensor,
        index: NDArray[np.intp],
        owners: Sequence[int],
        rows: NDArray[Any],
        work: NDArray[np.intp],
        faults: dict[int, Exception],
    ) -> None:
        """Leave, in place, only what each row's grammar allows next. `index`: the rows of `logits` that have one."""
        if not len(index):
            return
        allowed = np.ones((len(index), logits.shape[-1]), np.bool_)
        may_stop = rows["features"][index] & Feature.NO_STOP.value == 0
        for place, i in enumerate(index):
            try:
                allowed[place] = self._guided[owners[i]].allowed(logits.shape[-1], bool(may_stop[place]))
            except ChairliftError as error:
                faults.setdefault(int(work[i]), error)
        kept = pick(logits, index).masked_fill_(self._to_device(~allowed), -torch.inf)
        if kept is not logits:
            logits[self._to_device(index)] = kept

    def _add_bias(self, logits: Tensor, index: NDArray[np.intp], owners: Sequence[int]) -> None:
        if len(index):
            places = np.concatenate([self._bias[owners[i]][0] + i * logits.shape[-1] for i in index])
            amounts = np.concatenate([self._bias[owners[i]][1] for i in index])
            at, flat = self._to_device(places), logits.view(-1)
            flat[at] = flat[at] + self._to_device(amounts)

    def _forbid(self, logits: Tensor, banned: list[tuple[np.intp, NDArray[np.int64]]]) -> None:
        """banned: (row of `logits`, token ids)."""
        if banned:
            places = np.concatenate([ids + i * logits.shape[-1] for i, ids in banned])
            logits.view(-1)[self._to_device(places)] = -torch.inf

    def _remember(self, tokens: Tensor, slots: Sequence[int], rows: NDArray[Any]) -> None:
        """Let each sequence's state take in the token it goes on with."""
        penalised = having(rows, Feature.PENALTY)
        if len(penalised):
            self._seen.append([slots[row] for row in penalised], pick(tokens, penalised))
        kept = having(rows, Feature.TRANSCRIPT)
        if len(kept):
            for row, token in zip(kept, pick(tokens, kept).tolist(), strict=True):
                self._transcripts[slots[row]].append(token)
        guided = having(rows, Feature.GRAMMAR)
        if len(guided):
            for row, token in zip(guided, pick(tokens, guided).tolist(), strict=True):
                self._guided[slots[row]].append(token)

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return to_device(array, self._device)


def _rows_at_a_time(logits: Tensor) -> int:
    part = _CPU_PART * torch.get_num_threads() if logits.is_cpu else _GPU_PART
    return max(part // logits.shape[-1], 1)


class _Part(NamedTuple):
    """What became of some of the rows; they count from the first of them."""

    tokens: Tensor  # [num_rows] int64
    valid: Tensor  # [num_rows] bool
    faults: dict[int, Exception]
    scored: list[tuple[NDArray[np.intp], TokenLogprobs]]


class _Choice(NamedTuple):
    """What was chosen for some rows, and the logits by which it was."""

    rows: NDArray[np.intp]  # of the batch
    logits: Tensor  # [len(rows), width] float32
    columns: Tensor  # [len(rows), 1] int64, of `logits`
    ids: Tensor | None = None  # [len(rows), width], the token of each column; None: its index

    @property
    def tokens(self) -> Tensor:
        """[len(rows)] int64."""
        return (self.columns if self.ids is None else self.ids.gather(1, self.columns))[:, 0]


def _widened(logits: Tensor) -> Tensor:
    return logits.to(torch.float32).contiguous()


def _most_likely(index: NDArray[np.intp], logits: Tensor) -> _Choice:
    """The largest logit of each row, the lowest id among equals; NaN counts as the largest."""
    return _Choice(index, logits, logits.max(-1, keepdim=True).indices)


def _drawn(
    index: NDArray[np.intp],
    logits: Tensor,
    rows: NDArray[Any],
    positions: NDArray[np.int64],
    kernels: Native | None,
) -> Iterator[_Choice]:
    """Temperature, the filters in the order of `generate`, and the draw."""
    noise = uniforms(rows["key"], positions)
    for some, part, ids in filters.candidates(logits, rows["top_k"], kernels):
        records = rows[some]
        z = filters.centred(part, to_device(records["temperature"], part.device))
        for feature, column, keep in _FILTERS:
            chosen = having(records, feature)
            if len(chosen):
                kept = pick(z, chosen)
                keep(kept, records[column][chosen])
                if kept is not z:
                    z[to_device(chosen, z.device)] = kept
        yield _Choice(index[some], z, filters.draw(z, to_device(noise[some], z.device))[:, None], ids)


_FILTERS: tuple[tuple[Feature, str, Callable[[Tensor, NDArray[Any]], None]], ...] = (
    (Feature.TOP_K, "top_k", filters.top_k),
    (Feature.TOP_P, "top_p", filters.top_p),
    (Feature.MIN_P, "min_p", filters.min_p),
    (Feature.TYPICAL_P, "typical_p", filters.typical_p),
)


def _assembled(choices: list[_Choice]) -> tuple[Tensor, Tensor]:
    """Tokens of all rows, [num_rows] int64, and which of them are tokens at all, [num_rows] bool."""
    parts = [(choice.tokens, choice.logits.gather(1, choice.columns)[:, 0] > -torch.inf) for choice in choices]
    if len(parts) == 1:
        return parts[0]
    tokens, valid = (torch.cat(part) for part in zip(*parts, strict=True))
    order = np.argsort(np.concatenate([choice.rows for choice in choices]))
    back = to_device(order, tokens.device)
    return tokens[back], valid[back]


def _scored(choice: _Choice, logits: Tensor, rows: NDArray[Any]) -> Iterator[tuple[NDArray[np.intp], TokenLogprobs]]:
    """The logprobs that the rows of a choice ask for, in groups of one kind: (rows of the batch, logprobs)."""
    features, num_top = rows["features"][choice.rows], rows["top_logprobs"][choice.rows]
    asking = np.flatnonzero(features & Feature.LOGPROBS.value)
    is_raw = features & Feature.RAW_LOGPROBS.value != 0
    for raw, count in sorted({(bool(is_raw[i]), int(num_top[i])) for i in asking}):
        group = asking[(is_raw[asking] == raw) & (num_top[asking] == count)]
        index, ids = choice.rows[group], None
        if raw:
            source, columns = _widened(pick(logits, index)), pick(choice.tokens[:, None], group)
        else:
            source, columns = pick(choice.logits, group), pick(choice.columns, group)
            ids = None if choice.ids is None else pick(choice.ids, group)
        yield index, _score(source.log_softmax(-1), columns, count, ids)


def _score(logprobs: Tensor, columns: Tensor, num_top: int, ids: Tensor | None = None) -> TokenLogprobs:
    """logprobs: [num_rows, width]; columns: [num_rows, 1], the chosen ones; ids: the columns' tokens, if not these."""
    chosen = logprobs.gather(1, columns)[:, 0]
    if not num_top:
        return TokenLogprobs(chosen, ())
    values, best = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    return TokenLogprobs(chosen, (values, best if ids is None else ids.gather(1, best)))
