"""Ends a request at a stop string, and shows nothing of one while it streams."""

from bisect import bisect_right
from dataclasses import replace

from chairlift.request import GenerationOutput, RequestStatus
from chairlift.text.detokenizer import Detokenizer, StopFinder
from chairlift.text.vocabulary import Tokenizer


class StopStringFilter:
    """Between the engine and whoever receives one request's outputs.

    The answer ends before the stop string: `text` exactly there, `generated_tokens` with the last token that lies
    wholly before it. While streaming, tokens that may turn out to belong to a stop string are held back.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop_strings: tuple[str, ...], *, min_new_tokens: int, streaming: bool
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._finder = StopFinder(stop_strings)
        self._min_new_tokens = min_new_tokens
        self._streaming = streaming
        self._num_fed = 0
        self._num_shown = 0

    def apply(self, output: GenerationOutput) -> tuple[GenerationOutput | None, bool]:
        """What to deliver for this output of the engine, if anything, and whether a stop string ended the request."""
        tokens = output.generated_tokens
        self._detokenizer.feed(tokens[self._num_fed :])
        self._num_fed = len(tokens)
        if output.is_finished():
            self._detokenizer.finish()
        text, ends = self._detokenizer.text, self._detokenizer.ends
        if len(ends) >= self._min_new_tokens and output.exception is None:
            start = ends[self._min_new_tokens - 1] if self._min_new_tokens else 0
            if (hit := self._finder.find(text, start)) is not None:
                at, stop = hit
                ended = replace(output, status=RequestStatus.FINISHED, finish_reason="stop", stop_reason=stop)
                return self._cut(ended, at), True
        if output.is_finished():
            return self._show(output, len(tokens), text), False
        if not self._streaming:
            return None, False
        safe = self._finder.safe_length(text)
        num_safe = bisect_right(ends, safe)
        if num_safe <= self._num_shown:
            return None, False
        return self._show(output, num_safe, text[: ends[num_safe - 1]]), False

    def _cut(self, output: GenerationOutput, at: int) -> GenerationOutput:
        return self._show(output, bisect_right(self._detokenizer.ends, at), self._detokenizer.text[:at])

    def _show(self, output: GenerationOutput, count: int, text: str) -> GenerationOutput:
        shown, self._num_shown = self._num_shown, count
        return replace(
            output,
            generated_tokens=output.generated_tokens[:count],
            new_tokens=output.generated_tokens[shown:count],
            logprobs=output.logprobs[:count],
            top_logprobs=output.top_logprobs[:count],
            timestamps=None if output.timestamps is None else output.timestamps[:count],
            text=text,
        )
