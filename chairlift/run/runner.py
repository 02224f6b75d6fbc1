"""Executes plans on the device: the only place where a plan becomes tensors.

Knows the shadow model, the KV storage and the sampler. Does not decide anything: what to run, where KV goes and who
sits in which slot is all in the plan.
"""

import ctypes
import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chairlift.cache.layout import CacheLayout, LayerSpec
from chairlift.cache.storage import KVStorage
from chairlift.config import ResolvedConfig
from chairlift.errors import UnsupportedModelError
from chairlift.kernels import KVLayout, Native, Scratch
from chairlift.kernels.native import UNIT, ClGroup, ClRequest, ClStep
from chairlift.kernels.threads import release_threads
from chairlift.model.attention import NativeStep, Plan, ReferenceStep
from chairlift.model.loader import Shadow
from chairlift.run.graphs import CAPTURED_TOKENS, Best, NotCapturableError, Program, capture
from chairlift.run.inputs import SlotState, StepInputs
from chairlift.sample.sampler import SampledTokens, Sampler, TokenLogprobs
from chairlift.schedule.plan import PROMPT_LOGPROB_TOKENS, ScheduledBatch, ScheduledRow, Seat, TableUpdate

logger = logging.getLogger(__name__)

PROBE_BLOCKS = 2  # of each group, outside the pool
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.15}  # of the logits' mean size


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A step's result on the host; see `schedule.scheduler.Sampled`."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    top_logprobs: dict[int, dict[int, float]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[tuple[float, dict[int, float]]]] = field(default_factory=dict)
    faults: dict[int, Exception] = field(default_factory=dict)


class LaunchedStep:
    """A step on the device."""

    def __init__(
        self, batch: ScheduledBatch, sampled: SampledTokens | None, prompt: dict[int, list[TokenLogprobs]]
    ) -> None:
        self.batch = batch
        self._sampled = sampled
        self._prompt = prompt

    def wait(self) -> StepResult:
        """Wait for the device: the only synchronisation there is."""
        prompt = {row: [each for part in parts for each in part.to_host()] for row, parts in self._prompt.items()}
        if self._sampled is None:
            return StepResult(prompt_logprobs=prompt)
        host = self._sampled.to_host()
        return StepResult(
            tokens=host.tokens,
            logprobs=host.logprobs,
            top_logprobs=host.top_logprobs,
            prompt_logprobs=prompt,
            faults=host.faults,
        )


