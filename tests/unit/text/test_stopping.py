"""A stop string ends an answer before it begins, whatever the tokens, and none of it is shown while streaming."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.request import GenerationOutput, RequestStatus
from chairlift.text.stopping import StopStringFilter

PIECES = ("a", "b", "ab", "ba", "aab", "", "\u00e9")


class Pieces:
    """Tokens of one to three characters; the last two are halves of one."""

    def decode(self, token_ids: list[int], /) -> str:
        data = b"".join(
            b"\xc3" if token == 6 else b"\xa9" if token == 7 else PIECES[token].encode() for token in token_ids
        )
        return data.decode(errors="replace")


def run(
    tokens: list[int], stops: tuple[str, ...], *, streaming: bool, min_new_tokens: int = 0, step: int = 1
) -> tuple[list[GenerationOutput], int]:
    """All that is delivered, and how many tokens it took."""
    stopping = StopStringFilter(Pieces(), stops, min_new_tokens=min_new_tokens, streaming=streaming)
    delivered: list[GenerationOutput] = []
    for end in [*range(step, len(tokens), step), len(tokens)]:
        finished = end == len(tokens)
        output = GenerationOutput(
            request_id="r",
            generated_tokens=tokens[:end],
            new_tokens=tokens[end - step : end],
            logprobs=[-float(i) for i in range(end)],
            top_logprobs=[{i: 0.0} for i in range(end)],
            timestamps=[float(i) for i in range(end)],
            status=RequestStatus.FINISHED if finished else RequestStatus.DECODING,
            finish_reason="length" if finished else None,
        )
        shown, ended = stopping.apply(output)
        if shown is not None:
            delivered.append(shown)
        if ended:
            assert shown is not None and shown.is_finished()
            return delivered, end
    return delivered, len(tokens)


def expected(tokens: list[int], stops: tuple[str, ...], min_new_tokens: int) -> tuple[str, str | None]:
    """The text and the stop string that ends it: token by token over whole texts."""
    begin = len(Pieces().decode(tokens[:min_new_tokens]))
    for end in range(max(1, min_new_tokens), len(tokens) + 1):
        text = Pieces().decode(tokens[:end])
        if text.endswith("\ufffd") and end < len(tokens):
            continue
        hits = [(at, -len(stop), stop) for stop in stops if (at := text.find(stop, begin)) >= 0]
        if hits:
            at, _, stop = min(hits)
            return text[:at], stop
    return Pieces().decode(tokens), None


STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)
TOKENS = st.lists(
    st.one_of(st.integers(0, 5).map(lambda token: [token]), st.just([6, 7])), min_size=1, max_size=14
).map(lambda parts: [token for part in parts for token in part])


@given(TOKENS, STOPS, st.integers(0, 3), st.integers(1, 3))
def test_streamed_or_not_the_answer_is_the_same(
    tokens: list[int], stops: tuple[str, ...], min_new_tokens: int, step: int
) -> None:
    text, stop = expected(tokens, stops, min_new_tokens)
    if step == 1 and 6 not in tokens[min_new_tokens - 1 : min_new_tokens]:
        final = run(tokens, stops, streaming=False, min_new_tokens=min_new_tokens)[0][-1]
        assert (final.text, final.stop_reason) == (text, stop)
        assert final.finish_reason == ("stop" if stop else "length")
    texts = set()
    for streaming in (False, True):
        outputs, _ = run(tokens, stops, streaming=streaming, min_new_tokens=min_new_tokens, step=step)
        final = outputs[-1]
        assert [output.is_finished() for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert streaming or len(outputs) == 1
        count = len(final.generated_tokens)
        assert final.generated_tokens == tokens[:count]
        assert [token for output in outputs for token in output.new_tokens] == final.generated_tokens
        assert len(final.logprobs) == len(final.top_logprobs) == len(final.timestamps or []) == count
        assert final.text is not None and final.text.startswith(Pieces().decode(tokens[:count]).rstrip("\ufffd"))
        for before, after in pairwise(outputs):
            assert after.text is not None and before.text is not None and after.text.startswith(before.text)
            assert before.text == Pieces().decode(before.generated_tokens)
        texts.add(final.text)
    assert len(texts) == 1


@given(TOKENS, STOPS)
def test_no_part_of_a_stop_string_is_ever_shown(tokens: list[int], stops: tuple[str, ...]) -> None:
    outputs, _ = run(tokens, stops, streaming=True)
    final = outputs[-1]
    for output in outputs:
        assert output.text is not None
        assert final.text is not None and final.text.startswith(output.text)
        assert not any(stop in output.text for stop in stops)


def test_a_stop_string_may_take_many_tokens() -> None:
    outputs, used = run([0, 0, 1, 0, 1, 0, 0, 1], ("babaa",), streaming=True)
    assert used == 7
    assert [output.new_tokens for output in outputs] == [[0], [0], []]
    assert outputs[-1].text == "aa" and outputs[-1].stop_reason == "babaa"


def test_what_looked_like_a_stop_string_is_shown_once_it_is_none() -> None:
    outputs, _ = run([1, 0, 1, 1, 0], ("baba",), streaming=True)
    assert [output.new_tokens for output in outputs] == [[1, 0, 1], [1, 0]]
    assert outputs[-1].text == "babba" and outputs[-1].finish_reason == "length"


def test_a_token_that_holds_text_and_stop_string_is_cut_in_the_text_alone() -> None:
    outputs, _ = run([4], ("b",), streaming=True)
    assert (outputs[-1].text, outputs[-1].generated_tokens) == ("aa", [])


def test_a_stop_string_does_not_end_an_answer_that_must_be_longer() -> None:
    outputs, used = run([1, 0, 1, 0], ("b",), streaming=False, min_new_tokens=2)
    assert used == 3 and outputs[-1].text == "ba" and outputs[-1].generated_tokens == [1, 0]
    outputs, used = run([1, 6, 7, 1], ("b",), streaming=False, min_new_tokens=2)
    assert used == 4 and outputs[-1].text == "b\u00e9", "half a character is no end of the first two tokens"


def test_an_answer_that_ends_inside_a_character_shows_so() -> None:
    outputs, _ = run([0, 6], ("zz",), streaming=True)
    assert outputs[-1].text == "a\ufffd" and outputs[-1].generated_tokens == [0, 6]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_failed_or_cancelled_request_stays_so(streaming: bool) -> None:
    stopping = StopStringFilter(Pieces(), ("b",), min_new_tokens=0, streaming=streaming)
    output = GenerationOutput(request_id="r", generated_tokens=[0, 0], status=RequestStatus.DECODING)
    stopping.apply(output)
    fault = ArithmeticError()
    shown, ended = stopping.apply(replace(output, generated_tokens=[0, 0, 1]).failed(fault))
    assert not ended and shown is not None and shown.exception is fault and shown.status is RequestStatus.FAILED
    stopping = StopStringFilter(Pieces(), ("bb",), min_new_tokens=0, streaming=streaming)
    stopping.apply(replace(output, generated_tokens=[0, 1]))
    shown, ended = stopping.apply(
        replace(output, generated_tokens=[0, 1], status=RequestStatus.CANCELLED, finish_reason="cancelled")
    )
    assert not ended and shown is not None and shown.status is RequestStatus.CANCELLED and shown.text == "ab"
