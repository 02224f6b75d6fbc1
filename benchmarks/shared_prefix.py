"""64 requests with one system prompt of 1 000 tokens: prefill time with and without sharing, interleaved.

    python -m benchmarks shared_prefix [--rounds 3] [--json results.jsonl]

Seconds until all 64 requests have their first token; each has 16 tokens of its own after the shared ones.
"""

import argparse
import random
import time

from benchmarks.common import load, report
from chairlift import ContinuousBatchingConfig, attach

REQUESTS, SHARED, OWN = 64, 1000, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", help="append the result to this file")
    args = parser.parse_args()
    generator = random.Random(0)
    system = [generator.randrange(100, 49152) for _ in range(SHARED)]
    prompts = [system + [generator.randrange(100, 49152) for _ in range(OWN)] for _ in range(REQUESTS)]
    model = attach(load(args.dtype))

    def run(share: bool) -> float:
        config = ContinuousBatchingConfig(
            max_batch_tokens=2048, max_requests_per_batch=REQUESTS, allow_block_sharing=share
        )
        with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
            manager.add_request([1, 2, 3], max_new_tokens=2)
            manager.get_result()
            begin = time.perf_counter()
            manager.add_requests(prompts, max_new_tokens=1, ignore_eos=True)
            assert sum(1 for _ in manager) == REQUESTS
            return time.perf_counter() - begin

    results: dict[str, list[float]] = {"shared": [], "not shared": []}
    for _ in range(args.rounds):
        for name, values in results.items():
            values.append(run(name == "shared"))
            print(f"{name}: {values[-1]:.2f} s", flush=True)
    report("shared prefix, 1 000 x 64", results, "seconds of prefill", "shared", args.json)


if __name__ == "__main__":
    main()
