"""OpenVINO GenAI: its continuous batching pipeline, bf16 arithmetic, the KV cache in the precision that it chooses."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.works import BATCH_TOKENS, Channel, Meter, Prompts, Setting, arguments, serve, vocabulary

CACHE_GB, LONG_CACHE_GB = 4, 8


class OpenVINO:
    def __init__(self, model: Path, threads: int) -> None:
        self._model = str(model / "openvino")
        self._properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": threads}
        self._pipeline: Any = None

    def prepare(self, setting: Setting) -> None:
        self._pipeline = None
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = LONG_CACHE_GB if setting.cached else CACHE_GB
        scheduler.max_num_batched_tokens = BATCH_TOKENS
        scheduler.max_num_seqs = setting.rows
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = setting.cached
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(self._model, scheduler, "CPU", self._properties)

    def generate(self, prompts: Prompts, counts: Sequence[int], sampled: bool) -> int:
        configs = []
        for count in counts:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos = count, True
            config.set_eos_token_id(0)  # it wants one, even to ignore it
            config.do_sample, config.apply_chat_template = False, False
            configs.append(config)
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        return sum(len(result.m_generation_ids[0]) for result in self._pipeline.generate(inputs, configs))


def main() -> None:
    channel, args = Channel(), arguments()
    meter = Meter(OpenVINO(args.model, args.threads), vocabulary(args.model), args.tiny)
    works = ["w64", "one_stream", "prefill", "rows256", "shared_prefix", "long_context", "long_context_8"]
    serve(channel, {"works": works, "versions": {"openvino-genai": version("openvino-genai")}}, meter.measure)


if __name__ == "__main__":
    main()
