"""Reinforcement learning: roll out, train the very same model in place, roll out again.

The engine runs on the parameters of the model that is trained: there is no second copy and nothing to synchronise.
The reward is a toy: answers should use the letter "e".
"""

import torch

from chairlift import GenerationConfig, attach
from chairlift.model.loader import load_smollm2

ROUNDS, SAMPLES = 3, 4

model, tokenizer = load_smollm2(dtype=torch.bfloat16)
attach(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
chats = [[{"role": "user", "content": question}] for question in ("Describe a tree.", "Describe the sea.")]
prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)


def reward(tokens: list[int]) -> float:
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return text.count("e") / max(len(text), 1)


def policy_loss(prompt: list[int], answer: list[int], advantage: float) -> torch.Tensor:
    """REINFORCE: the summed logprob of the answer, weighted by how much better than average it was."""
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])
    return -advantage * logprobs.sum()


with model.continuous_batching_context_manager(GenerationConfig(max_new_tokens=16, do_sample=True)) as manager:
    for step in range(ROUNDS):
        # Each prompt is computed once and its cache shared by its samples.
        manager.add_requests(prompts, num_return_sequences=SAMPLES, temperature=1.0, seed=step)
        outputs = list(manager)  # ends when nothing is queued or running
        rewards = [reward(output.generated_tokens) for output in outputs]
        baseline = sum(rewards) / len(rewards)
        print(f"round {step}: mean reward {baseline:.4f} over {len(outputs)} answers")

        for output, value in zip(outputs, rewards, strict=True):
            loss = policy_loss(output.prompt_ids, output.generated_tokens, value - baseline)
            (loss / len(outputs)).backward()

        with manager.pause():  # the engine is parked between two steps: the weights are ours
            optimizer.step()
            optimizer.zero_grad()
        manager.reset_prefix_cache()  # what was cached belongs to the old weights
