"""What cannot be served is refused by name when the engine is built: never wrong tokens."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaForCausalLM,
    PreTrainedModel,
)

from chairlift import UnsupportedModelError, attach
from tests.parity.models import COMMON, EXPERTS, build

LINEAR = {
    **EXPERTS,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
JAMBA = {"num_experts": 2, "mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_offset": 1, "attn_layer_period": 2}
FALCON_H1 = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({}, "layer 0 of MambaForCausalLM is 'linear_attention'"),
    "qwen3_next": (LINEAR, "layer 0 of Qwen3NextForCausalLM is 'linear_attention'"),
    "jamba": (JAMBA, "layer 0 of JambaForCausalLM is 'linear_attention'"),
    "falcon_h1": (FALCON_H1, "layer 0 of FalconH1ForCausalLM is 'hybrid'"),
    "recurrent_gemma": ({}, "layer 0 of RecurrentGemmaForCausalLM is 'linear_attention'"),
    "rwkv": ({}, "layers .* of RwkvForCausalLM do not attend through"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "layer 0 of Lfm2ForCausalLM is 'conv'"),
    "llama4_text": ({"num_local_experts": 2}, "layer 0 of Llama4ForCausalLM is 'chunked_attention'"),
    "bloom": ({}, "layers .* of BloomForCausalLM do not attend through"),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2}, "layers .* of MptForCausalLM do not attend through"),
    "gpt_neo": (
        {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4},
        "layers .* of GPTNeoForCausalLM do not attend through",
    ),
    "diffllama": ({}, "layer 0 attends twice"),
    "doge": ({}, "layer 0 .DogeAttention. has a mask that is neither causal nor a sliding window"),
    "bert": ({}, "layer 0 .BertSelfAttention. has a mask that is neither causal nor a sliding window"),
    "gpt2": ({"reorder_and_upcast_attn": True}, "GPT2LMHeadModel has reorder_and_upcast_attn=True"),
    "gemma3n_text": (
        {
            "num_hidden_layers": 4,
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [64] * 4,
            "num_kv_shared_layers": 2,
        },
        "Gemma3nForCausalLM has num_kv_shared_layers=2",
    ),
}


@pytest.mark.filterwarnings("ignore")  # what transformers says about such models
@pytest.mark.parametrize("model_type", REFUSED)
def test_is_refused_by_name(model_type: str) -> None:
    changes, message = REFUSED[model_type]
    settings = {key: value for key, value in COMMON.items() if key != "layer_types"} | changes
    model = attach(AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).eval())
    with pytest.raises(UnsupportedModelError, match=message):
        model.generate_batch([[1, 2, 3]], max_new_tokens=2)


def test_an_encoder_decoder_is_refused() -> None:
    config = AutoConfig.for_model("t5", vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    model = attach(AutoModelForSeq2SeqLM.from_config(config).eval())
    with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration is an encoder-decoder model"):
        model.generate_batch([[1, 2, 3]], max_new_tokens=2)


def test_a_model_without_a_head_is_refused() -> None:
    model = attach(AutoModel.from_config(AutoConfig.for_model("llama", **COMMON)).eval())
    with pytest.raises(UnsupportedModelError, match="LlamaModel has no language-model head"):
        model.generate_batch([[1, 2, 3]], max_new_tokens=2)


class LooksAround(LlamaForCausalLM):
    """Its logits depend on the tokens of the whole batch, through no attention layer."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        out = super().forward(input_ids, **kwargs)
        out.logits = out.logits + input_ids.float().mean()
        return out


def test_a_model_that_depends_on_the_batch_is_refused() -> None:
    plain: PreTrainedModel = build("llama")
    model = attach(LooksAround(plain.config).eval())
    with pytest.raises(UnsupportedModelError, match="depends on something"):
        model.generate_batch([[1, 2, 3]], max_new_tokens=2)


class Tips(LlamaForCausalLM):
    """Other logits after the last tokens, with its own attention."""

    tipped = 1

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        out = super().forward(input_ids, **kwargs)
        if self.config._attn_implementation == "eager":
            out.logits[:, -self.tipped :] *= -2
        return out


def test_one_token_whose_roundings_tip_a_16_bit_model_over_is_no_reason_to_refuse_it() -> None:
    """A trained model after tokens that make no sense, on a processor that rounds in another way."""
    config = build("llama").config
    model = attach(Tips(config).to(torch.bfloat16).eval())
    assert model.generate_batch([[1, 2, 3]], max_new_tokens=2)
    for dtype, tipped in ((torch.float32, 1), (torch.bfloat16, 2)):
        model = attach(Tips(config).to(dtype).eval())
        model.tipped = tipped
        with pytest.raises(UnsupportedModelError, match="depends on something"):
            model.generate_batch([[1, 2, 3]], max_new_tokens=2)
