"""What the user said (`ContinuousBatchingConfig`), and what is true on this machine (`resolve` -> `ResolvedConfig`).

`resolve` is pure: the model and the device come in as plain facts, the answer is a value that can be printed before
anything is loaded. This module refuses to know PyTorch, Hugging Face and the machine it runs on.
"""

import math
import warnings
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from chairlift.errors import ConfigError, UnsupportedModelError

SCHEDULERS = ("fifo", "prefill_first", "priority", "fair_share")
_POLICY = ("decode_first", "select", "victim", "rank", "waits", "served")
LOGPROBS_MODES = ("processed", "raw")

DEFAULT_PAGE_SIZE = 256
DEFAULT_GROUP_TIMEOUT = 300.0
DEFAULT_MAX_REQUESTS = 1024
MOST_BATCH_TOKENS, FEWEST_BATCH_TOKENS = 8192, 256
ACTIVATION_SHARE = 1 / 8  # of the free memory, once for the hidden states of a pass and once for its logits
GIB = 1 << 30


# --- What a field accepts -------------------------------------------------------------------------------------------


class _Rule(NamedTuple):
    """Which values a field accepts, and the same in words for the error message."""

    accepts: Callable[[Any], bool]
    wants: str


def _optional(rule: _Rule) -> _Rule:
    return _Rule(lambda value: value is None or rule.accepts(value), f"{rule.wants}, or None")


