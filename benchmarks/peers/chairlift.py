"""Chairlift, and what this machine could do at most, measured in the same process."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.peers.works import BATCH_TOKENS, WORKS, Channel, Meter, Prompts, Setting, arguments, serve, vocabulary
from chairlift import ContinuousBatchingConfig, attach
from chairlift.kernels import native as ops
from chairlift.kernels.native import ClOp, ClStep, native

SAMPLING: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.2,
}
IN_FEATURES, OUT_FEATURES = 576, 3072  # of the product that stands for the best rate
RESIDENT = 512 << 20  # bytes to read, more than any cache holds


class Chairlift:
    def __init__(self, model: Path) -> None:
        self.model: Any = attach(AutoModelForCausalLM.from_pretrained(model / "hf", dtype=torch.bfloat16))
        self._manager: Any = None

    def prepare(self, setting: Setting) -> None:
        if self._manager is not None:
            self._manager.destroy()
        config = ContinuousBatchingConfig(
            max_batch_tokens=BATCH_TOKENS, max_requests_per_batch=setting.rows, allow_block_sharing=setting.cached
        )
        self._manager = self.model.init_continuous_batching(continuous_batching_config=config)
        self._manager.start()

    def generate(self, prompts: Prompts, counts: Sequence[int], sampled: bool) -> int:
        for number, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
            how = {**SAMPLING, "seed": number} if sampled else {"temperature": 0}
            self._manager.add_request(list(prompt), max_new_tokens=count, ignore_eos=True, **how)
        return sum(len(output.generated_tokens) for output in self._manager)

    def sizes(self) -> dict[str, int]:
        """Numbers in the weights that multiply: of the layers, for every token, and of the head, for every new one."""
        head = self.model.get_output_embeddings()
        layers = sum(m.weight.numel() for m in self.model.modules() if isinstance(m, torch.nn.Linear) and m is not head)
        return {"layers": layers, "head": head.weight.numel(), "itemsize": head.weight.element_size()}


def best_matmul() -> float:
    """GFLOP/s of our own bf16 product at its best number of rows; oneDNN's where there are no kernels."""
    rates = []
    weight = torch.randn(OUT_FEATURES, IN_FEATURES).bfloat16()
    kernels = native()
    for rows in (64, 128, 256, 512):
        x = torch.randn(rows, IN_FEATURES).bfloat16()
        out = torch.empty(rows, OUT_FEATURES, dtype=torch.bfloat16)
        times = 2048 // rows
        if kernels is not None:
            packed = kernels.pack(weight)
            program = (ClOp * times)(*[ops.linear(x, packed, out)] * times)
        for _ in range(5):
            begin = time.perf_counter()
            if kernels is not None:
                kernels.run(program, times, ClStep(num_tokens=rows))
            else:
                for _ in range(times):
                    torch.nn.functional.linear(x, weight)
            seconds = time.perf_counter() - begin
            rates.append(2 * rows * IN_FEATURES * OUT_FEATURES * times / seconds)
    return max(rates) / 1e9


def best_read() -> float:
    """GB/s at which memory is read, by PyTorch's sum or by our own products with one row, whichever is faster."""
    big = torch.ones(RESIDENT // 4)
    runs = [lambda: big.sum()]
    if (kernels := native()) is not None:
        weight = torch.ones(OUT_FEATURES, IN_FEATURES).bfloat16()
        packed = [kernels.pack(weight) for _ in range(RESIDENT // weight.nbytes)]
        x, out = torch.ones(1, IN_FEATURES).bfloat16(), torch.empty(1, OUT_FEATURES, dtype=torch.bfloat16)
        program = (ClOp * len(packed))(*[ops.linear(x, each, out) for each in packed])
        runs.append(lambda: kernels.run(program, len(packed), ClStep(num_tokens=1)))
    rates = []
    for run in runs:
        for _ in range(5):
            begin = time.perf_counter()
            run()
            rates.append(RESIDENT / (time.perf_counter() - begin))
    return max(rates) / 1e9


def main() -> None:
    channel, args = Channel(), arguments()
    torch.set_num_threads(args.threads)
    native()  # compiles, if need be: start-up is told with the kernels there
    engine = Chairlift(args.model)
    meter = Meter(engine, vocabulary(args.model), args.tiny)
    begin = time.perf_counter()
    engine.prepare(Setting())
    engine.generate([[100, 101, 102]], [1], False)
    startup = time.perf_counter() - begin

    def answer(work: str, number: int) -> float | dict[str, float]:
        if work == "limits":
            return {"matmul": best_matmul(), "read": best_read()}
        return meter.measure(work, number)

    hello = {
        "works": list(WORKS),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "sizes": engine.sizes(),
        "startup": startup,
    }
    serve(channel, hello, answer)


if __name__ == "__main__":
    main()
