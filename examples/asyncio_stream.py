"""Several chats at once from asyncio: one coroutine per chat, one engine for all."""

import asyncio

import torch

from chairlift import GenerationConfig, attach
from chairlift.model.loader import load_smollm2

model, tokenizer = load_smollm2(dtype=torch.bfloat16)
attach(model)


async def chat(manager, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    request_id = manager.add_request(prompt, streaming=True)
    tokens: list[int] = []
    async for output in manager.stream(request_id):  # sleeps on the event loop between outputs
        tokens += output.new_tokens
        print(f"{request_id}: {len(tokens)} tokens")
    return tokenizer.decode(tokens, skip_special_tokens=True)


async def main() -> None:
    questions = ["Name a cat breed.", "What is snow?", "Who was Ada Lovelace?"]
    with model.continuous_batching_context_manager(GenerationConfig(max_new_tokens=24, do_sample=False)) as manager:
        answers = await asyncio.gather(*(chat(manager, question) for question in questions))
    for question, answer in zip(questions, answers, strict=True):
        print(f"> {question}\n{answer}\n")


asyncio.run(main())
