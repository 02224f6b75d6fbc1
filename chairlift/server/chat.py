"""/v1/chat/completions: from a body to requests of the engine, and from their outputs to messages."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from chairlift.request import GenerationOutput
from chairlift.server.constraints import grammar_of
from chairlift.server.errors import ApiError
from chairlift.server.logprobs import chat_logprobs
from chairlift.server.protocol import ChatBody, Message, Tool
from chairlift.server.service import Job, Service
from chairlift.server.sse import DONE, event
from chairlift.server.usage import usage
from chairlift.text.answer import Answer, Delta
from chairlift.text.chat import render
from chairlift.text.vocabulary import Vocabulary


def prepare_chat(service: Service, body: ChatBody) -> Job:
    """Render and arrange; beside the event loop."""
    tools = None if body.tool_choice == "none" else body.tools
    tokens = render_messages(service, body.messages, tools, body.chat_template_kwargs)
    vocabulary = service.vocabulary(body.skip_special_tokens)
    sampling = body.sampling() | {
        "max_new_tokens": service.room(tokens) if body.limit is None else body.limit,
        "num_return_sequences": body.n or 1,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        "grammar": grammar_of(body),
        "tokenizer": vocabulary,
    }
    return Job(inputs=[tokens], sampling=sampling, shape=Chat(service.model_name, vocabulary, body))


def render_messages(
    service: Service,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    template_kwargs: dict[str, Any] | None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """The token ids of a conversation. Raises ApiError for template arguments that are none."""
    reserved = {"tokenizer", "messages", "conversation", "tools", "chat_template", "add_generation_prompt", "tokenize"}
    reserved |= {"return_dict", "return_tensors", "padding", "truncation", "max_length", "tokenizer_kwargs"}
    if taken := sorted(reserved & (template_kwargs or {}).keys()):
        raise ApiError(400, f"chat_template_kwargs cannot set {taken[0]}", param="chat_template_kwargs")
    return render(
        service.tokenizer,
        [message.model_dump(exclude_none=True) for message in messages],
        tools=[tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
        chat_template=service.chat_template,
        add_generation_prompt=add_generation_prompt,
        **(template_kwargs or {}),
    )


class Chat:
    """The shape of one answer of /v1/chat/completions."""

    def __init__(self, model: str, vocabulary: Vocabulary, body: ChatBody) -> None:
        self._base = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "", "created": int(time.time()), "model": model}
        self._vocabulary = vocabulary
        self._num_choices = body.n or 1
        self._wants_logprobs = bool(body.logprobs)
        self._includes_usage = body.includes_usage
        self._chunk_base = {**self._base, "object": "chat.completion.chunk"}
        self._chunk_tail = {"usage": None} if body.includes_usage else {}
        self._answers = [Answer(vocabulary) for _ in range(self._num_choices)]
        self._ended: dict[int, GenerationOutput] = {}

    # ------------------------------------------------------------------ whole

    def whole(self, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
        """The unstreamed answer."""
        return {
            **self._base,
            "object": "chat.completion",
            "choices": [self._choice(choice, output) for choice, output in enumerate(outputs)],
            "usage": usage(outputs, self._num_choices),
        }

    def _choice(self, choice: int, output: GenerationOutput) -> dict[str, Any]:
        answer = self._answers[choice]
        answer.feed(output)
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
            "logprobs": self._new_logprobs(output),
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
        deltas = [_delta(each) for each in answer.feed(output)]
        logprobs = self._new_logprobs(output)
        if logprobs is not None and not deltas:
            deltas = [{"content": ""}]  # tokens that show later still have logprobs
        events = [self._event(choice, delta, None if i else logprobs) for i, delta in enumerate(deltas)]
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
        return event({**self._chunk_base, "choices": [], "usage": usage(outputs, self._num_choices)}) + DONE

    def failed(self, error: ApiError) -> bytes:
        """The error as an event."""
        return event(error.body()) + DONE

    def _event(self, choice: int, delta: dict[str, Any], logprobs: Any, **end: Any) -> bytes:
        each = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": None, **end}
        return event({**self._chunk_base, "choices": [each], **self._chunk_tail})

    def _new_logprobs(self, output: GenerationOutput) -> dict[str, Any] | None:
        if not self._wants_logprobs or not output.new_tokens:
            return None
        start = len(output.generated_tokens) - len(output.new_tokens)
        return chat_logprobs(self._vocabulary, output.new_tokens, output.logprobs[start:], output.top_logprobs[start:])


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
