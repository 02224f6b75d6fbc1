"""A conversation as token ids, by the tokenizer's own chat template, and what its answers will look like.

Knows tokenizers by what they can do (`apply_chat_template`); refuses to know transformers and HTTP.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chairlift.errors import InvalidRequestError
from chairlift.params import Grammar
from chairlift.text.answer import Answer
from chairlift.text.reasoning import ReasoningParser, ReasoningTags, reasoning_tags
from chairlift.text.tools import (
    HERMES,
    Tool,
    ToolParser,
    ToolSyntax,
    after_reasoning,
    describe,
    tool_grammar,
    tool_request,
    tool_syntax,
    written,
)
from chairlift.text.vocabulary import Vocabulary, check_unicode

Message = Mapping[str, Any]  # as OpenAI's: role, content, and what belongs to the role
_TAIL = 16  # tokens at the end of a prompt in which a start tag is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What to ask the engine for the next message, and how to read its answers."""

    prompt_ids: list[int]
    vocabulary: Vocabulary  # pass it as `tokenizer=`: stop strings and grammar see the text that the answer shows
    grammar: Grammar | None = None  # pass it as `grammar=`: tool calls, or the grammar that was asked for
    syntax: ToolSyntax | None = None  # of the tool calls that may come
    tools: tuple[Tool, ...] = ()  # that they may call
    reasoning: ReasoningTags | None = None
    is_reasoning: bool = False  # the prompt ends inside the reasoning

    def answer(self) -> Answer:
        """A reader for one answer; each choice needs its own."""
        return Answer(
            self.vocabulary,
            reasoning=None if self.reasoning is None else ReasoningParser(self.reasoning, opened=self.is_reasoning),
            tools=None if self.syntax is None else ToolParser(self.syntax, self.tools),
        )


class ChatFormat:
    """How a model chats: its template, and the tags of tool calls and of reasoning that the template uses.

    Made once for a tokenizer, since much that belongs to a vocabulary is prepared once; may be used by many threads.
    """

    def __init__(self, tokenizer: Any, *, chat_template: str | None = None, skip_special_tokens: bool = True) -> None:
        self.template = template = _template_text(tokenizer, chat_template)
        self.reasoning = reasoning_tags(template)
        self.syntax = tool_syntax(template) or HERMES
        tags = [] if self.reasoning is None else [self.reasoning.start, self.reasoning.end]
        self.vocabulary = Vocabulary(tokenizer, skip_special_tokens=skip_special_tokens).showing(tags)
        self._calling = self.vocabulary.showing(self.syntax.tags)
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    def turn(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = "auto",
        parallel_tool_calls: bool = True,
        grammar: Grammar | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> Turn:
        """Render a conversation. `tools`, `tool_choice`, `parallel_tool_calls`: as in OpenAI's API.

        grammar: what the content must look like; reasoning may come before it, and tool calls instead of it.
        Raises InvalidRequestError as `render` does, and for tools and choices that make no sense.
        """
        request = tool_request(tools, tool_choice, parallel_tool_calls)
        prompt_ids = render(
            self._tokenizer,
            messages,
            tools=None if request is None else tools,
            chat_template=self._chat_template,
            add_generation_prompt=add_generation_prompt,
            **template_kwargs,
        )
        is_reasoning = self.reasoning is not None and self.vocabulary.raw_decode(prompt_ids[-_TAIL:]).rstrip().endswith(
            self.reasoning.start
        )
        token_of = self.vocabulary.added_id
        if request is not None:
            grammar = Grammar("lark", tool_grammar(request, self.syntax, token_of, content=grammar))
        if grammar is not None and self.reasoning is not None:
            grammar = Grammar("lark", after_reasoning(grammar, self.reasoning, token_of, opened=is_reasoning))
        return Turn(
            prompt_ids=prompt_ids,
            vocabulary=self.vocabulary if request is None else self._calling,
            grammar=grammar,
            syntax=None if request is None else self.syntax,
            tools=() if request is None else request.tools,
            reasoning=self.reasoning,
            is_reasoning=is_reasoning,
        )


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> list[int]:
    """The prompt for the next message of a conversation, as token ids.

    tools: as in OpenAI's API. A template that knows none gets them described in the system message, and earlier calls
    and their results as plain text. chat_template: instead of the tokenizer's own. template_kwargs: what else the
    template reads.
    Raises InvalidRequestError for what cannot be rendered: no template, no messages, content that is not text, or
    what the template itself refuses.
    """
    template = _template_text(tokenizer, chat_template)
    if not template:
        raise InvalidRequestError("the model's tokenizer has no chat template: give one, or use plain completions")
    if not messages:
        raise InvalidRequestError("messages is empty; a conversation needs at least one message")
    plain = [_plain(message, i, template) for i, message in enumerate(messages)]
    if tool_syntax(template) is None:
        plain = _without_tools(plain, tools, template)
        tools = None
    try:
        tokens = tokenizer.apply_chat_template(
            plain,
            tools=list(tools) if tools else None,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=False,
            **template_kwargs,
        )
    except Exception as fault:  # a template is a program: of jinja's errors and Python's any may come out
        check_unicode(json.dumps([plain, tools], ensure_ascii=False, default=str), "messages")
        raise InvalidRequestError(f"the chat template refuses these messages: {fault}") from fault
    return list(tokens)


def _template_text(tokenizer: Any, chat_template: str | None) -> str:
    """The source of the template, of all of them if there are several; "" if there is none."""
    if chat_template is not None:
        return chat_template
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)


