"""Tokens to text, one by one, and where a stop string begins in it.

Knows tokenizers only through `Vocabulary`; knows nothing of requests.
"""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from chairlift.text.vocabulary import REPLACEMENT, Tokenizer, Vocabulary

_PATIENCE = 8  # waiting tokens after which half a character may be given up


class Detokenizer:
    """The text of a growing list of tokens, never split inside a character.

    A token's text can depend on the tokens before it (a leading space, bytes of one character), so that tokens are
    decoded together with those of the last piece of text. `DecodeStream` does that; where it cannot go on (bytes that
    are no text, a tokenizer of another library) the same is done here, more slowly.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.text = ""
        self.ends: list[int] = []  # ends[i]: length of `text` once token i was whole
        self._vocabulary = (
            tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer, skip_special_tokens=False)
        )
        self._stream = None if self._vocabulary.backend_tokenizer is None else DecodeStream()
        self._last: list[int] = []  # the tokens of the last piece of text
        self._waiting: list[int] = []  # tokens after it, that are no whole text yet
        self._num_fed = 0

    def feed(self, tokens: Sequence[int]) -> None:
        """Append tokens. Those that end inside a character wait for the next ones."""
        for token in tokens:
            self._num_fed += 1
            if token not in self._vocabulary.hidden:
                self._waiting.append(token)
                if (piece := self._step(token)) is not None:
                    self._take(piece, len(self._waiting))
                elif len(self._waiting) % _PATIENCE == 0:
                    self._give_up()
            elif not self._waiting:
                self._take("", 0)

    def finish(self) -> None:
        """No token will follow: those that wait are shown as they are."""
        if self._waiting:
            self._take(self._fresh(self._waiting), len(self._waiting))

    def _step(self, token: int) -> str | None:
        """The text that this token makes whole, if any."""
        if self._stream is not None and self._vocabulary.backend_tokenizer is not None:
            try:
                return self._stream.step(self._vocabulary.backend_tokenizer, token)
            except Exception:  # the type that it raises when earlier text changed under it
                self._stream = None
        text = self._fresh(self._waiting)
        if text.endswith(REPLACEMENT):
            return None
        if text and self._vocabulary.backend_tokenizer is not None:
            self._stream = DecodeStream(ids=list(self._waiting))
        return text

    def _fresh(self, tokens: list[int]) -> str:
        """The text of these tokens after the last piece."""
        before = self._vocabulary.raw_decode(self._last) if self._last else ""
        after = self._vocabulary.raw_decode(self._last + tokens)
        return after[len(before) :] if after.startswith(before) else self._vocabulary.raw_decode(tokens)

    def _give_up(self) -> None:
        """Show what can no longer become text, up to a place that no character can cross: bytes that two parts have
        in common would read differently apart. The last three tokens may begin a character."""
        tokens, text = self._waiting, self._fresh(self._waiting)
        for size in range(len(tokens) - 1, len(tokens) - 4, -1):
            head = self._fresh(tokens[:size])
            if head + self._vocabulary.raw_decode(tokens[size:]) == text:
                self._take(head, size)
                self._stream = None
                return

    def _take(self, piece: str, size: int) -> None:
        """`piece` is the text of the first `size` of the waiting tokens."""
        self.text += piece
        if size:
            self._last, self._waiting = self._waiting[:size], self._waiting[size:]
        self.ends += [len(self.text)] * (self._num_fed - len(self._waiting) - len(self.ends))


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
