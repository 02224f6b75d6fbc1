"""/v1/chat/completions: from a body to requests of the engine, and from their outputs to messages."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from chairlift.params import Grammar
from chairlift.request import GenerationOutput
from chairlift.server.constraints import grammar_of
from chairlift.server.errors import ApiError
from chairlift.server.logprobs import chat_logprobs
from chairlift.server.protocol import ChatBody
from chairlift.server.service import Job, Service, Shape
from chairlift.server.sse import DONE, EventMaker, event
from chairlift.server.usage import reasoning_tokens, usage
from chairlift.text.answer import Delta
from chairlift.text.chat import Turn

# Arguments of the rendering itself.
NOT_FOR_TEMPLATES = {
    "self",
    "tokenizer",
    "conversation",
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "documents",
    "chat_template",
    "grammar",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "tokenizer_kwargs",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
}


def prepare_chat(service: Service, body: ChatBody) -> Job:
    """Render and arrange; beside the event loop."""
    turn = turn_of(
        service,
        [message.plain() for message in body.messages],
        tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        tool_choice=body.tool_choice if isinstance(body.tool_choice, str | None) else body.tool_choice.model_dump(),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        grammar=grammar_of(body),
        template_kwargs=body.chat_template_kwargs,
    )
    return job_of(
        service,
        turn,
        Chat(service.model_name, turn, body),
        sampling=body.sampling(),
        limit=body.limit,
        num_answers=body.n or 1,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        constraints=body.constraints(),
    )


def job_of(
    service: Service,
    turn: Turn,
    shape: Shape,
    *,
    sampling: dict[str, Any],
    limit: int | None,
    logprobs: int | None,
    constraints: Sequence[str],
    num_answers: int = 1,
    prompt_field: str = "messages",
) -> Job:
    """What answers a conversation, whatever the answer looks like. limit: new tokens; None: as many as fit."""
    arguments = turn.vocabulary.arguments(sampling) | {
        "max_new_tokens": service.room(turn.prompt_ids) if limit is None else limit,
        "num_return_sequences": num_answers,
        "logprobs": logprobs,
        "grammar": turn.grammar,
    }
    return Job(
        inputs=[turn.prompt_ids],
        sampling=arguments,
        shape=shape,
        num_answers=num_answers,
        max_tokens=limit,
        prompt_field=prompt_field,
        constraint=(*constraints, "tools")[0],
    )


def turn_of(
    service: Service,
    messages: Sequence[dict[str, Any]],
    *,
    tools: Sequence[dict[str, Any]] = (),
    tool_choice: str | dict[str, Any] | None = None,
    parallel_tool_calls: bool = True,
    grammar: Grammar | None = None,
    template_kwargs: dict[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> Turn:
    """A conversation, ready for the engine. Raises ApiError for template arguments that are none."""
    if taken := sorted(NOT_FOR_TEMPLATES & (template_kwargs or {}).keys()):
        raise ApiError(400, f"chat_template_kwargs cannot set {taken[0]}", param="chat_template_kwargs")
    return service.chat_format.turn(
        [message | {"role": "system"} if message["role"] == "developer" else message for message in messages],
        tools=tools or None,
        tool_choice=tool_choice or "auto",
        parallel_tool_calls=parallel_tool_calls,
        grammar=grammar,
        add_generation_prompt=add_generation_prompt,
        **(template_kwargs or {}),
    )


class Chat:
    """The shape of one answer of /v1/chat/completions."""

    def __init__(self, model: str, turn: Turn, body: ChatBody) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._base = {"id": self.id, "object": "", "created": int(time.time()), "model": model}
        self._vocabulary = turn.vocabulary
        self._num_choices = body.n or 1
        self._wants_logprobs = bool(body.logprobs)
        self._includes_usage = body.includes_usage
        self._chunk_base = {**self._base, "object": "chat.completion.chunk"}
        self._make_event = EventMaker(self._chunk_base, "choices", {"usage": None} if body.includes_usage else {})
        self._answers = [turn.answer() for _ in range(self._num_choices)]
        self._num_reasoning = 0
        self._ended: dict[int, GenerationOutput] = {}

    # ------------------------------------------------------------------ whole

    def whole(self, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
        """The unstreamed answer."""
        return {
            **self._base,
            "object": "chat.completion",
            "choices": [self._choice(choice, output) for choice, output in enumerate(outputs)],  # counts as it goes
            "usage": self._usage(outputs),
        }

    def _choice(self, choice: int, output: GenerationOutput) -> dict[str, Any]:
        answer = self._answers[choice]
        deltas = answer.feed(output)
        self._num_reasoning += reasoning_tokens(deltas)
        calls = [
            {
                "id": call.tool_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.tool_calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if calls:
            message |= {"content": answer.content or None, "tool_calls": calls}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        return {
            "index": choice,
            "message": message,
            "logprobs": self._logprobs(output, deltas),
            "finish_reason": answer.finish_reason,
            "stop_reason": output.stop_reason if output.finish_reason == "stop" else None,
        }

    # ------------------------------------------------------------------ streamed

    def opening(self) -> bytes:
        """The role, of each choice."""
        role = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._event(choice, role, None) for choice in range(self._num_choices))

    def chunk(self, choice: int, output: GenerationOutput) -> bytes:
        """What is new in one choice; its finish reason comes in a chunk of its own."""
        answer = self._answers[choice]
        deltas = answer.feed(output)
        self._num_reasoning += reasoning_tokens(deltas)
        events = [self._event(choice, _delta(each), self._logprobs(output, [each])) for each in deltas]
        if output.is_finished():
            self._ended[choice] = output
            stop_reason = output.stop_reason if output.finish_reason == "stop" else None
            events.append(self._event(choice, {}, None, finish_reason=answer.finish_reason, stop_reason=stop_reason))
        return b"".join(events)

    def closing(self) -> bytes:
        """The usage, if asked for."""
        if not self._includes_usage:
            return DONE
        outputs = [self._ended[choice] for choice in range(self._num_choices)]
        return event({**self._chunk_base, "choices": [], "usage": self._usage(outputs)}) + DONE

    def failed(self, error: ApiError) -> bytes:
        """The error as an event."""
        return event(error.body()) + DONE

    def _event(self, choice: int, delta: dict[str, Any], logprobs: Any, **end: Any) -> bytes:
        return self._make_event([{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": None, **end}])

    def _usage(self, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
        return usage(outputs, self._num_choices, self._num_reasoning)

    def _logprobs(self, output: GenerationOutput, deltas: Sequence[Delta]) -> dict[str, Any] | None:
        """Of the tokens that spell the content in these deltas."""
        if not self._wants_logprobs:
            return None
        places = [place for delta in deltas if delta.kind == "content" for place in delta.positions]
        return chat_logprobs(self._vocabulary, output, places)


def _delta(delta: Delta) -> dict[str, Any]:
    match delta.kind:
        case "content":
            return {"content": delta.text}
        case "reasoning":
            return {"reasoning_content": delta.text}
    function: dict[str, Any] = {"arguments": delta.text}
    call: dict[str, Any] = {"index": delta.index, "function": function}
    if delta.tool_id is not None:
        function["name"] = delta.tool_name
        call |= {"id": delta.tool_id, "type": "function"}
    return {"tool_calls": [call]}