def _plain(message: Any, index: int, template: str) -> dict[str, Any]:
    """A message whose content is one string, and whose tool calls have their arguments as objects."""
    name = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{name} must be an object with a role and content, got {message!r:.80}")
    plain = dict(message, content=_text(message.get("content"), f"{name}.content"))
    if plain["role"] == "developer" and "developer" not in template:
        plain["role"] = "system"
    if message.get("tool_calls"):
        plain["tool_calls"] = [_with_arguments(call, f"{name}.tool_calls") for call in message["tool_calls"]]
    return plain


def _text(content: object, name: str) -> str:
    """Content parts joined; None is no content."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequestError(f"{name} must be a string or a list of parts, got {content!r:.80}")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(f'{name} may hold parts {{"type": "text", "text": ...}} only, got {part!r:.80}')
        texts.append(part["text"])
    return "".join(texts)


def _with_arguments(call: Any, name: str) -> dict[str, Any]:
    """Templates want arguments as an object, the API gives them as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            f"{name} must hold objects with function.name and function.arguments, got {call!r:.80}"
        )
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (json.JSONDecodeError, RecursionError) as fault:
            raise InvalidRequestError(f"{name}: arguments are not JSON ({fault}): {arguments!r:.80}") from fault
    return {**call, "function": {**function, "arguments": arguments}}


# --- Templates that know no tools -----------------------------------------------------------------------------------


def _without_tools(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, template: str
) -> list[dict[str, Any]]:
    """The same conversation in messages of system, user and assistant alone."""
    plain: list[dict[str, Any]] = []
    role = ""  # of the message before
    for message in messages:
        role_before, role = role, message["role"]
        if role == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if role_before == "tool":
                plain[-1]["content"] += "\n" + result
            else:
                plain.append({"role": "user", "content": result})
        elif calls := message.get("tool_calls"):
            functions = [call["function"] for call in calls]
            text = written(HERMES, [(f["name"], json.dumps(f["arguments"], ensure_ascii=False)) for f in functions])
            plain.append({"role": role, "content": f"{message['content']}\n{text}".lstrip()})
        else:
            plain.append(message)
    request = tool_request(tools, "auto", parallel=True)
    return plain if request is None else _introduced(plain, describe(request, HERMES), template)


def _introduced(messages: list[dict[str, Any]], text: str, template: str) -> list[dict[str, Any]]:
    """With `text` in the system message, or in the first one if the template takes none of the system."""
    first, *rest = messages
    if first["role"] == "system" or "system" not in template or "System role not supported" in template:
        return [{**first, "content": f"{first['content']}\n\n{text}".lstrip()}, *rest]
    return [{"role": "system", "content": text}, *messages]
