"""Continuous batching for any Hugging Face causal language model, as it is loaded.

What needs PyTorch is imported when it is first asked for: the command's help does not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from chairlift.config import ContinuousBatchingConfig, WorkloadHints
from chairlift.errors import (
    ChairliftError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    UnsupportedModelError,
)
from chairlift.manager import ContinuousBatchingManager
from chairlift.request import GenerationOutput, RequestStatus

if TYPE_CHECKING:
    from transformers import CompileConfig, DistributedConfig, GenerationConfig

    from chairlift.api import AutoModelForCausalLM, attach
    from chairlift.llm import LLM, Completion

__all__ = [
    "LLM",
    "AutoModelForCausalLM",
    "ChairliftError",
    "CompileConfig",
    "Completion",
    "ConfigError",
    "ContinuousBatchingConfig",
    "ContinuousBatchingManager",
    "DistributedConfig",
    "EngineDeadError",
    "GenerationConfig",
    "GenerationOutput",
    "InvalidRequestError",
    "QueueFullError",
    "RequestStatus",
    "UnsupportedModelError",
    "WorkloadHints",
    "attach",
]

_LATE = {
    "chairlift.api": ("AutoModelForCausalLM", "attach"),
    "chairlift.llm": ("LLM", "Completion"),
    "transformers": ("CompileConfig", "DistributedConfig", "GenerationConfig"),
}


def __getattr__(name: str) -> Any:
    for home, names in _LATE.items():
        if name in names:
            value = globals()[name] = getattr(import_module(home), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
