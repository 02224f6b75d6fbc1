"""Text in, text out: what `LLM` adds to the engine, on a tiny random model with a real tokenizer."""

import gc
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import LLM, ConfigError, ContinuousBatchingConfig, EngineDeadError, InvalidRequestError
from chairlift.params import Grammar
from tests.server import toy

PROMPTS = ["The quick brown", "你好世界", "system user", '{"name":']
CHAT = [{"role": "system", "content": "You are a fox."}, {"role": "user", "content": "Jump."}]
SETTINGS: dict[str, Any] = {"page_size": 8, "num_blocks": 512}
WAIT = 30.0


def made(**settings: Any) -> LLM:
    words = toy.tokenizer()
    return LLM(toy.model(len(words)), words, **(SETTINGS | settings))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with made() as llm:
        yield llm


def assert_at_rest(llm: LLM) -> None:
    deadline = time.monotonic() + WAIT
    while (stats := llm.manager.stats()).running or stats.waiting or stats.used_blocks:
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)


def test_answers_are_those_of_the_engine_in_the_order_of_the_prompts(llm: LLM) -> None:
    completions = llm.generate(PROMPTS, max_new_tokens=12, temperature=0)
    ids = [llm.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    outputs = llm.model.generate_batch(ids, max_new_tokens=12, temperature=0)
    assert [each.token_ids for each in completions] == [each.generated_tokens for each in outputs.values()]
    assert [each.text for each in completions] == [
        llm.tokenizer.decode(each.generated_tokens, skip_special_tokens=True) for each in outputs.values()
    ]
    assert str(completions[0]) == completions[0].text
    assert len({each.text for each in completions}) == len(PROMPTS)


def test_one_prompt_as_text_or_tokens_is_a_list_of_one(llm: LLM) -> None:
    ids = llm.tokenizer(PROMPTS[0])["input_ids"]
    texts = {
        llm.generate(prompt, max_new_tokens=8, temperature=0)[0].text
        for prompt in (PROMPTS[0], ids, torch.tensor(ids), [ids], [PROMPTS[0]])
    }
    assert len(texts) == 1
    assert llm.generate([]) == []


def test_a_chat_is_the_rendered_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    (answer,) = llm.chat(CHAT, max_new_tokens=8, temperature=0)
    assert answer.output.prompt_ids == ids
    assert answer.text == llm.generate(ids, max_new_tokens=8, temperature=0)[0].text
    both = llm.chat([CHAT, CHAT[1:]], max_new_tokens=8, temperature=0)
    assert both[0].text == answer.text
    assert len(both[1].output.prompt_ids) < len(ids)


@pytest.mark.parametrize("prompt", [PROMPTS[1], CHAT], ids=["text", "conversation"])
@pytest.mark.parametrize("stops", [None, ["e"], ["qu", " the"]])
def test_the_pieces_of_a_stream_are_the_whole(llm: LLM, prompt: Any, stops: list[str] | None) -> None:
    sampling: dict[str, Any] = {"max_new_tokens": 60, "temperature": 1.0, "seed": 3, "stop_strings": stops}
    whole = (llm.generate if isinstance(prompt, str) else llm.chat)(prompt, **sampling)[0]
    stream = llm.stream(prompt, **sampling)
    pieces = list(stream)
    assert "".join(pieces) == whole.text
    assert len(pieces) > 1
    assert all(pieces)
    assert stream.completion is not None
    assert (stream.completion.text, stream.completion.finish_reason) == (whole.text, whole.finish_reason)
    assert list(stream) == []


def test_the_text_ends_before_a_stop_string(llm: LLM) -> None:
    free = llm.generate(PROMPTS[0], max_new_tokens=60, temperature=1.0, seed=3)[0].text
    stop = free[len(free) // 2 :][:3]
    (cut,) = llm.generate(PROMPTS[0], max_new_tokens=60, temperature=1.0, seed=3, stop_strings=[stop])
    assert cut.text == free[: free.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)


def test_a_stop_string_that_never_shows_ends_the_answer(llm: LLM) -> None:
    """The end of a turn is a special token, which leaves no text to be found."""
    end = llm.tokenizer.convert_tokens_to_ids("<|im_end|>")
    common: dict[str, Any] = {"max_new_tokens": 8, "logit_bias": {end: 100.0}, "ignore_eos": True}
    (answer,) = llm.generate(PROMPTS[0], stop_strings="<|im_end|>", **common)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("", "stop", end)
    for other in (7, [7], torch.tensor(7), torch.tensor([7])):
        (both,) = llm.generate(PROMPTS[0], stop_strings=["x", "<|im_end|>"], stop_token_ids=other, **common)
        assert both.stop_reason == end
    (without,) = llm.generate(PROMPTS[0], **common)
    assert without.finish_reason == "length"


def test_half_a_surrogate_pair_is_no_prompt(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        llm.generate("a\ud800")


def test_a_grammar_and_a_deadline_reach_the_engine(llm: LLM) -> None:
    (answer,) = llm.generate(PROMPTS[0], grammar=Grammar(kind="regex", source="[ab]{3}x"), temperature=1.0, seed=1)
    assert re.fullmatch("[ab]{3}x", answer.text)
    assert "".join(llm.stream(PROMPTS[0], grammar=Grammar(kind="choice", source=("yes", "no")))) in ("yes", "no")
    (late,) = llm.generate(PROMPTS[0], ignore_eos=True, deadline_s=1e-6)
    assert (late.finish_reason, late.first_token_seconds) == ("timeout", None)


def test_several_answers_to_one_prompt_stand_side_by_side(llm: LLM) -> None:
    completions = llm.generate(PROMPTS[:2], max_new_tokens=8, temperature=1.0, seed=5, num_return_sequences=3)
    ids = [llm.tokenizer(prompt)["input_ids"] for prompt in PROMPTS[:2]]
    assert [each.output.prompt_ids for each in completions] == [ids[0]] * 3 + [ids[1]] * 3
    assert len({each.text for each in completions[:3]}) > 1


def test_reasons_and_times(llm: LLM) -> None:
    (answer,) = llm.generate(PROMPTS[0], max_new_tokens=9, ignore_eos=True)
    assert (answer.finish_reason, answer.stop_reason, answer.error) == ("length", None, None)
    assert answer.queue_seconds is not None and answer.first_token_seconds is not None
    assert answer.total_seconds is not None and answer.tokens_per_second is not None
    assert 0 <= answer.queue_seconds <= answer.first_token_seconds <= answer.total_seconds
    stamps = answer.output.timestamps
    assert stamps is not None and len(stamps) == 9
    assert answer.tokens_per_second == pytest.approx(8 / (stamps[-1] - stamps[0]))
    (single,) = llm.generate(PROMPTS[0], max_new_tokens=1)
    assert single.tokens_per_second is None


def test_a_request_that_fails_says_so_and_the_others_go_on(llm: LLM) -> None:
    def fail(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no luck")

    (answer,) = llm.generate(PROMPTS[0], max_new_tokens=4, logits_processor=fail)
    assert answer.finish_reason == "error"
    assert answer.error is not None and "no luck" in answer.error
    stream = llm.stream(PROMPTS[0], max_new_tokens=4, logits_processor=fail)
    assert list(stream) == []
    assert stream.completion is not None and stream.completion.error == answer.error
    assert llm.generate(PROMPTS[0], max_new_tokens=4)[0].error is None


def test_cancelling_a_stream_keeps_what_has_come(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], ignore_eos=True)
    text = next(stream)
    stream.cancel()
    text += "".join(stream)
    assert stream.completion is not None
    assert (stream.completion.finish_reason, stream.completion.text) == ("cancelled", text)
    assert_at_rest(llm)


def test_a_stream_that_nobody_holds_is_cancelled(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], ignore_eos=True)
    next(stream)
    request_id = stream.request_id
    del stream
    gc.collect()
    assert_at_rest(llm)
    assert not llm.manager._router.expects(request_id)


def test_threads_share_the_engine(llm: LLM) -> None:
    alone = [llm.generate(prompt, max_new_tokens=20, temperature=0)[0].text for prompt in PROMPTS]

    def ask(prompt: str) -> str:
        return "".join(llm.stream(prompt, max_new_tokens=20, temperature=0))

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(ask, PROMPTS)) == alone


def test_bad_arguments_are_their_callers_error(llm: LLM) -> None:
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        llm.generate(PROMPTS[0], temprature=1)
    with pytest.raises(InvalidRequestError, match="top_p"):
        llm.stream(PROMPTS[0], top_p=2.0)
    with pytest.raises(InvalidRequestError, match="num_return_sequences=2"):
        llm.stream(PROMPTS[0], num_return_sequences=2)
    with pytest.raises(InvalidRequestError, match="is empty"):
        llm.generate([[]])
    with pytest.raises(InvalidRequestError, match="messages is empty"):
        llm.chat([[]])
    assert_at_rest(llm)


def test_settings_are_checked_before_anything_is_loaded() -> None:
    words = toy.tokenizer()
    with pytest.raises(ConfigError, match="page_size=1"):
        LLM("no such folder", page_size=1)
    with pytest.raises(TypeError, match="page_sise"):
        LLM("no such folder", page_sise=8)
    with pytest.raises(TypeError, match="page_size"):
        LLM("no such folder", continuous_batching_config=ContinuousBatchingConfig(), page_size=8)
    with pytest.raises(TypeError, match="tokenizer"):
        LLM(toy.model(len(words)))
    with pytest.raises(FileNotFoundError, match="/no/such/folder"):
        LLM("/no/such/folder")
    with pytest.raises(ValueError, match="attn_implementation='fancy'"):
        LLM("/no/such/folder", attn_implementation="fancy")


def test_a_folder_is_loaded_with_its_tokenizer(tmp_path: Path, llm: LLM) -> None:
    llm.model.save_pretrained(tmp_path)
    llm.tokenizer.save_pretrained(tmp_path)
    with LLM(str(tmp_path), dtype="float32", **SETTINGS) as loaded:
        assert loaded.generate(PROMPTS, max_new_tokens=6, temperature=0)[2].text == (
            llm.generate(PROMPTS, max_new_tokens=6, temperature=0)[2].text
        )
    with LLM(str(tmp_path), dtype="bfloat16", tokenizer=str(tmp_path), **SETTINGS) as loaded:
        assert loaded.model.dtype == torch.bfloat16
    with LLM(str(tmp_path), llm.tokenizer, attn_implementation="eager", **SETTINGS) as loaded:
        assert loaded.tokenizer is llm.tokenizer
        assert loaded.model.config._attn_implementation == "eager"


def test_closing_ends_the_engine() -> None:
    with made(seed=3) as llm:
        assert llm.manager.config.seed == 3
        stream = llm.stream(PROMPTS[0], ignore_eos=True)
        next(stream)
    assert not llm.manager.is_running()
    assert "chairlift-engine" not in [thread.name for thread in threading.enumerate() if thread is llm.manager._thread]
    list(stream)
    assert stream.completion is not None and stream.completion.finish_reason == "error"
    with pytest.raises(RuntimeError, match="destroyed"):
        llm.generate(PROMPTS[0])
    llm.close()


def test_a_crash_reaches_whoever_waits() -> None:
    with made() as llm:
        stream = llm.stream(PROMPTS[0], ignore_eos=True)
        next(stream)

        def crash() -> Any:
            raise RuntimeError("a fault that the test asked for")

        llm.manager._engine.step = crash
        with pytest.raises(EngineDeadError, match="asked for"):
            list(stream)
        with pytest.raises(EngineDeadError, match="asked for"):
            next(stream)
        with pytest.raises(EngineDeadError, match="asked for"):
            llm.generate(PROMPTS[0])
