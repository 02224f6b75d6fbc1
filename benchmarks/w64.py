"""W64 on SmolLM2: Chairlift, transformers' continuous batching and static batches of generate, interleaved.

    python -m benchmarks w64 [--rounds 3] [--dtype bfloat16] [--skip-static] [--no-compiler] [--json results.jsonl]

New tokens per second; 64 prompts of 16 to 256 tokens, 16 to 128 new tokens each, greedy, end of sequence ignored.
`--no-compiler` measures Chairlift as it is where there is no compiler: by PyTorch operators alone.
"""

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig as PeerConfig

from benchmarks.common import load, report
from benchmarks.peers.works import w64
from chairlift import ContinuousBatchingConfig, attach


def ours(dtype: str) -> Callable[[], float]:
    """Chairlift, 64 rows, 512 tokens per step."""
    model = attach(load(dtype))
    prompts, counts = w64()
    config = ContinuousBatchingConfig(max_batch_tokens=512, max_requests_per_batch=64, allow_block_sharing=False)

    def run() -> float:
        with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
            manager.add_request(prompts[0], max_new_tokens=4)
            manager.get_result()
            begin = time.perf_counter()
            for prompt, count in zip(prompts, counts, strict=True):
                manager.add_request(prompt, max_new_tokens=count, ignore_eos=True)
            done = sum(len(output.generated_tokens) for output in manager)
            seconds = time.perf_counter() - begin
        assert done == sum(counts)
        return done / seconds

    return run


def transformers_continuous(dtype: str, attention: str) -> Callable[[], float]:
    """transformers' own continuous batching, tuned as well as we could: 512 tokens per step, pages of 64."""
    prompts, counts = w64()

    def run() -> float:
        model: Any = load(dtype, attention)
        config = PeerConfig(num_blocks=512, page_size=64, max_batch_tokens=512, allow_block_sharing=False)
        manager = model.init_continuous_batching(
            generation_config=GenerationConfig(max_new_tokens=128, eos_token_id=-1, do_sample=False),
            continuous_batching_config=config,
        )
        manager.warmup()
        manager.start()
        manager.add_request(prompts[0], max_new_tokens=4)
        while not ((result := manager.get_result(timeout=1)) and result.is_finished()):
            pass
        begin = time.perf_counter()
        for prompt, count in zip(prompts, counts, strict=True):
            manager.add_request(prompt, max_new_tokens=count)
        done = finished = 0
        while finished < len(prompts):
            if (result := manager.get_result(timeout=1)) and result.is_finished():
                finished += 1
                done += len(result.generated_tokens)
        seconds = time.perf_counter() - begin
        manager.stop()
        del manager, model
        gc.collect()
        return done / seconds

    return run


def static(dtype: str, batch: int) -> Callable[[], float]:
    """`generate` in static, left-padded batches; only tokens that were asked for count."""
    model = load(dtype)
    prompts, counts = w64()

    def run() -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            for start in range(0, len(prompts), batch):
                part, asked = prompts[start : start + batch], counts[start : start + batch]
                width = max(map(len, part))
                ids = torch.tensor([[2] * (width - len(p)) + p for p in part])
                mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part])
                model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=max(asked),
                    min_new_tokens=max(asked),
                    do_sample=False,
                )
        return sum(counts) / (time.perf_counter() - begin)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--skip-static", action="store_true")
    parser.add_argument("--no-compiler", action="store_true")
    parser.add_argument("--json", help="append the result to this file")
    args = parser.parse_args()
    if args.no_compiler:
        os.environ |= {"CXX": "no-compiler", "CHAIRLIFT_CACHE": tempfile.mkdtemp()}
    contenders: dict[str, Callable[[], float]] = {
        "chairlift": ours(args.dtype),
        "transformers continuous batching, sdpa": transformers_continuous(args.dtype, "sdpa"),
    }
    if not args.skip_static:
        contenders["transformers generate, batches of 16"] = static(args.dtype, 16)
    results: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(args.rounds):
        for name, run in contenders.items():
            results[name].append(run())
            print(f"round {number + 1}: {name}: {results[name][-1]:.1f} new tokens/s", flush=True)
    title = f"W64 {args.dtype}" + ", PyTorch operators alone" * args.no_compiler
    report(title, results, "new tokens/s", "chairlift", args.json)


if __name__ == "__main__":
    main()
