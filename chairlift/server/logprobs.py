"""Logprobs in OpenAI's two shapes: of a chat, and of a completion.

A token that is no whole character is shown as `bytes:\\xe4`; its very bytes are in `bytes`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chairlift.request import GenerationOutput
from chairlift.text.vocabulary import REPLACEMENT, Vocabulary

LEAST = -9999.0  # for what has no probability at all: JSON knows no infinity


def token_name(vocabulary: Vocabulary, token: int) -> str:
    """The text of a token, or its bytes where they are no text."""
    known = vocabulary.token(token)
    if REPLACEMENT in known.text:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in known.data)
    return known.text


def chat_logprobs(vocabulary: Vocabulary, output: GenerationOutput, positions: Iterable[int]) -> dict[str, Any]:
    """Of the generated tokens at these positions, each with its alternatives, if any were asked for."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = list(vocabulary.token(token).data)
        return {"token": token_name(vocabulary, token), "logprob": max(logprob, LEAST), "bytes": data}

    def best_first(place: int) -> list[tuple[int, float]]:
        return sorted(output.top_logprobs[place].items(), key=lambda each: -each[1]) if output.top_logprobs else []

    content = [
        entry(output.generated_tokens[place], output.logprobs[place])
        | {"top_logprobs": [entry(*each) for each in best_first(place)]}
        for place in positions
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Of the tokens of one completion as they come; keeps where in the text the next one begins."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._offset = 0

    def take(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        alternatives: Sequence[Mapping[int, float] | None],
    ) -> dict[str, Any]:
        """The next tokens; `alternatives` is empty when none were asked for. The first token of a prompt has none."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += 0 if token in self._vocabulary.hidden else len(self._vocabulary.token(token).text)
        return {
            "tokens": [token_name(self._vocabulary, token) for token in tokens],
            "token_logprobs": [None if value is None else max(value, LEAST) for value in logprobs],
            "top_logprobs": [
                None
                if value is None
                else self._named(token, value, (alternatives[place] or {}) if alternatives else {})
                for place, (token, value) in enumerate(zip(tokens, logprobs, strict=True))
            ],
            "text_offset": offsets,
        }

    def _named(self, token: int, logprob: float, alternatives: Mapping[int, float]) -> dict[str, float]:
        """By text, the token itself among them; of several tokens with one text the most likely."""
        named: dict[str, float] = {}
        for each, value in sorted({**alternatives, token: logprob}.items(), key=lambda pair: pair[1]):
            named[token_name(self._vocabulary, each)] = max(value, LEAST)
        return dict(reversed(named.items()))
