"""`chairlift chat`: a conversation in the terminal. Answers go to stdout, all else to stderr."""

import io
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tyro.conf import OmitArgPrefixes, Positional

from chairlift.commands.flags import Engine
from chairlift.errors import InvalidRequestError

if TYPE_CHECKING:
    from chairlift.llm import LLM, Completion, Stream

HELP = """\
/system TEXT  what the model is told before the conversation, which starts anew; without TEXT it says nothing
/reset        forget the conversation
/help         this
/quit         leave, as does Ctrl-D
Ctrl-C        stop the answer"""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Talk to a model in the terminal."""

    model: Positional[str | None] = None
    """Folder or Hub name; None: SmolLM2-135M-Instruct."""
    system: str = ""
    """What the model is told before the conversation."""
    max_new_tokens: int | None = None
    """Most tokens of an answer; None: up to the context length."""
    temperature: float | None = None
    """0 is greedy; None: as the model's generation config says."""
    top_p: float | None = None
    """Smallest set of tokens that is this likely; None: as the model's generation config says."""
    engine: OmitArgPrefixes[Engine] = Engine()  # noqa: RUF009 - it is frozen
    """How the model is loaded."""

    def __call__(self) -> int:
        sampling = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature, "top_p": self.top_p}
        with self.engine.open(self.model) as llm:
            _say("Type /help for the commands.")
            Conversation(llm, self.system, sampling).talk()
        return 0


class Conversation:
    """What was said so far, and the lines that come."""

    def __init__(self, llm: "LLM", system: str, sampling: dict[str, Any]) -> None:
        self._llm = llm
        self._sampling = sampling
        self._begin(system)

    def _begin(self, system: str) -> None:
        self._system = system
        self._messages = [{"role": "system", "content": system}] if system else []

    def talk(self) -> None:
        """Until /quit or the end of the input."""
        for line in _lines():
            with suppress(KeyboardInterrupt):  # pressed just before an answer began, or just after it ended
                if line in ("/quit", "/exit"):
                    return
                self._obey(line)

    def _obey(self, line: str) -> None:
        command, _, text = line.partition(" ")
        match command:
            case "":
                pass
            case "/help":
                _say(HELP)
            case "/reset":
                self._begin(self._system)
                _say("The conversation starts anew.")
            case "/system":
                self._begin(text.strip())
                _say("The conversation starts anew" + (f", with: {self._system}" if self._system else "."))
            case _ if command.startswith("/"):
                _say(f"There is no {command}; /help lists what there is.")
            case _:
                self._answer(line)

    def _answer(self, text: str) -> None:
        """One turn. What was stopped half-way stays in the history; what was refused does not enter it."""
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            stream = self._llm.stream(messages, **self._sampling)
        except InvalidRequestError as error:
            _say(f"{error}\n/reset forgets the conversation.")
            return
        with _interrupt_stops(stream):
            for piece in stream:
                print(piece, end="", flush=True)
        print(flush=True)
        if (completion := stream.completion) is not None:
            _say(_speed(completion))
            self._messages = [*messages, {"role": "assistant", "content": completion.text}]


def _lines() -> Iterator[str]:
    """What the user types, line by line. Ctrl-C at the prompt drops the line."""
    is_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(
            errors="surrogateescape"
        )  # what is no UTF-8 is refused as no text, and the next line read
    if is_terminal:
        with suppress(ImportError):  # editing and history, where Python was built with it
            import readline  # noqa: F401
    while True:
        try:
            yield input("> " if is_terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            _say("\n/quit leaves.")


@contextmanager
def _interrupt_stops(stream: "Stream") -> Iterator[None]:
    """Ctrl-C ends the answer, and not the program."""
    before = signal.signal(signal.SIGINT, lambda number, frame: stream.cancel())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _speed(completion: "Completion") -> str:
    output = completion.output
    parts = [f"{len(output.generated_tokens)} tokens"]
    if (rate := completion.tokens_per_second) is not None:
        parts.append(f"{rate:.0f} tok/s")
    if (first := completion.first_token_seconds) is not None:
        parts.append(f"first token after {first:.2f} s")
    parts.append(f"{output.num_cached_tokens} of {len(output.prompt_ids)} prompt tokens cached")
    if completion.finish_reason != "stop":
        parts.append(completion.error or f"ended by: {completion.finish_reason}")
    return "[" + ", ".join(parts) + "]"


def _say(text: str) -> None:
    """To the user, not part of an answer."""
    is_terminal = sys.stderr.isatty()
    print(f"\033[2m{text}\033[0m" if is_terminal else text, file=sys.stderr, flush=True)
