"""/v1/responses: what it takes, and its answer as items, whole or as the events that build it.

An answer is made by one machine, `Items`, that turns deltas into events; the items themselves, which an unstreamed
answer consists of, are what the events add up to. Nothing is stored: `store` may not be true.
"""

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from chairlift.request import GenerationOutput
from chairlift.server.chat import job_of, turn_of
from chairlift.server.constraints import grammar_of, schema_grammar
from chairlift.server.errors import ApiError
from chairlift.server.logprobs import chat_logprobs
from chairlift.server.protocol import (
    MAX_LOGPROBS,
    Body,
    FieldError,
    Function,
    JsonObjectFormat,
    RefusalPart,
    Sampling,
    TextFormat,
)
from chairlift.server.service import Job, Service
from chairlift.server.sse import event
from chairlift.server.usage import reasoning_tokens
from chairlift.text.answer import Delta
from chairlift.text.chat import Turn

LOGPROBS = "message.output_text.logprobs"  # what `include` may ask for


class InputText(Body):
    """A piece of text, of a client's or of an earlier answer."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Body):
    """One turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Annotated[InputText | RefusalPart, Field(discriminator="type")]]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class InputCall(Body):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    namespace: None = None
    caller: None = None


class InputCallOutput(Body):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: str | None = None
    name: str | None = None
    namespace: None = None
    caller: None = None


class ReasoningText(Body):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(Body):
    """What the model thought before an earlier answer."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: None = None
    status: str | None = None


def _item_type(item: Any) -> str:
    """A message need not say that it is one."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return kind if isinstance(kind, str) else ""


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_item_type),
]


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class NamedFunctionTool(Body):
    """The one tool that must be called."""

    type: Literal["function"]
    name: str


class SchemaFormat(Body):
    """An answer that is JSON of a schema."""

    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(Body):
    """What the text must match."""

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: None = None


class ReasoningConfig(Body):
    """A model reasons or not; nothing can be asked of it here."""

    effort: None = None
    summary: None = None
    generate_summary: None = None


