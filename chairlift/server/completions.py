"""/v1/completions: from a body to requests of the engine, and from their outputs to completions."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from chairlift.request import GenerationOutput
from chairlift.server.constraints import grammar_of
from chairlift.server.errors import ApiError
from chairlift.server.logprobs import CompletionLogprobs
from chairlift.server.protocol import DEFAULT_MAX_TOKENS, CompletionBody
from chairlift.server.service import Job, Service
from chairlift.server.sse import DONE, EventMaker, event
from chairlift.server.usage import usage
from chairlift.text.answer import Answer
from chairlift.text.vocabulary import Vocabulary


def prepare_completion(service: Service, body: CompletionBody) -> Job:
    """Tokenise and arrange; beside the event loop."""
    prompts = body.prompts()
    inputs = [
        service.encode(prompt, body.add_special_tokens) if isinstance(prompt, str) else prompt for prompt in prompts
    ]
    vocabulary = service.vocabulary(body.skip_special_tokens)
    sampling = vocabulary.arguments(body.sampling()) | {
        "max_new_tokens": DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        "num_return_sequences": body.n or 1,
        "logprobs": body.logprobs,
        "prompt_logprobs": body.logprobs if body.echo else None,
        "grammar": grammar_of(body),
    }
    return Job(
        inputs=inputs,
        sampling=sampling,
        shape=Completion(service.model_name, vocabulary, body, prompts),
        num_answers=body.n or 1,
        max_tokens=body.max_tokens,
        constraint=next(iter(body.constraints()), None),
    )


class Completion:
    """The shape of one answer of /v1/completions."""

    def __init__(
        self, model: str, vocabulary: Vocabulary, body: CompletionBody, prompts: Sequence[str | list[int]]
    ) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._base = {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._vocabulary = vocabulary
        self._num_per_prompt = body.n or 1
        self._echoed = prompts if body.echo else []
        self._wants_logprobs = body.logprobs is not None
        self._includes_usage = body.includes_usage
        self._event = EventMaker(self._base, "choices", {"usage": None} if body.includes_usage else {})
        self._answers: dict[int, Answer] = {}
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._ended: dict[int, GenerationOutput] = {}

    def whole(self, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
        """The unstreamed answer."""
        choices = [self._choice(choice, output) for choice, output in enumerate(outputs)]
        return {**self._base, "choices": choices, "usage": usage(outputs, self._num_per_prompt)}

    def opening(self) -> bytes:
        """A completion begins with its text."""
        return b""

    def chunk(self, choice: int, output: GenerationOutput) -> bytes:
        """What is new in one choice."""
        new = self._choice(choice, output)
        if output.is_finished():
            self._ended[choice] = output
        elif not new["text"] and not new["logprobs"]:
            return b""
        return self._event([new])

    def closing(self) -> bytes:
        """The usage, if asked for."""
        if not self._includes_usage:
            return DONE
        outputs = [self._ended[choice] for choice in sorted(self._ended)]
        return event({**self._base, "choices": [], "usage": usage(outputs, self._num_per_prompt)}) + DONE

    def failed(self, error: ApiError) -> bytes:
        """The error as an event."""
        return event(error.body()) + DONE

    def _choice(self, choice: int, output: GenerationOutput) -> dict[str, Any]:
        """What an output adds to a choice: all of it, if it is the only one."""
        is_first = choice not in self._answers
        if is_first:
            self._answers[choice] = Answer(self._vocabulary)
            self._logprobs[choice] = CompletionLogprobs(self._vocabulary)
        text = "".join(delta.text for delta in self._answers[choice].feed(output))
        echoes = is_first and bool(self._echoed)
        if echoes:
            prompt = self._echoed[choice // self._num_per_prompt]
            text = (prompt if isinstance(prompt, str) else self._vocabulary.decode(prompt)) + text
        return {
            "index": choice,
            "text": text,
            "logprobs": self._new_logprobs(choice, output, echoes) if self._wants_logprobs else None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason if output.finish_reason == "stop" else None,
        }

    def _new_logprobs(self, choice: int, output: GenerationOutput, echoes: bool) -> dict[str, Any] | None:
        tokens, start = output.new_tokens, len(output.generated_tokens) - len(output.new_tokens)
        logprobs: list[float | None] = list(output.logprobs[start:])
        alternatives: list[dict[int, float] | None] = list(output.top_logprobs[start:])
        if echoes:
            tokens = output.prompt_ids + tokens
            logprobs = output.prompt_logprobs + logprobs
            alternatives = output.prompt_top_logprobs + alternatives
        return self._logprobs[choice].take(tokens, logprobs, alternatives) if tokens else None
