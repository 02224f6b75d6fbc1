"""Splits an answer into what a model thinks and what it says.

Knows the tags that models put around their reasoning; refuses to know tokens and requests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from chairlift.text.detokenizer import StopFinder

Kind = Literal["content", "reasoning", "tool"]


class Piece(NamedTuple):
    """Some text to show, and where it stood in the text it was found in: from `start` to `end`, in characters."""

    kind: Kind
    text: str
    start: int
    end: int
    call: int = 0  # number of the tool call
    tool_id: str | None = None
    tool_name: str | None = None


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """What a model puts around its reasoning, which comes before everything else."""

    start: str
    end: str


_KNOWN = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
)


def reasoning_tags(chat_template: str) -> ReasoningTags | None:
    """The tags that a chat template writes or looks for; None: the model does not reason."""
    return next((tags for tags in _KNOWN if tags.end in chat_template), None)


class ReasoningParser:
    """Feed it the text as it comes. `opened`: the prompt ended with the start tag, so the text begins inside.

    White space next to a tag belongs to neither part. Text without tags is content from the first character on.
    """

    def __init__(self, tags: ReasoningTags, *, opened: bool) -> None:
        self._tags = tags
        self._end = StopFinder((tags.end,))
        self._step: Callable[[list[Piece]], None] = self._open if opened else self._begin
        self._text = ""  # not yet decided about
        self._offset = 0  # where it begins

    def feed(self, text: str) -> list[Piece]:
        """What can be told now."""
        self._text += text
        pieces: list[Piece] = []
        step: Callable[[list[Piece]], None] | None = None
        while self._text and step != self._step:
            step = self._step
            step(pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """No text will follow."""
        if self._step == self._begin:
            return self._take("content", len(self._text))
        return self._take("reasoning", len(self._text.rstrip()))

    def _begin(self, pieces: list[Piece]) -> None:
        shown = self._text.lstrip()
        if shown.startswith(self._tags.start):
            self._drop(len(self._text) - len(shown) + len(self._tags.start))
            self._step = self._open
        elif not self._tags.start.startswith(shown):
            self._step = self._say

    def _open(self, pieces: list[Piece]) -> None:
        self._skip_space(self._think)

    def _think(self, pieces: list[Piece]) -> None:
        at = self._text.find(self._tags.end)
        shown = self._text[: at if at >= 0 else self._end.safe_length(self._text)].rstrip()
        pieces += self._take("reasoning", len(shown))
        if at >= 0:
            self._drop(at - len(shown) + len(self._tags.end))
            self._step = self._close

    def _close(self, pieces: list[Piece]) -> None:
        self._skip_space(self._say)

    def _say(self, pieces: list[Piece]) -> None:
        pieces += self._take("content", len(self._text))

    def _skip_space(self, then: Callable[[list[Piece]], None]) -> None:
        self._drop(len(self._text) - len(self._text.lstrip()))
        if self._text:
            self._step = then

    def _take(self, kind: Kind, size: int) -> list[Piece]:
        start, text = self._offset, self._text[:size]
        self._drop(size)
        return [Piece(kind, text, start, self._offset)] if text else []

    def _drop(self, size: int) -> None:
        self._text = self._text[size:]
        self._offset += size
