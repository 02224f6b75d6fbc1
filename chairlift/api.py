"""The four methods on the model: from a loaded transformers model to answers.

Puts the parts together; decides nothing about scheduling, memory or sampling.
"""

import logging
import queue
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM as TransformersAutoModel
from transformers import GenerationConfig, PreTrainedModel

from chairlift.cache.cache import KVCache
from chairlift.cache.layout import LayerSpec, plan_layout
from chairlift.config import ContinuousBatchingConfig, WorkloadHints, resolve
from chairlift.engine import Engine
from chairlift.errors import EngineDeadError
from chairlift.manager import ContinuousBatchingManager
from chairlift.model.loader import Shadow, check_attention, device_facts, model_facts, vocab_size
from chairlift.params import SamplingDefaults
from chairlift.request import GenerationOutput
from chairlift.run.runner import ModelRunner
from chairlift.schedule.policy import POLICIES
from chairlift.schedule.scheduler import Scheduler
from chairlift.stats import StepRecorder

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=PreTrainedModel)


@dataclass
class _Session:
    """A started manager and the calls that share it."""

    manager: ContinuousBatchingManager
    key: tuple[Any, ...]  # equal keys may share
    num_users: int = 0


class _Desk:
    """The one manager that a model keeps (`persistent_manager=True`), and who uses it now."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kept: _Session | None = None


_desks: "weakref.WeakKeyDictionary[PreTrainedModel, _Desk]" = weakref.WeakKeyDictionary()
_desks_lock = threading.Lock()


class AutoModelForCausalLM:
    """`transformers.AutoModelForCausalLM`, whose models come with continuous batching attached."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does and `attach` to it. Raises ValueError for an `attn_implementation` that
        does not work here, with those that do."""
        check_attention(kwargs.get("attn_implementation"))
        return attach(TransformersAutoModel.from_pretrained(*args, **kwargs))

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a model with random weights as transformers does and `attach` to it."""
        return attach(TransformersAutoModel.from_config(*args, **kwargs))


