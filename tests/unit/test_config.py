"""What the user may say, and what `resolve` makes of it on a machine described by plain numbers."""

import copy
import math
import pickle
import warnings
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.cache.layout import CacheLayout, LayerSpec, plan_layout
from chairlift.config import (
    ContinuousBatchingConfig,
    DeviceFacts,
    ModelFacts,
    ResolvedConfig,
    WorkloadHints,
    resolve,
)
from chairlift.errors import ConfigError
from chairlift.schedule.policy import Fifo, PrefillFirst

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# One block of 256 tokens is 256 * 4 heads * 64 * 2 (K and V) * 2 bytes * 16 layers = 4 MiB.
MODEL = ModelFacts(
    name="tiny/llama",
    vocab_size=32_000,
    max_model_length=4096,
    layers=((None, 4, 64),) * 16,
    hidden_size=1024,
    intermediate_size=4096,
    dtype="bfloat16",
    itemsize=2,
    parameter_bytes=500 * MIB,
)
BLOCK = 4 * MIB
CPU = DeviceFacts(
    kind="cpu",
    name="a CPU",
    free_memory=12 * GIB,
    total_memory=16 * GIB,
    total_system_memory=16 * GIB,
    num_cores=8,
    attention=("fast", "sdpa", "eager"),
)
CUDA = DeviceFacts(
    kind="cuda",
    name="a GPU",
    free_memory=70 * GIB,
    total_memory=80 * GIB,
    total_system_memory=100 * GIB,
    num_cores=8,
    attention=("flash_attention_2", "sdpa", "eager"),
)
TOKEN_BYTES = 2 * (8 * 1024 + 3 * 4096)  # activations of one query token
ROW_BYTES = 32_000 * (2 + 8)  # logits of one row


def resolved(
    config: ContinuousBatchingConfig | None = None,
    model: ModelFacts = MODEL,
    device: DeviceFacts = CPU,
    hints: WorkloadHints | None = None,
    block_bytes: int = BLOCK,
    **more: Any,
) -> ResolvedConfig:
    return resolve(config or ContinuousBatchingConfig(), model, device, hints or WorkloadHints(), block_bytes, **more)


class NewestFirst(Fifo):
    """A user's own policy."""


@dataclass
class CompileConfig:
    """Stands for transformers' class of this name: opaque here, and without a hash."""

    mode: str = "default"


# --- ContinuousBatchingConfig ---------------------------------------------------------------------------------------


def test_fields_and_defaults_are_the_published_ones() -> None:
    assert {spec.name: spec.default for spec in fields(ContinuousBatchingConfig)} == {
        "page_size": 256,
        "block_size": None,
        "num_blocks": None,
        "max_memory_percent": None,
        "max_batch_tokens": None,
        "max_requests_per_batch": None,
        "scheduler_type": "fifo",
        "safety_margin": None,
        "allow_block_sharing": True,
        "return_logprobs": False,
        "logprobs_mode": "processed",
        "per_request_processors": False,
        "use_cuda_graph": None,
        "q_padding_interval_size": 0,
        "kv_padding_interval_size": 0,
        "use_async_batching": None,
        "default_compile_level": 0,
        "varlen_compile_config": None,
        "decode_compile_config": None,
        "max_blocks_per_request": None,
        "pack_weights": True,
        "cpu_offload_space": 0.0,
        "cpu_offload_space_safety_threshold": 0.8,
        "cpu_group_timeout": 300.0,
        "auto_switch_to_flash": True,
        "max_queue_size": 0,
        "seed": None,
    }
    assert all(spec.metadata["help"] for spec in fields(ContinuousBatchingConfig))


