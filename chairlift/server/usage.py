"""What a request has cost, in tokens."""

from collections.abc import Sequence
from typing import Any

from chairlift.request import GenerationOutput
from chairlift.text.answer import Delta

# What OpenAI counts and this server has none of: clients that add usages up stumble over counts that are not there.
_NO_PROMPT = dict.fromkeys(("audio_tokens", "image_tokens", "cache_write_tokens"), 0)
_NO_COMPLETION = dict.fromkeys(("audio_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"), 0)


def usage(
    outputs: Sequence[GenerationOutput], num_per_prompt: int = 1, num_reasoning: int | None = None
) -> dict[str, Any]:
    """From the terminal outputs of all choices, those of one prompt side by side; a prompt counts once.
    `num_reasoning`: tokens of reasoning in all choices, where there may be some."""
    prompts = outputs[::num_per_prompt]
    prompt_tokens = sum(len(output.prompt_ids) for output in prompts)
    completion_tokens = sum(len(output.generated_tokens) for output in outputs)
    cached = sum(output.num_cached_tokens for output in prompts)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached, "text_tokens": prompt_tokens, **_NO_PROMPT},
    }
    if num_reasoning is not None:
        told = {"reasoning_tokens": num_reasoning, "text_tokens": completion_tokens - num_reasoning}
        counts["completion_tokens_details"] = told | _NO_COMPLETION
    return counts


def reasoning_tokens(deltas: Sequence[Delta]) -> int:
    """Tokens of reasoning in these deltas."""
    return sum(len(delta.positions) for delta in deltas if delta.kind == "reasoning")
