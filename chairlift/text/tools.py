"""Tool calls: how a model writes them, the grammar that keeps it to the tools it was given, and reading them back.

Five ways of writing are known, told apart by the chat template. Refuses to know tokens (a tag that is one token is
named to the grammar by whoever knows the vocabulary), requests and HTTP.
"""

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from chairlift.errors import InvalidRequestError
from chairlift.params import Grammar
from chairlift.text.detokenizer import StopFinder
from chairlift.text.reasoning import Piece, ReasoningTags
from chairlift.text.schemas import closed

_TAGS = re.compile(r"(</?tool_call>|<\|python_tag\|>|\[TOOL_CALLS\]|\[ARGS\])")
_MOST_CALLS = 128  # in one answer; without end it may have no end
_LETTER = re.compile(r"\\.|/|\n", re.DOTALL)  # of a regex: an escaped one, or one that would end it in a Lark grammar
_ESCAPED = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
_PARAMETER_END = "\n</parameter>"
_PLAIN_TEXT = frozenset({"type", "enum", "title", "description", "default", "examples"})  # which mean nothing else
_SPACING = {"whitespace_pattern": r"[ \n\t]{1,32}"}  # of JSON that is not a call; the same goes for it


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSyntax:
    """How a model writes calls: `opening`, then calls with `between` in between, then `closing`.

    A call is a JSON object of the tool's name and, under the key `arguments`, its arguments; with `names_first` it is
    the name, the text `arguments` and the arguments; with `tagged` a tag of the name around one for each argument.
    `tag` is the part of `opening` that announces calls, anywhere in an answer; a `bare` call may begin an answer
    without it.
    """

    tag: str
    opening: str
    arguments: str
    closing: str
    between: str
    punctuation: str = ""  # besides white space, what may stand between calls
    bare: bool = False
    names_first: bool = False
    tagged: bool = False
    short_ids: bool = False  # the template wants ids of nine letters or digits

    @property
    def tags(self) -> list[str]:
        """Every tag that may be a token of its own."""
        return _TAGS.findall(self.tag + self.opening + self.between + self.closing)


HERMES = ToolSyntax(
    tag="<tool_call>",
    opening="<tool_call>\n",
    arguments="arguments",
    closing="\n</tool_call>",
    between="\n</tool_call>\n<tool_call>\n",
)
QWEN_CODER = replace(HERMES, arguments="", tagged=True)
LLAMA = ToolSyntax(
    tag="<|python_tag|>", opening="", arguments="parameters", closing="", between="; ", punctuation=";", bare=True
)
MISTRAL = ToolSyntax(
    tag="[TOOL_CALLS]",
    opening="[TOOL_CALLS][",
    arguments="arguments",
    closing="]",
    between=", ",
    punctuation="[,",
    short_ids=True,
)
MISTRAL_NAMES = ToolSyntax(
    tag="[TOOL_CALLS]",
    opening="[TOOL_CALLS]",
    arguments="[ARGS]",
    closing="",
    between="[TOOL_CALLS]",
    names_first=True,
    short_ids=True,
)


def tool_syntax(chat_template: str) -> ToolSyntax | None:
    """How the model behind a chat template calls tools; None: the template knows no tools."""
    if "tools" not in chat_template:
        return None
    if "[TOOL_CALLS]" in chat_template:
        return MISTRAL_NAMES if "[ARGS]" in chat_template else MISTRAL
    if "<function=" in chat_template and "<parameter=" in chat_template:
        return QWEN_CODER
    if "<tool_call>" not in chat_template and '"parameters"' in chat_template:
        return LLAMA
    return HERMES


# --- What is asked for ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. `parameters`: JSON schema of its arguments, an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """The tools that one answer may call, and whether it must."""

    tools: tuple[Tool, ...]  # not empty
    required: bool = False  # the answer is calls and nothing else
    parallel: bool = True  # more than one call


