"""From a request's outputs to what a reader sees: reasoning, content and tool calls, piece by piece.

Streamed or not it is the same chain: the text (the manager's where stop strings cut it, else decoded here, once), then
the reasoning, then the tool calls. Refuses to know HTTP and where the outputs come from.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chairlift.request import GenerationOutput
from chairlift.text.detokenizer import Detokenizer
from chairlift.text.reasoning import Kind, Piece, ReasoningParser
from chairlift.text.tools import ToolParser
from chairlift.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A piece of an answer. All texts of one kind (and, for tools, one `index`) concatenated are the whole."""

    kind: Kind
    text: str  # content, reasoning, or a fragment of the call's arguments (JSON)
    positions: tuple[int, ...] = ()  # with logprobs: indices into them of the tokens that spell it
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

    reasoning, tools: parsers of this answer alone; None: what looks like reasoning, or like a call, is content.
    `ChatFormat.turn` makes answers with what belongs to a conversation.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None
    ) -> None:
        self.content = ""
        self.reasoning = ""
        self.tool_calls: list[ToolCall] = []
        self.finish_reason: str | None = None  # as the output's, but "tool_calls" when it stopped after calls
        self._vocabulary = vocabulary
        self._reasoning = reasoning
        self._tools = tools
        self._detokenizer = Detokenizer(vocabulary)
        self._num_fed = 0
        self._length = 0  # of the text so far
        self._places = _Places(vocabulary)

    def feed(self, output: GenerationOutput) -> list[Delta]:
        """What this output adds. Several pieces may come at once, or none."""
        is_last = output.is_finished()
        deltas = [self._add(piece) for piece in self._split(self._new_text(output), is_last)]
        if is_last:
            has_called = output.finish_reason == "stop" and bool(self.tool_calls)
            self.finish_reason = "tool_calls" if has_called else output.finish_reason
        return deltas

    def _new_text(self, output: GenerationOutput) -> str:
        """The text since the last output; where there are logprobs, its tokens take their places in it."""
        first, self._num_fed = self._num_fed, len(output.generated_tokens)
        tokens = output.generated_tokens[first:]
        if output.text is None:
            self._detokenizer.feed(tokens)
            if output.is_finished():
                self._detokenizer.finish()
            text, ends = self._detokenizer.text, self._detokenizer.ends
        else:
            text, ends = output.text, None
        if output.logprobs:
            self._places.take(output.generated_tokens, ends, len(text))
        new, self._length = text[self._length :], len(text)
        return new

    def _split(self, text: str, is_last: bool) -> list[Piece]:
        pieces = [Piece("content", text, self._length - len(text), self._length)] if text else []
        if self._reasoning is not None:
            pieces = self._reasoning.feed(text)
            if is_last:
                pieces += self._reasoning.finish()
        if self._tools is not None:
            parts = [[piece] if piece.kind != "content" else self._tools.feed(piece) for piece in pieces]
            pieces = [piece for part in parts for piece in part]
            if is_last:
                pieces += self._tools.finish()
        return pieces

    def _add(self, piece: Piece) -> Delta:
        if piece.kind == "content":
            self.content += piece.text
        elif piece.kind == "reasoning":
            self.reasoning += piece.text
        elif piece.tool_id is not None and piece.tool_name is not None:
            self.tool_calls.append(ToolCall(tool_id=piece.tool_id, name=piece.tool_name, arguments=piece.text))
        else:
            call = self.tool_calls[piece.call]
            self.tool_calls[piece.call] = replace(call, arguments=call.arguments + piece.text)
        return Delta(
            kind=piece.kind,
            text=piece.text,
            positions=self._places.within(piece.start, piece.end),
            index=piece.call,
            tool_id=piece.tool_id,
            tool_name=piece.tool_name,
        )


class _Places:
    """Where in the text the tokens stand that no piece has taken yet. Hidden tokens stand nowhere."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._waiting: deque[tuple[int, int, int]] = deque()  # index of a token, start and end of its text
        self._num_taken = 0
        self._start = self._end = 0  # of the last one

    def take(self, tokens: Sequence[int], ends: Sequence[int] | None, length: int) -> None:
        """Place new tokens. `ends`: as of `Detokenizer`; None: as long as each token is alone, within `length`."""
        known = len(tokens) if ends is None else len(ends)
        for index in range(self._num_taken, known):
            token = tokens[index]
            if token in self._vocabulary.hidden:
                continue
            end = ends[index] if ends is not None else min(self._end + _num_begun(self._vocabulary, token), length)
            if end > self._end:  # else it completes a character together with the one before
                self._start, self._end = self._end, end
            self._waiting.append((index, self._start, end))
        self._num_taken = known

    def within(self, start: int, end: int) -> tuple[int, ...]:
        """The tokens that stand there, or reach into it, and were in no earlier piece."""
        indices = []
        while self._waiting and self._waiting[0][1] < end:
            index, _, token_end = self._waiting.popleft()
            if token_end > start:
                indices.append(index)
        return tuple(indices)


def _num_begun(vocabulary: Vocabulary, token: int) -> int:
    """How many characters begin in a token."""
    return sum(byte & 0xC0 != 0x80 for byte in vocabulary.token(token).data)
