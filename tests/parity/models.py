"""Tiny random models of many families, and what transformers itself answers with them.

The weights are large, so that the best token wins by far: `Expected` checks that, and whoever compares tokens may ask
for equality.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from chairlift import attach

VOCAB = 97
NEW_TOKENS = 14
SEED = 1
LEAST_GAP = 2e-4  # between the two best logits; errors are mostly 1e-5

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


LONGROPE = rope(
    "longrope",
    short_factor=[1.0, 1.5, 2.0, 3.0],
    long_factor=[1.0, 2.0, 4.0, 8.0],
    original_max_position_embeddings=16,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 4},
    "llama-dynamic": {"model_type": "llama", "max_position_embeddings": 16, **rope("dynamic", factor=8.0)},
    "llama-linear": {"model_type": "llama", **rope("linear", factor=4.0)},
    "llama-yarn": {"model_type": "llama", **rope("yarn", factor=4.0, original_max_position_embeddings=32)},
    "llama-llama3": {
        "model_type": "llama",
        **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    },
    "llama-longrope": {"model_type": "llama", **LONGROPE},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {
        "num_hidden_layers": 4,
        "sliding_window": 6,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 20.0,
        "query_pre_attn_scalar": 8,
    },
    "gemma3_text": {
        "num_hidden_layers": 4,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 8,
    },
    "phi3-longrope": {"model_type": "phi3", "original_max_position_embeddings": 16, **LONGROPE},
    "olmo2": {},
    "gpt2": {},
    "gptj": {"rotary_dim": 4},
    "stablelm": {},
    "gpt_oss": {
        "sliding_window": 6,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": EXPERTS,
    "qwen2_moe": {  # says its window in the mask only
        **EXPERTS,
        "num_hidden_layers": 4,
        "shared_expert_intermediate_size": 32,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 4,
    },
    "deepseek_v3": {
        **MLA,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
}
LENGTH_DEPENDENT = {"llama-dynamic", "llama-longrope", "phi3-longrope"}  # one dense forward is not what was generated


def build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    settings = {"model_type": family, **COMMON, **FAMILIES.get(family, {}), **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.5 * noise if parameter.ndim >= 2 else parameter + 0.2 * noise)
    model.generation_config.eos_token_id = None
    return attach(model.eval().to(dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The answer of `model.generate` to one prompt alone: [NEW_TOKENS] each."""

    tokens: list[int]
    logprobs: torch.Tensor


def expected(model: PreTrainedModel, prompt: list[int], *, dense: bool = True) -> Expected:
    """Greedy tokens, and their logprobs by a forward pass over all of it at once (`dense`), else by `generate`."""
    with torch.no_grad():
        model(torch.tensor([[0]]))  # dynamic RoPE of transformers remembers a longer prompt until it sees a short one
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.stack(out.logits, 1)[0].float()
    if dense:
        with torch.no_grad():
            logits = model(out.sequences).logits[0, len(prompt) - 1 : -1].float()
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > LEAST_GAP, "nothing can be said about near ties"
    tokens = out.sequences[0, len(prompt) :]
    logprobs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return Expected(tokens=tokens.tolist(), logprobs=logprobs)


def random_tokens(seed: int, length: int) -> list[int]:
    return torch.randint(5, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PREFIX = random_tokens(100, 21)
PROMPTS = {
    False: [random_tokens(seed, length) for seed, length in enumerate((3, 9, 17, 33, 1, 15, 6))],
    True: [PREFIX[:keep] + random_tokens(seed, more) for seed, (keep, more) in enumerate(
        ((21, 3), (21, 9), (10, 1), (21, 3), (4, 12), (19, 1), (21, 1))
    )],
}  # fmt: skip


@cache
def served(family: str) -> PreTrainedModel:
    return build(family)


@cache
def answers(family: str, shared: bool) -> list[Expected]:
    """To `PROMPTS[shared]`."""
    return [expected(served(family), prompt, dense=family not in LENGTH_DEPENDENT) for prompt in PROMPTS[shared]]