def tool_request(
    tools: Sequence[Mapping[str, Any]] | None, tool_choice: str | Mapping[str, Any] | None, parallel: bool
) -> ToolRequest | None:
    """Read OpenAI's `tools` and `tool_choice`. None: no tool may be called.

    Raises InvalidRequestError for tools without a name, with equal names or of another type than function, and for a
    choice that names none of them.
    """
    known = tuple(_tool(tool, i) for i, tool in enumerate(tools or ()))
    names = [tool.name for tool in known]
    if len(set(names)) < len(names):
        raise InvalidRequestError(f"tools have equal names: {sorted(names)}; give each its own")
    choice = tool_choice or "auto"
    if choice == "none" or (choice == "auto" and not known):
        return None
    if not known:
        raise InvalidRequestError(f"tool_choice={choice!r} needs tools; give tools, or leave it out")
    if choice in ("auto", "required"):
        return ToolRequest(tools=known, required=choice == "required", parallel=parallel)
    name = _chosen(choice)
    if name not in names:
        raise InvalidRequestError(f"tool_choice={choice!r}: no such tool; give auto, none, required or one of {names}")
    chosen = known[names.index(name)]
    return ToolRequest(tools=(chosen,), required=True, parallel=False)


def _chosen(choice: object) -> object:
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def _tool(tool: Mapping[str, Any], index: int) -> Tool:
    function = tool.get("function", tool) if tool.get("type", "function") == "function" else None
    if not isinstance(function, Mapping):
        raise InvalidRequestError(
            f'tools[{index}] must be {{"type": "function", "function": {{...}}}}, got {tool!r:.80}'
        )
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"tools[{index}] has no name; give function.name")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping):
        raise InvalidRequestError(f"tools[{index}].function.parameters must be a JSON schema, got {parameters!r:.80}")
    description = function.get("description") or ""
    return Tool(
        name=name, description=str(description), parameters=parameters, strict=bool(function.get("strict", False))
    )


def describe(request: ToolRequest, syntax: ToolSyntax) -> str:
    """What to tell a model whose chat template knows no tools."""
    lines = [
        json.dumps(
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters}, ensure_ascii=False
        )
        for tool in request.tools
    ]
    example = written(syntax, [("NAME", '{"ARGUMENT": "VALUE"}')])
    return "\n".join(
        (
            "You can call functions. These are the functions, one per line, with a JSON schema of their arguments:",
            *lines,
            "To call one, answer with nothing but its name and arguments, written like this:",
            example,
            "The result will be given to you. If no function helps, answer without calling any.",
        )
    )


def written(syntax: ToolSyntax, calls: Sequence[tuple[str, str]]) -> str:
    """Calls as the model writes them, from names and arguments (JSON text)."""
    return syntax.opening + syntax.between.join(_head(syntax, *call) + _tail(syntax) for call in calls) + syntax.closing


def _head(syntax: ToolSyntax, name: str, arguments: str = "") -> str:
    """A call up to and with its arguments."""
    if syntax.tagged:
        given = json.loads(arguments) if arguments else {}
        return f"<function={name}>\n" + "".join(_tagged(key, value) for key, value in given.items())
    if syntax.names_first:
        return f"{name}{syntax.arguments}{arguments}"
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{syntax.arguments}": {arguments}'


def _tail(syntax: ToolSyntax) -> str:
    if syntax.tagged:
        return "</function>"
    return "" if syntax.names_first else "}"


