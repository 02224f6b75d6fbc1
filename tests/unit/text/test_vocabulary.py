"""A token is its text and its very bytes, whatever it is a half of."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.text.vocabulary import REPLACEMENT, TokenText, Vocabulary
from tests.unit.text.conftest import byte_tokenizer, sentencepiece


@given(text=st.text(min_size=1))
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(smollm2: Any, text: str) -> None:
    vocabulary = Vocabulary(smollm2)
    tokens = smollm2.backend_tokenizer.encode(text, add_special_tokens=False).ids
    data = b"".join(vocabulary.token(token).data for token in tokens)
    assert data.decode(errors="replace") == smollm2.backend_tokenizer.decode(tokens)


def test_every_token_has_bytes(smollm2: Any) -> None:
    vocabulary = Vocabulary(smollm2)
    for token in range(len(smollm2)):
        known = vocabulary.token(token)
        assert known.data.decode(errors="replace") == known.text
    halves = [token for token in range(len(smollm2)) if REPLACEMENT in vocabulary.token(token).text]
    assert len(halves) > 200, "single bytes, and pieces of characters"


def test_half_a_character_has_its_bytes() -> None:
    tokenizer = byte_tokenizer(None)
    tokens = tokenizer.encode("é", add_special_tokens=False)
    vocabulary = Vocabulary(tokenizer)
    assert [vocabulary.token(token) for token in tokens] == [
        TokenText(REPLACEMENT, b"\xc3"),
        TokenText(REPLACEMENT, b"\xa9"),
    ]


def test_a_token_is_what_it_is_in_the_middle_of_a_text() -> None:
    vocabulary = Vocabulary(sentencepiece())
    assert vocabulary.token(256) == TokenText(" word", b" word"), "alone it would lose its space"
    assert vocabulary.token(257) == TokenText("er", b"er")
    assert vocabulary.token(0xE4) == TokenText(REPLACEMENT, b"\xe4")
    assert vocabulary.token(ord("a")) == TokenText("a", b"a")


def test_special_tokens_show_only_where_they_are_wanted() -> None:
    tokenizer = byte_tokenizer(None, special=("[CALLS]",), added=("<call>",))
    tokens = tokenizer.encode("a[CALLS]<call><|end|>", add_special_tokens=False)
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.decode(tokens) == "a<call>"
    assert vocabulary.showing(["[CALLS]", "none"]).decode(tokens) == "a[CALLS]<call>"
    assert vocabulary.decode(tokens) == "a<call>", "the other one is as it was"
    assert vocabulary.showing(["<call>", "x"]) is vocabulary
    assert Vocabulary(tokenizer, skip_special_tokens=False).decode(tokens) == "a[CALLS]<call><|end|>"
    assert vocabulary.token(tokens[1]).text == "[CALLS]"
    assert [vocabulary.added_id(text) for text in ("<call>", "[CALLS]", "a")] == [tokens[2], tokens[1], None]


def test_any_object_that_decodes_will_do() -> None:
    class Letters:
        def decode(self, token_ids: list[int], /) -> str:
            return "".join("abc"[token] for token in token_ids)

    vocabulary = Vocabulary(Letters())
    assert vocabulary.hidden == frozenset()
    assert vocabulary.decode([0, 1]) == "ab"
    assert vocabulary.token(2) == TokenText("c", b"c")
    assert vocabulary.added_id("a") is None
    with pytest.raises(IndexError):
        vocabulary.token(3)
