"""Requests come while others run; one is read token by token, one is cancelled, one is waited for."""

import torch

from chairlift import GenerationConfig, attach
from chairlift.model.loader import load_smollm2

model, tokenizer = load_smollm2(dtype=torch.bfloat16)
attach(model)


def prompt(question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


# The manager runs the engine in a background thread; leaving the block finishes what is queued, then ends the thread.
with model.continuous_batching_context_manager(GenerationConfig(max_new_tokens=48, do_sample=False)) as manager:
    story = manager.add_request(prompt("Tell me a story about a chairlift."), streaming=True)
    answer = manager.add_request(prompt("What is the capital of France?"))
    endless = manager.add_request(prompt("Count to a million."), max_new_tokens=1000)

    # Each output of a streaming request brings the tokens since the last one; the answers of others are not touched.
    for output in manager.request_id_iter(story):
        print(tokenizer.decode(output.new_tokens, skip_special_tokens=True), end="", flush=True)
    print(f"\n[{output.finish_reason}]")

    # A cancelled request still ends in one output, with the tokens that it had.
    manager.cancel_request(endless)
    cancelled = manager.get_result(endless)
    assert cancelled is not None
    print(f"cancelled after {len(cancelled.generated_tokens)} tokens: {cancelled.status.name}")

    result = manager.get_result(answer)
    assert result is not None
    print(tokenizer.decode(result.generated_tokens, skip_special_tokens=True))
