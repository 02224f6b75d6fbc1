"""`chairlift plan`: what an engine for a model would be on this machine, from the model's config alone."""

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tyro.conf import OmitArgPrefixes, Positional

from chairlift.cache.layout import LayerSpec, plan_layout
from chairlift.commands.flags import UsageError, understood
from chairlift.config import ContinuousBatchingConfig, DeviceFacts, ModelFacts, ResolvedConfig, WorkloadHints, resolve

if TYPE_CHECKING:
    from chairlift.model.outline import Outline


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Show what would be resolved for a model: memory, blocks, concurrency. Reads its config; loads no weights."""

    model: Positional[str | None] = None
    """Folder or Hub name; None: SmolLM2-135M-Instruct."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the weights; auto: as the config says."""
    json: bool = False
    """Print JSON."""
    hints: OmitArgPrefixes[WorkloadHints] = WorkloadHints()  # noqa: RUF009 - it is frozen
    """What is known of the load."""
    config: OmitArgPrefixes[ContinuousBatchingConfig] = ContinuousBatchingConfig()  # noqa: RUF009 - it is frozen
    """The engine; None: as fits the model and the machine."""

    def __call__(self) -> int:
        from chairlift.model.outline import Outline, machine, read_config

        with understood(f"no model can be made of the config of {self.model or 'the default model'}"):
            outline = Outline(read_config(self.model), self.dtype, self.config.pack_weights)
        facts, resolved = self._resolve(outline, machine())
        if self.json:
            print(json.dumps(_as_dict(facts, resolved), indent=2))
        else:
            print(_as_text(facts, resolved))
        return 0

    def _resolve(self, outline: "Outline", device: DeviceFacts) -> tuple[ModelFacts, ResolvedConfig]:
        facts = outline.facts
        layers = [
            LayerSpec(index=index, window=call.window, num_kv_heads=call.num_kv_heads, head_dim=call.head_dim)
            for index, call in outline.layers.items()
        ]
        layout = plan_layout(layers, self.config.page_size, facts.itemsize)
        free = device.free_memory - facts.parameter_bytes
        if free <= 0:
            raise UsageError(
                f"the weights of {facts.name} take {_gib(facts.parameter_bytes)}, "
                f"and {_gib(device.free_memory)} are free"
            )
        loaded = dataclasses.replace(device, free_memory=free)
        return facts, resolve(self.config, facts, loaded, self.hints, layout.block_bytes)


def _as_text(facts: ModelFacts, resolved: ResolvedConfig) -> str:
    total = facts.parameter_bytes + resolved.packed_bytes + resolved.cache_bytes + resolved.activation_bytes
    kinds = {window: [w for w, _, _ in facts.layers].count(window) for window, _, _ in facts.layers}
    layers = ", ".join(
        f"{count} with full attention" if window is None else f"{count} with a window of {window}"
        for window, count in kinds.items()
    )
    return "\n".join(
        [
            str(resolved),
            f"{facts.num_layers} layers: {layers}",
            f"weights {_gib(facts.parameter_bytes)}, packed {_gib(resolved.packed_bytes)}, "
            f"cache at most {_gib(resolved.cache_bytes)}, activations {_gib(resolved.activation_bytes)}: "
            f"{_gib(total)} in all",
        ]
    )


def _as_dict(facts: ModelFacts, resolved: ResolvedConfig) -> dict[str, object]:
    return {
        "model": dataclasses.asdict(facts),
        "resolved": dataclasses.asdict(resolved)
        | {"cache_bytes": resolved.cache_bytes, "max_concurrency": resolved.max_concurrency},
    }


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
