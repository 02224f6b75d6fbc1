"""The engine's requests behind one HTTP request.

Outputs come from the engine on the manager's callback thread, where they are made into what the route wants (text, and
for streams finished bytes), and cross to the event loop with one wake-up for all that have come. Knows no OpenAI.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from starlette.types import Receive

from chairlift.manager import ContinuousBatchingManager
from chairlift.request import GenerationOutput, RequestStatus
from chairlift.server.errors import ClientGoneError, failure, shutting_down

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Observer = Callable[[GenerationOutput], object]


class Bell:
    """Wakes one event loop from other threads, once for all that is handed over until it has woken."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._arrived: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._rung = False

    def hand(self, take: Callable[[Any], None], item: object) -> None:
        """Have `take(item)` called on the loop. Any thread; in order for each thread."""
        self._arrived.append((take, item))
        if not self._rung:  # read after the append: the loop empties what it finds after it has cleared it
            self._rung = True
            with suppress(RuntimeError):  # the loop is closed: nobody is left to hear
                self.loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._rung = False
        while self._arrived:
            take, item = self._arrived.popleft()
            take(item)


class Call(Generic[Item]):
    """An asynchronous iterator over lists of items, one item for each output of the engine; ends after the terminal
    output of each request, raises when one of them failed, and `ClientGoneError` once the client has left.

    Use it on its event loop only, `submit` apart. Whoever opens one closes it.
    """

    def __init__(self, manager: ContinuousBatchingManager, bell: Bell, observe: Observer) -> None:
        self._manager = manager
        self._bell = bell
        self._observe = observe  # of terminal outputs
        self._lock = threading.Lock()  # over what follows
        self._make: Callable[[int, GenerationOutput], Item]
        self._families: list[list[str]] = []
        self._choices: dict[str, int] = {}  # request id -> its place among the answers
        self._early: list[GenerationOutput] | None = []  # came before `submit` knew the ids
        self._is_over = False
        self._items: list[Item] = []  # from here on: the event loop's own
        self._num_open = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._on_close: Callable[[], None] = lambda: None

    # ------------------------------------------------------------------ other threads

    def submit(
        self,
        inputs: Sequence[Sequence[int]],
        sampling: Mapping[str, Any],
        name: str,
        make: Callable[[int, GenerationOutput], Item],
        streaming: bool,
    ) -> None:
        """Queue the requests of all inputs; a single one is called `name`. `make(choice, output)` gives the items, on
        the callback thread. Raises what the manager raises, and `ApiError` 503 once that has been told to stop."""
        self._make = make
        families = self._manager.submit(
            inputs,
            sampling,
            request_id=name if len(inputs) == 1 else None,
            streaming=streaming,
            record_timestamps=True,
            handler=self._arrive,
        )
        if not families:
            raise shutting_down()
        names = [name for family in families for name in family]
        with self._lock:
            self._families = families
            self._choices = {name: choice for choice, name in enumerate(names)}
            self._num_open = len(names)
            early, self._early = self._early or [], None
            for output in early:
                self._take(output)
            if self._is_over:
                self._cancel()

    def _arrive(self, output: GenerationOutput) -> None:
        with self._lock:
            if self._early is not None:
                self._early.append(output)
            else:
                self._take(output)

    def _take(self, output: GenerationOutput) -> None:
        if output.is_finished():
            try:
                self._observe(output)  # first: whoever has the answer may count on being counted
            except Exception:
                logger.exception("the end of request %r was not counted", output.request_id)
        if not self._is_over:
            self._hand(output)

    def _hand(self, output: GenerationOutput) -> None:
        item: Item | Exception
        try:
            if output.status is RequestStatus.FAILED:
                item = failure(output, self._manager.cause)
            else:
                item = self._make(self._choices[output.request_id], output)
        except Exception as error:
            item = error
        self._bell.hand(self._receive_last if output.is_finished() else self._receive, item)

    def _cancel(self) -> None:
        for family in self._families:
            self._manager.cancel_request(family[0])  # and its children

    # ------------------------------------------------------------------ the event loop

    def _receive(self, item: Item | Exception) -> None:
        if isinstance(item, Exception):
            self.abort(item)
        else:
            self._items.append(item)
            self._wake()

    def _receive_last(self, item: Item | Exception) -> None:
        self._num_open -= 1
        self._receive(item)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> "Call[Item]":
        return self

    async def __anext__(self) -> list[Item]:
        while not self._items or self._error is not None:
            if self._error is not None:
                raise self._error
            if not self._num_open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        items, self._items = self._items, []
        return items

    def watch(self, receive: Receive) -> None:
        """Abort as soon as the client has left; the whole body must have been read."""

        async def until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.abort(ClientGoneError())

        self._watch = asyncio.get_running_loop().create_task(until_gone())

    def abort(self, error: Exception) -> None:
        """End now: the requests are cancelled, and whoever iterates gets `error`."""
        self._error = self._error or error
        self._wake()
        with self._lock:
            if not self._is_over:
                self._is_over = True
                if self._num_open:
                    self._cancel()

    def on_close(self, callback: Callable[[], None]) -> None:
        """Have `callback` called by `close`."""
        self._on_close = callback

    def close(self) -> None:
        """Nobody iterates any more; requests still under way are cancelled."""
        self.abort(ClientGoneError())
        if self._watch is not None:
            self._watch.cancel()
        self._on_close()
