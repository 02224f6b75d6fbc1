"""What clients may send: the bodies of all requests, and what they mean to the engine.

A field that is not here is refused by name. One that OpenAI has and this server cannot honour is here with the values
that ask for nothing (`None`, `"auto"`), so that a client which always sends it is served. Knows no engine, no HTTP.
"""

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI's
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_GRAMMAR = 1 << 14  # characters: the worst that fit take llguidance a tenth of a second, ten times as many minutes

TokenIds = list[int]
NotEmpty = Annotated[str, Field(min_length=1)]
Source = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR)]
Choices = Annotated[list[NotEmpty], Field(min_length=1)]


class FieldError(ValueError):
    """What is wrong with one field in the light of the others."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class Body(BaseModel):
    """No field beyond those named, no value but of the type that is named."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """`include_usage`: one more chunk at the end, without choices, with the usage of the whole request."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


class JsonSchema(Body):
    """The schema of an answer. `strict` is always met: an answer cannot leave its schema."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    """An answer in free text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """An answer that is any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """An answer that is JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class Sampling(Body):
    """What every kind of request may say about sampling and scheduling. None: not said."""

    model: str | None = None
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = None
    stop: NotEmpty | Annotated[list[NotEmpty], Field(max_length=64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # for whoever reads the traffic; means nothing here

    top_k: int | None = Field(default=None, ge=-1, description="0 or -1: off")
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    min_tokens: int | None = Field(default=None, ge=0)
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    regex: Source | None = Field(default=None, description="the answer matches this regular expression")
    grammar: Source | None = Field(default=None, description="the answer matches this Lark grammar")
    choice: Choices | None = Field(default=None, description="the answer is one of these")
    priority: int = Field(default=0, description="lower is sooner")
    deadline_s: float | None = Field(
        default=None, gt=0, description="seconds after which the answer ends with finish reason `timeout`"
    )
    cache_salt: NotEmpty | None = Field(default=None, description="cached prefixes are shared only under equal salts")

    def sampling(self) -> dict[str, Any]:
        """As arguments of `ContinuousBatchingManager.submit`. What is not said is left to the model's generation
        config, then to OpenAI's defaults: sampling, at temperature 1."""
        said: dict[str, Any] = {
            "temperature": self.temperature,
            "do_sample": True if self.temperature is None else None,
            "top_p": self.top_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": None if self.logit_bias is None else self.biases(self.logit_bias),
            "seed": self.seed,
            "stop_strings": [self.stop] if isinstance(self.stop, str) else self.stop,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "min_new_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "stop_token_ids": self.stop_token_ids,
            "priority": self.priority or None,
            "deadline_s": self.deadline_s,
            "cache_salt": self.cache_salt,
        }
        return {name: value for name, value in said.items() if value is not None and value != []}

    @staticmethod
    def biases(given: dict[str, float]) -> dict[int, float]:
        """JSON has only strings as keys."""
        return {int(token): bias for token, bias in given.items()}

    @model_validator(mode="after")
    def _check(self) -> "Sampling":
        for token in self.logit_bias or ():
            if not (token.isascii() and token.isdigit() and len(token) < 12):
                raise FieldError("logit_bias", f"logit_bias: {token!r:.40} is no token id")
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options is only for stream=true")
        given = [name for name in self.constraints() if name]
        if len(given) > 1:
            raise FieldError(given[-1], f"only one of {', '.join(given)} can be given")
        return self

    def constraints(self) -> list[str]:
        """The names of all fields that say what the answer must match."""
        return [name for name in ("regex", "grammar", "choice") if getattr(self, name) is not None]

    @property
    def may_compile(self) -> bool:
        """Whether a grammar may have to be compiled before the answer begins."""
        return bool(self.constraints())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class Formatted(Sampling):
    """`response_format`, as completions (an extension) and chats have it."""

    response_format: ResponseFormat | None = None

    def constraints(self) -> list[str]:
        """`response_format` asks for something unless it is text."""
        formatted = self.response_format is not None and self.response_format.type != "text"
        return super().constraints() + ["response_format"] * formatted


class CompletionBody(Formatted):
    """POST /v1/completions."""

    prompt: str | list[str] | TokenIds | list[TokenIds]
    max_tokens: int | None = Field(default=None, ge=0)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    suffix: None = None
    add_special_tokens: bool = Field(default=True, description="of a prompt that is text")
    skip_special_tokens: bool = Field(default=True, description="of the answer")

    @model_validator(mode="after")
    def _check_completion(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise FieldError(
                "best_of", f"best_of={self.best_of} is not supported: leave it out, or give n ({self.n or 1})"
            )
        if not self.prompt:
            raise FieldError("prompt", "prompt is empty; it needs at least one token (the BOS token, say)")
        return self

    def prompts(self) -> list[str] | list[TokenIds]:
        """All prompts, each as text or as token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return cast("list[str] | list[TokenIds]", prompt)


class TextPart(Body):
    """A piece of text in a message."""

    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """A piece of an earlier answer in which the model refused."""

    type: Literal["refusal"]
    refusal: str


class FunctionCall(Body):
    """A call as the model made it; `arguments` is JSON in a string."""

    name: str
    arguments: str


class ToolCall(Body):
    """One call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """One turn of a conversation. An answer of this server can be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _check(self) -> "Message":
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.refusal)):
            raise FieldError("content", f"a message of role {self.role} needs content")
        return self

    def plain(self) -> dict[str, Any]:
        """For a chat template: only what is said, and content as one string."""
        said = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            texts = (part.text if isinstance(part, TextPart) else part.refusal for part in self.content)
            said["content"] = "".join(texts)
        return said


class Function(Body):
    """What a tool is called, does and takes."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The name of a tool."""

    name: str


class NamedTool(Body):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(Formatted):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="more variables for the template")

    # Labels, which mean nothing here.
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    # Only with the value that asks for nothing.
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None
    moderation: None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    reasoning_effort: None = None
    verbosity: None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    functions: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs is only for logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise FieldError("max_tokens", "max_tokens and max_completion_tokens say the same thing: give one of them")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise FieldError("tools", "tools must have different names")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise FieldError(
                "tool_choice", f"tool_choice names {self.tool_choice.function.name!r:.80}, which is none of the tools"
            )
        if self.tool_choice == "required" and not names:
            raise FieldError("tool_choice", "tool_choice is 'required', but there are no tools")
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer; None: as many as the context has room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def may_compile(self) -> bool:
        """Calls of tools keep to a grammar."""
        return super().may_compile or bool(self.tools)


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages by the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "give either prompt or messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