class ModelRunner:
    """One model on one device."""

    def __init__(
        self, shadow: Shadow, layout: CacheLayout, layers: list[LayerSpec], config: ResolvedConfig, vocab_size: int
    ) -> None:
        self.vocab_size = vocab_size
        self.restart_length = shadow.restart_length
        self._shadow = shadow
        self._layout = layout
        fits = layout.page_size % UNIT == 0 and all(layer.head_dim % UNIT == 0 for layer in layers)
        self._native = shadow.ops.native if fits else None
        unit = UNIT if self._native else 0
        self._storage = KVStorage(
            layout,
            layers,
            config.num_blocks + PROBE_BLOCKS * len(layout.groups),
            config.num_host_blocks,
            shadow.dtype,
            shadow.device,
            unit,
        )
        num_slots = config.max_requests_per_batch
        self._probe_slot = num_slots  # and blocks of their own: a probe touches nobody's state
        self._probe_blocks = [
            tuple(config.num_blocks + 1 + group * PROBE_BLOCKS + i for i in range(PROBE_BLOCKS))
            for group in range(len(layout.groups))
        ]
        max_blocks = -(-(config.max_sequence_length + 1) // layout.page_size) + 1
        self._slots = SlotState(num_slots + 1, len(layout.groups), max_blocks)
        self._sampler = Sampler(self._num_logits(), num_slots, shadow.device, shadow.ops.native)
        self._last_token = np.zeros(num_slots, np.int64)
        self._scratch = Scratch()
        tables = self._slots.tables
        self._requests = np.empty((num_slots + 1, len(ClRequest._fields_)), np.int32)  # of the step under way
        self._requests_address = self._requests.ctypes.data
        self._cl_groups = (ClGroup * len(tables))(*(self._cl_group(table) for table in tables))
        self._groups = {layer.index: layout.place(layer.index)[0] for layer in layers}
        self._layouts = {
            layer.index: KVLayout.of(self._storage.key(layer.index)) for layer in layers if not self._native
        }

        self._max_tokens = config.max_batch_tokens
        self._max_logits = num_slots + PROMPT_LOGPROB_TOKENS
        self._program: Program | None = None
        self._is_hooked = shadow.is_hooked
        self._capture()

    def _num_logits(self) -> int:
        return int(self._shadow.module.get_output_embeddings().weight.shape[0])

    def _cl_group(self, table: NDArray[np.int32]) -> ClGroup:
        """A group's block tables where they are: a request's row is its slot."""
        block = self._layout.page_bytes // self._shadow.dtype.itemsize
        return ClGroup(table.ctypes.data, table.shape[1], self._layout.page_size, block)

    # ------------------------------------------------------------------ what the manager asks of a served model

    def refresh_weights(self, force: bool = False) -> bool:
        """Follow the user's model: its weights, and whether it is hooked. True if weights have changed, or by force."""
        with torch.no_grad():
            changed = self._shadow.refresh(force)
        if changed or self._is_hooked != self._shadow.is_hooked:
            self._is_hooked = self._shadow.is_hooked
            self._capture()
        return changed

    def _capture(self) -> None:
        """Make the forward pass a program of the C++ kernels, if it can be one; hooks need the modules to run."""
        self._program = None
        try:
            self._program, how = self._captured()
        except NotCapturableError as reason:
            how = f"module by module: {reason}"
        self.paths = self._paths() | {"forward pass": how}
        logger.info("%s: %s", self._shadow.name, "; ".join(f"{part}: {path}" for part, path in self.paths.items()))

    def _captured(self) -> tuple[Program, str]:
        """A program that agrees with the modules, and what it is. Raises NotCapturableError with the reason if none."""
        if self._native is None:
            raise NotCapturableError("the C++ kernels do not do its attention")
        if self._is_hooked:
            raise NotCapturableError("it has hooks")
        if any(call.has_sinks for call in self._shadow.layers.values()):
            raise NotCapturableError("attention sinks are converted in every step")
        program = capture(self._native, self._shadow, self._captured_pass, self._max_tokens, self._max_logits)
        if not self._agrees(program):
            raise NotCapturableError("its program gave other numbers than its modules")
        return program, f"one program of {program.num_ops} operations"

    def _paths(self) -> dict[str, str]:
        """Which kernels do what of this model."""
        kernels = self._shadow.ops.native
        if self._native is not None:
            attention = f"C++, {self._native.isa}"
        elif kernels is None:
            attention = "PyTorch operators"
        else:
            attention = f"PyTorch operators: page_size and head sizes are not all multiples of {UNIT}"
        fused = ", ".join(f"{count} {name}" for name, count in self._shadow.fused.items())
        return {
            "matrices": "PyTorch operators" if kernels is None else f"C++, {kernels.isa}",
            "attention": attention,
            "fused": fused or "nothing",
        }

    def _captured_pass(self, token_ids: Tensor, keep: Tensor) -> Tensor:
        inputs = self._probe_inputs(token_ids.tolist(), 0, len(token_ids))
        return self._shadow.forward(token_ids, torch.from_numpy(inputs.positions), self._attention(inputs), keep)

    def _agrees(self, program: Program) -> bool:
        """Whether a program gives what the modules give, on other tokens and another number of them."""
        tokens = self._shadow.probe_tokens[::-1][: min(CAPTURED_TOKENS - 2, self._max_tokens)]
        with torch.no_grad():
            inputs = self._probe_inputs(tokens, 0, len(tokens))
            wanted, _ = self._forward(inputs)
            self._program = program
            agrees = torch.equal(self._forward(inputs)[0], wanted)
            self._program = None
            return agrees

    def prefix_salt(self, num_prompt: int) -> bytes:
        """What KV depends on beside the tokens before it: the regimes of length-dependent RoPE."""
        regimes = [rope.regime(num_prompt) for rope in self._shadow.ropes]
        return repr(regimes).encode() if any(regimes) else b""

    def warmup(self) -> None:
        """Run one small step, so that the first real one finds everything allocated."""
        with torch.inference_mode(False):  # the caller may be in it; what is allocated is for the engine's thread
            self._probe(self._shadow.probe_tokens)
        release_threads()

    def verify(self) -> None:
        """Compare the paged path with the model's own logits of the probe; UnsupportedModelError if they differ: the
        model then depends on something that the paged path does not give it.

        In 16 bits the worst of the tokens does not count: after tokens that make no sense, other roundings of the same
        numbers can tip a trained model over.
        """
        expected = self._shadow.probe_logits.float()
        got = self._probe(self._shadow.probe_tokens).float()
        size = expected.abs().mean().clamp_min(1e-6)
        errors = (got - expected).abs().mean(-1) / size  # [tokens]
        if self._shadow.dtype != torch.float32 and len(errors) > 1:
            errors = errors.sort().values[:-1]  # a NaN is the largest: then there are others
        error = float(errors.mean())
        if not error <= TOLERANCE[self._shadow.dtype]:
            raise UnsupportedModelError(
                f"{self._shadow.name} gives other logits through the paged cache than by itself (mean difference "
                f"{error:.2g} of their size): it depends on something that continuous batching does not give it"
            )
        release_threads()  # the engine has a thread of its own

    def close(self) -> None:
        """Free the cache and the shadow."""
        paths = self.paths
        self.__dict__.clear()
        self.paths = paths

    # ------------------------------------------------------------------ steps

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Enqueue a step."""
        self._slots.apply(batch.seats, batch.table_updates)
        for seat in batch.seats:
            self._sampler.seat(seat.slot, seat.tokens, seat.num_prompt, seat.params, seat.seed)
        with torch.no_grad():
            self._storage.copy(batch.copies)
            if not batch.rows:
                return LaunchedStep(batch, None, {})
            inputs = self._slots.build(batch.rows)
            logits, best = self._forward(inputs)
            is_decoding = len(inputs.carried_tokens) == len(batch.rows)
            prompt = {} if is_decoding else self._score_prompts(batch.rows, logits)
            return LaunchedStep(batch, self._sample(inputs, logits, best), prompt)

    def _forward(self, inputs: StepInputs) -> tuple[Tensor, Best | None]:
        """Logits [len(inputs.keep), vocab], and the best of each row where a program has looked for it: see
        `Program.run`."""
        inputs.token_ids[inputs.carried_tokens] = self._last_token[inputs.carried_slots]
        self._set_rope_regimes(inputs)
        token_ids, positions, keep = map(torch.from_numpy, (inputs.token_ids, inputs.positions, inputs.keep))
        plan = self._attention(inputs)
        fits = len(keep) <= self._max_logits and len(token_ids) <= self._max_tokens  # a probe may be larger
        if isinstance(plan, NativeStep) and self._program is not None and fits:
            return self._program.run(plan.step, token_ids, positions, keep, inputs.max_length)
        return self._shadow.forward(token_ids, positions, plan, keep), None

    def _attention(self, inputs: StepInputs) -> Plan:
        return self._reference_step(inputs) if self._native is None else self._native_step(self._native, inputs)

    def _native_step(self, kernels: Native, inputs: StepInputs) -> NativeStep:
        requests = self._requests[: len(inputs.slots)]
        requests[:, 0] = inputs.last_tokens + 1 - inputs.counts
        requests[:, 1], requests[:, 2], requests[:, 3] = inputs.counts, inputs.starts, inputs.slots
        step = ClStep(
            num_tokens=len(inputs.token_ids),
            num_logits=len(inputs.keep),
            num_requests=len(requests),
            requests=self._requests_address,
            groups=ctypes.addressof(self._cl_groups),
        )
        return NativeStep(kernels, self._storage, self._groups, step, requests)

    def _reference_step(self, inputs: StepInputs) -> ReferenceStep:
        page_size = self._layout.page_size
        lengths = inputs.starts + inputs.counts
        slot_mapping = [
            torch.from_numpy(self._slots.slot_mapping(group, inputs, page_size))
            for group in range(len(self._layout.groups))
        ]
        plans: dict[tuple[int, KVLayout], Any] = {}
        for layer, group in self._groups.items():
            key = group, self._layouts[layer]
            if key not in plans:
                plans[key] = self._shadow.ops.build_attention_plan(
                    inputs.counts,
                    lengths,
                    self._slots.block_tables(group, inputs, page_size),
                    layout=self._layouts[layer],
                    window=self._layout.groups[group].window,
                    scratch=self._scratch,
                )
        return ReferenceStep(
            self._shadow.ops,
            self._storage,
            {layer: plans[group, self._layouts[layer]] for layer, group in self._groups.items()},
            {layer: slot_mapping[group] for layer, group in self._groups.items()},
        )

    def _set_rope_regimes(self, inputs: StepInputs) -> None:
        """Each token's RoPE follows the length its own request had: the prompt's, then one more with every token.

        A sequence that was computed anew counts as a prompt of the length it had then."""
        if not (ropes := self._shadow.ropes):
            return
        given = self._slots.num_prompt if self.restart_length is None else self._slots.num_known
        lengths = np.maximum(given[inputs.slots][inputs.row_of_token], inputs.positions + 1).tolist()
        for rope in ropes:
            regimes = [rope.regime(length) for length in lengths]
            rope.regimes = regimes if any(regimes) else None

    def _sample(self, inputs: StepInputs, logits: Tensor, best: Best | None) -> SampledTokens | None:
        if not inputs.sampled_slots:
            return None
        if len(inputs.sampled_slots) < len(inputs.keep):
            logits, best = logits[torch.from_numpy(inputs.sampled_logits)], None
        sampled = self._sampler.sample(logits, inputs.sampled_slots, inputs.sampled_ends, best)
        self._last_token[inputs.sampled_slots] = sampled.tokens
        return sampled

    def _score_prompts(self, rows: tuple[ScheduledRow, ...], logits: Tensor) -> dict[int, list[TokenLogprobs]]:
        """By row: logprobs of the known token after each of the row's tokens, for rows that asked."""
        scored = {}
        end = 0
        for index, row in enumerate(rows):
            begin, end = end, end + row.num_logits
            seat = self._slots.seats[row.slot]
            top = seat.params.prompt_logprobs
            if top is None or row.start >= seat.num_prompt:
                continue
            targets = seat.tokens[row.start + 1 : row.start + 1 + row.num_tokens]
            if targets:
                part = logits[begin : begin + len(targets)]
                scored[index] = self._sampler.prompt_logprobs(part, torch.tensor(targets), top)
        return scored

    # ------------------------------------------------------------------ probe

    def _probe(self, tokens: list[int]) -> Tensor:
        """Logits [len(tokens), vocab] of one sequence in two chunks, through cache blocks that nobody owns yet."""
        half = -(-len(tokens) // 2)
        with torch.no_grad():
            chunks = [(0, half), (half, len(tokens) - half)]
            logits = [self._forward(self._probe_inputs(tokens, *chunk))[0].clone() for chunk in chunks if chunk[1]]
        return torch.cat(logits)

    def _probe_inputs(self, tokens: list[int], start: int, count: int) -> StepInputs:
        """A step that computes `count` of these tokens, with logits for all of them."""
        slot = self._probe_slot
        seat = Seat(slot, tuple(tokens), len(tokens), None, 0)  # type: ignore[arg-type]  # nothing is sampled
        self._slots.apply([seat], [TableUpdate(slot, 0, tuple(self._probe_blocks))])
        return self._slots.build([ScheduledRow(0, slot, start, count, count, False)])