NONSENSE = {
    "page_size": [3, 0, -256, 256.0, True, "256", None, math.nan],
    "block_size": [3, 0, -1, 16.0, True, "16"],
    "num_blocks": [0, -1, 1.5, True, "all", math.inf],
    "max_memory_percent": [0, 0.0, -0.1, 1.01, 90, math.nan, math.inf, True, "0.9"],
    "max_batch_tokens": [0, -1, 8192.0, True, "8192"],
    "max_requests_per_batch": [0, -1, 2.0, True, "8"],
    "scheduler_type": ["", "FIFO", "lifo", None, 1, object(), Fifo, ["fifo"]],
    "safety_margin": [-0.01, 1.01, math.nan, True, "0.15"],
    "allow_block_sharing": [None, 1, 0, "yes"],
    "return_logprobs": [None, 1, 5, "raw"],
    "logprobs_mode": [None, "", "Raw", "softmax", 1, ["raw"]],
    "per_request_processors": [None, 1],
    "use_cuda_graph": [1, "yes", (True,), (True, False, True), (1, 0), (None, True), []],
    "q_padding_interval_size": [-1, 1.0, None, True],
    "kv_padding_interval_size": [-1, 1.0, None, True],
    "use_async_batching": [1, 0, "on", (True, False)],
    "default_compile_level": [-1, 4, 1.0, True, None, "max-autotune"],
    "varlen_compile_config": ["default", 1, True],
    "decode_compile_config": ["default", 2.0, False],
    "max_blocks_per_request": [-1, 32.0, True, "32"],
    "cpu_offload_space": [-0.5, math.nan, math.inf, True, "4"],
    "cpu_offload_space_safety_threshold": [-0.1, 1.1, math.nan, None, True],
    "cpu_group_timeout": [0, -1.0, math.nan, math.inf, True, "300"],
    "auto_switch_to_flash": [None, 1, "flash_attention_2"],
    "pack_weights": [None, 1, "yes"],
    "max_queue_size": [-1, 1.0, None, True],
    "seed": [1.0, True, "1", math.nan],
}


def test_nonsense_is_tried_on_every_field() -> None:
    assert NONSENSE.keys() == {spec.name for spec in fields(ContinuousBatchingConfig)}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NONSENSE.items() for value in values])
def test_nonsense_is_refused_by_name_and_value(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        ContinuousBatchingConfig(**{name: value})
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert message.startswith(f"{name}={value!r} ")
    assert ": give " in message


SENSE = {
    "page_size": [4, 5, 1024],
    "num_blocks": [None, 1],
    "max_memory_percent": [None, 0.001, 1, 1.0],
    "max_batch_tokens": [None, 1],
    "max_requests_per_batch": [None, 1],
    "scheduler_type": ["fifo", "prefill_first", "priority", "fair_share", Fifo(), NewestFirst()],
    "safety_margin": [None, 0, 0.0, 1, 1.0],
    "logprobs_mode": ["processed", "raw"],
    "use_cuda_graph": [None, True, False, (True, False), [False, True]],
    "use_async_batching": [None, True, False],
    "default_compile_level": [0, 1, 2, 3],
    "varlen_compile_config": [None, CompileConfig()],
    "decode_compile_config": [None, CompileConfig()],
    "max_blocks_per_request": [None, 0, 32],
    "cpu_offload_space": [None, 0, 0.5, 4],
    "cpu_offload_space_safety_threshold": [0, 1, 0.8],
    "cpu_group_timeout": [None, 1, 0.5],
    "max_queue_size": [0, 1],
    "seed": [None, 0, -1, 2**80],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in SENSE.items() for value in values])
def test_the_edges_of_sense_are_accepted(name: str, value: object) -> None:
    config = ContinuousBatchingConfig(**{name: value})
    assert getattr(config, name) == (tuple(value) if isinstance(value, list) else value)


def test_an_unknown_scheduler_is_told_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"scheduler_type='lifo' .*fifo, prefill_first, priority, fair_share.*policy object"
    ):
        ContinuousBatchingConfig(scheduler_type="lifo")


def test_positional_and_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        ContinuousBatchingConfig(256)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="pagesize"):
        ContinuousBatchingConfig(pagesize=256)  # type: ignore[call-arg]


