"""What benchmarks share: the model, the record of a result."""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import chairlift
from chairlift.model.loader import load_smollm2


def load(dtype: str, attn_implementation: str = "sdpa") -> Any:
    """SmolLM2-135M-Instruct with a given attention."""
    model, _ = load_smollm2(dtype=getattr(torch, dtype))
    model.set_attn_implementation(attn_implementation)
    return model


def machine() -> dict[str, Any]:
    """Where a number was measured."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "cpu": name,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "chairlift": getattr(chairlift, "__version__", "source"),
    }


def report(benchmark: str, results: dict[str, Sequence[float]], unit: str, baseline: str, path: str | None) -> None:
    """Print medians and each one's ratio to `baseline`; append a JSON line to `path`."""
    median = {name: statistics.median(values) for name, values in results.items()}
    print(f"\n{benchmark}, {unit}: median of the rounds, and ours divided by it")
    ours = median[baseline]
    for name, values in results.items():
        rounds = " ".join(f"{value:.1f}" for value in values)
        print(f"  {name:40} {median[name]:9.1f}   x {ours / median[name]:.2f}   ({rounds})")
    if path:
        record = {"benchmark": benchmark, "unit": unit, "results": {k: list(v) for k, v in results.items()}} | machine()
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")
