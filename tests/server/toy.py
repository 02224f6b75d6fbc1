"""A tiny random model with a real tokenizer of its own, and servers over it, in this process and in others."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from chairlift import ContinuousBatchingConfig, ContinuousBatchingManager, attach
from chairlift.model.loader import load_smollm2
from tests.cases.tiny import llama

CONTEXT = 2048
WAIT = 60.0  # seconds until a test that hangs is called one

TEXTS = [
    "The quick brown fox jumps over the lazy dog, again and again and again.",
    '{"name": "value", "list": [1, 2, 3], "nothing": null, "true": false}',
    "Grüße aus Köln. 你好世界。日本語のテキスト。🙂👩‍👩‍👧‍👦🇩🇪",
    "system user assistant tool call the weather in Paris is 21 degrees",
]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer() -> Any:
    """A byte-level BPE of 400 tokens: what a random model says is often half a character."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXTS * 3, trainer)
    wrapped: Any = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    wrapped.chat_template = TEMPLATE
    return wrapped


def model(vocab_size: int) -> Any:
    """Two layers, random, with EOS."""
    return llama(vocab_size=vocab_size, max_position_embeddings=CONTEXT, eos_token_id=0)


def manager(**changes: Any) -> tuple[ContinuousBatchingManager, Any]:
    """A running manager of the toy, and its tokenizer."""
    words = tokenizer()
    return started(model(len(words)), **changes), words


def smollm2(**changes: Any) -> tuple[ContinuousBatchingManager, Any]:
    """A running manager of SmolLM2, and its tokenizer."""
    loaded, words = load_smollm2(dtype=torch.bfloat16)
    return started(attach(loaded), **({"num_blocks": 64, "page_size": 64} | changes)), words


def started(loaded: Any, **changes: Any) -> ContinuousBatchingManager:
    settings: dict[str, Any] = {"page_size": 8, "num_blocks": 1024, "scheduler_type": "fair_share"}
    made = loaded.init_continuous_batching(continuous_batching_config=ContinuousBatchingConfig(**(settings | changes)))
    made.start()
    return made


@dataclass
class Live:
    """A server in a process of its own."""

    process: "subprocess.Popen[str]"
    url: str

    def end(self, sent: int = signal.SIGTERM) -> int:
        """Signal it and wait for its exit status."""
        self.process.send_signal(sent)
        return self.process.wait(WAIT)


@contextlib.contextmanager
def live(*arguments: str) -> Iterator[Live]:
    """`python -m tests.server.live ARGUMENTS` on a free port of this machine."""
    command = [sys.executable, "-m", "tests.server.live", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            ready, _, _ = select.select([process.stdout], [], [], 4 * WAIT)
            assert ready, "the server did not start"
            yield Live(process, process.stdout.readline().strip())
        finally:
            process.kill()