def test_block_size_is_page_size_with_a_warning_at_the_caller() -> None:
    with pytest.warns(FutureWarning, match="block_size is deprecated: use page_size") as caught:
        config = ContinuousBatchingConfig(block_size=32)
    assert caught[0].filename == __file__
    assert config.page_size == 32
    assert config == ContinuousBatchingConfig(page_size=32)
    assert hash(config) == hash(ContinuousBatchingConfig(page_size=32))
    assert replace(config, page_size=64).page_size == 64  # without another warning: warnings are errors here


@pytest.mark.parametrize("page_size", [256, 32])
def test_block_size_may_repeat_page_size(page_size: int) -> None:
    with pytest.warns(FutureWarning):
        assert ContinuousBatchingConfig(page_size=page_size, block_size=32).page_size == 32


def test_block_size_may_not_contradict_page_size() -> None:
    with pytest.warns(FutureWarning), pytest.raises(ConfigError, match="page_size=64 and block_size=32"):
        ContinuousBatchingConfig(page_size=64, block_size=32)


def test_a_config_is_a_value() -> None:
    config = ContinuousBatchingConfig(num_blocks=8, use_cuda_graph=(True, False), seed=1)
    same = ContinuousBatchingConfig(num_blocks=8, use_cuda_graph=(True, False), seed=1)
    assert config == same
    assert hash(config) == hash(same)
    assert config != replace(same, seed=2)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(FrozenInstanceError):
        config.seed = 2  # type: ignore[misc]


def test_a_pair_given_as_a_list_can_be_hashed() -> None:
    config = ContinuousBatchingConfig(use_cuda_graph=[True, False])  # type: ignore[arg-type]
    assert hash(config) == hash(ContinuousBatchingConfig(use_cuda_graph=(True, False)))


def test_equality_reaches_into_compile_configs_and_hashing_needs_hashable_fields() -> None:
    config = ContinuousBatchingConfig(varlen_compile_config=CompileConfig("a"))
    assert config == ContinuousBatchingConfig(varlen_compile_config=CompileConfig("a"))
    assert config != ContinuousBatchingConfig(varlen_compile_config=CompileConfig("b"))
    with pytest.raises(TypeError, match="unhashable"):
        hash(config)


@pytest.mark.parametrize("name", ["max_prompt_length", "max_generated_length", "num_requests"])
@pytest.mark.parametrize("value", [-1, 1.0, True, "8"])
def test_hints_are_checked_too(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}="):
        WorkloadHints(**{name: value})


# --- resolve: sizes -------------------------------------------------------------------------------------------------


def test_defaults_on_a_gpu_take_what_memory_allows() -> None:
    r = resolved(device=CUDA)
    assert (r.page_size, r.max_batch_tokens, r.max_requests_per_batch) == (256, 8192, 1024)
    assert r.activation_bytes == 8192 * TOKEN_BYTES + 1024 * ROW_BYTES
    assert r.max_memory_percent == 0.9
    assert r.num_blocks == int(0.9 * (70 * GIB - r.activation_bytes)) // BLOCK
    assert r.cache_bytes == r.num_blocks * BLOCK
    assert (r.blocks_per_request, r.max_model_length, r.max_sequence_length) == (16, 4096, 4096)
    assert r.max_concurrency == r.num_blocks // 16 < 1024
    assert r.warnings == ()


def test_a_cpu_pool_is_never_more_than_the_workload_can_use() -> None:
    hints = WorkloadHints(max_prompt_length=1000, max_generated_length=500, num_requests=10)
    r = resolved(ContinuousBatchingConfig(safety_margin=0.0), hints=hints)
    assert r.max_requests_per_batch == 10
    assert r.blocks_per_request == 6
    assert r.num_blocks == 60
    assert resolved(ContinuousBatchingConfig(safety_margin=0.0), device=CUDA, hints=hints).num_blocks > 10_000


def test_the_safety_margin_comes_on_top_of_what_the_workload_uses() -> None:
    hints = WorkloadHints(max_prompt_length=1000, max_generated_length=500, num_requests=10)
    r = resolved(ContinuousBatchingConfig(safety_margin=0.25), hints=hints)
    assert r.num_blocks == 80  # of which 60 are not kept back
    assert resolved(ContinuousBatchingConfig(safety_margin=1.0), hints=hints).num_blocks == 60


