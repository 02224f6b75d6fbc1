"""What the host does per row and step: scheduling, index arrays, commit. The device is a null device.

    python -m benchmarks host [--waiting 10000]

Prints microseconds per row and step while N sequences decode (page 256, one group of layers), the median of the steps.
"""

import argparse
import statistics
import time

from chairlift.cache.cache import KVCache
from chairlift.cache.layout import LayerSpec, plan_layout
from chairlift.kernels import KVLayout, Scratch, build_attention_plan
from chairlift.params import SamplingParams
from chairlift.request import Request
from chairlift.run.inputs import SlotState
from chairlift.run.runner import StepResult
from chairlift.schedule.policy import Fifo
from chairlift.schedule.scheduler import Scheduler

PAGE, PROMPT, STEPS = 256, 200, 300


def measure(num_rows: int, num_waiting: int) -> dict[str, float]:
    """Median microseconds per row of each part of a step."""
    layout = plan_layout([LayerSpec(index=0, window=None, num_kv_heads=3, head_dim=64)], PAGE, 2)
    scheduler = Scheduler(
        KVCache(layout, num_rows * 4), Fifo(), max_batch_tokens=8192, max_rows=num_rows, safety_margin=0.0
    )
    slots = SlotState(num_rows, 1, 8)
    kv_layout = KVLayout(page_size=PAGE, num_kv_heads=3, head_dim=64, block_stride=768, token_stride=3)
    scratch = Scratch()
    params = SamplingParams(max_new_tokens=STEPS * 3)
    for i in range(num_rows + num_waiting):
        prompt = tuple((i * 7 + k) % 97 for k in range(PROMPT))
        scheduler.add(Request(request_id=str(i), prompt_ids=prompt, params=params, max_length=4 * PAGE, seed=0))
    times: dict[str, list[float]] = {"schedule": [], "inputs": [], "attention plan": [], "commit": []}
    done = 0
    while done < STEPS:
        begin = time.perf_counter()
        batch = scheduler.schedule()
        assert batch is not None
        scheduled = time.perf_counter()
        slots.apply(batch.seats, batch.table_updates)
        inputs = slots.build(batch.rows)
        slots.slot_mapping(0, inputs, PAGE)
        tables = slots.block_tables(0, inputs, PAGE)
        built = time.perf_counter()
        build_attention_plan(inputs.counts, inputs.starts + inputs.counts, tables, layout=kv_layout, scratch=scratch)
        planned = time.perf_counter()
        scheduler.commit(batch, StepResult(tokens=[5] * len(inputs.sampled)))
        ended = time.perf_counter()
        if len(batch.rows) == num_rows == batch.num_tokens:
            done += 1
            marks = (begin, scheduled, built, planned, ended)
            for name, first, last in zip(times, marks, marks[1:], strict=False):
                times[name].append((last - first) * 1e6 / num_rows)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=0, help="requests that wait meanwhile")
    waiting = parser.parse_args().waiting
    print(f"microseconds per row and step, {waiting} waiting")
    for num_rows in (1, 64, 256, 1024):
        parts = measure(num_rows, waiting)
        host = parts["schedule"] + parts["inputs"] + parts["commit"]
        detail = ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
        print(f"{num_rows:5} rows: {host:6.2f}   ({detail})")


if __name__ == "__main__":
    main()
