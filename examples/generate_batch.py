"""The shortest way in: a list of prompts, all answers at once."""

import torch

from chairlift import GenerationConfig, attach
from chairlift.model.loader import load_smollm2

# Any causal model that transformers loads will do: `attach` adds four methods to it and changes nothing else.
# `chairlift.AutoModelForCausalLM.from_pretrained(...)` loads and attaches in one call.
model, tokenizer = load_smollm2(dtype=torch.bfloat16)
attach(model)

questions = ["Name a cat breed.", "Name a dog breed.", "What is the capital of France?"]
chats = [[{"role": "user", "content": question}] for question in questions]
prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)

# Prompts of any length share forward passes; one that ends makes room for the next at once.
outputs = model.generate_batch(prompts, generation_config=GenerationConfig(max_new_tokens=32, do_sample=False))

for question, output in zip(questions, outputs.values(), strict=True):  # in the order of the prompts
    print(f"> {question}\n{tokenizer.decode(output.generated_tokens, skip_special_tokens=True)}")
    print(f"  ({output.finish_reason}, {len(output.generated_tokens)} tokens)\n")
