"""What all routes share: manager, tokenizer, a few threads for text and for grammars, and the calls under way."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response

from chairlift.errors import EngineDeadError, InvalidRequestError
from chairlift.manager import ContinuousBatchingManager
from chairlift.request import GenerationOutput
from chairlift.server.call import Bell, Call
from chairlift.server.errors import ApiError, as_api_error, bad_request, json_response, shutting_down
from chairlift.server.metrics import Metrics
from chairlift.server.protocol import Sampling
from chairlift.server.sse import EventStream, Streamed
from chairlift.server.tracing import Tracing
from chairlift.text.chat import ChatFormat
from chairlift.text.vocabulary import Vocabulary

NUM_THREADS = 4
NUM_COMPILERS = 2  # more would take more from the engine

Result = TypeVar("Result")
Asked = TypeVar("Asked", bound=Sampling)


class Shape(Streamed, Protocol):
    """How one kind of answer looks, streamed or not. The engine knows the answer to a single prompt by its `id`."""

    id: str

    def whole(self, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
        """The answer to a request that is not streamed, from the terminal output of each choice."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request, ready for the engine, and how its answer looks."""

    inputs: Sequence[Sequence[int]]
    sampling: dict[str, Any]
    shape: Shape
    num_answers: int = 1  # to each input
    max_tokens: int | None = None  # of an answer; None: nobody said
    prompt_field: str = "prompt"
    constraint: str | None = None  # the field that the grammar comes from

    def blame(self, message: str) -> ApiError:
        """What the engine refuses, before or in the middle of an answer, by the client's own name for it."""
        if self.constraint is not None and message.removeprefix("the ").startswith("grammar "):
            return ApiError(400, message, param=self.constraint)
        return bad_request(message, self.prompt_field)

    def explain(self, error: Exception) -> ApiError:
        """What the client is told about what went wrong in the middle of an answer."""
        return self.blame(str(error)) if isinstance(error, InvalidRequestError) else as_api_error(error)

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """Raise so what is refused within."""
        try:
            yield
        except InvalidRequestError as error:
            raise self.blame(str(error)) from error


class Service:
    """One per application. What speaks of requests is for the event loop, what speaks of text for any thread."""

    def __init__(
        self,
        manager: ContinuousBatchingManager,
        tokenizer: Any,
        model_name: str,
        chat_template: str | None,
        tracing: Tracing | None,
    ) -> None:
        self.manager = manager
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.chat_format = ChatFormat(tokenizer, chat_template=chat_template)
        self.created = int(time.time())
        self.metrics = Metrics(manager, model_name)
        self._tracing = tracing
        self._vocabularies = {skip: Vocabulary(tokenizer, skip_special_tokens=skip) for skip in (True, False)}
        self.encode("a")  # what a fast tokenizer sets up at its first call must not be set up by two threads at once
        self._threads = ThreadPoolExecutor(NUM_THREADS, "chairlift-text")  # both end with the service
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, "chairlift-grammar")
        self._bell: Bell | None = None
        self._calls: set[Call[Any]] = set()
        self._is_ending = False

    @property
    def max_model_length(self) -> int:
        """Tokens of prompt and answer together, at most."""
        config = self.manager.config
        return min(config.max_sequence_length + 1, config.max_model_length)

    def room(self, tokens: Sequence[int]) -> int:
        """The longest answer to this prompt; 1 for a prompt that is too long, which the manager refuses by name."""
        return max(self.max_model_length - len(tokens), 1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; takes its time, so beside the event loop."""
        return self.vocabulary(skip_special_tokens=True).encode(text, add_special_tokens=add_special_tokens)

    def vocabulary(self, skip_special_tokens: bool) -> Vocabulary:
        """The tokenizer for those who read its tokens."""
        return self._vocabularies[skip_special_tokens]

    def check(self) -> None:
        """Raise EngineDeadError after a crash, ApiError 503 when the manager takes no requests."""
        try:
            self.manager.check()
        except EngineDeadError:
            raise
        except RuntimeError as destroyed:
            raise shutting_down() from destroyed
        if self._is_ending or not self.manager.is_running():
            raise shutting_down()

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for a model that is not served here."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"the model {name!r:.200} is not served here; {self.model_name!r} is",
                param="model",
                code="model_not_found",
            )

    async def offload(self, work: Callable[[], Result], *, compiles: bool = False) -> Result:
        """Do `work` beside the event loop. What compiles a grammar takes as long as its client likes, up to half a
        second, and has threads of its own: whatever compiles none is never behind it."""
        return await asyncio.get_running_loop().run_in_executor(self._compilers if compiles else self._threads, work)

    async def answer(self, request: Request, prepare: Callable[["Service", Asked], Job], body: Asked) -> Response:
        """Answer one request. `prepare` (tokenising, checking) runs beside the event loop. A client that leaves
        cancels whatever there is."""
        streaming = bool(body.stream)
        call: Call[Any] = self._open(request)
        try:

            def submit() -> tuple[Job, bytes]:
                job = prepare(self, body)
                shape = job.shape
                opening = shape.opening() if streaming else b""  # first: chunks are made from here on
                sampling = {"tenant": request.scope.get("tenant")} | job.sampling
                with job.blaming():
                    call.submit(job.inputs, sampling, shape.id, shape.chunk if streaming else _keep, streaming)
                self.metrics.admit(len(job.inputs), job.num_answers, job.max_tokens)
                return job, opening

            job, opening = await self.offload(submit, compiles=body.may_compile)
            if not streaming:
                with job.blaming():
                    outputs = dict([item async for items in call for item in items])
                whole = await self.offload(lambda: job.shape.whole([outputs[choice] for choice in sorted(outputs)]))
                return json_response(whole)
            stream = EventStream(call, job.shape, opening, job.explain)
        except BaseException:
            call.close()
            raise
        finally:
            if not streaming:
                call.close()
        return stream

    def _open(self, request: Request) -> Call[Any]:
        self.check()
        loop = asyncio.get_running_loop()
        if self._bell is None or self._bell.loop is not loop:
            self._bell = Bell(loop)
        call: Call[Any] = Call(self.manager, self._bell, self._observer(request))
        self._calls.add(call)
        call.on_close(lambda: self._calls.discard(call))
        call.watch(request.receive)
        return call

    def _observer(self, request: Request) -> Callable[[GenerationOutput], object]:
        """Who hears of the end of this request's answers."""
        if (tracing := self._tracing) is None:
            return self.metrics.observe
        operation = "text_completion" if request.url.path == "/v1/completions" else "chat"
        headers = dict(request.headers)

        def observe(output: GenerationOutput) -> None:
            self.metrics.observe(output)
            tracing.observe(output, operation=operation, headers=headers)

        return observe

    @property
    def num_calls(self) -> int:
        """Requests that are being answered."""
        return len(self._calls)

    def end(self) -> None:
        """Answer whatever is under way, and whatever may still come, with 503."""
        self._is_ending = True
        for call in tuple(self._calls):
            call.abort(shutting_down())


def _keep(choice: int, output: GenerationOutput) -> tuple[int, GenerationOutput]:
    return choice, output