def attach(model: Model) -> Model:
    """Add `generate_batch`, `init_continuous_batching`, `continuous_batching_context_manager` and
    `destroy_cached_continuous_batching_manager` to a loaded transformers model, and return it. The model is otherwise
    left as it is, now and while an engine runs on it. Raises TypeError for anything but a transformers model."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"attach needs a loaded transformers model, got {type(model).__name__}")
    for method in (
        generate_batch,
        init_continuous_batching,
        continuous_batching_context_manager,
        destroy_cached_continuous_batching_manager,
    ):
        # Not a bound method: one of those unpickles as the method of the same name of the model's class.
        bound = partial(method, model)
        bound.__doc__ = method.__doc__
        setattr(model, method.__name__, bound)
    return model


def init_continuous_batching(
    model: PreTrainedModel,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: WorkloadHints | None = None,
) -> ContinuousBatchingManager:
    """A manager for this model, not yet started.

    Raises `UnsupportedModelError` for a model that cannot be served, `ConfigError` for settings that cannot be met.
    """
    generation_config = generation_config or _own_config(model)
    config = continuous_batching_config or _config_of(generation_config)
    if not isinstance(config, ContinuousBatchingConfig):
        raise TypeError(f"continuous_batching_config must be a chairlift.ContinuousBatchingConfig, got {config!r:.80}")
    with torch.inference_mode(False):  # the caller may be in it; what is allocated is for the engine's thread
        return _make_manager(model, generation_config, config, workload_hints or WorkloadHints())


def _make_manager(
    model: PreTrainedModel, generation_config: GenerationConfig, config: ContinuousBatchingConfig, hints: WorkloadHints
) -> ContinuousBatchingManager:
    shadow = Shadow(model, config.pack_weights)
    layers = [
        LayerSpec(index=index, window=call.window, num_kv_heads=call.num_kv_heads, head_dim=call.head_dim)
        for index, call in shadow.layers.items()
    ]
    layout = plan_layout(layers, config.page_size, shadow.dtype.itemsize)
    defaults = SamplingDefaults(
        generation_config,
        _own_config(model),
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
        default_logprobs=config.return_logprobs,
        logprobs_mode=config.logprobs_mode,
    )
    resolved = resolve(
        config,
        model_facts(model, shadow),
        device_facts(shadow.device),
        hints,
        layout.block_bytes,
        logits_processed=bool(generation_config.do_sample),
    )
    runner = ModelRunner(shadow, layout, layers, resolved, vocab_size(model))
    runner.verify()
    policy = POLICIES[resolved.scheduler]() if isinstance(resolved.scheduler, str) else resolved.scheduler
    scheduler = Scheduler(
        KVCache(layout, resolved.num_blocks, resolved.num_host_blocks),
        policy,
        max_batch_tokens=resolved.max_batch_tokens,
        max_rows=resolved.max_requests_per_batch,
        safety_margin=resolved.safety_margin,
    )
    engine = Engine(scheduler, runner, StepRecorder(), resolved.depth)
    logger.info("ready:\n%s", resolved)
    return ContinuousBatchingManager(engine, runner, defaults, resolved)


def _own_config(model: PreTrainedModel) -> GenerationConfig:
    """A model without a head has none; it is refused, but by a message that says so."""
    own: GenerationConfig | None = getattr(model, "generation_config", None)
    return own or GenerationConfig()


def _config_of(generation_config: GenerationConfig | None) -> ContinuousBatchingConfig:
    """The deprecated way to pass a config, else the default one."""
    config = getattr(generation_config, "continuous_batching_config", None)
    return config if isinstance(config, ContinuousBatchingConfig) else ContinuousBatchingConfig()


@contextmanager
def continuous_batching_context_manager(
    model: PreTrainedModel,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    block: bool = True,
    timeout: float | None = None,
    persistent_manager: bool = False,
    warmup: bool = True,
    workload_hints: WorkloadHints | None = None,
) -> Iterator[ContinuousBatchingManager]:
    """A started manager; on leaving it is stopped, and destroyed unless `persistent_manager`: then the next call with
    equal configs gets it back, one with other configs replaces it. `block` and `timeout` are those of `stop`."""
    config = continuous_batching_config or _config_of(generation_config)
    key = (
        _comparable(generation_config or _own_config(model)),
        _comparable(_own_config(model)),
        config,
        (model.dtype, model.device, *map(id, model.modules())),
    )
    desk = _desk(model)
    with desk.lock:
        session = desk.kept
        if session is not None and session.num_users and not persistent_manager:
            session = None  # others use it, and count on finding it again
        elif session is None or session.key != key or not session.manager.is_usable:
            _retire(desk)
            session = None
        if session is None:
            session = _Session(init_continuous_batching(model, generation_config, config, workload_hints), key)
        if persistent_manager:
            desk.kept = session
        elif desk.kept is session:
            desk.kept = None
        if warmup:
            session.manager.warmup()
        if not session.num_users:
            session.manager.start()
        session.num_users += 1
    try:
        yield session.manager
    finally:
        with desk.lock:
            session.num_users -= 1
            is_last, is_kept = not session.num_users, desk.kept is session
            if is_last and is_kept:
                session.manager.stop(block=block, timeout=timeout)
        if is_last and not is_kept:
            session.manager.stop(block=block, timeout=timeout)
            session.manager.destroy()


def _desk(model: PreTrainedModel) -> _Desk:
    with _desks_lock:
        return _desks.setdefault(model, _Desk())


def _retire(desk: _Desk) -> None:
    """Keep no manager any longer: destroy it, or leave that to those who use it now."""
    session, desk.kept = desk.kept, None
    if session is not None and not session.num_users:
        session.manager.destroy()


def _comparable(generation_config: GenerationConfig | None) -> Any:
    return None if generation_config is None else generation_config.to_dict()


def destroy_cached_continuous_batching_manager(model: PreTrainedModel) -> None:
    """Destroy the manager that an earlier call kept (`persistent_manager=True`), if any."""
    desk = _desk(model)
    with desk.lock:
        _retire(desk)


def generate_batch(
    model: PreTrainedModel,
    inputs: Sequence[Sequence[int]],
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    max_new_tokens: int | None = None,
    **sampling: Any,
) -> dict[str, GenerationOutput]:
    """Answer all prompts; blocks until the last is done.

    inputs: token ids of each prompt. sampling: see `SamplingParams`. Returns the outputs by request id in the order of
    `inputs`, the answers of one prompt side by side. Every prompt is checked before anything runs:
    `InvalidRequestError` (a `ValueError`) says which one is wrong and why. `EngineDeadError` if the engine fails; its
    `partial` holds what had finished.
    """
    if len(inputs) == 0:
        return {}
    config = generation_config or _own_config(model)
    answers = sampling.get("num_return_sequences") or config.num_return_sequences or 1
    hints = WorkloadHints(num_requests=len(inputs) * (answers if isinstance(answers, int) and answers > 0 else 1))
    with continuous_batching_context_manager(
        model,
        generation_config=generation_config,
        continuous_batching_config=continuous_batching_config,
        persistent_manager=persistent_manager,
        warmup=warmup,
        workload_hints=None if persistent_manager else hints,  # the next call may bring more
    ) as manager:
        return answer_all(
            manager,
            inputs,
            sampling | {"max_new_tokens": max_new_tokens},
            record_timestamps=record_timestamps,
            progress_bar=progress_bar,
        )


def answer_all(
    manager: ContinuousBatchingManager,
    inputs: Sequence[Sequence[int]],
    sampling: Mapping[str, Any],
    *,
    record_timestamps: bool = False,
    progress_bar: bool = False,
) -> dict[str, GenerationOutput]:
    """Send prompts to a running manager and wait for all answers; returns and raises as `generate_batch`."""
    arrived: queue.SimpleQueue[GenerationOutput] = queue.SimpleQueue()
    families = manager.submit(inputs, sampling, record_timestamps=record_timestamps, handler=arrived.put, bounded=False)
    if not families:
        raise RuntimeError("the manager was stopped while it was used")
    request_ids = [name for family in families for name in family]
    try:
        done = _collect(arrived, len(request_ids), progress_bar)
    except BaseException:  # the user's Ctrl-C, say: leaving shall not wait for the answers
        for request_id in request_ids:
            manager.cancel_request(request_id)
        raise
    _check_all_finished(manager, done)
    return {request_id: done[request_id] for request_id in request_ids}


def _collect(
    arrived: "queue.SimpleQueue[GenerationOutput]", count: int, progress_bar: bool
) -> dict[str, GenerationOutput]:
    """Wait for the outputs of `count` requests."""
    done: dict[str, GenerationOutput] = {}
    num_tokens = 0
    with tqdm(total=count, disable=not progress_bar, unit="request") as bar:
        while len(done) < count:
            output = arrived.get()
            done[output.request_id] = output
            num_tokens += len(output.generated_tokens)
            if elapsed := bar.format_dict["elapsed"]:
                bar.set_postfix_str(f"{num_tokens / elapsed:.1f} tok/s", refresh=False)
            bar.update()
    return done


def _check_all_finished(manager: ContinuousBatchingManager, done: dict[str, GenerationOutput]) -> None:
    """Raise EngineDeadError, with what had finished, if the engine's death ended any of these."""
    if (cause := manager.cause) is None:
        return
    finished = {request_id: output for request_id, output in done.items() if output.exception is not cause}
    if len(finished) < len(done):
        raise EngineDeadError(f"the engine stopped on a fault: {cause!r}", finished) from cause
