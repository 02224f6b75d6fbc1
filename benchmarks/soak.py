"""Ten minutes of mixed requests, cancellations, streams and weight updates: memory, blocks and threads stay flat.

    python -m benchmarks soak [--minutes 10]

Prints resident memory, blocks in use, threads and throughput every half minute; exits with an error if any of them
grew, or if a request got lost. A small random model, so that the engine and not the arithmetic is loaded.
"""

import argparse
import gc
import random
import threading
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from chairlift import ContinuousBatchingConfig, attach

ACTIVE = 200


def resident() -> float:
    """Resident memory of this process in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    minutes = parser.parse_args().minutes
    generator = random.Random(0)
    shape = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    model = attach(LlamaForCausalLM(shape).eval())
    config = ContinuousBatchingConfig(page_size=16, num_blocks=600, max_batch_tokens=512, max_requests_per_batch=64)
    marks: list[tuple[float, int]] = []
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        active: set[str] = set()
        num_done = num_tokens = 0
        begin = last = time.monotonic()
        while time.monotonic() - begin < minutes * 60:
            while len(active) < ACTIVE:
                prompt = [generator.randrange(512) for _ in range(generator.choice((1, 5, 40, 200)))]
                request_id = manager.add_request(
                    prompt,
                    max_new_tokens=generator.randint(1, 60),
                    streaming=generator.random() < 0.3,
                    temperature=generator.choice((0.0, 0.8)),
                    seed=generator.randrange(1000),
                    repetition_penalty=generator.choice((1.0, 1.2)),
                )
                assert request_id is not None
                active.add(request_id)
                if generator.random() < 0.1:
                    manager.cancel_request(generator.choice(sorted(active)))
            output = manager.get_result(timeout=30)
            assert output is not None, "no result for 30 seconds: something is lost"
            if output.is_finished():
                active.remove(output.request_id)
                num_done += 1
                num_tokens += len(output.generated_tokens)
            if generator.random() < 0.0005:
                with manager.pause(), torch.no_grad():
                    model.model.norm.weight.mul_(1.0)
            if time.monotonic() - last > 30:
                last = time.monotonic()
                gc.collect()
                marks.append((resident(), threading.active_count()))
                print(
                    f"{last - begin:5.0f} s: {num_done} requests, {num_tokens} tokens, {marks[-1][0]:.0f} MiB, ", end=""
                )
                print(f"{marks[-1][1]} threads; {manager.stats()}", flush=True)
        for request_id in active:
            manager.cancel_request(request_id)
        num_left = sum(output.is_finished() for output in manager)
        assert num_left == len(active), f"{len(active) - num_left} requests have vanished"
        assert manager.stats().used_blocks == 0, manager.stats()
    settled = marks[len(marks) // 4 :]
    assert settled[-1][0] < settled[0][0] * 1.05 + 8, f"memory grew: {settled}"
    assert settled[-1][1] <= settled[0][1], f"threads grew: {settled}"
    print(f"flat: {settled[0][0]:.0f} MiB -> {settled[-1][0]:.0f} MiB")


if __name__ == "__main__":
    main()