def _tagged(key: str, value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"<parameter={key}>\n{text}\n</parameter>\n"


# --- The grammar ----------------------------------------------------------------------------------------------------

TokenOf = Callable[[str], int | None]  # the token that a tag is on its own, if there is one


def tool_grammar(request: ToolRequest, syntax: ToolSyntax, token_of: TokenOf, content: Grammar | None = None) -> str:
    """A Lark grammar (llguidance's kind) of answers that call these tools in this syntax.

    Unless a call is required, text comes first and is free until the tag, or to the end; after a call only calls
    follow. Each call's arguments keep to the tool's schema. content: what an answer without calls must be instead.
    """

    def text(string: str) -> str:
        return " ".join(_literal(part, token_of) for part in _TAGS.split(string) if part)

    calls = f"call ({text(syntax.between)} call){{0,{_MOST_CALLS - 1}}}" if request.parallel else "call"
    calls = f"{calls} {text(syntax.closing)}"
    if request.required:
        start = f"{text(syntax.opening)} {calls}"
    elif content is not None:
        start = f"content | {text(syntax.opening)} {calls}"
    elif syntax.bare:
        start = f"SPEECH? | {text(syntax.tag)}? {calls}"
    else:
        start = f"TEXT | opened {text(syntax.opening.removeprefix(syntax.tag))} {calls}"
    rules = [f"start: {start}", *_text_until("opened", syntax.tag, token_of)]
    rules.append(f"call: {' | '.join(f'call{i}' for i in range(len(request.tools)))}")
    for i, tool in enumerate(request.tools):
        head, tail = text(_head(syntax, tool.name)), text(_tail(syntax))
        arguments = _parameters(tool, text) if syntax.tagged else f"%json {json.dumps(_schema(tool))}"
        rules.append(f"call{i}: {head} {arguments} {tail}")
    if syntax.tagged:
        rules.append('value[lazy]: TEXT "</parameter>"')
    if content is not None:
        rules.append(f"content: %lark {{\n{_as_lark(content)}}}")
    return "\n".join([*rules, r"TEXT: /(.|\n)*/", r"SPEECH: /\s*[^{\s](.|\n)*/"]) + "\n"


def after_reasoning(grammar: Grammar, tags: ReasoningTags, token_of: TokenOf, *, opened: bool) -> str:
    """A grammar that allows reasoning before what `grammar` describes. `opened`: the prompt has begun it."""
    reasoning = "reasoned" if opened else f"({_literal(tags.start, token_of)} reasoned)?"
    rules = [f"start: {reasoning} GAP answer", *_text_until("reasoned", tags.end, token_of)]
    rules += [r"TEXT: /(.|\n)*/", r"GAP: /\s{0,4}/", f"answer: %lark {{\n{_as_lark(grammar)}}}"]
    return "\n".join(rules) + "\n"


def _as_lark(grammar: Grammar) -> str:
    """Any grammar in the words of a Lark grammar."""
    match grammar.kind, grammar.source:
        case "choice", answers:
            return "start: " + " | ".join(json.dumps(answer, ensure_ascii=False) for answer in answers) + "\n"
        case "json_object", _:
            return f"start: %json {json.dumps({'type': 'object', 'x-guidance': _SPACING})}\n"
        case "json_schema", str(source):
            schema = json.loads(source)
            schema = {"x-guidance": _SPACING, **schema} if isinstance(schema, dict) else schema
            return f"start: %json {json.dumps(schema)}\n"
        case "regex", str(regex):
            return "start: /" + _LETTER.sub(lambda found: _ESCAPED.get(found[0], found[0]), regex) + "/\n"
        case _, lark:
            return f"{lark}\n"


def _parameters(tool: Tool, text: Callable[[str], str]) -> str:
    """The arguments of a tool as tags, in the order of its schema."""
    schema = _schema(tool)
    shared = {key: value for key, value in schema.items() if key in ("$defs", "definitions", "x-guidance")}
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    rules = []
    for key, kind in _properties(tool).items():
        if _is_text(kind):
            values = kind.get("enum")
            value = "value" if values is None else f"({' | '.join(map(text, values))}) {text(_PARAMETER_END)}"
        else:
            value = f"%json {json.dumps(shared | kind if isinstance(kind, dict) else shared)} {text(_PARAMETER_END)}"
        rule = f"{text(f'<parameter={key}>' + chr(10))} {value} {text(chr(10))}"
        rules.append(rule if key in required else f"({rule})?")
    return " ".join(rules)


def _is_text(kind: object) -> bool:
    """Whether an argument of this schema stands between its tags as it is; all others are JSON."""
    if not isinstance(kind, Mapping) or not _PLAIN_TEXT.issuperset(kind) or kind.get("type", "string") != "string":
        return False
    values = kind.get("enum")
    if values is None:
        return "type" in kind
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) and value for value in values)


def _schema(tool: Tool) -> dict[str, Any]:
    """White space as models are trained on it; of a tool that is not `strict`, what cannot be enforced is ignored."""
    spacing = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {**closed(tool.parameters), "x-guidance": spacing | {"lenient": not tool.strict}}


def _literal(text: str, token_of: TokenOf) -> str:
    """What matches this text, as one token too if there is one: llguidance takes that for no text."""
    token = token_of(text)
    string = json.dumps(text, ensure_ascii=False)
    return string if token is None else f"(<[{token}]> | {string})"


def _text_until(rule: str, tag: str, token_of: TokenOf) -> list[str]:
    """Rules for free text up to the first tag, and the tag."""
    token = token_of(tag)
    by_token = "" if token is None else f" | TEXT? <[{token}]>"
    return [f"{rule}: {rule}_spelled{by_token}", f"{rule}_spelled[lazy]: TEXT {json.dumps(tag)}"]