def test_a_cpu_pool_without_hints_is_for_requests_of_full_length() -> None:
    r = resolved(ContinuousBatchingConfig(max_requests_per_batch=4, safety_margin=0.0))
    assert r.num_blocks == 4 * 16
    for half in (WorkloadHints(max_prompt_length=10), WorkloadHints(max_generated_length=10)):  # bounds no request
        assert resolved(ContinuousBatchingConfig(max_requests_per_batch=4, safety_margin=0.0), hints=half) == r


def test_hints_never_make_a_full_length_request_impossible_on_a_cpu() -> None:
    hints = WorkloadHints(max_prompt_length=10, max_generated_length=10, num_requests=1)
    r = resolved(hints=hints)
    assert r.num_blocks == 16
    assert r.max_sequence_length == 4096


def test_a_cpu_pool_stays_within_the_memory_share() -> None:
    r = resolved(device=replace(CPU, free_memory=2 * GIB))
    rows = 256 * MIB // ROW_BYTES  # an eighth of the memory
    assert r.num_blocks == int(0.9 * (2 * GIB - 4096 * TOKEN_BYTES - rows * ROW_BYTES)) // BLOCK


@pytest.mark.parametrize(("processed", "share"), [(False, 0.9), (True, 0.8)])
def test_the_memory_share_is_less_when_logits_are_processed(processed: bool, share: float) -> None:
    assert resolved(device=CUDA, logits_processed=processed).max_memory_percent == share
    own = ContinuousBatchingConfig(max_memory_percent=0.5)
    assert resolved(own, device=CUDA, logits_processed=processed).max_memory_percent == 0.5


@pytest.mark.parametrize(("free", "tokens"), [(12 * GIB, 8192), (2 * GIB, 4096), (400 * MIB, 1024), (60 * MIB, 256)])
def test_the_token_budget_shrinks_with_memory_but_not_below_256(free: int, tokens: int) -> None:
    r = resolved(device=replace(CPU, free_memory=free))
    assert r.max_batch_tokens == tokens


def test_a_token_budget_that_was_given_is_kept() -> None:
    r = resolved(ContinuousBatchingConfig(max_batch_tokens=7), device=replace(CPU, free_memory=GIB))
    assert r.max_batch_tokens == 7
    assert r.max_requests_per_batch == 7  # every row has at least one token


