"""A conversation as token ids, by the tokenizer's own chat template.

Knows tokenizers by what they can do (`apply_chat_template`); refuses to know transformers and HTTP.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chairlift.errors import InvalidRequestError
from chairlift.text.answer import Answer
from chairlift.text.vocabulary import Vocabulary

Message = Mapping[str, Any]  # as OpenAI's: role, content, and what belongs to the role


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What to ask the engine for the next message, and how to read its answers."""

    prompt_ids: list[int]
    vocabulary: Vocabulary  # pass it as `tokenizer=`, so that stop strings see the text that the answer shows

    def answer(self) -> Answer:
        """A reader for one answer; each choice needs its own."""
        return Answer(self.vocabulary)


class ChatFormat:
    """How a model chats: its template, and the tags of tool calls and of reasoning that the template uses.

    Made once for a tokenizer; may be used by many threads.
    """

    def __init__(self, tokenizer: Any, *, chat_template: str | None = None) -> None:
        self.vocabulary = Vocabulary(tokenizer)
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    def turn(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> Turn:
        """Render a conversation. `tools`, `tool_choice`, `parallel_tool_calls`: as in OpenAI's API.

        Raises InvalidRequestError as `render` does, and for tools and choices that make no sense.
        """
        prompt_ids = render(
            self._tokenizer,
            messages,
            tools=tools,
            chat_template=self._chat_template,
            add_generation_prompt=add_generation_prompt,
            **template_kwargs,
        )
        return Turn(prompt_ids=prompt_ids, vocabulary=self.vocabulary)


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

    tools: as in OpenAI's API. A template that knows none gets them described in the system message.
    chat_template: instead of the tokenizer's own. template_kwargs: what else the template reads.
    Raises InvalidRequestError for what cannot be rendered: no template, no messages, content that is not text, or
    what the template itself refuses.
    """
    if getattr(tokenizer, "chat_template", None) is None and chat_template is None:
        raise InvalidRequestError("the model's tokenizer has no chat template: give one, or use plain completions")
    if not messages:
        raise InvalidRequestError("messages is empty; a conversation needs at least one message")
    plain = [_plain(message, i) for i, message in enumerate(messages)]
    try:
        return list(
            tokenizer.apply_chat_template(
                plain,
                tools=list(tools) if tools else None,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=False,
                **template_kwargs,
            )
        )
    except Exception as fault:  # a template is a program: of jinja's errors and Python's any may come out
        raise InvalidRequestError(f"the chat template refuses these messages: {fault}") from fault


def _plain(message: Message, index: int) -> dict[str, Any]:
    """A message whose content is one string, and whose tool calls have their arguments as objects."""
    plain = dict(message)
    plain["content"] = _text(message.get("content"), f"messages[{index}].content")
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_with_arguments(call, f"messages[{index}].tool_calls") for call in calls]
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


def _with_arguments(call: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Templates want arguments as an object, the API gives them as JSON text."""
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments or "{}")
        except json.JSONDecodeError as fault:
            raise InvalidRequestError(f"{name}: arguments are not JSON ({fault}): {arguments!r:.80}") from fault
    return {**call, "function": function}
