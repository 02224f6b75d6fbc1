"""From a request's outputs to what a reader sees: reasoning, content and tool calls, piece by piece.

Streamed or not it is the same chain: the text (the manager's where stop strings cut it, else decoded here, once), then
the reasoning, then the tool calls. Refuses to know HTTP and where the outputs come from.
"""

from dataclasses import dataclass
from typing import Literal

from chairlift.request import GenerationOutput
from chairlift.text.detokenizer import Detokenizer
from chairlift.text.vocabulary import Vocabulary

Kind = Literal["content", "reasoning", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A piece of an answer. All texts of one kind (and, for tools, one `index`) concatenated are the whole."""

    kind: Kind
    text: str  # content, reasoning, or a fragment of the call's arguments (JSON)
    positions: tuple[int, ...] = ()  # indices into `generated_tokens` and `logprobs` of the tokens that spell it
    index: int = 0  # tool: which call, counted from 0
    tool_id: str | None = None  # tool: in the first delta of a call only
    tool_name: str | None = None  # tool: in the first delta of a call only


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call, as far as it has come."""

    tool_id: str
    name: str
    arguments: str  # JSON


class Answer:
    """The answer of one request.

    Feed it each output, in order; the deltas come back, and add up in `content`, `reasoning` and `tool_calls`. For a
    request with stop strings, pass the same `vocabulary` as `tokenizer=` when it is submitted. Not thread-safe, but
    `feed` may be called from any thread (it decodes: milliseconds for a whole long answer).
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.content = ""
        self.reasoning = ""
        self.tool_calls: list[ToolCall] = []
        self.finish_reason: str | None = None  # of OpenAI: as the output's, or "tool_calls"
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(vocabulary)
        self._num_fed = 0
        self._num_read = 0

    def feed(self, output: GenerationOutput) -> list[Delta]:
        """What this output adds. Several pieces may come at once, or none."""
        new = self._new_text(output)
        if output.is_finished():
            self.finish_reason = output.finish_reason
        if not new:
            return []
        self.content += new
        return [Delta(kind="content", text=new)]

    def _new_text(self, output: GenerationOutput) -> str:
        tokens = output.generated_tokens[self._num_fed :]
        self._num_fed += len(tokens)
        if output.text is None:
            self._detokenizer.feed(tokens)
            if output.is_finished():
                self._detokenizer.finish()
        text = self._detokenizer.text if output.text is None else output.text
        new, self._num_read = text[self._num_read :], len(text)
        return new
