"""Text that grows token by token is the text of all tokens, and a stop string is found as soon as it is there."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from chairlift.text.detokenizer import Detokenizer, StopFinder
from chairlift.text.vocabulary import REPLACEMENT, Vocabulary
from tests.unit.text.conftest import byte_tokenizer, sentencepiece

TEXTS = [
    "The quick brown fox, said he, didn't jump.\n\n\tNever?  Two  spaces.",
    "Grüße aus Köln, ça va? Ελλάδα, Россия",
    "你好世界。日本語のテキスト。한국어",
    "🙂👩‍👩‍👧‍👦🇩🇪🏳️‍🌈 emoji of many parts",
    "combining: e\u0301 n\u0303 \u200d\u200b zero width",
    "<|im_start|>not a special token\x00\x01",
]


class Bytes:
    """A token is a byte; what is not UTF-8 becomes a replacement character."""

    def decode(self, token_ids: list[int], /) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


class Words:
    """As tokenizers that put a space before each word but the first."""

    vocabulary = ("the", "cat", "sat", ",", "s", "")

    def decode(self, token_ids: list[int], /) -> str:
        return " ".join(self.vocabulary[token] for token in token_ids)


class ByteFallback:
    """As SentencePiece: bytes in a row become text only if they are UTF-8 all together."""

    def decode(self, token_ids: list[int], /) -> str:
        text, run = "", b""
        for token in [*token_ids, -1]:
            if 0 <= token < 256:
                run += bytes([token])
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += REPLACEMENT * len(run)
            run = b""
            text += "" if token < 0 else chr(token)
        return text


@cache
def bpe() -> Any:
    """A byte-level BPE of a few hundred tokens, with one special token. Its merges cross the bounds of characters."""
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


class WithSpecialTokens:
    """Shows special tokens, as `decode` of transformers does."""

    def decode(self, token_ids: list[int], /) -> str:
        return str(bpe().decode(token_ids, skip_special_tokens=False))


def grow(detokenizer: Detokenizer, tokens: Iterable[int]) -> list[str]:
    """The text after each token. It only ever grows."""
    texts = [""]
    for token in tokens:
        detokenizer.feed([token])
        assert detokenizer.text.startswith(texts[-1])
        assert detokenizer.ends == sorted(detokenizer.ends)
        assert not detokenizer.ends or detokenizer.ends[-1] == len(detokenizer.text)
        texts.append(detokenizer.text)
    return texts[1:]


@pytest.mark.parametrize("text", TEXTS)
def test_characters_are_never_split(text: str) -> None:
    for tokenizer, tokens in ((Bytes(), list(text.encode())), (bpe(), bpe().encode(text).ids)):
        detokenizer = Detokenizer(tokenizer)
        for shown in grow(detokenizer, tokens):
            assert text.startswith(shown), "a character is not there at all until it is whole"
        assert detokenizer.text == text
        assert len(detokenizer.ends) == len(tokens)


@given(st.text())
def test_any_text_grows_out_of_its_tokens(text: str) -> None:
    for tokenizer, tokens in ((Bytes(), list(text.encode())), (bpe(), bpe().encode(text).ids)):
        detokenizer = Detokenizer(tokenizer)
        grow(detokenizer, tokens)
        detokenizer.finish()
        assert detokenizer.text == tokenizer.decode(tokens) == text


@given(st.lists(st.integers(0, 399), max_size=30))
def test_any_tokens_come_to_an_end(tokens: list[int]) -> None:
    """Also those of no text: what is not UTF-8 is shown as such, sooner or later."""
    detokenizer = Detokenizer(WithSpecialTokens())
    grow(detokenizer, tokens)
    detokenizer.finish()
    assert len(detokenizer.ends) == len(tokens)
    assert detokenizer.ends == sorted(detokenizer.ends)


@given(st.text(alphabet="ǁé你🙂"))
def test_tokens_of_bytes_between_whole_ones(text: str) -> None:
    tokens = [token for character in text for token in ([ord("ǁ")] if character == "ǁ" else character.encode())]
    detokenizer = Detokenizer(ByteFallback())
    grow(detokenizer, tokens)
    detokenizer.finish()
    assert detokenizer.text == text


@given(st.lists(st.integers(0, 5), max_size=12), st.data())
def test_it_does_not_matter_how_many_tokens_come_at_once(tokens: list[int], data: st.DataObject) -> None:
    alone, together = Detokenizer(Words()), Detokenizer(Words())
    grow(alone, tokens)
    left = list(tokens)
    while left:
        count = data.draw(st.integers(1, len(left)))
        together.feed(left[:count])
        left = left[count:]
    assert (alone.text, alone.ends) == (together.text, together.ends)
    assert alone.text == Words().decode(tokens)


def test_the_end_of_a_token_is_where_its_last_character_ends() -> None:
    detokenizer = Detokenizer(Bytes())
    detokenizer.feed(list("aé🙂b".encode()))
    assert detokenizer.ends == [1, 2, 2, 3, 3, 3, 3, 4]


def test_tokens_may_cross_the_bounds_of_characters() -> None:
    """Each of these tokens ends inside a character, and all together are text."""

    class Crossing:
        data = "你好世界。".encode()

        def decode(self, token_ids: list[int], /) -> str:
            pieces = (self.data[max(0, 3 * token - 2) : 3 * token + 1] for token in token_ids)
            return b"".join(pieces).decode(errors="replace")

    detokenizer = Detokenizer(Crossing())
    texts = grow(detokenizer, range(6))
    assert all(REPLACEMENT not in text for text in texts)
    assert texts[-1] == "你好世界。"


def test_what_will_never_be_text_is_shown_in_the_end() -> None:
    detokenizer = Detokenizer(Bytes())
    texts = grow(detokenizer, [0xFF] * 9)
    assert texts[-1].startswith(REPLACEMENT)
    detokenizer.finish()
    assert detokenizer.text == REPLACEMENT * 9
    detokenizer = Detokenizer(Bytes())
    grow(detokenizer, [0xF0, 0x9F, ord("a")])
    assert detokenizer.text == REPLACEMENT + "a"


def test_an_answer_cut_inside_a_character_says_so() -> None:
    detokenizer = Detokenizer(Bytes())
    grow(detokenizer, "ab🙂".encode()[:-1])
    assert detokenizer.text == "ab"
    detokenizer.finish()
    assert detokenizer.text == "ab" + REPLACEMENT
    assert detokenizer.ends == [1, 2, 3, 3, 3]
    detokenizer.finish()
    assert detokenizer.text == "ab" + REPLACEMENT


def test_special_tokens_are_text_too() -> None:
    end = bpe().token_to_id("<|end|>")
    detokenizer = Detokenizer(WithSpecialTokens())
    grow(detokenizer, [*bpe().encode("bye").ids, end])
    assert detokenizer.text == "bye<|end|>"
    hidden = Detokenizer(Vocabulary(bpe()))
    texts = grow(hidden, [*bpe().encode("bye").ids, end, *bpe().encode(" now").ids])
    assert texts[-1] == "bye now"


def test_the_work_per_token_does_not_grow_with_the_text() -> None:
    longest = 0

    class Counting(Bytes):
        def decode(self, token_ids: list[int], /) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return super().decode(token_ids)

    grow(Detokenizer(Counting()), list(("ab🙂你" * 300).encode()))
    assert longest <= 8


def stream(tokenizer: Any, tokens: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    grow(detokenizer, tokens)
    detokenizer.finish()
    assert len(detokenizer.ends) == len(tokens)
    return detokenizer.text


TOKENS = st.lists(st.one_of(st.integers(0, 49151), st.integers(17, 300)), max_size=40)  # the second: mostly bytes


@given(tokens=TOKENS)
def test_any_tokens_of_a_real_tokenizer_grow_to_their_text(smollm2: Any, tokens: list[int]) -> None:
    """Words, special tokens, and bytes in any order: mostly no text at all."""
    assert stream(smollm2, tokens) == smollm2.backend_tokenizer.decode(tokens, skip_special_tokens=False)
    assert stream(Vocabulary(smollm2), tokens) == smollm2.backend_tokenizer.decode(tokens, skip_special_tokens=True)


@given(text=st.text())
def test_any_text_grows_with_a_real_tokenizer(smollm2: Any, text: str) -> None:
    """It has no token for a few control characters and bytes, and leaves these out."""
    tokens = smollm2.backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert stream(smollm2, tokens) == smollm2.backend_tokenizer.decode(tokens)


@given(data=st.binary(max_size=40))
def test_any_bytes_grow_to_what_python_makes_of_them(data: bytes) -> None:
    """Whatever is no UTF-8 becomes as many replacement characters as for a whole text, however long it goes on."""
    assert stream(byte_tokenizer(None), list(data)) == data.decode(errors="replace")


@given(st.lists(st.integers(0, 258), max_size=30))
def test_bytes_that_are_text_only_in_company_never_fail(tokens: list[int]) -> None:
    """A run of byte tokens of SentencePiece may lose what was text before: the stream decoder then gives up, we not."""
    together = Detokenizer(sentencepiece())
    together.feed(tokens)
    together.finish()
    assert together.text == stream(sentencepiece(), tokens)
    assert bool(together.text) >= any(token not in (32, 258) for token in tokens)


def test_text_after_bytes_that_were_none() -> None:
    tokenizer = sentencepiece()
    assert stream(tokenizer, [256, *"你".encode(), 0xFF, 256, 256]) == "word你" + REPLACEMENT + " word word"


# --- Stop strings ---------------------------------------------------------------------------------------------------


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3), st.text(alphabet="ab"))
def test_the_first_stop_string_is_found_when_it_is_whole(stops: list[str], text: str) -> None:
    finder = StopFinder(stops)
    for end in range(len(text) + 1):
        shown = text[:end]
        hit = finder.find(shown)
        whole = [(shown.find(stop), -len(stop), stop) for stop in stops if stop in shown]
        if whole:
            at, _, stop = min(whole)
            assert hit == (at, stop)
            return
        assert hit is None
        safe = finder.safe_length(shown)
        assert not any(stop.startswith(shown[at:]) for stop in stops for at in range(safe)), "shown too early"
        assert safe == len(shown) or any(stop.startswith(shown[safe:]) for stop in stops), "held back for nothing"


@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text(alphabet="ab", max_size=5), max_size=6),
    st.integers(0, 6),
)
def test_a_match_may_have_to_begin_after_a_place(stops: list[str], parts: list[str], start: int) -> None:
    finder = StopFinder(stops)
    text = ""
    for part in parts:
        text += part
        if len(text) < start:
            continue
        hits = [(at, -len(stop), stop) for stop in stops if (at := text.find(stop, start)) >= 0]
        expected = (min(hits)[0], min(hits)[2]) if hits else None
        found = finder.find(text, start)
        assert found == expected
        if found:
            return


def test_of_two_stop_strings_in_one_place_the_longer_is_meant() -> None:
    assert StopFinder(["ab", "abc"]).find("xabc") == (1, "abc")
    assert StopFinder(["ab", "abc"]).find("xab") == (1, "ab")
    assert StopFinder(["bc", "abcd"]).find("abcd") == (0, "abcd")
    assert StopFinder(["bc", "abcd"]).find("abc") == (1, "bc")


def test_a_stop_string_of_one_character_holds_nothing_back() -> None:
    assert StopFinder(["\n"]).safe_length("abc") == 3
