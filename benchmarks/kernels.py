"""Matrix products: the native kernels against oneDNN's prepacked ones, interleaved, at the shapes of two models.

    python -m benchmarks kernels [--rows 1 64] [--rounds 7] [--dtype bfloat16] [--threads 2] [--json results.jsonl]

Each shape has as many copies of its weight as do not fit a cache, used in turn, as the layers of a model are. `program`
is one call for all copies, `eager` one call each, as for oneDNN; for gate and up, oneDNN has one product for both and
PyTorch the activation and the multiplication. GFLOP/s counts products; GB/s counts weights, once.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import machine
from chairlift.kernels import native as ops
from chairlift.kernels.native import Activation, ClOp, ClStep, Native, native

RESIDENT = 96 << 20  # bytes of weights used in turn: more than a cache holds
ROWS = (1, 4, 8, 16, 64, 128, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A weight of a model, of which `gated` has two."""

    name: str
    in_features: int
    out_features: int
    gated: bool = False

    @property
    def numbers(self) -> int:
        return self.in_features * self.out_features * (1 + self.gated)


SHAPES = [
    Shape(name="SmolLM2 qkv", in_features=576, out_features=960),
    Shape(name="SmolLM2 o", in_features=576, out_features=576),
    Shape(name="SmolLM2 gate, up", in_features=576, out_features=1536, gated=True),
    Shape(name="SmolLM2 down", in_features=1536, out_features=576),
    Shape(name="SmolLM2 head", in_features=576, out_features=49152),
    Shape(name="Qwen3 qkv", in_features=1024, out_features=4096),
    Shape(name="Qwen3 o", in_features=2048, out_features=1024),
    Shape(name="Qwen3 gate, up", in_features=1024, out_features=3072, gated=True),
    Shape(name="Qwen3 down", in_features=3072, out_features=1024),
    Shape(name="Qwen3 head", in_features=1024, out_features=151936),
]

Contestant = Callable[[Tensor], object]  # runs all copies


def contestants(shape: Shape, dtype: torch.dtype, kernels: Native) -> tuple[int, dict[str, Contestant]]:
    """How many copies of the weight there are, and who multiplies with them."""
    copies = max(1, RESIDENT // (shape.numbers * dtype.itemsize))
    size = (shape.out_features, shape.in_features)
    weights = [(torch.randn(size) / size[1] ** 0.5).to(dtype) for _ in range(1 + shape.gated)]
    if shape.gated:
        packed = [kernels.pack_gated(weights[0], weights[1]) for _ in range(copies)]
    else:
        packed = [kernels.pack(weights[0]) for _ in range(copies)]
    merged = torch.cat(weights)
    reordered = [torch.ops.mkldnn._reorder_linear_weight(merged.clone()) for _ in range(copies)]

    def program(x: Tensor) -> object:
        out = torch.empty(len(x), shape.out_features, dtype=dtype)
        if shape.gated:
            each = [ops.gated(x, weight, out, Activation.SILU) for weight in packed]
        else:
            each = [ops.linear(x, weight, out) for weight in packed]
        kernels.run((ClOp * copies)(*each), copies, ClStep(num_tokens=len(x)))
        return out

    def eager(x: Tensor) -> object:
        for weight in packed:
            _ = kernels.gated(x, weight, Activation.SILU) if shape.gated else kernels.linear(x, weight)
        return None

    def onednn(x: Tensor) -> object:
        for weight in reordered:
            y = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
            if shape.gated:
                gate, up = y.chunk(2, -1)
                _ = F.silu(gate) * up
        return None

    return copies, {"program": program, "eager": eager, "oneDNN": onednn}


def measure(contestant: Contestant, x: Tensor) -> float:
    begin = time.perf_counter()
    contestant(x)
    return time.perf_counter() - begin


def compare(shape: Shape, args: argparse.Namespace, kernels: Native) -> None:
    dtype: torch.dtype = getattr(torch, args.dtype)
    copies, runners = contestants(shape, dtype, kernels)
    for rows in args.rows:
        x = torch.randn(rows, shape.in_features).to(dtype)
        for run in runners.values():
            run(x)
        times: dict[str, list[float]] = {name: [] for name in runners}
        for _ in range(args.rounds):
            for name, run in runners.items():
                times[name].append(measure(run, x) / copies)
        show(shape, rows, dtype, times)
        if args.json:
            record = {"benchmark": "kernels", "shape": shape.name, "rows": rows, "dtype": args.dtype, "seconds": times}
            with open(args.json, "a") as file:
                file.write(json.dumps(record | machine()) + "\n")


def show(shape: Shape, rows: int, dtype: torch.dtype, times: dict[str, list[float]]) -> None:
    cells = []
    for name, values in times.items():
        middle, best = statistics.median(values), min(values)
        flops, read = 2e-9 * rows * shape.numbers, 1e-9 * shape.numbers * dtype.itemsize
        cells.append(
            f"{name} {flops / middle:6.0f} ({flops / best:4.0f}) GF/s {read / middle:5.1f} ({read / best:5.1f}) GB/s"
        )
    ratio = statistics.median(b / a for a, b in zip(times["program"], times["oneDNN"], strict=True))
    print(f"{shape.name:17} M={rows:<4} {' | '.join(cells)} | x {ratio:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--shape", default="", help="only shapes whose name contains this")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json")
    args = parser.parse_args()
    kernels = native()
    if kernels is None:
        raise SystemExit("no native kernels on this machine")
    torch.set_num_threads(args.threads)
    print(
        f"{kernels.isa}, {args.threads} threads; median of {args.rounds} rounds (best); last: oneDNN's time / program's"
    )
    for shape in SHAPES:
        if args.shape in shape.name:
            compare(shape, args, kernels)


if __name__ == "__main__":
    main()
