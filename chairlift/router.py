"""Each output to whom it belongs.

An output goes to the request's handler when one is registered, else it waits in the order of delivery until somebody
takes it, by request or as the next of any. Taking one never moves another. The router knows no engine; it learns from
`expect` that outputs of a request will come, and from `close` or `fail` that none will come any more.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from chairlift.errors import EngineDeadError
from chairlift.request import GenerationOutput, Outgoing, written

logger = logging.getLogger(__name__)

Callback = Callable[[GenerationOutput], object]
_Call = tuple[Callback, Outgoing]
_Calls = dict[asyncio.AbstractEventLoop | None, list[_Call]]  # by loop; None: the callback thread


@dataclass
class _Waiters:
    """The threads that wait for one request, or for any."""

    condition: threading.Condition
    count: int = 0


class Router:
    """Thread-safe. One lock; whoever waits for a request is woken only for that request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._serial = 0
        self._outputs: OrderedDict[int, Outgoing] = OrderedDict()  # not yet taken, oldest first
        self._by_request: dict[str, deque[int]] = {}
        self._expected: set[str] = set()  # requests whose terminal output has not been delivered
        self._handlers: dict[str, tuple[Callback, asyncio.AbstractEventLoop | None]] = {}
        self._waiters: dict[str | None, _Waiters] = {}
        self._calls = _CallbackThread()
        self._cause: BaseException | None = None
        self._closed = True  # until `open()`

    # ------------------------------------------------------------------ the engine's side

    def expect(self, request_ids: Iterable[str], callback: Callback | None = None) -> None:
        """Outputs of these requests will come, and go to `callback` (on the callback thread) if there is one. Raises
        ValueError for an id that is in use, and then takes none."""
        ids = list(request_ids)
        with self._lock:
            for request_id in ids:
                if request_id in self._expected:
                    raise ValueError(
                        f"request_id {request_id!r} is in use; wait for its last output or choose another id"
                    )
            if len(set(ids)) < len(ids):
                raise ValueError(f"request ids must differ, got {ids}")
            self._expected.update(ids)
            if callback is not None:
                self._handlers.update(dict.fromkeys(ids, (callback, None)))

    def expects(self, request_id: str) -> bool:
        """Whether outputs of this id are to come, or wait to be taken."""
        with self._lock:
            return request_id in self._expected or request_id in self._by_request

    def deliver(self, outputs: Iterable[Outgoing]) -> None:
        """Hand out a step's outputs; wakes each waiting thread, the callback thread and each event loop once."""
        calls: _Calls = {}
        with self._lock:
            for output in outputs:
                self._route(output, calls)
            self._calls.put(calls.pop(None, ()))
        _call_on_loops(calls)

    def _route(self, output: Outgoing, calls: _Calls) -> None:
        request_id, finished = output.request_id, output.is_finished()
        if finished:
            self._expected.discard(request_id)
        if (handler := self._handlers.get(request_id)) is not None:
            if finished:
                del self._handlers[request_id]
            callback, loop = handler
            calls.setdefault(loop, []).append((callback, output))
        else:
            self._outputs[self._serial] = output
            self._by_request.setdefault(request_id, deque()).append(self._serial)
            self._serial += 1
        self._wake(request_id)
        self._wake(None, everyone=not self._expected)

    def _wake(self, request_id: str | None, everyone: bool = True) -> None:
        if (waiters := self._waiters.get(request_id)) is not None:
            waiters.condition.notify(waiters.count if everyone else 1)

    def open(self) -> None:
        """Outputs may come (again)."""
        with self._lock:
            self._closed = False

    def close(self) -> None:
        """No output will come any more; waiters return."""
        with self._lock:
            self._closed = True
            self._wake_all()

    def fail(self, cause: BaseException) -> None:
        """The engine died: waiters raise, and each handler gets a last output with the cause."""
        calls: _Calls = {}
        with self._lock:
            self._cause, self._closed = cause, True
            for request_id in self._expected & self._handlers.keys():
                self._route(GenerationOutput(request_id=request_id).failed(cause), calls)
            self._expected.clear()
            self._wake_all()
            self._calls.put(calls.pop(None, ()))
        _call_on_loops(calls)

    def _wake_all(self) -> None:
        for request_id in self._waiters:
            self._wake(request_id)

    # ------------------------------------------------------------------ the callers' side

    def take(
        self, request_id: str | None = None, timeout: float | None = None, until_idle: bool = False
    ) -> GenerationOutput | None:
        """The next output of one request, or of any.

        None on timeout, for a request of which nothing will come, when the router is closed and nothing is left, and
        with `until_idle` as soon as nothing is left and no request is under way. Raises EngineDeadError.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while (output := self._pop(request_id)) is None:
                if self._cause is not None:
                    raise EngineDeadError(f"the engine stopped on a fault: {self._cause!r}") from self._cause
                if self._closed or (request_id is not None and request_id not in self._expected):
                    return None
                if until_idle and not self._expected:
                    return None
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._wait(request_id, left)
        return written(output)

    def _wait(self, request_id: str | None, timeout: float | None) -> None:
        waiters = self._waiters.setdefault(request_id, _Waiters(threading.Condition(self._lock)))
        waiters.count += 1
        try:
            waiters.condition.wait(timeout)
        finally:
            waiters.count -= 1
            if not waiters.count:
                del self._waiters[request_id]

    def _pop(self, request_id: str | None) -> Outgoing | None:
        if request_id is None:
            if not self._outputs:
                return None
            serial, output = self._outputs.popitem(last=False)
            serials = self._by_request[output.request_id]
            serials.remove(serial)
        else:
            if (found := self._by_request.get(request_id)) is None:
                return None
            serials = found
            output = self._outputs.pop(serials.popleft())
        if not serials:
            del self._by_request[output.request_id]
        return output

    def register(self, request_id: str, callback: Callback) -> None:
        """Send this request's outputs, those waiting first, to `callback`: on the event loop that runs in the calling
        thread if one does, else on the router's callback thread. A callback that raises is logged and harms nobody.
        For an id that is not in use the callback waits until it is."""
        self._adopt(request_id, callback, may_wait=True)

    def _adopt(self, request_id: str, callback: Callback, may_wait: bool = False) -> bool:
        """`register`; False if there is nothing to send and nothing is known to come."""
        try:
            loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        with self._lock:
            if self._cause is not None:
                raise EngineDeadError(f"the engine stopped on a fault: {self._cause!r}") from self._cause
            waiting = [self._outputs.pop(serial) for serial in self._by_request.pop(request_id, ())]
            if request_id in self._expected or (may_wait and not waiting):
                self._handlers[request_id] = (callback, loop)
            if loop is None:
                self._calls.put([(callback, output) for output in waiting])
            else:
                for output in waiting:
                    loop.call_soon(partial(_call, callback, output))
            return bool(waiting) or request_id in self._expected

    def _disown(self, request_id: str, callback: Callback) -> None:
        """Outputs of this request wait to be taken again, unless they go to somebody else by now."""
        with self._lock:
            if request_id in self._handlers and self._handlers[request_id][0] is callback:
                del self._handlers[request_id]

    async def stream(self, request_id: str) -> AsyncIterator[GenerationOutput]:
        """Outputs of one request until its terminal one. Raises EngineDeadError if the engine dies first."""
        outputs: asyncio.Queue[GenerationOutput] = asyncio.Queue()
        callback = outputs.put_nowait
        if not self._adopt(request_id, callback):
            return
        try:
            while True:
                output = await outputs.get()
                if output.is_finished() and self._cause is not None and output.exception is self._cause:
                    raise EngineDeadError(f"the engine stopped on a fault: {self._cause!r}") from self._cause
                yield output
                if output.is_finished():
                    return
        finally:
            self._disown(request_id, callback)

    def shut_down(self) -> None:
        """End the callback thread once it has made the calls it was given."""
        self._calls.stop()


def _call(callback: Callback, output: Outgoing) -> None:
    try:
        callback(written(output))
    except KeyboardInterrupt:
        raise
    except BaseException:  # a SystemExit too: it would end the thread that all other callbacks need
        logger.exception("the result handler of request %r raised", output.request_id)


def _call_all(calls: Iterable[_Call]) -> None:
    for callback, output in calls:
        _call(callback, output)


def _call_on_loops(calls: _Calls) -> None:
    for loop, its_own in calls.items():
        assert loop is not None
        try:
            loop.call_soon_threadsafe(_call_all, its_own)
        except RuntimeError:  # the loop has been closed: nobody is left to hear
            logger.warning("%d outputs were for an event loop that is closed", len(its_own))


class _CallbackThread:
    """Runs callbacks one after another beside the engine, so that a slow one delays no step."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Sequence[_Call] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, calls: Sequence[_Call]) -> None:
        """Called under the router's lock, so that one thread is started."""
        if not calls:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="chairlift-callbacks", daemon=True)
            self._thread.start()
        self._calls.put(calls)

    def _run(self) -> None:
        while (calls := self._calls.get()) is not None:
            _call_all(calls)

    def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._calls.put(None)
            if thread is not threading.current_thread():
                thread.join()
