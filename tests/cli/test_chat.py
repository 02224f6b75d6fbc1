"""`chairlift chat`: a conversation through pipes, and one through a terminal."""

import os
import pty
import re
import select
import time
from typing import Any

import pytest

from chairlift import LLM
from tests.cli.conftest import WAIT, Start

FLAGS = ("--page-size", "16", "--num-blocks", "4096", "--temperature", "0")
SPEED = re.compile(r"\[(\d+) tokens, \d+ tok/s, first token after [\d.]+ s, (\d+) of (\d+) prompt tokens cached(.*)\]")


def talk(start: Start, folder: str, text: str, *flags: str) -> tuple[str, str]:
    """What it writes to stdout and stderr when `text` is piped in."""
    process = start("chat", folder, *FLAGS, *flags)
    out, err = process.communicate(text.encode(errors="surrogatepass"), timeout=WAIT)
    assert process.returncode == 0, err
    return out.decode(), err.decode()


def test_a_conversation_through_pipes(start: Start, folder: str) -> None:
    told = ["/system Be quick.", "Hello fox", "/nonsense", "/help", "/reset", "Again", "/quit", "never read"]
    lines = ["Hello fox", "", "And the dog?", *told]
    out, err = talk(start, folder, "\n".join(lines) + "\n", "--max-new-tokens", "9")

    with LLM(folder, page_size=16, num_blocks=4096) as llm:

        def answer(*messages: tuple[str, str]) -> str:
            chat = [{"role": role, "content": content} for role, content in messages]
            return llm.chat(chat, max_new_tokens=9, temperature=0)[0].text

        first = answer(("user", "Hello fox"))
        second = answer(("user", "Hello fox"), ("assistant", first), ("user", "And the dog?"))
        third = answer(("system", "Be quick."), ("user", "Hello fox"))
        again = answer(("system", "Be quick."), ("user", "Again"))
    assert out == f"{first}\n{second}\n{third}\n{again}\n"

    speeds = SPEED.findall(err)
    assert [(int(tokens), ended) for tokens, _, _, ended in speeds] == [(9, ", ended by: length")] * 4
    cached, prompt = int(speeds[1][1]), int(speeds[1][2])
    assert int(speeds[0][2]) <= cached < prompt, "the second turn finds the first one's tokens"
    assert "There is no /nonsense" in err
    assert "/system TEXT" in err
    assert "with: Be quick." in err


def test_the_end_of_the_input_ends_it_and_what_is_refused_is_forgotten(start: Start, folder: str) -> None:
    flags = ("--max-new-tokens", "4", "--num-blocks", "16", "--system", "A fox.")
    out, err = talk(start, folder, "fox " * 400 + "\nHello\n", *flags)
    assert "/reset forgets the conversation" in err
    assert "has at most" not in out
    assert len(SPEED.findall(err)) == 1


def test_what_is_no_text_is_refused_and_forgotten(start: Start, folder: str) -> None:
    out, err = talk(start, folder, "Half \ud83d of one\nHello fox\n", "--max-new-tokens", "3")
    assert "half a surrogate pair" in err and "TextEncodeInput" not in err and "Traceback" not in err
    assert len(SPEED.findall(err)) == 1 and out.strip()


class Terminal:
    """The other end of a pseudo-terminal."""

    def __init__(self, start: Start, *arguments: str) -> None:
        self._fd, other = pty.openpty()
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), other)
        self.process: Any = start(*arguments, **ends, start_new_session=True, preexec_fn=_own_terminal)
        os.close(other)
        self._seen = ""

    def expect(self, pattern: str, again: str = "") -> str:
        """Read until `pattern` comes; all that was read. `again` is typed now, and whenever nothing comes for long."""
        deadline = time.monotonic() + WAIT
        self.type(again)
        while not (match := re.search(pattern, self._seen)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self._seen[-2000:]!r}"
            if not select.select([self._fd], [], [], 2.0)[0]:
                self.type(again)
                continue
            try:
                self._seen += os.read(self._fd, 1 << 16).decode(errors="replace")
            except OSError as ended:  # the process has closed its side
                raise AssertionError(f"no {pattern!r} in {self._seen[-2000:]!r}") from ended
        seen, self._seen = self._seen[: match.end()], self._seen[match.end() :]
        return seen

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def close(self) -> None:
        os.close(self._fd)


def _own_terminal() -> None:
    """Make the standard input the controlling terminal, so that Ctrl-C typed there is SIGINT."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of f:DeprecationWarning")
def test_ctrl_c_stops_the_answer_and_not_the_program(start: Start, folder: str) -> None:
    terminal = Terminal(start, "chat", folder, *FLAGS)
    try:
        terminal.expect("/help for the commands.")
        terminal.expect("> ")
        terminal.type("Tell me all\r")
        terminal.expect("Tell me all\r\n")
        terminal.expect("..")  # the answer has begun; by itself it would last a minute
        terminal.type("\x03")
        said = terminal.expect(r"\[\d+ tokens.*\]")
        assert "ended by: cancelled" in said
        terminal.expect("> ")
        terminal.expect("/quit leaves.", again="\x03")  # readline does not see one between its prompt and its wait
        terminal.expect("> ")
        terminal.type("And then\r")
        terminal.expect("And then\r\n")
        terminal.expect("..")
        terminal.type("\x03")
        told = terminal.expect(r"\[\d+ tokens.*\]")
        speed = SPEED.search(told)
        assert speed is not None and int(speed[2]) > 0, "what was stopped stays in the history"
        terminal.expect("> ")
        terminal.type("\x04")  # Ctrl-D
        assert terminal.process.wait(WAIT) == 0
    finally:
        terminal.close()
