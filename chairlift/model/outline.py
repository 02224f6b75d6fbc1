"""What a model would be, from its config alone: built without weights, and asked which layers attend and how.

Nothing is read from the Hub but the config, and nothing is computed but shapes. This module refuses to serve.
"""

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from chairlift.config import DeviceFacts, ModelFacts
from chairlift.errors import UnsupportedModelError
from chairlift.kernels import REFERENCE
from chairlift.model.attention import DISCOVERY, Seam
from chairlift.model.fused import Seen
from chairlift.model.layers import DTYPES, Projection, RopeTable, replacement
from chairlift.model.loader import (
    PROBE_TOKENS,
    SMOLLM2,
    check_kind,
    check_layers,
    check_name,
    device_facts,
    model_facts,
    model_name,
    refuse,
    smollm2_file,
)


class Outline:
    """A model of which only the shapes exist.

    `model` has its parameters on the meta device. Raises `UnsupportedModelError` as `Shadow` does for what shows in
    shapes; what shows in numbers only, a start-up finds.
    """

    def __init__(self, config: PretrainedConfig, dtype: str = "auto", pack_weights: bool = True) -> None:
        wanted = {} if dtype == "auto" else {"dtype": getattr(torch, dtype)}
        with torch.device("meta"):
            self.model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **wanted).eval()
        refuse(self.model)
        self.name = model_name(self.model)
        self.dtype: torch.dtype = self.model.dtype
        if self.dtype not in DTYPES:
            raise UnsupportedModelError(f"{self.name} cannot be served in {self.dtype}")
        parts = {module: replacement(module, REFERENCE) for module in self.model.modules()}
        self.ropes = [part for part in parts.values() if isinstance(part, RopeTable) and part.kind != "default"]
        packed = [part for part in parts.values() if isinstance(part, Projection)]
        self.packed_bytes = sum(part.weight.nbytes for part in packed) if pack_weights else 0
        self.layers = check_layers(self._observe(), self.model, self.name)

    @property
    def facts(self) -> ModelFacts:
        """What `resolve` needs to know."""
        return model_facts(self.model, self)

    def _observe(self) -> Seen:
        """One pass of shapes, with an attention that notes how it is called."""
        seen, seam = Seen(), Seam()
        seam.plan = seen
        for module in self.model.modules():
            if hasattr(module, "layer_idx"):
                object.__setattr__(module, "seam", seam)
            if isinstance(replacement(module, REFERENCE), RopeTable):
                _forget_lengths(module)
        self.model.set_experts_implementation("batched_mm")  # the one whose shapes do not depend on the routing
        implementation = self.model.config._attn_implementation
        self.model.set_attn_implementation(DISCOVERY)
        ids = torch.zeros((1, PROBE_TOKENS), dtype=torch.int64, device="meta")
        with torch.no_grad():  # with a mask no model looks at the numbers in the positions
            self.model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
        self.model.set_attn_implementation(implementation)
        return seen


def _forget_lengths(rope: nn.Module) -> None:
    """Let a rotary embedding compute its angles without asking how long the sequence is: there are no numbers."""
    plain: Any = inspect.unwrap(type(rope).forward)
    object.__setattr__(rope, "forward", partial(plain, rope))


def read_config(name: str | None = None) -> PretrainedConfig:
    """The config of a model by name, as `load` finds it. Raises OSError for one that is not there,
    UnsupportedModelError for what is no causal language model."""
    config: PretrainedConfig
    if name is None and (source := smollm2_file()) is not None:
        folder, file = source
        config = AutoConfig.from_pretrained(folder, gguf_file=file, dtype="bfloat16")
    else:
        name = name or SMOLLM2
        check_name(name)
        config = AutoConfig.from_pretrained(name)
        check_kind(config)
    return config


def machine() -> DeviceFacts:
    """The device that models are served on here."""
    return device_facts(torch.device("cpu"))
