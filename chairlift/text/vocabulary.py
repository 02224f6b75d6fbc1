"""What each token of a tokenizer is as text and as bytes, and which tokens do not show in an answer.

Knows tokenizers by what they can do: those of the `tokenizers` library and what wraps one (`backend_tokenizer`), and
anything else that has `decode(ids) -> str`. Refuses to know transformers, and how text grows (see `detokenizer`).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import tokenizers

from chairlift.errors import InvalidRequestError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what an incomplete UTF-8 sequence decodes to


class Tokenizer(Protocol):
    """The part of a tokenizer that is always there."""

    def decode(self, token_ids: list[int], /) -> str:
        """Text of these tokens."""
        ...


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token: its text, with U+FFFD for half a character, and its very bytes."""

    text: str
    data: bytes


def check_unicode(text: str, name: str) -> None:
    """Raise InvalidRequestError for what UTF-8 cannot spell: JSON can, and so can a terminal."""
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        raise InvalidRequestError(
            f"{name} holds half a surrogate pair, {fault.object[fault.start]!a}, which is no text; send whole ones"
        ) from None


class Vocabulary:
    """A tokenizer as those see it who read its tokens. May be used by many threads.

    tokenizer: of transformers, of `tokenizers`, or any object with `decode`.
    skip_special_tokens: whether the tokenizer's special tokens leave no text; `showing` makes exceptions.

    A `Vocabulary` has `decode` itself: give it as `tokenizer=` of a request with stop strings, and the text that
    these are looked for in is the text that an `Answer` with the same vocabulary gives.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.backend_tokenizer = _backend(tokenizer)  # None if it is none of the `tokenizers` library
        self.hidden = _special_ids(tokenizer, self.backend_tokenizer) if skip_special_tokens else frozenset[int]()
        self._known: dict[int, TokenText] = {}
        self._anchor: list[int] | None = None

    def showing(self, texts: Iterable[str]) -> "Vocabulary":
        """The same, but special tokens with one of these texts show: a parser waits for them."""
        shown = self.hidden.intersection(token for text in texts if (token := self.added_id(text)) is not None)
        if not shown:
            return self
        other = object.__new__(Vocabulary)
        other.__dict__.update(self.__dict__, hidden=self.hidden - shown)
        return other

    def added_id(self, text: str) -> int | None:
        """The token that was added to the vocabulary for exactly this text (a tag, say), if there is one."""
        return self._added.get(text)

    @cached_property
    def _added(self) -> dict[str, int]:
        if self.backend_tokenizer is not None:
            return {added.content: token for token, added in self.backend_tokenizer.get_added_tokens_decoder().items()}
        get = getattr(self.tokenizer, "get_added_vocab", None)
        return {} if get is None else dict(get())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, by a tokenizer of transformers. Raises InvalidRequestError for what is no Unicode."""
        check_unicode(text, "prompt")
        encode: Any = self.tokenizer.encode  # type: ignore[attr-defined]  # whoever only decodes needs none
        return list(encode(text, add_special_tokens=add_special_tokens))

    def arguments(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """A request's arguments with this as its tokenizer. Text of a hidden token is never found in an answer: a stop
        string that is one (the end of a turn, say) becomes a stop token as well."""
        arguments = {**sampling, "tokenizer": self}
        stops = sampling.get("stop_strings")
        stops = [stops] if isinstance(stops, str) else stops if isinstance(stops, Collection) else ()
        if ends := self.hidden & {self.added_id(stop) for stop in stops if isinstance(stop, str)}:
            given = sampling.get("stop_token_ids")
            is_one = not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0
            arguments["stop_token_ids"] = [*ends, *(() if given is None else (given,) if is_one else given)]
        return arguments

    def decode(self, token_ids: list[int], /) -> str:
        """Text of these tokens, all at once, without the hidden ones."""
        return self.raw_decode([token for token in token_ids if token not in self.hidden])

    def raw_decode(self, token_ids: list[int]) -> str:
        """Text of these tokens, special ones too."""
        if self.backend_tokenizer is not None:
            return self.backend_tokenizer.decode(token_ids, skip_special_tokens=False)
        return self.tokenizer.decode(token_ids)

    def token(self, token_id: int) -> TokenText:
        """What one token is in the middle of a text."""
        if (known := self._known.get(token_id)) is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> TokenText:
        """A token alone may read differently from one that follows another (a leading space), hence the anchor."""
        if self._anchor is None:
            self._anchor = self._find_anchor()
        before, after = self.raw_decode(self._anchor), self.raw_decode([*self._anchor, token_id])
        text = after[len(before) :] if after.startswith(before) else self.raw_decode([token_id])
        if REPLACEMENT in text and (name := self._name(token_id)) is not None:
            return TokenText(text, _bytes_of(name, text))
        return TokenText(text, text.encode())

    def _find_anchor(self) -> list[int]:
        """A token that is a plain letter or word, to put before others."""
        for token in range(2048):
            try:
                text = self.raw_decode([token])
            except (IndexError, KeyError, OverflowError):  # the vocabulary is shorter than that
                return []
            if text.isascii() and text.isalpha():
                return [token]
        return []

    def _name(self, token_id: int) -> str | None:
        """The token as the vocabulary file spells it."""
        if self.backend_tokenizer is not None:
            return self.backend_tokenizer.id_to_token(token_id)
        convert = getattr(self.tokenizer, "convert_ids_to_tokens", None)
        name = None if convert is None else convert(token_id)
        return name if isinstance(name, str) else None


def _backend(tokenizer: Any) -> tokenizers.Tokenizer | None:
    backend = (
        tokenizer if isinstance(tokenizer, tokenizers.Tokenizer) else getattr(tokenizer, "backend_tokenizer", None)
    )
    return backend if isinstance(backend, tokenizers.Tokenizer) else None


def _special_ids(tokenizer: Any, backend: tokenizers.Tokenizer | None) -> frozenset[int]:
    ids = set(getattr(tokenizer, "all_special_ids", ()))
    if backend is not None:
        ids.update(token for token, added in backend.get_added_tokens_decoder().items() if added.special)
    return frozenset(ids)


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE spells a byte as one printable character: its own in Latin-1, or the next one from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(own)]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_LETTERS = _byte_alphabet()


def _bytes_of(name: str, text: str) -> bytes:
    """The bytes of a token that is no whole text: `<0xE4>` of SentencePiece, or the letters of byte-level BPE."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    if all(letter in BYTE_LETTERS for letter in name):
        return bytes(BYTE_LETTERS[letter] for letter in name)
    return text.encode()
