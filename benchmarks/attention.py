"""Paged attention: the native kernel against PyTorch's on dense tensors and the reference operators, interleaved.

    python -m benchmarks attention [--case decode] [--rounds 7] [--dtype bfloat16] [--threads 2] [--json results.jsonl]

The heads are those of SmolLM2-135M. Each of its 30 layers has a cache of its own, so that a case reads from memory what
a step of the model reads. `program` is one native call for all layers; `sdpa` is PyTorch's attention of equally long
requests that lie dense, one call a layer; `reference` the package's PyTorch operators, one layer, times 30.
ms are of all layers; GB/s count the keys and values in the cache once, GFLOP/s the products that causality leaves.
`--library` adds another build of the kernels; `--cpu` counts CPU seconds, for a machine that others use as well.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import machine
from chairlift.kernels import KVLayout, reference
from chairlift.kernels import native as ops
from chairlift.kernels.native import ClGroup, ClOp, ClRequest, ClStep, Native, address_of, native
from chairlift.kernels.plan import build_attention_plan

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 30, 9, 3, 64, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`requests` with `new` tokens each, that see themselves and `context` tokens before them."""

    name: str
    requests: int
    new: int
    context: int

    @property
    def length(self) -> int:
        return self.context + self.new

    @property
    def tokens(self) -> int:
        return self.requests * self.new

    @property
    def numbers_read(self) -> int:
        return LAYERS * self.requests * self.length * 2 * KV_HEADS * HEAD_DIM

    @property
    def products(self) -> int:
        return LAYERS * self.tokens * (self.context + (self.new + 1) // 2) * 2 * Q_HEADS * HEAD_DIM


CASES = [
    Case(name="decode 64 at 200", requests=64, new=1, context=199),
    Case(name="decode 16 at 200", requests=16, new=1, context=199),
    Case(name="decode 1 at 100", requests=1, new=1, context=99),
    Case(name="decode 1 at 8192", requests=1, new=1, context=8191),
    Case(name="decode 8 at 8192", requests=8, new=1, context=8191),
    Case(name="verify 8 at 1000", requests=1, new=8, context=992),
    Case(name="prefill 4 of 128", requests=4, new=128, context=0),
    Case(name="prefill 512 on 512", requests=1, new=512, context=512),
    Case(name="prefill 512 on 7680", requests=1, new=512, context=7680),
]

Contestant = Callable[[], object]


class Paged:
    """The requests of a case, with random caches for all layers, for the native kernels."""

    def __init__(self, case: Case, dtype: torch.dtype, kernels: Native) -> None:
        pages = -(-case.length // PAGE_SIZE)
        elements = kernels.cache_elements(dtype, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        # A step's blocks come from anywhere.
        self.tables = (1 + torch.randperm(case.requests * pages)).to(torch.int32).view(case.requests, pages)
        self.caches = [torch.randn(1 + self.tables.numel(), elements).to(dtype) for _ in range(LAYERS)]
        self.query = torch.randn(case.tokens, Q_HEADS * HEAD_DIM).to(dtype)
        self.out = torch.empty_like(self.query)
        each = [ClRequest(i * case.new, case.new, case.context, i) for i in range(case.requests)]
        self._requests = (ClRequest * len(each))(*each)
        self._groups = (ClGroup * 1)(ClGroup(self.tables.data_ptr(), pages, PAGE_SIZE, elements))
        self._step = ClStep(
            num_tokens=case.tokens,
            num_requests=case.requests,
            requests=address_of(self._requests),
            groups=address_of(self._groups),
        )
        self._program = (ClOp * LAYERS)(*map(self._layer, self.caches))

    def _layer(self, cache: Tensor) -> ClOp:
        return ops.attend(
            self.query, cache, self.out, head_dim=HEAD_DIM, kv_heads=KV_HEADS, group=0, scale=HEAD_DIM**-0.5
        )

    def runner(self, kernels: Native) -> Contestant:
        return lambda: kernels.run(self._program, LAYERS, self._step)


def dense(case: Case, dtype: torch.dtype) -> Contestant:
    query = torch.randn(case.requests, Q_HEADS, case.new, HEAD_DIM).to(dtype)
    caches = torch.randn(LAYERS, 2, case.requests, KV_HEADS, case.length, HEAD_DIM).to(dtype)
    seen = torch.ones(case.new, case.length, dtype=torch.bool).tril(case.context)

    def run() -> None:
        mask, causal = (None, case.new > 1) if case.context == 0 or case.new == 1 else (seen, False)
        for keys, values in caches:
            F.scaled_dot_product_attention(query, keys, values, mask, is_causal=causal, enable_gqa=True)

    return run


def one_layer_of_reference(case: Case, dtype: torch.dtype, tables: Tensor) -> Contestant:
    keys, values = (torch.randn(1 + tables.numel(), PAGE_SIZE, KV_HEADS, HEAD_DIM).to(dtype) for _ in range(2))
    lengths = [case.new] * case.requests, [case.length] * case.requests
    plan = build_attention_plan(*lengths, tables.numpy(), layout=KVLayout.of(keys))
    query = torch.randn(case.tokens, Q_HEADS, HEAD_DIM).to(dtype)
    return lambda: reference.paged_attention(query, keys, values, plan, scale=HEAD_DIM**-0.5)


def compare(case: Case, args: argparse.Namespace, builds: dict[str, Native]) -> None:
    dtype: torch.dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    paged = Paged(case, dtype, builds["program"])
    runners = {name: paged.runner(kernels) for name, kernels in builds.items()}
    if not args.native:
        runners |= {"sdpa": dense(case, dtype), "reference": one_layer_of_reference(case, dtype, paged.tables)}
    clock = time.process_time if args.cpu else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in runners}
    for round_number in range(args.rounds + 1):  # the first is to warm up
        for name, run in runners.items():
            begin = clock()
            run()
            if round_number:
                times[name].append((clock() - begin) * (LAYERS if name == "reference" else 1))
    show(case, dtype, times)
    if args.json:
        record = {"benchmark": "attention", "case": case.name, "dtype": args.dtype, "cpu": args.cpu, "seconds": times}
        with open(args.json, "a") as file:
            file.write(json.dumps(record | machine()) + "\n")


def show(case: Case, dtype: torch.dtype, times: dict[str, list[float]]) -> None:
    best = min(times["program"])
    rates = f"{1e-9 * case.numbers_read * dtype.itemsize / best:5.1f} GB/s {2e-9 * case.products / best:5.0f} GFLOP/s"
    cells = [
        f"{name} {1e3 * statistics.median(values):8.2f} ({1e3 * min(values):8.2f})" for name, values in times.items()
    ]
    print(f"{case.name:20} ms, median (best): {' | '.join(cells)} | best: {rates}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--native", action="store_true", help="only the native kernels")
    parser.add_argument("--library", type=Path, nargs="*", default=[], help="other builds of the kernels")
    parser.add_argument("--cpu", action="store_true", help="CPU seconds instead of wall time")
    parser.add_argument("--json")
    args = parser.parse_args()
    kernels = native()
    if kernels is None:
        raise SystemExit("no native kernels on this machine")
    torch.set_num_threads(args.threads)
    builds = {"program": kernels} | {path.stem: Native(path) for path in args.library}
    for build in builds.values():
        build.set_threads(args.threads)
    for case in CASES:
        if args.case in case.name:
            compare(case, args, builds)


if __name__ == "__main__":
    main()
