"""What a request has cost, in tokens."""

from collections.abc import Sequence
from typing import Any

from chairlift.request import GenerationOutput


def usage(outputs: Sequence[GenerationOutput], num_per_prompt: int = 1) -> dict[str, Any]:
    """From the terminal outputs of all choices, those of one prompt side by side; a prompt counts once."""
    prompts = outputs[::num_per_prompt]
    prompt_tokens = sum(len(output.prompt_ids) for output in prompts)
    completion_tokens = sum(len(output.generated_tokens) for output in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in prompts)},
    }
