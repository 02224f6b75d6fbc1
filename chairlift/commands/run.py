"""`chairlift run`: a file of OpenAI batch lines in, a file of answers out.

A line is answered by the server's own application, called in this process, so that it means what it means over HTTP.
An answer is appended as one whole line as soon as it is there, under an id that is its line's number: whatever ends the
process, the same command goes on where it stopped.
"""

import asyncio
import fcntl
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from tqdm import tqdm
from tyro.conf import OmitArgPrefixes, Positional, arg

from chairlift.commands.flags import Engine, UsageError, needs, served_name
from chairlift.errors import EngineDeadError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_ID = re.compile(r"batch_req_(\d+)")
_BEGINNING = b'{"id": "batch_req_'  # of every line that is written here


@dataclass(frozen=True, kw_only=True)
class Run:
    """Answer a file of OpenAI batch lines. Started again after it was killed, it goes on where it stopped."""

    input: Positional[Path]
    """JSON lines: {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}."""
    output: Annotated[Path, arg(aliases=("-o",))]
    """Where answers are appended, as they come: {"id", "custom_id", "response", "error"}."""
    model: Annotated[str | None, arg(aliases=("-m",))] = None
    """Folder or Hub name; None: SmolLM2-135M-Instruct."""
    served_model_name: str | None = None
    """What the lines call the model; None: the last part of its name."""
    concurrency: int | None = None
    """Lines that are handed to the engine at once; None: twice what fits into one pass."""
    engine: OmitArgPrefixes[Engine] = Engine()  # noqa: RUF009 - it is frozen
    """How the model is loaded."""

    def __call__(self) -> int:
        with needs("server"):
            from chairlift.server import create_app
        if self.concurrency is not None and self.concurrency < 1:
            raise UsageError(f"--concurrency {self.concurrency} makes no sense: give at least 1")
        with _open_input(self.input) as source, Answers(self.output) as answers:
            todo = list(_todo(source, answers))
            if todo:
                with self.engine.open(self.model, max_queue_size=0) as llm:  # a line that waits is not refused
                    app = create_app(
                        llm.manager,
                        llm.tokenizer,
                        model_name=self.served_model_name or served_name(self.model),
                        max_body_bytes=sys.maxsize,
                    )
                    limit = self.concurrency or 2 * llm.manager.config.max_requests_per_batch
                    asyncio.run(_answer_all(app, source, todo, answers, limit))
            print(answers, file=sys.stderr)
        return 0


@dataclass(frozen=True, slots=True)
class Line:
    """Where a line of the input stands."""

    number: int  # from 1, blank lines counted
    offset: int  # bytes
    is_repeated: bool  # an earlier line has its custom_id


def _open_input(path: Path) -> BinaryIO:
    try:
        file = path.open("rb")
    except OSError as error:
        raise UsageError(str(error)) from error
    if not file.seekable():
        file.close()
        raise UsageError(f"{path} can be read only once; give a file")
    return file


class Answers:
    """The output file, and which lines of the input it has answered already.

    Raises UsageError for a file that cannot be one or that another process is writing to. A last line that was cut off
    when a process died is dropped.
    """

    def __init__(self, path: Path) -> None:
        self.custom_ids: dict[int, object] = {}  # of the lines answered, by number
        self.num_errors = 0
        self._path = path
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise UsageError(str(error)) from error
        try:
            self._take_up()
        except BaseException:
            self._file.close()
            raise

    def _take_up(self) -> None:
        """Read what is there, and drop half a line."""
        if not self._path.is_file():
            raise UsageError(f"{self._path} is no file; answers are read again when the command is")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"{self._path} is being written to by another process") from error
        self._file.seek(0)
        whole = 0
        for line in self._file:
            if line.endswith(b"\n"):
                self._note(line, whole)
                whole += len(line)
            elif line[: len(_BEGINNING)] != _BEGINNING[: len(line)]:
                raise self._foreign(whole)
        self._file.truncate(whole)

    def _note(self, line: bytes, offset: int) -> None:
        try:
            answer = json.loads(line)
            number = int(_ID.fullmatch(answer["id"])[1])  # type: ignore[index]  # None is no answer of ours
        except (ValueError, TypeError, KeyError) as error:
            raise self._foreign(offset) from error
        self._count(number, answer)

    def _foreign(self, offset: int) -> UsageError:
        return UsageError(f"{self._path} holds something else than answers, at byte {offset}")

    def _count(self, number: int, answer: dict[str, Any]) -> None:
        self.custom_ids[number] = answer["custom_id"]
        response = answer["response"]
        if response is None or response["status_code"] != 200:
            self.num_errors += 1

    def append(self, number: int, custom_id: object, response: dict[str, Any] | None, error: str | None) -> None:
        """One answer: a response of the server, or why there is none."""
        answer = {
            "id": f"batch_req_{number}",
            "custom_id": custom_id,
            "response": response,
            "error": None if error is None else {"code": "invalid_line", "message": error},
        }
        line = json.dumps(answer, ensure_ascii=False)
        self._file.write(line.encode(errors="backslashreplace") + b"\n")  # half a surrogate pair, as JSON spells it
        self._file.flush()
        self._count(number, answer)

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def __str__(self) -> str:
        return f"{self._path}: {len(self.custom_ids)} lines answered, {self.num_errors} of them with an error"


