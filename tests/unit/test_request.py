"""The arithmetic of a sequence, and the values that are handed out."""

from dataclasses import FrozenInstanceError, replace

import pytest

from chairlift.cache.cache import KVCache
from chairlift.cache.layout import LayerSpec, plan_layout
from chairlift.params import SamplingParams
from chairlift.request import GenerationOutput, Request, RequestStatus, Sequence, written


def sequence(prompt: tuple[int, ...] = (5, 6, 7), **fields: object) -> Sequence:
    params = fields.pop("params", SamplingParams())
    assert isinstance(params, SamplingParams)
    request = Request(
        request_id="r",
        prompt_ids=prompt,
        params=params,
        max_length=len(prompt) + 10,
        seed=0,
        **fields,  # type: ignore[arg-type]
    )
    layout = plan_layout([LayerSpec(index=0, window=None, num_kv_heads=1, head_dim=1)], 4, 1)
    return Sequence(request, 0, KVCache(layout, 4).new(b""))


def test_terminal_statuses_are_the_last_three() -> None:
    terminal = {RequestStatus.FINISHED, RequestStatus.FAILED, RequestStatus.CANCELLED}
    for status in RequestStatus:
        assert GenerationOutput(request_id="r", status=status).is_finished() == (status in terminal)


def test_requests_and_outputs_are_frozen() -> None:
    seq = sequence()
    with pytest.raises(FrozenInstanceError):
        seq.request.seed = 1  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        seq.output().status = RequestStatus.FINISHED  # type: ignore[misc]


def test_pending_is_what_exists_or_is_promised_and_has_no_kv() -> None:
    seq = sequence()
    assert (seq.num_pending, seq.num_generated) == (3, 0)
    seq.num_computed = 2
    assert seq.num_pending == 1
    seq.num_computed, seq.num_promised = 3, 1
    assert (seq.num_pending, seq.num_generated) == (1, 1)
    seq.tokens.append(9)
    seq.num_promised = 0
    assert (seq.num_pending, seq.num_generated) == (1, 1)


@pytest.mark.parametrize(("computed", "prefilling"), [(0, True), (1, True), (2, False), (3, False)])
def test_a_sequence_with_one_token_to_go_is_no_longer_prefilling(computed: int, prefilling: bool) -> None:
    seq = sequence()
    seq.num_computed = computed
    assert seq.is_prefilling == prefilling


def test_status_follows_what_happened() -> None:
    seq = sequence()
    assert seq.status is RequestStatus.PENDING
    seq.first_scheduled = 1.0
    assert seq.status is RequestStatus.PREFILLING
    seq.tokens.append(9)
    assert seq.status is RequestStatus.DECODING


def test_new_tokens_count_from_the_output_before() -> None:
    seq = sequence(streaming=True)
    seq.tokens += [1, 2]
    first = seq.output()
    seq.tokens.append(3)
    second, third = seq.output(), seq.output(status=RequestStatus.FINISHED, finish_reason="length")
    assert [output.new_tokens for output in (first, second, third)] == [[1, 2], [3], []]
    assert [output.generated_tokens for output in (first, second, third)] == [[1, 2], [1, 2, 3], [1, 2, 3]]
    assert third.prompt_ids == [5, 6, 7]


def test_an_output_does_not_change_with_its_sequence() -> None:
    seq = sequence(params=SamplingParams(logprobs=1), record_timestamps=True)
    seq.tokens.append(1)
    seq.logprobs.append(-0.5)
    seq.top_logprobs.append({1: -0.5})
    assert seq.timestamps is not None
    seq.timestamps.append(1.0)
    output = seq.output()
    seq.tokens.append(2)
    seq.logprobs.append(-0.7)
    seq.top_logprobs.append({2: -0.7})
    seq.timestamps.append(2.0)
    assert (output.generated_tokens, output.logprobs, output.top_logprobs, output.timestamps) == (
        [1],
        [-0.5],
        [{1: -0.5}],
        [1.0],
    )


def test_progress_is_written_out_as_it_was_however_late() -> None:
    seq = sequence(params=SamplingParams(logprobs=1), record_timestamps=True, streaming=True)
    seq.first_scheduled, seq.cached_tokens = 0.5, 2
    made = []
    for token in (1, 2, 3):
        seq.tokens.append(token)
        seq.logprobs.append(-float(token))
        seq.top_logprobs.append({token: -float(token)})
        assert seq.timestamps is not None
        seq.timestamps.append(float(token))
        made.append((seq.progress(), replace(sequence(params=seq.request.params).output(), **shown(seq))))
    last = seq.output(status=RequestStatus.FINISHED, finish_reason="length", now=4.0)
    assert last.new_tokens == [] and last.generated_tokens == [1, 2, 3] and last.lifespan == (0.5, 4.0)
    for number, (progress, expected) in enumerate(made):
        output = written(progress)
        assert output.new_tokens == [number + 1] and not output.is_finished() and not progress.is_finished()
        assert output.request_id == progress.request_id == expected.request_id
        assert replace(output, created_time=0.0) == replace(expected, created_time=0.0)
    assert written(last) is last


def shown(seq: Sequence) -> dict[str, object]:
    """What an output shows of a sequence, copied."""
    assert seq.timestamps is not None
    return {
        "generated_tokens": seq.tokens[seq.num_prompt :],
        "new_tokens": seq.tokens[-1:],
        "logprobs": seq.logprobs[:],
        "top_logprobs": seq.top_logprobs[:],
        "timestamps": seq.timestamps[:],
        "status": RequestStatus.DECODING,
        "num_cached_tokens": seq.cached_tokens,
        "lifespan": (seq.first_scheduled, -1.0),
    }


def test_logprobs_of_alternatives_are_only_for_those_who_ask() -> None:
    seq = sequence(params=SamplingParams(logprobs=0, prompt_logprobs=0))
    seq.top_logprobs.append({})
    seq.prompt_logprobs[1:] = [(-1.0, {3: -0.1}), (-2.0, {4: -0.2})]
    output = seq.output()
    assert output.top_logprobs == [] and output.prompt_top_logprobs == []
    assert output.prompt_logprobs == [None, -1.0, -2.0]
    seq = sequence(params=SamplingParams(prompt_logprobs=1))
    seq.prompt_logprobs[1:] = [(-1.0, {3: -0.1}), (-2.0, {4: -0.2})]
    assert seq.output().prompt_top_logprobs == [None, {3: -0.1}, {4: -0.2}]


def test_an_exception_is_told_in_words_too() -> None:
    fault = ValueError("no such thing")
    output = sequence().output(status=RequestStatus.FAILED, finish_reason="error", exception=fault)
    assert (output.error, output.exception) == ("ValueError: no such thing", fault)
    failed = GenerationOutput(request_id="r", generated_tokens=[1]).failed(fault)
    assert failed.status is RequestStatus.FAILED and failed.finish_reason == "error" and failed.is_finished()
    assert (failed.error, failed.exception, failed.generated_tokens) == ("ValueError: no such thing", fault, [1])


def test_cached_tokens_of_a_sequence_that_was_never_seated_are_none() -> None:
    assert sequence().output(status=RequestStatus.CANCELLED).num_cached_tokens == 0


def test_a_request_with_stop_strings_emits_every_step() -> None:
    assert not sequence().emits_steps
    assert sequence(streaming=True).emits_steps
    assert sequence(params=SamplingParams(stop_strings=("x",))).emits_steps