def test_rows_come_from_config_then_hints_then_1024_and_are_capped_to_fit() -> None:
    hints = WorkloadHints(num_requests=10)
    assert resolved(ContinuousBatchingConfig(max_requests_per_batch=5), hints=hints).max_requests_per_batch == 5
    assert resolved(hints=hints).max_requests_per_batch == 10
    assert resolved().max_requests_per_batch == 1024
    assert resolved(ContinuousBatchingConfig(num_blocks=3)).max_requests_per_batch == 3  # one block each
    small = resolved(device=replace(CPU, free_memory=256 * MIB))
    assert small.max_requests_per_batch == min(small.num_blocks, 32 * MIB // ROW_BYTES)


def test_num_blocks_that_was_given_is_kept_and_bounds_the_longest_request() -> None:
    r = resolved(ContinuousBatchingConfig(num_blocks=3))
    assert r.num_blocks == 3
    assert (r.max_model_length, r.max_sequence_length) == (4096, 3 * 256)
    assert r.blocks_per_request == 3


def test_page_size_sets_the_grain() -> None:
    r = resolved(ContinuousBatchingConfig(page_size=16, num_blocks=5), block_bytes=BLOCK // 16)
    assert (r.page_size, r.max_sequence_length, r.block_bytes) == (16, 80, 256 * KIB)


def test_num_blocks_too_small_for_one_request_is_refused_with_the_number_that_would_do() -> None:
    hints = WorkloadHints(max_prompt_length=1000, max_generated_length=500)
    with pytest.raises(ConfigError, match=r"num_blocks=5 is too small: one request of 1500 tokens needs 6 blocks"):
        resolved(ContinuousBatchingConfig(num_blocks=5), hints=hints)
    assert resolved(ContinuousBatchingConfig(num_blocks=6), hints=hints).num_blocks == 6


def test_hints_beyond_the_model_count_as_its_length() -> None:
    hints = WorkloadHints(max_prompt_length=4000, max_generated_length=4000, num_requests=1)
    assert resolved(hints=hints).blocks_per_request == 16


@pytest.mark.parametrize("device", [CPU, CUDA], ids=lambda device: device.kind)
def test_memory_for_no_request_is_refused_with_what_is_missing(device: DeviceFacts) -> None:
    hints = WorkloadHints(max_prompt_length=4000, max_generated_length=96, num_requests=1)
    config = ContinuousBatchingConfig(max_batch_tokens=256)
    tight = replace(device, free_memory=40 * MIB)
    with pytest.raises(
        ConfigError, match=r"one request of 4096 tokens needs 16 blocks, .* more must be free"
    ) as caught:
        resolved(config, device=tight, hints=hints)
    # 64 MiB of cache are 0.9 of what is left after the activations.
    missing = 64 * MIB / 0.9 - (40 * MIB - 256 * TOKEN_BYTES - ROW_BYTES)
    assert f"{missing / MIB:.3g} MiB more must be free" in str(caught.value)
    enough = replace(tight, free_memory=tight.free_memory + math.ceil(missing))
    assert resolved(config, device=enough, hints=hints).num_blocks == 16


def test_no_memory_at_all_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="memory is left for 0"):
        resolved(device=replace(CUDA, free_memory=0))


@pytest.mark.parametrize(
    ("device", "blocks"), [(CUDA, 70 * GIB // BLOCK), (CPU, 16 * GIB // BLOCK)], ids=["cuda", "cpu"]
)
def test_a_cache_larger_than_the_device_is_refused(device: DeviceFacts, blocks: int) -> None:
    with pytest.raises(ConfigError, match=rf"num_blocks={blocks} .*{device.name}"):
        resolved(ContinuousBatchingConfig(num_blocks=blocks), device=device)


def test_a_cpu_pool_that_was_given_may_exceed_what_is_free_now() -> None:
    blocks = 13 * GIB // BLOCK
    assert resolved(ContinuousBatchingConfig(num_blocks=blocks)).num_blocks == blocks


def test_a_pass_larger_than_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="lower max_batch_tokens"):
        resolved(ContinuousBatchingConfig(max_batch_tokens=10**7))


# --- resolve: sliding windows and hybrids, against the layout that the cache uses -----------------------------------


LAYERS = st.lists(
    st.tuples(st.sampled_from([None, 1, 7, 32, 500]), st.integers(1, 4), st.sampled_from([8, 16])),
    min_size=1,
    max_size=20,
)


def facts_and_layout(
    layers: list[tuple[int | None, int, int]], page_size: int, max_length: int
) -> tuple[ModelFacts, CacheLayout]:
    specs = [
        LayerSpec(index=index, window=window, num_kv_heads=heads, head_dim=size)
        for index, (window, heads, size) in enumerate(layers)
    ]
    layout = plan_layout(specs, page_size, MODEL.itemsize)
    return replace(MODEL, layers=tuple(layers), max_model_length=max_length), layout


@given(layers=LAYERS, page_size=st.integers(4, 64), max_length=st.integers(1, 3000), chunk=st.integers(1, 600))
def test_blocks_per_request_are_those_of_the_cache_layout(
    layers: list[tuple[int | None, int, int]], page_size: int, max_length: int, chunk: int
) -> None:
    model, layout = facts_and_layout(layers, page_size, max_length)
    config = ContinuousBatchingConfig(page_size=page_size, max_batch_tokens=chunk)
    r = resolved(config, model, block_bytes=layout.block_bytes)
    assert r.max_sequence_length == max_length
    assert r.blocks_per_request == layout.blocks_needed(max_length, chunk)


@given(layers=LAYERS, page_size=st.integers(4, 64), num_blocks=st.integers(1, 200), chunk=st.integers(1, 600))
def test_the_longest_request_is_the_longest_that_the_layout_fits(
    layers: list[tuple[int | None, int, int]], page_size: int, num_blocks: int, chunk: int
) -> None:
    model, layout = facts_and_layout(layers, page_size, 2000)
    config = ContinuousBatchingConfig(page_size=page_size, num_blocks=num_blocks, max_batch_tokens=chunk)
    if layout.blocks_needed(page_size, chunk) > num_blocks:
        with pytest.raises(ConfigError, match="is too small"):
            resolved(config, model, block_bytes=layout.block_bytes)
        return
    r = resolved(config, model, block_bytes=layout.block_bytes)
    assert layout.blocks_needed(r.max_sequence_length, chunk) <= num_blocks
    assert r.max_sequence_length == 2000 or layout.blocks_needed(r.max_sequence_length + 1, chunk) > num_blocks
    assert 1 <= r.max_requests_per_batch <= num_blocks


# --- resolve: everything else ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheduler", "margin"),
    [
        ("fifo", 0.15),
        ("prefill_first", 0.0),
        ("priority", 0.15),
        ("fair_share", 0.15),
        (NewestFirst(), 0.15),
        (PrefillFirst(), 0.0),
    ],
)
def test_the_safety_margin_follows_the_scheduler(scheduler: object, margin: float) -> None:
    r = resolved(ContinuousBatchingConfig(scheduler_type=scheduler))
    assert r.scheduler is scheduler
    assert r.safety_margin == margin
    assert resolved(ContinuousBatchingConfig(scheduler_type=scheduler, safety_margin=0.0)).safety_margin == 0.0
    assert resolved(ContinuousBatchingConfig(scheduler_type=scheduler, safety_margin=0.5)).safety_margin == 0.5


@pytest.mark.parametrize(
    ("device", "asked", "depth", "warned"),
    [
        (CPU, None, 1, 0),
        (CPU, False, 1, 0),
        (CPU, True, 2, 0),
        (CUDA, None, 1, 0),
        (CUDA, False, 1, 0),
        (CUDA, True, 1, 1),
    ],
)
def test_async_is_a_depth(device: DeviceFacts, asked: bool | None, depth: int, warned: int) -> None:
    r = resolved(ContinuousBatchingConfig(use_async_batching=asked), device=device)
    assert r.depth == depth
    assert [w.split("=")[0] for w in r.warnings] == ["use_async_batching"] * warned


def test_what_passes_through() -> None:
    config = ContinuousBatchingConfig(
        allow_block_sharing=False,
        return_logprobs=True,
        logprobs_mode="raw",
        max_queue_size=9,
        seed=-3,
        cpu_group_timeout=None,
    )
    r = resolved(config)
    assert (r.allow_block_sharing, r.return_logprobs, r.logprobs_mode) == (False, True, "raw")
    assert (r.max_queue_size, r.seed, r.cpu_group_timeout) == (9, -3, None)


@pytest.mark.parametrize(
    ("loaded", "auto", "attention"),
    [
        ("sdpa", True, "flash_attention_2"),
        ("eager", True, "flash_attention_2"),
        ("flash_attention_2", True, "flash_attention_2"),
        ("flash_attention_3", True, "flash_attention_2"),
        ("sdpa", False, "sdpa"),
        ("eager", False, "eager"),
        ("paged|eager", False, "eager"),
        ("flash_attention_2", False, "flash_attention_2"),
    ],
)
def test_attention(loaded: str, auto: bool, attention: str) -> None:
    config = ContinuousBatchingConfig(auto_switch_to_flash=auto)
    assert resolved(config, replace(MODEL, attention=loaded), CUDA).attention == attention


def test_a_flash_attention_that_was_asked_for_is_not_exchanged_for_a_faster_one() -> None:
    device = replace(CUDA, attention=("flash_attention_3", "flash_attention_2", "sdpa"))
    assert resolved(model=replace(MODEL, attention="flash_attention_2"), device=device).attention == "flash_attention_2"


def test_attention_that_shall_be_kept_but_does_not_work_here() -> None:
    config = ContinuousBatchingConfig(auto_switch_to_flash=False)
    with pytest.raises(ConfigError, match=r"'flash_attention_3', which does not work .*flash_attention_2, sdpa, eager"):
        resolved(config, replace(MODEL, attention="flash_attention_3"), CUDA)


# --- resolve: host memory -------------------------------------------------------------------------------------------


def test_offloading_is_off_by_default() -> None:
    assert resolved(device=CUDA).num_host_blocks == resolved(device=CPU).num_host_blocks == 0


def test_offload_space_in_gib_becomes_host_blocks() -> None:
    r = resolved(ContinuousBatchingConfig(cpu_offload_space=1.5), device=CUDA)
    assert r.num_host_blocks == 384
    assert r.cpu_offload_bytes == 1.5 * GIB
    assert r.warnings == ()


def test_offload_space_from_the_threshold_is_no_more_than_the_workload() -> None:
    config = ContinuousBatchingConfig(cpu_offload_space=None, cpu_offload_space_safety_threshold=0.25)
    assert resolved(config, device=CUDA).num_host_blocks == 25 * GIB // BLOCK
    assert resolved(replace(config, max_requests_per_batch=4), device=CUDA).num_host_blocks == 4 * 16


def test_offload_space_is_capped_by_the_threshold_with_a_warning() -> None:
    config = ContinuousBatchingConfig(cpu_offload_space=60, cpu_offload_space_safety_threshold=0.5)
    r = resolved(config, device=CUDA)
    assert r.num_host_blocks == 50 * GIB // BLOCK
    (warning,) = r.warnings
    assert "cpu_offload_space=60 was set, but 50 GiB of system memory may be used" in warning


def test_offload_space_smaller_than_a_block_is_a_warning() -> None:
    r = resolved(ContinuousBatchingConfig(cpu_offload_space=0.001), device=CUDA)
    assert r.num_host_blocks == 0
    (warning,) = r.warnings
    assert "one block takes 4 MiB" in warning


def test_offload_space_on_a_cpu_comes_out_of_the_same_memory() -> None:
    with_offload = resolved(ContinuousBatchingConfig(cpu_offload_space=2.0))
    assert with_offload.num_host_blocks == 512
    assert with_offload.num_blocks == resolved().num_blocks - 512
    assert with_offload.warnings == ()


def test_offload_space_on_a_cpu_is_what_the_cache_leaves_free() -> None:
    blocks = 10 * GIB // BLOCK
    r = resolved(ContinuousBatchingConfig(cpu_offload_space=4.0, num_blocks=blocks))
    assert r.num_host_blocks == (2 * GIB - r.activation_bytes) // BLOCK
    assert len(r.warnings) == 1
    assert resolved(ContinuousBatchingConfig(cpu_offload_space=None, num_blocks=blocks)).num_host_blocks == (
        r.num_host_blocks
    )


# --- resolve: warnings ----------------------------------------------------------------------------------------------

NO_EFFECT = [
    {"use_cuda_graph": True},
    {"use_cuda_graph": (False, True)},
    {"q_padding_interval_size": 64},
    {"kv_padding_interval_size": 64},
    {"default_compile_level": 2},
    {"varlen_compile_config": CompileConfig()},
    {"decode_compile_config": CompileConfig()},
    {"max_blocks_per_request": 32},
    {"cpu_group_timeout": 10.0},
    {"cpu_group_timeout": None},
    {"num_blocks": 64, "max_memory_percent": 0.5},
]


@pytest.mark.parametrize("device", [CPU, CUDA], ids=lambda device: device.kind)
@pytest.mark.parametrize("arguments", NO_EFFECT, ids=repr)
def test_what_cannot_take_effect_is_said_once_and_resolves_to_off(
    arguments: dict[str, Any], device: DeviceFacts
) -> None:
    r = resolved(ContinuousBatchingConfig(**arguments), device=device)
    (warning,) = r.warnings
    name, value = list(arguments.items())[-1]
    assert warning.startswith(f"{name}={value!r} was set but cannot take effect: ")
    assert "; leave it at " in warning
    assert (r.use_cuda_graph, r.compile_levels, r.max_blocks_per_request) == ((False, False), (0, 0), 0)


@pytest.mark.parametrize("device", [CPU, CUDA], ids=lambda device: device.kind)
@pytest.mark.parametrize(
    "arguments",
    [
        {"use_cuda_graph": False},
        {"use_cuda_graph": (False, False)},
        {"use_async_batching": False},
        {"max_blocks_per_request": 0},
        {"num_blocks": 64},
        {"max_memory_percent": 0.5},
        {"per_request_processors": True},
        {"max_requests_per_batch": 64},
    ],
    ids=repr,
)
def test_what_is_off_or_true_anyway_is_no_warning(arguments: dict[str, Any], device: DeviceFacts) -> None:
    assert resolved(ContinuousBatchingConfig(**arguments), device=device).warnings == ()


def test_the_reason_is_that_of_the_machine() -> None:
    graphs = ContinuousBatchingConfig(use_cuda_graph=True)
    assert "there are no CUDA graphs on a CPU" in resolved(graphs, device=CPU).warnings[0]
    assert "CUDA graphs are not implemented yet" in resolved(graphs, device=CUDA).warnings[0]


def test_fewer_rows_than_asked_for_is_a_warning() -> None:
    r = resolved(ContinuousBatchingConfig(max_requests_per_batch=50, num_blocks=20))
    assert r.max_requests_per_batch == 20
    (warning,) = r.warnings
    assert warning.startswith("max_requests_per_batch=50 was set, but 20 fit: ")


# --- ResolvedConfig -------------------------------------------------------------------------------------------------


def test_resolve_is_pure_and_its_result_a_value() -> None:
    config = ContinuousBatchingConfig(use_cuda_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = resolved(config), resolved(config)
    assert first == second
    assert config == ContinuousBatchingConfig(use_cuda_graph=True)
    assert pickle.loads(pickle.dumps(first)) == first
    with pytest.raises(FrozenInstanceError):
        first.depth = 2  # type: ignore[misc]


def test_nothing_that_means_decide_is_left() -> None:
    """Two fields keep a None that means something else: wait for ever, a fresh seed for each request."""
    config = ContinuousBatchingConfig(cpu_offload_space=None, cpu_group_timeout=None)
    r = resolved(config)
    assert {spec.name for spec in fields(r) if getattr(r, spec.name) is None} == {"cpu_group_timeout", "seed"}


@pytest.mark.parametrize(
    ("num_blocks", "size"), [(1, "4 MiB"), (249, "996 MiB"), (250, "0.977 GiB"), (256, "1 GiB"), (2900, "11.3 GiB")]
)
def test_sizes_have_three_digits(num_blocks: int, size: str) -> None:
    assert f"  {num_blocks} = {size}\n" in str(resolved(ContinuousBatchingConfig(num_blocks=num_blocks)))


def test_it_prints_as_a_table() -> None:
    text = str(resolved(ContinuousBatchingConfig(num_blocks=64, use_cuda_graph=True, scheduler_type=NewestFirst())))
    lines = text.splitlines()
    assert lines[0] == "tiny/llama on a CPU"
    for name, value in {
        "page_size": "256 tokens, 4 MiB per block",
        "num_blocks": "64 = 256 MiB",
        "longest request": "4096 of the model's 4096 tokens",
        "concurrency": "4 requests of 16 blocks",
        "scheduler": "NewestFirst",
        "depth": "1 (synchronous)",
    }.items():
        assert any(
            line.split(maxsplit=len(name.split()))[-1] == value for line in lines if line.strip().startswith(name)
        )
    columns = {len(line) - len(line[2:].split("  ", 1)[1].lstrip()) for line in lines[1:-1]}
    assert len(columns) == 1
    assert lines[-1].startswith("  ! use_cuda_graph=True was set but cannot take effect")