def _todo(source: BinaryIO, answers: Answers) -> Iterator[Line]:
    """The lines that have no answer yet. Raises UsageError when the answers are those of another input."""
    seen: set[object] = set()
    known = dict(answers.custom_ids)
    offset = 0
    for number, line in enumerate(source, start=1):
        if line.strip():
            custom_id = _custom_id(line)
            if number not in known:
                yield Line(number, offset, custom_id is not None and custom_id in seen)
            elif known.pop(number) != custom_id:
                raise UsageError(
                    f"line {number} of the input has custom_id {custom_id!r}, its answer "
                    f"{answers.custom_ids[number]!r}: the output belongs to another input; name a new one"
                )
            seen.add(custom_id)
        offset += len(line)
    if known:
        raise UsageError(f"the output answers line {min(known)}, which the input does not have; name a new one")


def _custom_id(line: bytes) -> str | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    custom_id = entry.get("custom_id") if isinstance(entry, dict) else None
    return custom_id if isinstance(custom_id, str) else None


async def _answer_all(app: Any, source: BinaryIO, todo: list[Line], answers: Answers, limit: int) -> None:
    """Answer the lines, at most `limit` at a time. Raises EngineDeadError once the engine takes no more."""
    room = asyncio.Semaphore(limit)
    with tqdm(
        total=len(answers.custom_ids) + len(todo), initial=len(answers.custom_ids), unit="line", disable=None
    ) as bar:

        async def answer(line: Line, text: bytes) -> None:
            try:
                await _answer(app, line, text, answers)
            finally:
                room.release()
            bar.update()

        try:
            async with asyncio.TaskGroup() as group:
                for line in todo:
                    await room.acquire()
                    source.seek(line.offset)
                    group.create_task(answer(line, source.readline()))
        except* EngineDeadError as dead:
            raise dead.exceptions[0] from None


async def _answer(app: Any, line: Line, text: bytes, answers: Answers) -> None:
    custom_id = _custom_id(text)
    try:
        url, body = _request(line, text)
    except ValueError as error:
        answers.append(line.number, custom_id, None, str(error))
        return
    status, content = await post(app, url, body)
    if status == 503:
        raise EngineDeadError(f"the engine stopped: {content.decode(errors='replace')}")
    answer = json.loads(content)
    request_id = str(answer.get("id") or f"req_{line.number}")
    answers.append(line.number, custom_id, {"status_code": status, "request_id": request_id, "body": answer}, None)


def _request(line: Line, text: bytes) -> tuple[str, bytes]:
    """URL and body of a line. Raises ValueError with what is wrong with it."""
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {line.number} is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ValueError(f"line {line.number} is no JSON object")
    if not isinstance(entry.get("custom_id"), str):
        raise ValueError(f"custom_id must be a string, got {entry.get('custom_id')!r:.80}")
    if line.is_repeated:
        raise ValueError(f"custom_id {entry['custom_id']!r:.80} is that of an earlier line; give each its own")
    if entry.get("method", "POST") != "POST":
        raise ValueError(f"method must be POST, got {entry['method']!r:.80}")
    if entry.get("url") not in URLS:
        raise ValueError(f"url must be one of {', '.join(URLS)}, got {entry.get('url')!r:.80}")
    body = entry.get("body")
    if not isinstance(body, dict):
        raise ValueError(f"body must be an object, got {body!r:.80}")
    if body.get("stream"):
        raise ValueError("body.stream is true; a line is answered as a whole")
    return entry["url"], json.dumps(body).encode()


async def post(app: Any, path: str, body: bytes) -> tuple[int, bytes]:
    """Call an ASGI application: status and content of its response."""
    status, content, requests = 0, bytearray(), [body]

    async def receive() -> dict[str, Any]:
        if requests:
            return {"type": "http.request", "body": requests.pop()}
        await asyncio.Event().wait()  # this client never leaves
        raise AssertionError("unreachable")

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            content.extend(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
    }
    await app(scope, receive, send)
    return status, bytes(content)
