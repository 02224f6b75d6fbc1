"""Continuous batching for any Hugging Face causal language model, as it is loaded."""

from transformers import CompileConfig, DistributedConfig, GenerationConfig

from chairlift.api import AutoModelForCausalLM, attach
from chairlift.config import ContinuousBatchingConfig, WorkloadHints
from chairlift.errors import (
    ChairliftError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    UnsupportedModelError,
)
from chairlift.llm import LLM, Completion
from chairlift.manager import ContinuousBatchingManager
from chairlift.request import GenerationOutput, RequestStatus

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