class ResponsesBody(Sampling):
    """POST /v1/responses."""

    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="more variables for the template")

    # Labels, which mean nothing here.
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    # Only with the value that asks for nothing.
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    reasoning: ReasoningConfig | None = None
    access_programs: None = None
    background_options: None = None
    context_management: None = None
    conversation: None = None
    image: None = None
    max_tool_calls: None = None
    moderation: None = None
    previous_response_id: None = None
    prompt: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None

    @model_validator(mode="after")
    def _check_response(self) -> "ResponsesBody":
        names = [tool.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise FieldError("tools", "tools must have different names")
        if isinstance(self.tool_choice, NamedFunctionTool) and self.tool_choice.name not in names:
            raise FieldError("tool_choice", f"tool_choice names {self.tool_choice.name!r:.80}, which is no tool")
        if self.tool_choice == "required" and not names:
            raise FieldError("tool_choice", "tool_choice is 'required', but there are no tools")
        return self

    def constraints(self) -> list[str]:
        """`text.format` asks for something unless it is text."""
        formatted = self.text is not None and self.text.format is not None and self.text.format.type != "text"
        return super().constraints() + ["text"] * formatted

    @property
    def may_compile(self) -> bool:
        """Calls of tools keep to a grammar."""
        return super().may_compile or bool(self.tools)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the logprobs of the text's tokens are to be told."""
        return LOGPROBS in (self.include or ()) or self.top_logprobs is not None

    def messages(self) -> list[dict[str, Any]]:
        """As messages of a chat."""
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        thoughts = ""
        for item in items:
            match item:
                case InputReasoning():
                    thoughts += "".join(part.text for part in item.content or ())
                case InputCallOutput():
                    content = item.output if isinstance(item.output, str) else "".join(p.text for p in item.output)
                    messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
                case InputCall():
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    if not messages or messages[-1]["role"] != "assistant":
                        messages.append({"role": "assistant", "content": ""})
                    messages[-1].setdefault("tool_calls", []).append(call)
                case InputMessage():
                    messages.append({"role": item.role, "content": _joined(item.content)})
            if thoughts and messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("reasoning_content", thoughts)
                thoughts = ""
        return messages


def _joined(content: str | Sequence[InputText | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, InputText) else part.refusal for part in content)


def prepare_response(service: Service, body: ResponsesBody) -> Job:
    """Render and arrange; beside the event loop."""
    choice = body.tool_choice
    grammar = grammar_of(body)
    match body.text and body.text.format:
        case JsonObjectFormat():
            grammar = schema_grammar(None)
        case SchemaFormat(schema_=schema):
            grammar = schema_grammar(schema)
    turn = turn_of(
        service,
        body.messages(),
        tools=[
            {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
            for tool in body.tools or ()
        ],
        tool_choice=choice
        if isinstance(choice, str | None)
        else {"type": "function", "function": {"name": choice.name}},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        grammar=grammar,
        template_kwargs=body.chat_template_kwargs,
    )
    return job_of(
        service,
        turn,
        ResponseShape(service.model_name, turn, body),
        sampling=body.sampling(),
        limit=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
        constraints=body.constraints(),
        prompt_field="input",
    )


class Items:
    """The items of one answer and the events that make them."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._number = 0
        self._open: tuple[str, int] | None = None  # kind and call of the last item, while it grows

    def event(self, kind: str, **fields: Any) -> bytes:
        """The next event."""
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def take(self, delta: Delta, logprobs: list[dict[str, Any]]) -> bytes:
        """The events of one delta."""
        events = b""
        if self._open != (delta.kind, delta.index):
            events += self.finish("completed") + self._begin(delta)
        item, place = self.output[-1], self._place()
        match delta.kind:
            case "tool":
                item["arguments"] += delta.text
                kind = "response.function_call_arguments.delta"
                return events + (self.event(kind, delta=delta.text, **place) if delta.text else b"")
            case "reasoning":
                item["content"][0]["text"] += delta.text
                return events + self.event("response.reasoning_text.delta", delta=delta.text, content_index=0, **place)
        item["content"][0]["text"] += delta.text
        item["content"][0]["logprobs"] += logprobs
        return events + self.event(
            "response.output_text.delta", delta=delta.text, logprobs=logprobs, content_index=0, **place
        )

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _begin(self, delta: Delta) -> bytes:
        self._open = (delta.kind, delta.index)
        item: dict[str, Any] = {"id": f"{_PREFIXES[delta.kind]}_{uuid.uuid4().hex}", "status": "in_progress"}
        part: dict[str, Any] | None = None
        match delta.kind:
            case "tool":
                item |= {"type": "function_call", "call_id": delta.tool_id, "name": delta.tool_name, "arguments": ""}
            case "reasoning":
                part = {"type": "reasoning_text", "text": ""}
                item |= {"type": "reasoning", "summary": [], "content": []}
            case _:
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                item |= {"type": "message", "role": "assistant", "content": []}
        self.output.append(item)
        events = self.event("response.output_item.added", output_index=len(self.output) - 1, item=item)
        if part is not None:
            events += self.event("response.content_part.added", content_index=0, part=part, **self._place())
            item["content"].append(part)
        return events

    def finish(self, status: str) -> bytes:
        """The last item is done, if there is one."""
        if self._open is None:
            return b""
        kind, self._open = self._open[0], None
        item, place = self.output[-1], self._place()
        item["status"] = status
        if kind == "tool":
            events = self.event("response.function_call_arguments.done", arguments=item["arguments"], **place)
        else:
            part = item["content"][0]
            name = "response.reasoning_text.done" if kind == "reasoning" else "response.output_text.done"
            more = {} if kind == "reasoning" else {"logprobs": part["logprobs"]}
            events = self.event(name, text=part["text"], content_index=0, **more, **place)
            events += self.event("response.content_part.done", content_index=0, part=part, **place)
        return events + self.event("response.output_item.done", output_index=place["output_index"], item=item)


_PREFIXES = {"tool": "fc", "reasoning": "rs", "content": "msg"}


class ResponseShape:
    """The shape of one answer of /v1/responses."""

    def __init__(self, model: str, turn: Turn, body: ResponsesBody) -> None:
        self._vocabulary = turn.vocabulary
        self._answer = turn.answer()
        self._wants_logprobs = body.wants_logprobs
        self._items = Items()
        self._num_reasoning = 0
        self.id = f"resp_{uuid.uuid4().hex}"
        self._response = _echo(self.id, model, body)

    def whole(self, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
        """The unstreamed answer."""
        self.chunk(0, outputs[0])
        return self._response

    def opening(self) -> bytes:
        """The response as it stands before the first token."""
        return self._items.event("response.created", response=self._response) + self._items.event(
            "response.in_progress", response=self._response
        )

    def chunk(self, choice: int, output: GenerationOutput) -> bytes:
        """The events of what is new."""
        deltas = self._answer.feed(output)
        self._num_reasoning += reasoning_tokens(deltas)
        events = b"".join(self._items.take(delta, self._new_logprobs(delta, output)) for delta in deltas)
        if not output.is_finished():
            return events
        cut = self._answer.finish_reason not in ("stop", "tool_calls")
        status = "incomplete" if cut else "completed"
        events += self._items.finish(status)
        self._response |= {
            "status": status,
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": _INCOMPLETE.get(str(self._answer.finish_reason))} if cut else None,
            "output": self._items.output,
            "usage": self._usage(output),
        }
        return events + self._items.event(f"response.{status}", response=self._response)

    def closing(self) -> bytes:
        """The last event was the response itself."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """The response, failed."""
        refused = {"code": "invalid_prompt", "param": error.param} if error.status == 400 else {"code": "server_error"}
        self._response |= {
            "status": "failed",
            "error": refused | {"message": str(error)},
            "output": self._items.output,
        }
        return self._items.event("response.failed", response=self._response)

    def _usage(self, output: GenerationOutput) -> dict[str, Any]:
        given, made = len(output.prompt_ids), len(output.generated_tokens)
        return {
            "input_tokens": given,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": given + made,
        }

    def _new_logprobs(self, delta: Delta, output: GenerationOutput) -> list[dict[str, Any]]:
        if not self._wants_logprobs or delta.kind != "content":
            return []
        content: list[dict[str, Any]] = chat_logprobs(self._vocabulary, output, delta.positions)["content"]
        return content


# What OpenAI calls them; a deadline is ours.
_INCOMPLETE = {"length": "max_output_tokens", "timeout": "timeout", "cancelled": "cancelled"}


def _echo(name: str, model: str, body: ResponsesBody) -> dict[str, Any]:
    """What a response says of its request."""
    said = body.model_dump(exclude_none=True, by_alias=True)
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "text": {"format": said.get("text", {}).get("format") or {"type": "text"}},
        "tool_choice": said.get("tool_choice", "auto"),
        "tools": said.get("tools", []),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }
