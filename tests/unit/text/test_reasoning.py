"""What a model thinks is never shown as what it says, however the text is cut."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.text.reasoning import Piece, ReasoningParser, ReasoningTags, reasoning_tags
from tests.unit.text.conftest import chunked, joined

TAGS = ReasoningTags("<think>", "</think>")
PARTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "th", "/", "a", "b c", " ", "\n", "<thin", "k>"]), max_size=8
).map("".join)


def split(chunks: Sequence[str], *, opened: bool) -> list[Piece]:
    parser = ReasoningParser(TAGS, opened=opened)
    return [*(piece for chunk in chunks for piece in parser.feed(chunk)), *parser.finish()]


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes."),
        ("\nHm.\n</think>\n\nYes.\n", True, "Hm.", "Yes.\n"),
        ("Yes.", False, "", "Yes."),
        ("  <b>Yes.", False, "", "  <b>Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
        ("Hm. a < b", True, "Hm. a < b", ""),
        ("<think>Hm. </think", False, "Hm. </think", ""),
        ("<thin", False, "", "<thin"),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("<think> </think><think><", False, "", "<think><"),
        ("", True, "", ""),
        (" \n", False, "", " \n"),
    ],
)
def test_reasoning_and_content(text: str, opened: bool, reasoning: str, content: str) -> None:
    for chunks in ([text], list(text)):
        parts = joined(split(chunks, opened=opened))
        assert parts == {kind: part for kind, part in (("reasoning", reasoning), ("content", content)) if part}


@given(PARTS, st.booleans(), st.data())
def test_it_does_not_matter_how_the_text_is_cut(text: str, opened: bool, data: st.DataObject) -> None:
    pieces = split(chunked(text, data), opened=opened)
    assert joined(pieces) == joined(split([text], opened=opened))
    assert all(piece.text == text[piece.start : piece.end] for piece in pieces)
    places = [0, *(place for piece in pieces for place in (piece.start, piece.end)), len(text)]
    hidden = [text[start:end] for start, end in zip(places[::2], places[1::2], strict=True)]
    assert all(re.fullmatch(r"\s*(<think>)?\s*(</think>)?\s*", part) for part in hidden)


def test_content_is_shown_as_it_comes() -> None:
    parser = ReasoningParser(TAGS, opened=False)
    assert [piece.text for chunk in ("H", "i ", "<think>") for piece in parser.feed(chunk)] == ["H", "i ", "<think>"]
    parser = ReasoningParser(TAGS, opened=True)
    assert [piece.text for chunk in ("H", "m ", "< ", "</") for piece in parser.feed(chunk)] == ["H", "m", " <"]


def test_a_template_shows_how_its_model_reasons() -> None:
    assert reasoning_tags("{{ content.split('</think>')[-1] }}") == TAGS
    assert reasoning_tags("[SYSTEM_PROMPT][THINK][/THINK]") == ReasoningTags("[THINK]", "[/THINK]")
    assert reasoning_tags("{{ message.content }}") is None
