"""Text in, text out: a model, its tokenizer and a running engine in one object.

Batching, sampling and memory are the engine's; what a request may ask for is `SamplingParams`'. This module only
turns text into tokens and back.
"""

import queue
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias

from transformers import GenerationConfig, PreTrainedModel

from chairlift.api import answer_all, init_continuous_batching
from chairlift.config import ContinuousBatchingConfig
from chairlift.errors import EngineDeadError, InvalidRequestError
from chairlift.manager import ContinuousBatchingManager
from chairlift.model.loader import load
from chairlift.request import GenerationOutput
from chairlift.text.answer import Answer
from chairlift.text.chat import Message, render
from chairlift.text.vocabulary import Vocabulary

Prompt: TypeAlias = str | Sequence[int]  # text, or the token ids themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer. Durations are in seconds; None where there was no such moment (a request that failed early)."""

    text: str  # ends before a stop string; without special tokens
    output: GenerationOutput  # tokens, logprobs, status and times as the engine gave them

    @property
    def token_ids(self) -> list[int]:
        """The tokens of `text`, special ones included."""
        return self.output.generated_tokens

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length", "cancelled", "timeout" or "error"."""
        return self.output.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The token id or the string that ended it."""
        return self.output.stop_reason

    @property
    def error(self) -> str | None:
        """What went wrong with this request, if its finish reason is "error"."""
        return self.output.error

    @property
    def queue_seconds(self) -> float | None:
        """From arrival until it was first scheduled."""
        started = self.output.lifespan[0]
        return None if started < 0 else started - self.output.created_time

    @property
    def first_token_seconds(self) -> float | None:
        """From arrival until the first token."""
        stamps = self.output.timestamps
        return stamps[0] - self.output.created_time if stamps else None

    @property
    def total_seconds(self) -> float | None:
        """From arrival until the end."""
        ended = self.output.lifespan[1]
        return None if ended < 0 else ended - self.output.created_time

    @property
    def tokens_per_second(self) -> float | None:
        """After the first token; None with fewer than two."""
        stamps = self.output.timestamps
        return (len(stamps) - 1) / (stamps[-1] - stamps[0]) if stamps and stamps[-1] > stamps[0] else None

    def __str__(self) -> str:
        return self.text


class LLM:
    """A model that answers text with text, and an engine that runs until `close()` or the end of a `with` block.

    All methods may be called from any thread, and at the same time: their requests share the batch.
    """

    def __init__(
        self,
        model_or_path: PreTrainedModel | str | None = None,
        tokenizer: Any = None,
        *,
        dtype: str = "auto",
        device: str | None = None,
        attn_implementation: str | None = None,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        **config: Any,
    ) -> None:
        """Load what has to be loaded and start the engine.

        model_or_path: a loaded transformers model (then `tokenizer` is needed), a folder, or a name on the Hub; None:
        SmolLM2-135M-Instruct. tokenizer: an object, a folder or a name; None: the one beside the model. dtype, device
        and attn_implementation are for loading. generation_config: defaults of the sampling arguments; None: the
        model's own. config: fields of `ContinuousBatchingConfig`, or the whole of it as `continuous_batching_config`.

        Raises `ConfigError` for settings that make no sense, `UnsupportedModelError` for a model that cannot be
        served, OSError for one that is not there.
        """
        if continuous_batching_config is not None and config:
            raise TypeError(f"give continuous_batching_config or its fields ({', '.join(config)}), not both")
        settings = continuous_batching_config or ContinuousBatchingConfig(**config)
        if isinstance(model_or_path, PreTrainedModel):
            if tokenizer is None or isinstance(tokenizer, str):
                raise TypeError("a model that is loaded already needs its tokenizer, loaded too: LLM(model, tokenizer)")
            self.model = model_or_path
        else:
            name = tokenizer if isinstance(tokenizer, str) else None
            self.model, own = load(
                model_or_path, name, dtype=dtype, device=device, attn_implementation=attn_implementation
            )
            tokenizer = own if name or tokenizer is None else tokenizer
        self.tokenizer: Any = tokenizer
        self._vocabulary = Vocabulary(tokenizer, skip_special_tokens=True)
        self.manager: ContinuousBatchingManager = init_continuous_batching(self.model, generation_config, settings)
        self.manager.warmup()
        self.manager.start()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, progress_bar: bool = False, **sampling: Any
    ) -> list[Completion]:
        """Continue each prompt; blocks until all are done. One prompt is taken as a list of one.

        sampling: see `SamplingParams`. Returns the answers in the order of the prompts, those of one prompt
        (`num_return_sequences`) side by side. Raises `InvalidRequestError` or TypeError for a bad argument before
        anything runs, `EngineDeadError` if the engine fails.
        """
        batch = [prompts] if _is_prompt(prompts) else prompts
        return self._answer([self._encode(prompt) for prompt in batch], sampling, progress_bar)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        progress_bar: bool = False,
        **sampling: Any,
    ) -> list[Completion]:
        """Answer a conversation, or each of several; otherwise as `generate`. A message is a mapping with "role" and
        "content". Raises `InvalidRequestError` if the tokenizer has no chat template or it refuses the messages."""
        conversations: Any = [messages] if _is_conversation(messages) else messages
        return self._answer([self._render(each) for each in conversations], sampling, progress_bar)

    def stream(self, prompt: Prompt | Sequence[Message], **sampling: Any) -> "Stream":
        """Continue one prompt, or answer one conversation, and give the text as it comes."""
        ids = self._render(prompt) if _is_conversation(prompt) else self._encode(prompt)
        return Stream(self.manager, self._vocabulary, ids, sampling)

    def close(self) -> None:
        """End the engine and release what it holds; requests under way fail. May be called again."""
        self.manager.destroy()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(
        self, inputs: Sequence[Sequence[int]], sampling: Mapping[str, Any], progress_bar: bool
    ) -> list[Completion]:
        if not inputs:
            return []
        outputs = answer_all(
            self.manager,
            inputs,
            self._vocabulary.arguments(sampling),
            record_timestamps=True,
            progress_bar=progress_bar,
        )
        return [Completion(text=_text(Answer(self._vocabulary), output), output=output) for output in outputs.values()]

    def _encode(self, prompt: Any) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt  # type: ignore[no-any-return]  # token ids, which the manager checks
        return self._vocabulary.encode(prompt)

    def _render(self, messages: Any) -> list[int]:
        return render(self.tokenizer, messages)


class Stream(Iterator[str]):
    """The pieces of one answer's text, as they come; all of it in `completion` once they have ended."""

    def __init__(
        self,
        manager: ContinuousBatchingManager,
        vocabulary: Vocabulary,
        input_ids: Sequence[int],
        sampling: Mapping[str, Any],
    ) -> None:
        self.completion: Completion | None = None
        self._manager = manager
        self._answer = Answer(vocabulary)
        self._text = ""
        self._arrived: queue.SimpleQueue[GenerationOutput] = queue.SimpleQueue()
        if (sampling.get("num_return_sequences") or 1) != 1:
            raise InvalidRequestError(
                f"num_return_sequences={sampling['num_return_sequences']!r} cannot be streamed as one text: "
                "call stream() for each answer"
            )
        families = manager.submit(
            [input_ids],
            vocabulary.arguments(sampling) | {"num_return_sequences": 1},
            streaming=True,
            record_timestamps=True,
            handler=self._arrived.put,
            bounded=False,
        )
        if not families:
            raise RuntimeError("the manager was stopped")
        self.request_id = families[0][0]

    def __next__(self) -> str:
        """The next piece, never empty. Raises `EngineDeadError` if the engine fails; a fault of this request alone ends
        the stream, and is the completion's `error`."""
        while self.completion is None:
            output = self._arrived.get()
            if output.exception is not None and output.exception is self._manager.cause:
                self._arrived.put(output)  # whoever asks again is told again
                raise EngineDeadError(f"the engine stopped on a fault: {output.exception!r}") from output.exception
            piece = _text(self._answer, output)
            self._text += piece
            if output.is_finished():
                self.completion = Completion(text=self._text, output=output)
            if piece:
                return piece
        raise StopIteration

    def cancel(self) -> None:
        """Ask for the end; the pieces that are there already still come. May be called from a signal handler."""
        self._manager.cancel_request(self.request_id)

    def __del__(self) -> None:
        if getattr(self, "request_id", None) and self.completion is None:
            self.cancel()  # nobody reads the rest


def _text(answer: Answer, output: GenerationOutput) -> str:
    """What is new in an answer's text."""
    return "".join(delta.text for delta in answer.feed(output))


def _is_prompt(value: object) -> bool:
    """Whether this is one prompt, not several."""
    if isinstance(value, str) or getattr(value, "ndim", 0) == 1:
        return True
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], int)


def _is_conversation(value: object) -> bool:
    """Whether this is one conversation, not several, and no prompt."""
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], Mapping)
