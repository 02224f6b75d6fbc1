"""Tiny random models, what they should say, and a hand on the engine's steps."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from chairlift import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationOutput, attach

VOCAB = 97
CONTEXT = 64
WAIT = 30.0  # seconds until a test that hangs is called one

_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
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


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return attach(LlamaForCausalLM(LlamaConfig(**(_SIZES | changes))).eval())


def mistral(window: int, **changes: Any) -> Any:
    torch.manual_seed(1)
    config = MistralConfig(**(_SIZES | {"sliding_window": window} | changes))
    return attach(MistralForCausalLM(config).eval())


def gemma2(softcap: float = 5.0, window: int = 4, **changes: Any) -> Any:
    torch.manual_seed(2)
    config = Gemma2Config(
        **(_SIZES | {"attn_logit_softcapping": softcap, "sliding_window": window, "query_pre_attn_scalar": 8} | changes)
    )
    config._attn_implementation = "eager"  # the one that applies the soft cap
    return attach(Gemma2ForCausalLM(config).eval())


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(5, VOCAB, (length,), generator=generator).tolist()


def expected(model: Any, tokens: Sequence[int], count: int, **settings: Any) -> list[int]:
    """What `model.generate` adds to `tokens`, greedy."""
    ids = torch.tensor([list(tokens)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0, **settings
    )
    return out[0, len(tokens) :].tolist()


def small(**changes: Any) -> ContinuousBatchingConfig:
    """A small pool of small pages, so that every boundary is near."""
    return ContinuousBatchingConfig(**({"page_size": 4, "num_blocks": 64, "safety_margin": 0.0} | changes))


@contextmanager
def serving(model: Any, **changes: Any) -> Iterator[ContinuousBatchingManager]:
    """A running manager with a small pool."""
    with model.continuous_batching_context_manager(
        continuous_batching_config=small(**changes), warmup=False
    ) as manager:
        yield manager


def answer(manager: ContinuousBatchingManager, tokens: Sequence[int], count: int | None = None, **sampling: Any) -> Any:
    """The terminal output of one request."""
    request_id = manager.add_request(list(tokens), max_new_tokens=count, **sampling)
    return last(manager, request_id)


def last(manager: ContinuousBatchingManager, request_id: str | None) -> GenerationOutput:
    """The terminal output of this request; fails if there is none in time."""
    assert request_id is not None
    while True:
        output = manager.get_result(request_id, timeout=WAIT)
        assert output is not None, f"{request_id} ended without a terminal output"
        if output.is_finished():
            return output


def assert_at_rest(manager: ContinuousBatchingManager) -> None:
    """Nothing runs, waits or holds a block."""
    stats = manager.stats()
    assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0), stats
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks


class Steps:
    """Holds the engine at its forward passes, through a hook on the user's model that the engine's shadow shares."""

    def __init__(self, model: nn.Module, held: bool = True) -> None:
        self.sizes: list[int] = []  # tokens of each forward pass so far, the one that is held included
        self._model = model
        self._held = held
        self._allowed = 0
        self._changed = threading.Condition()

    def __enter__(self) -> "Steps":
        self._hook = self._model.register_forward_pre_hook(self._before, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._hook.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.current_thread().name != "chairlift-engine":
            return
        ids: Tensor = args[0] if args else kwargs["input_ids"]
        with self._changed:
            self.sizes.append(ids.shape[1])
            self._changed.notify_all()
            number = len(self.sizes)
            self._changed.wait_for(lambda: not self._held or self._allowed >= number, timeout=WAIT)

    def let_go_to(self, number: int) -> None:
        """Let the engine go on, and hold it in forward pass `number`, counted from 1, should it come there."""
        with self._changed:
            self._allowed = number - 1
            self._changed.notify_all()

    def at(self, number: int) -> None:
        """Let the engine go on until it is held in forward pass `number`."""
        with self._changed:
            self.let_go_to(number)
            assert self._changed.wait_for(lambda: len(self.sizes) >= number, timeout=WAIT)

    def release(self) -> None:
        """Let the engine go."""
        with self._changed:
            self._held = False
            self._changed.notify_all()


def scripted(tokens: Sequence[int], num_prompt: int) -> Callable[[list[int], Tensor], Tensor]:
    """A logits processor that makes the answer be `tokens`."""

    def process(token_ids: list[int], logits: Tensor) -> Tensor:
        forced = torch.full_like(logits, float("-inf"))
        forced[tokens[len(token_ids) - num_prompt]] = 0.0
        return forced

    return process
