"""Tokens to text, one by one, and where a stop string begins in it.

Knows tokenizers only as objects with `decode(ids) -> str`; knows nothing of requests.
"""

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what an incomplete UTF-8 sequence decodes to


class Tokenizer(Protocol):
    """The part of a tokenizer that is used here."""

    def decode(self, token_ids: list[int], /) -> str:
        """Text of these tokens."""
        ...


class Detokenizer:
    """The text of a growing list of tokens, never split inside a character.

    A token's text can depend on the tokens before it (a leading space, bytes of one character), so that each step
    decodes the tokens since the last but one boundary and takes what is new.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.text = ""
        self.ends: list[int] = []  # ends[i]: length of `text` once token i was whole
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._prefix = 0  # tokens before this one are not decoded again
        self._read = 0  # tokens before this one are in `text`

    def feed(self, tokens: Sequence[int]) -> None:
        """Append tokens. Those that end inside a character wait for the next ones."""
        for token in tokens:
            self._tokens.append(token)
            before = self._tokenizer.decode(self._tokens[self._prefix : self._read])
            after = self._tokenizer.decode(self._tokens[self._prefix :])
            if not after.endswith(REPLACEMENT) or self._is_hopeless(after):
                self._take(after[len(before) :])

    def finish(self) -> None:
        """No token will follow: those that wait are shown as they are."""
        if self._read < len(self._tokens):
            before = self._tokenizer.decode(self._tokens[self._prefix : self._read])
            self._take(self._tokenizer.decode(self._tokens[self._prefix :])[len(before) :])

    def _is_hopeless(self, text: str) -> bool:
        """Whether the end of `text` is invalid for good: four bytes make any character."""
        return len(self._tokens) - self._read >= 4 and text.endswith(REPLACEMENT * 4)

    def _take(self, text: str) -> None:
        self.text += text
        self.ends += [len(self.text)] * (len(self._tokens) - self._read)
        self._prefix, self._read = self._read, len(self._tokens)


class StopFinder:
    """Finds the first stop string in a growing text, and how much of the text is safe to show meanwhile."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stops = tuple(stop_strings)
        self._reach = max(map(len, self._stops)) - 1
        self._searched = 0

    def find(self, text: str, start: int = 0) -> tuple[int, str] | None:
        """Where the first match after `start` begins, and which stop string it is; of two at one place the longer."""
        begin = max(start, self._searched - self._reach)
        hits = [(at, -len(stop), stop) for stop in self._stops if (at := text.find(stop, begin)) >= 0]
        self._searched = len(text)
        if not hits:
            return None
        at, _, stop = min(hits)
        return at, stop

    def safe_length(self, text: str) -> int:
        """The length of `text` up to which no later text can turn it into a part of a stop string."""
        for size in range(min(self._reach, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return len(text) - size
        return len(text)
