"""Every request brings its own sampling arguments; all of them run in the same forward passes."""

import torch

from chairlift import GenerationConfig, attach
from chairlift.model.loader import load_smollm2

model, tokenizer = load_smollm2(dtype=torch.bfloat16)
attach(model)
messages = [{"role": "user", "content": "Name a fruit and say why you like it."}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
banana = tokenizer.encode(" banana", add_special_tokens=False)[0]


def never_repeat(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor of our own: no token that was seen before.  token_ids: so far; logits: [vocab]."""
    logits[token_ids] = -torch.inf
    return logits


requests = {
    "greedy": {"temperature": 0},
    "seed 7": {"temperature": 0.9, "top_p": 0.95, "seed": 7},
    "seed 7 again": {"temperature": 0.9, "top_p": 0.95, "seed": 7},
    "seed 8": {"temperature": 0.9, "top_p": 0.95, "seed": 8},
    "penalised": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "bananas": {"temperature": 0, "logit_bias": {banana: 8.0}},
    "own processor": {"temperature": 0, "logits_processor": never_repeat},
    "with logprobs": {"temperature": 0, "logprobs": 2, "max_new_tokens": 4},
}

with model.continuous_batching_context_manager(GenerationConfig(max_new_tokens=24)) as manager:
    for name, sampling in requests.items():
        manager.add_request(prompt, request_id=name, **sampling)
    outputs = {output.request_id: output for output in manager}

for name in requests:
    print(f"{name:14} {tokenizer.decode(outputs[name].generated_tokens, skip_special_tokens=True)!r}")

# A seed gives the same tokens whatever else runs beside it.
assert outputs["seed 7"].generated_tokens == outputs["seed 7 again"].generated_tokens

print("\ntoken, its logprob, and the alternatives at that position:")
scored = outputs["with logprobs"]
for token, logprob, alternatives in zip(scored.generated_tokens, scored.logprobs, scored.top_logprobs, strict=True):
    print(f"{tokenizer.decode([token])!r:12} {logprob:7.3f}  {alternatives}")