# --- Reading --------------------------------------------------------------------------------------------------------

_STRING = r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[\da-fA-F]{4}))*"'
_HEADER = re.compile(rf'\{{\s*"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
_NAME = re.compile(r"([\w.-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*(?=\{)")
_FUNCTION = re.compile(r"<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(?:\n|(?=[^\n]))")
_VALUE_END = _PARAMETER_END.removeprefix("\n")  # of a value; the line's end before it is no part of it, if there is one
_FUNCTION_END = re.compile(r"\s*(?:</function>|(?=</tool_call>))")
_NAME_SO_FAR = re.compile(r"[\w.-]+(\[[\w\]]*)*\s*")


class _JsonEnd:
    """Finds where a JSON object ends that comes in parts."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def find(self, text: str) -> int | None:
        """How many characters of this part belong to the object; None: all of them, and more will."""
        for i, letter in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif letter == "\\":
                    self._is_escaped = True
                else:
                    self._in_string = letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return None


class ToolParser:
    """Feed it the content as it comes, of an answer that may hold calls.

    A call with its keys in the usual order streams its arguments; any other object that has a name is read when it is
    whole. An argument with tags of its own streams if `tools` say that it is text; any other is read when it is whole,
    as JSON, or text if it is none. What turns out to be no call is content. White space before a tag is not shown.
    """

    def __init__(self, syntax: ToolSyntax, tools: Sequence[Tool] = ()) -> None:
        self._syntax = syntax
        self._tag = StopFinder((syntax.tag,))
        self._value_end = StopFinder((_PARAMETER_END, _VALUE_END))
        self._step: Callable[[], list[Piece] | None] = self._begin if syntax.bare else self._speak
        self._text = ""  # not yet decided about
        self._offset = 0  # where it begins
        self._index = -1  # of the latest call
        self._object = self._arguments = _JsonEnd()
        self._num_scanned = 0  # characters of `_text` that `_object` has seen, or that hold no end of an argument
        self._texts = {(tool.name, key) for tool in tools for key, kind in _properties(tool).items() if _is_text(kind)}
        self._name = ""  # of the latest call
        self._num_arguments = 0  # of it, where they have tags

    def feed(self, content: Piece) -> list[Piece]:
        """What can be told now."""
        self._offset = content.start - len(self._text)
        self._text += content.text
        pieces: list[Piece] = []
        while self._text and (told := self._step()) is not None:
            pieces += told
        return pieces

    def finish(self) -> list[Piece]:
        """No text will follow: half a tag is content, half a call stays half."""
        is_content = self._step in (self._begin, self._speak) or (self._syntax.bare and self._step == self._read)
        return self._take("content", len(self._text)) if is_content else []

    # Each step looks at the text, takes some of it and says what that was; None: it must see more.

    def _begin(self) -> list[Piece] | None:
        shown = self._text.lstrip()
        if not shown:
            return None
        self._step = self._seek if shown.startswith("{") else self._speak
        return []

    def _speak(self) -> list[Piece] | None:
        """Before a tag."""
        at = self._text.find(self._syntax.tag)
        if at < 0:
            return self._take("content", len(self._text[: self._tag.safe_length(self._text)].rstrip())) or None
        told = self._take("content", len(self._text[:at].rstrip()))
        self._drop(self._text.index(self._syntax.tag) + len(self._syntax.tag))
        self._step = self._seek
        return told

    def _seek(self) -> list[Piece] | None:
        """After a tag or a call: the next call, or the end of calls."""
        self._drop(len(self._text) - len(self._text.lstrip()))
        for tag in (self._syntax.tag, self._syntax.closing.strip()):
            if tag and self._text.startswith(tag):
                self._drop(len(tag))
                return []
            if tag.startswith(self._text):
                return None
        if self._text[0] in self._syntax.punctuation:
            self._drop(1)
            return []
        if self._syntax.tagged and (self._text.startswith("<function=") or "<function=".startswith(self._text)):
            match = _FUNCTION.match(self._text)
            return self._start(match[1], match.end()) if match else None
        if self._text.startswith("{"):
            self._object, self._num_scanned = _JsonEnd(), 0
            self._step = self._read
        elif not self._syntax.names_first:
            self._step = self._speak
        elif match := _NAME.match(self._text):
            return self._start(match[1], match.end(), tool_id=match[2])
        elif _NAME_SO_FAR.fullmatch(self._text):
            return None
        else:
            self._step = self._speak
        return []

    def _read(self) -> list[Piece] | None:
        """An object that may be a call."""
        if match := _HEADER.match(self._text):
            self._object.find(self._text[self._num_scanned : match.end()])
            return self._start(json.loads(match[1]), match.end())
        size = self._object.find(self._text[self._num_scanned :])
        if size is None:
            self._num_scanned = len(self._text)
            return None
        size += self._num_scanned
        self._step = self._seek
        if (call := _call(self._text[:size])) is None:
            self._step = self._speak
            return self._take("content", size)
        started = self._start(call[0], 0)
        self._step = self._seek
        return started + self._take("tool", size, shown=call[1])

    def _start(self, name: str, size: int, tool_id: str | None = None) -> list[Piece]:
        self._index += 1
        self._arguments, self._step = _JsonEnd(), self._fill if self._text.startswith("<function=") else self._argue
        self._name, self._num_arguments, self._num_scanned = name, 0, 0
        tool_id = tool_id or (uuid.uuid4().hex[:9] if self._syntax.short_ids else f"call_{uuid.uuid4().hex[:24]}")
        start = self._offset
        self._drop(size)
        return [Piece("tool", "", start, self._offset, self._index, tool_id, name)]

    def _fill(self) -> list[Piece] | None:
        """The next argument between tags, or the end of the call."""
        if match := _FUNCTION_END.match(self._text):
            self._step = self._seek
            return self._take("tool", match.end(), shown="}" if self._num_arguments else "{}")
        if (match := _PARAMETER.match(self._text)) is None:
            return None
        head = f"{', ' if self._num_arguments else '{'}{_quoted(match[1])}: "
        if (self._name, match[1]) in self._texts:
            self._num_arguments, self._step = self._num_arguments + 1, self._spell
            return self._take("tool", match.end(), shown=head + '"')
        end = self._text.find(_VALUE_END, self._num_scanned)
        if end < 0:
            self._num_scanned = max(len(self._text) - len(_VALUE_END), 0)
            return None
        self._num_arguments, self._num_scanned = self._num_arguments + 1, 0
        value = self._text[match.end() : end].removesuffix("\n")
        value = value.strip() if _is_json(value) else _quoted(value)
        return self._take("tool", end + len(_VALUE_END), shown=head + value)

    def _spell(self) -> list[Piece] | None:
        """The text of an argument between tags."""
        end = self._text.find(_VALUE_END)
        if end < 0:
            size = self._value_end.safe_length(self._text)
            return self._take("tool", size, shown=_quoted(self._text[:size])[1:-1]) or None
        value = self._text[:end].removesuffix("\n")
        self._step = self._fill
        return self._take("tool", end + len(_VALUE_END), shown=_quoted(value)[1:])

    def _argue(self) -> list[Piece] | None:
        size = self._arguments.find(self._text)
        if size is not None:
            self._step = self._seek if self._syntax.names_first else self._end
        size = len(self._text) if size is None else size
        self._object.find(self._text[:size])
        return self._take("tool", size)

    def _end(self) -> list[Piece] | None:
        """What follows the arguments in the object of a call."""
        size = self._object.find(self._text)
        if size is not None:
            self._step = self._seek
        self._drop(len(self._text) if size is None else size)
        return []

    def _take(self, kind: Literal["content", "tool"], size: int, shown: str | None = None) -> list[Piece]:
        start, text = self._offset, self._text[:size] if shown is None else shown
        self._drop(size)
        index = self._index if kind == "tool" else 0
        return [Piece(kind, text, start, self._offset, index)] if text else []

    def _drop(self, size: int) -> None:
        self._text = self._text[size:]
        self._offset += size


def _call(text: str) -> tuple[str, str] | None:
    """Name and arguments of an object that is a call, its keys in any order."""
    try:
        call = json.loads(text)
    except json.JSONDecodeError:
        return None
    if not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str) and _is_object(arguments):
        return call["name"], arguments
    return call["name"], json.dumps(arguments if isinstance(arguments, dict) else {}, ensure_ascii=False)


def _properties(tool: Tool) -> Mapping[str, Any]:
    properties = tool.parameters.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except json.JSONDecodeError:
        return False