def _integer(low: float = -math.inf, high: float = math.inf) -> _Rule:
    bounds = "" if low == -math.inf else f" of at least {low}" if high == math.inf else f" from {low} to {high}"
    return _Rule(lambda value: type(value) is int and low <= value <= high, f"an integer{bounds}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_FLAG = _Rule(lambda value: isinstance(value, bool), "True or False")
_SHARE = _Rule(lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1")
_POSITIVE_SHARE = _Rule(lambda value: _is_number(value) and 0 < value <= 1, "a number above 0 and at most 1")
_AMOUNT = _Rule(lambda value: _is_number(value) and value >= 0, "a number of at least 0")
_DURATION = _Rule(lambda value: _is_number(value) and value > 0, "a number of seconds above 0")
_OPAQUE = _Rule(lambda value: not isinstance(value, (str, int, float)), "a CompileConfig, or None")
_LOGPROBS_MODE = _Rule(
    lambda value: isinstance(value, str) and value in LOGPROBS_MODES, f"one of {', '.join(LOGPROBS_MODES)}"
)
_GRAPHS = _Rule(
    lambda value: (
        isinstance(value, bool)
        or (isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(item, bool) for item in value))
    ),
    "True, False or a pair of them (varlen, decode)",
)
_SCHEDULER = _Rule(
    lambda value: (
        value in SCHEDULERS
        if isinstance(value, str)
        else not isinstance(value, type) and all(hasattr(value, name) for name in _POLICY)
    ),
    f"one of {', '.join(SCHEDULERS)}, or a policy object (an instance with {', '.join(_POLICY)})",
)


def _setting(default: Any, rule: _Rule, help: str) -> Any:
    """A field whose rule and one-line meaning travel in its metadata: checks and command line read them there."""
    return field(default=default, metadata={"rule": rule, "help": help})


def _check_fields(config: "ContinuousBatchingConfig | WorkloadHints") -> None:
    for spec in fields(config):
        rule: _Rule = spec.metadata["rule"]
        value = getattr(config, spec.name)
        if not rule.accepts(value):
            raise ConfigError(f"{spec.name}={value!r} makes no sense: give {rule.wants}")


# --- What the user said ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousBatchingConfig:
    """What the user asks of an engine. None means: decide for this machine.

    Two configs with equal fields are equal (a persistent manager is kept for equal ones), and a config is hashable
    when its fields are. A value that makes no sense raises `ConfigError`, a `ValueError`, with the field's name.
    """

    page_size: int = _setting(DEFAULT_PAGE_SIZE, _integer(4), "tokens of one layer in one KV page")
    block_size: int | None = _setting(
        None, _optional(_integer(4)), "deprecated name of page_size; reads None once page_size has taken its value"
    )
    num_blocks: int | None = _setting(
        None, _optional(_integer(1)), "size of the KV cache in blocks; None: what memory allows"
    )
    max_memory_percent: float | None = _setting(
        None,
        _optional(_POSITIVE_SHARE),
        "share of the free device memory for the cache; None: 0.9, or 0.8 when logits are processed",
    )
    max_batch_tokens: int | None = _setting(
        None, _optional(_integer(1)), "query tokens of one forward pass; None: 8192, less if memory is short"
    )
    max_requests_per_batch: int | None = _setting(
        None, _optional(_integer(1)), "rows of one pass; None: the number of prompts if known, else 1024"
    )
    # A name, or a Policy of chairlift.schedule.policy, which stands on a higher floor.
    scheduler_type: str | Any = _setting(  # noqa: RUF009 - it returns a field()
        "fifo", _SCHEDULER, "fifo, prefill_first, priority, fair_share (between tenants) or a policy object"
    )
    safety_margin: float | None = _setting(
        None,
        _optional(_SHARE),
        "share of the cache kept for active requests; None: 0.15, or 0.0 with prefill_first",
    )
    allow_block_sharing: bool = _setting(True, _FLAG, "prefix caching")
    return_logprobs: bool = _setting(False, _FLAG, "return the logprob of each generated token")
    logprobs_mode: Literal["processed", "raw"] = _setting(
        "processed", _LOGPROBS_MODE, "logprobs after or before the logits are processed"
    )
    per_request_processors: bool = _setting(
        False, _FLAG, "accepted for compatibility; sampling is always per request, so it changes nothing"
    )
    use_cuda_graph: bool | tuple[bool, bool] | None = _setting(
        None, _optional(_GRAPHS), "CUDA graphs, or a pair for the (varlen, decode) path; None: decide"
    )
    q_padding_interval_size: int = _setting(
        0, _integer(0), "query tokens are padded to a multiple of it; 0: preset; setting it turns CUDA graphs on"
    )
    kv_padding_interval_size: int = _setting(
        0, _integer(0), "KV lengths are padded to a multiple of it; 0: preset; setting it turns CUDA graphs on"
    )
    use_async_batching: bool | None = _setting(
        None, _optional(_FLAG), "prepare step N+1 while step N runs; None: decide"
    )
    default_compile_level: int = _setting(
        0,
        _integer(0, 3),
        "torch.compile: 0 off, 1 default/dynamic, 2 max-autotune-no-cudagraphs/dynamic, 3 the same, static",
    )
    varlen_compile_config: object | None = _setting(
        None, _OPAQUE, "a CompileConfig for the varlen path; wins over the level"
    )
    decode_compile_config: object | None = _setting(
        None, _OPAQUE, "a CompileConfig for the decode path; wins over the level"
    )
    max_blocks_per_request: int | None = _setting(
        None, _optional(_integer(0)), "width of the decode path's block table; None: from the hints, else 32; 0: off"
    )
    cpu_offload_space: float | None = _setting(
        0.0, _optional(_AMOUNT), "GiB of host memory for preempted requests' KV; None: size from the threshold"
    )
    cpu_offload_space_safety_threshold: float = _setting(
        0.8, _SHARE, "the offload space takes at most this share of system memory"
    )
    cpu_group_timeout: float | None = _setting(
        DEFAULT_GROUP_TIMEOUT, _optional(_DURATION), "seconds a rank waits for the others; None: for ever"
    )
    auto_switch_to_flash: bool = _setting(
        True, _FLAG, "use the fastest attention this machine has; False keeps sdpa or eager"
    )
    pack_weights: bool = _setting(
        True, _FLAG, "keep a second copy of the matrices, laid out for the CPU kernels; False: slower, no copy"
    )
    max_queue_size: int = _setting(0, _integer(0), "waiting requests; 0: no bound")
    seed: int | None = _setting(None, _optional(_integer()), "for requests without a seed of their own")

    def __post_init__(self) -> None:
        _check_fields(self)
        if not isinstance(self.use_cuda_graph, (bool, type(None))):
            object.__setattr__(self, "use_cuda_graph", tuple(self.use_cuda_graph))  # a list would not be hashable
        if self.block_size is not None:
            self._adopt_block_size(self.block_size)

    def _adopt_block_size(self, block_size: int) -> None:
        warnings.warn("block_size is deprecated: use page_size", FutureWarning, stacklevel=4)
        if self.page_size not in (DEFAULT_PAGE_SIZE, block_size):
            raise ConfigError(
                f"page_size={self.page_size} and block_size={block_size} contradict each other: give page_size only"
            )
        object.__setattr__(self, "page_size", block_size)
        object.__setattr__(self, "block_size", None)  # else dataclasses.replace would give it again


@dataclass(frozen=True, slots=True)
class WorkloadHints:
    """What the caller knows about the requests to come; tokens and counts, None or 0 where unknown."""

    max_prompt_length: int | None = _setting(None, _optional(_integer(0)), "longest prompt, in tokens")
    max_generated_length: int | None = _setting(None, _optional(_integer(0)), "most tokens one request generates")
    num_requests: int | None = _setting(None, _optional(_integer(0)), "requests, all children counted")

    def __post_init__(self) -> None:
        _check_fields(self)


# --- What is true ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model, as far as memory and limits go."""

    name: str
    vocab_size: int
    max_model_length: int  # tokens of prompt and generation together
    layers: tuple[tuple[int | None, int, int], ...]  # per attention layer: window or None, KV heads, head size
    hidden_size: int
    intermediate_size: int  # width of the MLP that one token passes through (all its active experts)
    dtype: str
    itemsize: int  # bytes of one element of weights, activations and KV
    parameter_bytes: int
    packed_bytes: int = 0  # of the second copy of the matrices, laid out for the kernels
    attention: str = "sdpa"  # the implementation the model was loaded with

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_model_length", "num_layers", "hidden_size", "intermediate_size"):
            if (value := getattr(self, name)) < 1:
                raise UnsupportedModelError(f"{self.name} has {name}={value}; there is nothing to serve")

    @property
    def num_layers(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """A device, and the host it hangs on. Memory in bytes."""

    kind: str  # "cpu", "cuda", ...
    name: str
    free_memory: int  # with the model's weights in place
    total_memory: int
    total_system_memory: int
    num_cores: int
    attention: tuple[str, ...]  # implementations that work here, fastest first


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What an engine does on this machine: no None that means "decide" is left. `str()` of it is a table."""

    model: str
    device: str
    attention: str

    page_size: int  # tokens
    block_bytes: int
    num_blocks: int
    blocks_per_request: int  # of the longest request: as hinted, else as long as the model and the cache allow
    max_memory_percent: float
    activation_bytes: int  # estimate for one full forward pass
    packed_bytes: int  # of the matrices laid out for the kernels, beside the model's own
    num_host_blocks: int

    max_model_length: int  # tokens, the model's own limit
    max_sequence_length: int  # tokens, the longest request that fits: the model's limit or the cache's
    max_batch_tokens: int
    max_requests_per_batch: int
    max_blocks_per_request: int  # 0: no decode path
    max_queue_size: int  # 0: no bound

    scheduler: str | Any  # a name of SCHEDULERS, or the user's policy object
    safety_margin: float
    depth: int  # steps in flight: 1 synchronous, 2 asynchronous
    allow_block_sharing: bool

    use_cuda_graph: tuple[bool, bool]  # (varlen, decode)
    compile_levels: tuple[int, int]  # (varlen, decode)
    cpu_group_timeout: float | None  # seconds; None: for ever

    return_logprobs: bool
    logprobs_mode: Literal["processed", "raw"]
    seed: int | None  # None: a fresh one per request

    warnings: tuple[str, ...]  # what the user set that cannot take effect here, why, and the remedy

    @property
    def cache_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def cpu_offload_bytes(self) -> int:
        return self.num_host_blocks * self.block_bytes

    @property
    def max_concurrency(self) -> int:
        """How many requests of `blocks_per_request` blocks run side by side."""
        return min(self.max_requests_per_batch, self.num_blocks // self.blocks_per_request)

    def __str__(self) -> str:
        rows = {
            "page_size": f"{self.page_size} tokens, {_size(self.block_bytes)} per block",
            "num_blocks": f"{self.num_blocks} = {_size(self.cache_bytes)}",
            "num_host_blocks": f"{self.num_host_blocks} = {_size(self.cpu_offload_bytes)}",
            "activations": _size(self.activation_bytes),
            "packed weights": _size(self.packed_bytes),
            "max_memory_percent": self.max_memory_percent,
            "longest request": f"{self.max_sequence_length} of the model's {self.max_model_length} tokens",
            "concurrency": f"{self.max_concurrency} requests of {self.blocks_per_request} blocks",
            "max_batch_tokens": self.max_batch_tokens,
            "max_requests_per_batch": self.max_requests_per_batch,
            "max_blocks_per_request": self.max_blocks_per_request or "off",
            "max_queue_size": self.max_queue_size or "no bound",
            "scheduler": self.scheduler if isinstance(self.scheduler, str) else type(self.scheduler).__name__,
            "safety_margin": self.safety_margin,
            "depth": f"{self.depth} ({'synchronous' if self.depth == 1 else 'asynchronous'})",
            "allow_block_sharing": self.allow_block_sharing,
            "attention": self.attention,
            "use_cuda_graph": "varlen {}, decode {}".format(*self.use_cuda_graph),
            "compile_levels": "varlen {}, decode {}".format(*self.compile_levels),
            "cpu_group_timeout": "none" if self.cpu_group_timeout is None else f"{self.cpu_group_timeout:g} s",
            "return_logprobs": f"{self.return_logprobs} ({self.logprobs_mode})",
            "seed": "fresh for each request" if self.seed is None else self.seed,
        }
        width = max(map(len, rows))
        lines = [f"{self.model} on {self.device}", *(f"  {name:<{width}}  {value}" for name, value in rows.items())]
        return "\n".join([*lines, *(f"  ! {warning}" for warning in self.warnings)])


def _size(num_bytes: float) -> str:
    """`num_bytes` for people: three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


# --- From one to the other ------------------------------------------------------------------------------------------


class _Blocks(NamedTuple):
    """How many blocks one request holds, from the sizes alone.

    Layers of one window form one or more groups, and every group has a block table of its own. How many layers share a
    group is in the size of a block: it holds one page of each.
    """

    page_size: int
    groups: tuple[tuple[int | None, int], ...]  # (window, number of groups with it)

    @classmethod
    def of(cls, model: ModelFacts, page_size: int, block_bytes: int) -> "_Blocks":
        page_bytes = max(page_size * heads * size * 2 * model.itemsize for _, heads, size in model.layers)
        per_group = max(1, block_bytes // page_bytes)
        windows = [window for window, _, _ in model.layers]
        return cls(page_size, tuple((w, math.ceil(windows.count(w) / per_group)) for w in dict.fromkeys(windows)))

    def needed(self, num_tokens: int, chunk: int) -> int:
        """Most blocks at any time while a request grows to `num_tokens` in chunks of at most `chunk` tokens."""
        pages = math.ceil(num_tokens / self.page_size)
        total = 0
        for window, count in self.groups:
            if window is None:
                total += count * pages
            else:  # behind the window pages are handed back; its first token may be the last one of a page
                span = window - 1 + chunk
                total += count * min(pages, (span + self.page_size - 2) // self.page_size + 1)
        return total

    def longest(self, num_blocks: int, chunk: int, limit: int) -> int:
        """Tokens, at most `limit`, of the longest request that `num_blocks` blocks hold."""
        return bisect_right(range(1, limit + 1), num_blocks, key=lambda length: self.needed(length, chunk))


class _Activations(NamedTuple):
    """Estimate of what one forward pass needs beside weights and cache, in bytes."""

    per_token: int
    per_row: int

    @classmethod
    def of(cls, model: ModelFacts, logits_processed: bool) -> "_Activations":
        # Residual, norm, Q, K, V, attention, projection and one spare; gate, up and their product.
        per_token = model.itemsize * (8 * model.hidden_size + 3 * model.intermediate_size)
        # Logits as the model gives them, in float32, and their logprobs; when processed also sorted with int64 indices,
        # and as probabilities.
        per_row = model.vocab_size * (model.itemsize + (24 if logits_processed else 8))
        return cls(per_token, per_row)

    def bytes(self, num_tokens: int, num_rows: int) -> int:
        return num_tokens * self.per_token + num_rows * self.per_row


def resolve(
    config: ContinuousBatchingConfig,
    model: ModelFacts,
    device: DeviceFacts,
    hints: WorkloadHints,
    block_bytes: int,
    *,
    logits_processed: bool = False,
) -> ResolvedConfig:
    """Replace every None in `config` by what is true on `device`. Pure: reads nothing else and changes nothing.

    `block_bytes` is the size of one block of the paged cache at `config.page_size`. `logits_processed` says that the
    caller's generation config samples or penalises, so that more memory has to stay free.

    Raises `ConfigError` when the cache cannot hold one request or is larger than the device, and when the attention
    to be kept does not work here.
    """
    share = config.max_memory_percent or (0.8 if logits_processed else 0.9)
    margin = _safety_margin(config)
    blocks = _Blocks.of(model, config.page_size, block_bytes)
    activations = _Activations.of(model, logits_processed)

    tokens, rows = _pass_size(config, hints, activations, device.free_memory)
    length = _hinted_length(hints, model.max_model_length)
    workload = rows * blocks.needed(length or model.max_model_length, tokens)
    spare = int(share * (device.free_memory - model.packed_bytes - activations.bytes(tokens, rows)))
    if device.kind == "cpu":
        spare -= int((config.cpu_offload_space or 0.0) * GIB)  # it comes out of the same memory
    num_blocks = config.num_blocks or max(0, spare // block_bytes)
    if config.num_blocks is None and device.kind == "cpu":
        # Whatever the hints, one request of full length is welcome: committed lazily, its room costs nothing.
        longest = blocks.needed(model.max_model_length, tokens)
        num_blocks = min(num_blocks, max(longest, _with_margin(workload, margin)))
    smallest = length or min(config.page_size, model.max_model_length)
    needed = blocks.needed(smallest, tokens)
    if num_blocks < needed:
        missing = (needed * block_bytes - spare) / share
        raise _too_small(config, num_blocks, smallest, needed, missing)
    rows = min(rows, num_blocks // blocks.needed(1, tokens))
    activation_bytes = activations.bytes(tokens, rows)
    _check_fits_device(config, device, num_blocks * block_bytes, activation_bytes)

    max_sequence_length = blocks.longest(num_blocks, tokens, model.max_model_length)
    num_host_blocks, host_warnings = _host_blocks(
        config, device, block_bytes, workload, in_use=num_blocks * block_bytes + activation_bytes
    )
    return ResolvedConfig(
        model=model.name,
        device=device.name,
        attention=_attention(config, model, device),
        page_size=config.page_size,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        blocks_per_request=blocks.needed(length or max_sequence_length, tokens),
        max_memory_percent=share,
        activation_bytes=activation_bytes,
        packed_bytes=model.packed_bytes,
        num_host_blocks=num_host_blocks,
        max_model_length=model.max_model_length,
        max_sequence_length=max_sequence_length,
        max_batch_tokens=tokens,
        max_requests_per_batch=rows,
        max_blocks_per_request=0,
        max_queue_size=config.max_queue_size,
        scheduler=config.scheduler_type,
        safety_margin=margin,
        depth=2 if config.use_async_batching and device.kind == "cpu" else 1,
        allow_block_sharing=config.allow_block_sharing,
        use_cuda_graph=(False, False),
        compile_levels=(0, 0),
        cpu_group_timeout=config.cpu_group_timeout,
        return_logprobs=config.return_logprobs,
        logprobs_mode=config.logprobs_mode,
        seed=config.seed,
        warnings=(*_without_effect(config, device), *_fewer_rows(config, rows), *host_warnings),
    )


def _safety_margin(config: ContinuousBatchingConfig) -> float:
    if config.safety_margin is not None:
        return config.safety_margin
    scheduler = config.scheduler_type
    decode_first = scheduler != "prefill_first" if isinstance(scheduler, str) else scheduler.decode_first
    return 0.15 if decode_first else 0.0


def _with_margin(num_blocks: int, margin: float) -> int:
    """A pool of which the safety margin leaves `num_blocks`; a margin of 1 leaves none of any pool."""
    return math.ceil(num_blocks / (1 - margin)) if margin < 1 else num_blocks


def _pass_size(
    config: ContinuousBatchingConfig, hints: WorkloadHints, activations: _Activations, free_memory: int
) -> tuple[int, int]:
    """Query tokens and rows of one forward pass."""
    room = int(free_memory * ACTIVATION_SHARE)
    tokens = config.max_batch_tokens
    if tokens is None:
        tokens = MOST_BATCH_TOKENS
        while tokens > FEWEST_BATCH_TOKENS and tokens * activations.per_token > room:
            tokens //= 2
    wanted = config.max_requests_per_batch or hints.num_requests or DEFAULT_MAX_REQUESTS
    return tokens, max(1, min(wanted, tokens, room // activations.per_row))


def _hinted_length(hints: WorkloadHints, max_model_length: int) -> int | None:
    """Tokens of the longest request to come, None when the hints do not bound it."""
    if not hints.max_prompt_length or not hints.max_generated_length:
        return None
    return min(hints.max_prompt_length + hints.max_generated_length, max_model_length)


def _too_small(
    config: ContinuousBatchingConfig, num_blocks: int, length: int, needed: int, missing_bytes: float
) -> ConfigError:
    need = f"one request of {length} tokens needs {needed} blocks"
    if config.num_blocks is not None:
        return ConfigError(f"num_blocks={num_blocks} is too small: {need}; set num_blocks to at least {needed}")
    return ConfigError(
        f"the KV cache does not fit: {need}, but memory is left for {num_blocks}; {_size(missing_bytes)} more must be "
        "free. Free memory, lower max_batch_tokens, page_size or cpu_offload_space, or raise max_memory_percent"
    )


def _check_fits_device(
    config: ContinuousBatchingConfig, device: DeviceFacts, cache_bytes: int, activation_bytes: int
) -> None:
    limit = device.total_memory if device.kind == "cpu" else device.free_memory  # a CPU commits its pool lazily
    if cache_bytes + activation_bytes > limit:
        raise ConfigError(
            f"num_blocks={config.num_blocks} ({_size(cache_bytes)}) and max_batch_tokens={config.max_batch_tokens} "
            f"(about {_size(activation_bytes)}) exceed the {_size(limit)} of {device.name}: lower them or give None"
        )


def _host_blocks(
    config: ContinuousBatchingConfig, device: DeviceFacts, block_bytes: int, workload: int, in_use: int
) -> tuple[int, list[str]]:
    """Blocks of host memory for preempted requests, and the warning if they are fewer than asked for."""
    limit = config.cpu_offload_space_safety_threshold * device.total_system_memory
    if device.kind == "cpu":
        limit = min(limit, max(0, device.free_memory - in_use))
    if config.cpu_offload_space is None:
        return min(workload, int(limit // block_bytes)), []
    wanted = config.cpu_offload_space * GIB
    num_blocks = int(min(wanted, limit) // block_bytes)
    if wanted <= limit and (num_blocks or not wanted):
        return num_blocks, []
    why = f"{_size(limit)} of system memory may be used" if wanted > limit else f"one block takes {_size(block_bytes)}"
    remedy = "lower cpu_offload_space, or num_blocks" if wanted > limit else "raise cpu_offload_space"
    return num_blocks, [
        f"cpu_offload_space={config.cpu_offload_space} was set, but {why}, so it is {num_blocks} blocks: {remedy}"
    ]


def _attention(config: ContinuousBatchingConfig, model: ModelFacts, device: DeviceFacts) -> str:
    loaded = model.attention.removeprefix("paged|")
    keep = loaded.startswith("flash") or not config.auto_switch_to_flash
    if keep and loaded in device.attention:
        return loaded
    if config.auto_switch_to_flash:
        return device.attention[0]
    raise ConfigError(
        f"auto_switch_to_flash=False keeps attention {model.attention!r}, which does not work on {device.name}: "
        f"load the model with one of {', '.join(device.attention)}"
    )


def _without_effect(config: ContinuousBatchingConfig, device: DeviceFacts) -> list[str]:
    """A line for every field that was set and that nothing here can obey."""
    on_cuda, on_cpu = device.kind == "cuda", device.kind == "cpu"
    graphs = "CUDA graphs are not implemented yet" if on_cuda else f"there are no CUDA graphs on {device.name}"
    compiler = "torch.compile is not implemented yet"
    harmless: dict[str, tuple[tuple[object, ...], str]] = {
        "use_cuda_graph": ((None, False, (False, False)), graphs),
        "q_padding_interval_size": ((0,), graphs),
        "kv_padding_interval_size": ((0,), graphs),
        "use_async_batching": ((None, False, on_cpu), "it needs CUDA graphs, which are not implemented yet"),
        "default_compile_level": ((0,), compiler),
        "varlen_compile_config": ((None,), compiler),
        "decode_compile_config": ((None,), compiler),
        "max_blocks_per_request": ((None, 0), "there is no separate decode path yet"),
        "cpu_group_timeout": ((DEFAULT_GROUP_TIMEOUT,), "one process runs the whole model"),
        "max_memory_percent": (
            (config.max_memory_percent,) if config.num_blocks is None else (None,),
            "num_blocks wins",
        ),
    }
    return [
        f"{name}={getattr(config, name)!r} was set but cannot take effect: {why}; leave it at {values[0]}"
        for name, (values, why) in harmless.items()
        if getattr(config, name) not in values
    ]


def _fewer_rows(config: ContinuousBatchingConfig, rows: int) -> list[str]:
    if config.max_requests_per_batch is None or config.max_requests_per_batch == rows:
        return []
    return [
        f"max_requests_per_batch={config.max_requests_per_batch} was set, but {rows} fit: "
        "raise max_batch_tokens or num_blocks, or free memory"
    ]
