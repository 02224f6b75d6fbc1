"""Flags that several verbs share, and how the fields of a config become flags.

The configs are read, never copied: names, types, defaults and help texts are those of `chairlift.config`.
"""

import dataclasses
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from tyro.conf import OmitArgPrefixes
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from chairlift.config import ContinuousBatchingConfig, WorkloadHints
from chairlift.errors import ChairliftError, ConfigError

if TYPE_CHECKING:
    from chairlift.llm import LLM

registry = ConstructorRegistry()


class UsageError(Exception):
    """What was typed cannot be done; the message is one line that says why."""


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Around imports of what only `extra` installs."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise UsageError(f"{missing.name} is not installed; run: pip install 'chairlift[{extra}]'") from missing


@contextmanager
def understood(subject: str) -> Iterator[None]:
    """Around what reads files that somebody else wrote: whatever is wrong with them, it is said in one line."""
    try:
        yield
    except (ChairliftError, UsageError):
        raise
    except Exception as fault:  # a config is fed to a model's own code, which may raise anything
        kind = "" if isinstance(fault, OSError | ValueError) else f"{type(fault).__name__}: "
        raise UsageError(f"{subject}: {kind}{str(fault) or type(fault).__name__}") from fault


@registry.struct_rule
def _flags_of(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Each field of a config that can be typed is a flag."""
    config = info.type
    if config not in (ContinuousBatchingConfig, WorkloadHints):
        return None
    hints = get_type_hints(config)
    start = info.default if isinstance(info.default, config) else config()
    flags = [
        StructFieldSpec(name=field.name, type=kind, default=getattr(start, field.name), helptext=field.metadata["help"])
        for field in dataclasses.fields(config)
        if (kind := _typed(hints[field.name])) is not None
    ]

    def build(**values: Any) -> object:
        try:
            return config(**values)
        except ConfigError as error:
            raise UsageError(str(error)) from error

    return StructConstructorSpec(instantiate=build, fields=tuple(flags))


def _typed(kind: Any) -> Any:
    """A field's type without what is an object in Python; None if nothing is left that can be typed."""
    if get_origin(kind) not in (Union, types.UnionType):
        return None if kind in (Any, object) else kind
    parts = [part for part in get_args(kind) if part not in (Any, object)]
    return Union[tuple(parts)] if set(parts) - {types.NoneType} else None  # noqa: UP007 - it is made of a tuple


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How the model is loaded, and the engine that runs it."""

    tokenizer: str | None = None
    """Folder or Hub name of the tokenizer; None: the model's own."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the weights; auto: as they were saved."""
    device: str | None = None
    """Where the model runs; None: where it is loaded to."""
    attn_implementation: str | None = None
    """Attention to load the model with; None: the model's default."""
    config: OmitArgPrefixes[ContinuousBatchingConfig] = ContinuousBatchingConfig()  # noqa: RUF009 - it is frozen
    """The engine; None: as fits the model and the machine."""

    def open(self, model: str | None, **changes: Any) -> "LLM":
        """Load the model and start its engine. `changes`: fields of the config that the verb decides. Raises UsageError
        for a model that is not there or cannot be loaded so, and what `LLM` raises."""
        from chairlift.llm import LLM  # here, as in all verbs: whoever asks for help need not wait for PyTorch
        from chairlift.model.loader import load

        with understood(f"{model or 'the default model'} cannot be loaded"):
            loaded, tokenizer = load(
                model,
                self.tokenizer,
                dtype=self.dtype,
                device=self.device,
                attn_implementation=self.attn_implementation,
            )
        return LLM(loaded, tokenizer, continuous_batching_config=dataclasses.replace(self.config, **changes))


def served_name(model: str | None) -> str:
    """What a model is called where it has to have a name: as on the Hub, or the name of its folder."""
    return (model or "SmolLM2-135M-Instruct").rstrip("/").rsplit("/", 1)[-1]
