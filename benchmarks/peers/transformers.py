"""transformers' own continuous batching, sdpa, pages of 64."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from benchmarks.peers.works import BATCH_TOKENS, Channel, Meter, Prompts, Setting, arguments, serve, vocabulary


class Transformers:
    def __init__(self, model: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model / "hf", dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        self._manager: Any = None

    def prepare(self, setting: Setting) -> None:
        if self._manager is not None:
            self._manager.stop()
            gc.collect()
        self._manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(max_new_tokens=128, eos_token_id=-1, do_sample=False),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=512, page_size=64, max_batch_tokens=BATCH_TOKENS, allow_block_sharing=setting.cached
            ),
        )
        self._manager.warmup()
        self._manager.start()

    def generate(self, prompts: Prompts, counts: Sequence[int], sampled: bool) -> int:
        for prompt, count in zip(prompts, counts, strict=True):
            self._manager.add_request(list(prompt), max_new_tokens=count)
        done = finished = 0
        while finished < len(prompts):
            if (result := self._manager.get_result(timeout=1)) and result.is_finished():
                finished += 1
                done += len(result.generated_tokens)
        return done


def main() -> None:
    channel, args = Channel(), arguments()
    torch.set_num_threads(args.threads)
    meter = Meter(Transformers(args.model), vocabulary(args.model), args.tiny)
    hello = {"works": ["w64"], "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
    serve(channel, hello, meter.measure)


if __name__ == "__main__":
    main()
