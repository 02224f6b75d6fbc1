"""What a request has cost, in tokens."""

from collections.abc import Sequence
from typing import Any

from chairlift.request import GenerationOutput
from chairlift.text.answer import Delta


def usage(
    outputs: Sequence[GenerationOutput], num_per_prompt: int = 1, num_reasoning: int | None = None
) -> dict[str, Any]:
    """From the terminal outputs of all choices, those of one prompt side by side; a prompt counts once.
    `num_reasoning`: tokens of reasoning in all choices, where there may be some."""
    prompts = outputs[::num_per_prompt]
    prompt_tokens = sum(len(output.prompt_ids) for output in prompts)
    completion_tokens = sum(len(output.generated_tokens) for output in outputs)
    details = {} if num_reasoning is None else {"completion_tokens_details": {"reasoning_tokens": num_reasoning}}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in prompts)},
        **details,
    }


def reasoning_tokens(deltas: Sequence[Delta]) -> int:
    """Tokens of reasoning in these deltas."""
    return sum(len(delta.positions) for delta in deltas if delta.kind == "reasoning")
