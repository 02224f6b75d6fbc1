"""Owns the engine's thread.

Callers put commands in one inbox; the thread carries them out in order between steps, steps the engine while there is
work and sleeps when there is none. Whatever kills the thread is kept, told to everyone who waits, and raised from by
every later call. Requests are checked in the caller's thread, so that a bad one is its caller's error alone.
"""

import atexit
import itertools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from chairlift.config import ResolvedConfig
from chairlift.engine import Engine
from chairlift.errors import EngineDeadError, InvalidRequestError, QueueFullError
from chairlift.params import REQUEST_ARGUMENTS, SamplingDefaults, SamplingParams, Terms, child_seed, fold_seed
from chairlift.request import GenerationOutput, Outgoing, Request, written
from chairlift.router import Callback, Router
from chairlift.stats import EngineView, Stats
from chairlift.text.stopping import StopStringFilter

logger = logging.getLogger(__name__)


_Checked = tuple[tuple[int, ...], SamplingParams, int]


@dataclass(eq=False)
class _Watcher:
    """Somebody who looks at the engine live."""

    callback: Callable[[EngineView], object]
    interval_s: float
    due: float = 0.0


class ServedModel(Protocol):
    """What the manager asks of the model's side."""

    vocab_size: int
    restart_length: int | None  # a sequence with more tokens than this has all its KV computed anew

    def refresh_weights(self, force: bool = False) -> bool:
        """Rebuild what was derived from weights that have changed. True if any had, or by force."""
        ...

    def prefix_salt(self, num_prompt: int) -> bytes:
        """Prompts whose KV differs for equal tokens (length-dependent RoPE) get different salts."""
        ...

    @property
    def paths(self) -> Mapping[str, str]:
        """Which part of the model is computed how, and why; for people."""
        ...

    def warmup(self) -> None:
        """Do what the first step would otherwise pay for."""
        ...

    def close(self) -> None:
        """Free everything on the device."""
        ...


class ContinuousBatchingManager:
    """Continuous batching of one model in a background thread. See `attach` for how to get one.

    Every method may be called from any thread. Errors: `InvalidRequestError` (a `ValueError`) or `TypeError` for a bad
    argument, `QueueFullError` while `max_queue_size` requests wait, `EngineDeadError` after a crash, `RuntimeError`
    after `destroy()`.
    """

    def __init__(self, engine: Engine, model: ServedModel, defaults: SamplingDefaults, config: ResolvedConfig) -> None:
        self.config = config
        self._engine = engine
        self._model = model
        self._defaults = defaults
        self._router = Router()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._filters: dict[str, StopStringFilter] = {}  # of requests with stop strings
        self._watchers: tuple[_Watcher, ...] = ()
        self._lock = threading.Lock()  # over what follows
        self._thread: threading.Thread | None = None
        self._accepting = True
        self._stopping = self._hard_stopping = self._destroyed = False
        self._is_warm = False
        self._num_unseen = 0  # requests in the inbox
        self._ids = itertools.count()
        self._seeds = itertools.count()
        self._cause: BaseException | None = None
        self._pause = threading.Condition()  # over what follows
        self._pausers: list[int] = []  # thread idents; the loop parks while there is one
        self._parked = False
        self._weights_said_changed = False
        if config.warnings:
            logger.warning("some settings have no effect here:\n%s", "\n".join(config.warnings))

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start the background thread, once an earlier one that was told to stop has ended. Raises RuntimeError after
        `destroy()`, EngineDeadError after a crash."""
        self._await_end()
        with self._lock:
            self.check()
            if self._thread is not None and self._thread.is_alive():
                logger.warning("the manager is running already")
                return
            self._accepting = True
            self._stopping = self._hard_stopping = self._parked = False
            self._is_warm = True
            self._router.open()
            self._thread = threading.Thread(target=self._run, name="chairlift-engine", daemon=True)
            self._thread.start()
            _started.add(self)
        logger.info("started: %s", self.config.model)

    def _await_end(self) -> None:
        """Wait for a thread that is finishing what it has accepted."""
        thread = self._thread
        if thread is None or not self._stopping or thread is threading.current_thread():
            return
        if threading.get_ident() in self._pausers:
            raise RuntimeError("start() after stop() inside pause() would wait for itself; leave the pause first")
        thread.join()

    @property
    def cause(self) -> BaseException | None:
        """What the engine died of, if it did."""
        return self._cause

    @property
    def is_usable(self) -> bool:
        """Whether `start()` would work: neither destroyed nor crashed."""
        return not self._destroyed and self._cause is None

    def is_running(self) -> bool:
        """Whether the background thread lives, and has not died of a fault."""
        thread = self._thread
        return thread is not None and thread.is_alive() and self._cause is None

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        hard_stop: bool = False,
        keep_for_next_session: bool = False,
    ) -> None:
        """Refuse new requests, finish those accepted, end the thread; `start()` may follow.

        With `hard_stop` end after the step in flight: unfinished requests come back FAILED with a RuntimeError. With
        `block` wait for the end, at most `timeout` seconds. The manager keeps its cache either way, until `destroy()`,
        so that `keep_for_next_session` has nothing left to do. Raises RuntimeError inside `pause()`, where the wait
        would never end.
        """
        if block and threading.get_ident() in self._pausers:
            raise RuntimeError(
                "stop() inside pause() would wait for itself; leave the pause first, or pass block=False"
            )
        with self._lock:
            thread = self._thread
            self._accepting = False
            if thread is None:
                logger.warning("the manager is not running")
            self._stopping = True
            self._hard_stopping = self._hard_stopping or hard_stop
        if thread is None:
            if not self._destroyed:
                self._fail_unstarted()
            return
        self._inbox.put(None)
        with self._pause:
            self._pause.notify_all()
        if block and thread is not threading.current_thread():
            thread.join(timeout)
            if thread.is_alive():
                logger.warning("the engine is still finishing its requests after %s s", timeout)

    def _fail_unstarted(self) -> None:
        """Requests queued before a start that will not come."""
        self._obey()
        self._deliver(self._engine.scheduler.fail_all(RuntimeError("the manager was stopped before it was started")))
        self._router.close()

    def destroy(self) -> None:
        """Stop at once if needed and release everything; may be called again."""
        if self._destroyed:
            return
        if threading.get_ident() in self._pausers:
            raise RuntimeError("destroy() inside pause() would wait for itself; leave the pause first")
        thread = self._thread
        if thread is not None and thread.is_alive():
            self.stop(hard_stop=True)
        elif self._cause is None:
            self._fail_unstarted()
        with self._lock:
            self._destroyed, self._accepting = True, False
        self._router.shut_down()
        self._model.close()
        logger.info("destroyed: %s", self.config.model)

    def warmup(self) -> None:
        """Do now what the first request would otherwise wait for. Does nothing once the manager has been started: the
        cache is in use then."""
        with self._lock:
            self.check()
            if not self._is_warm:
                self._model.warmup()
                self._is_warm = True

    def check(self) -> None:
        """Raise what a call would raise: RuntimeError after `destroy()`, EngineDeadError after a crash."""
        if self._destroyed:
            raise RuntimeError("the manager was destroyed; make a new one with init_continuous_batching()")
        if self._cause is not None:
            raise EngineDeadError(f"the engine stopped on a fault: {self._cause!r}") from self._cause

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **sampling: Any,
    ) -> str | None:
        """Queue one request and return its id, or None (with a warning) once the manager has been told to stop.

        `input_ids`: token ids, not empty. `sampling`: see `SamplingParams` and `Terms`, and `tokenizer=` for
        `stop_strings` and `grammar`, which need one. With `num_return_sequences=n` the answers come under the id itself
        and `<id>__child#0` ... `<id>__child#<n-2>`.
        """
        if eos_token_id is not None:
            sampling["eos_token_id"] = eos_token_id
        families = self.submit(
            [input_ids],
            sampling | {"max_new_tokens": max_new_tokens},
            request_id=request_id,
            streaming=streaming,
            record_timestamps=record_timestamps,
        )
        return families[0][0] if families else None

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **sampling: Any,
    ) -> list[str]:
        """Queue many requests, all of them or, when one is bad, none. Returns their ids in the order of `inputs`, or
        nothing (with a warning) once the manager has been told to stop. They are queued so that prompts with common
        beginnings follow one another."""
        families = self.submit(
            inputs,
            sampling | {"max_new_tokens": max_new_tokens},
            streaming=streaming,
            record_timestamps=record_timestamps,
        )
        return [family[0] for family in families]

    def submit(
        self,
        inputs: Sequence[Sequence[int]],
        sampling: Mapping[str, Any],
        *,
        request_id: str | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        handler: Callback | None = None,
        bounded: bool = True,
    ) -> list[list[str]]:
        """As `add_requests`, but returns the ids of all answers of each input: its own and its children's.

        All outputs go to `handler` if there is one, the first of them too: nobody else can take it. `bounded=False`:
        a caller that waits for the answers anyway is not refused because of `max_queue_size`.
        """
        self.check()
        if request_id is not None and not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {request_id!r}")
        if request_id == "":
            raise InvalidRequestError("request_id is empty; give another, or None for one of the manager's")
        tokenizer = sampling.get("tokenizer")
        terms = Terms.read(sampling)
        if terms.priority and self.config.scheduler in ("fifo", "prefill_first"):
            raise InvalidRequestError(
                f"priority={terms.priority} has no effect with scheduler_type={self.config.scheduler!r}; "
                "give the engine scheduler_type='priority' or 'fair_share'"
            )
        params = self._defaults.resolve(
            {name: value for name, value in sampling.items() if name not in REQUEST_ARGUMENTS}
        )
        if params.stop_strings and not callable(getattr(tokenizer, "decode", None)):
            raise InvalidRequestError(
                f"stop_strings={list(params.stop_strings)!r} need a tokenizer; pass tokenizer=, an object with decode()"
            )
        if params.grammar is not None:
            params = _guided(params, tokenizer)
        limit = self.config.max_queue_size if bounded else 0
        number = params.num_return_sequences
        if limit and (count := len(inputs) * number) > limit:
            blamed = "inputs" if number == 1 else f"num_return_sequences={number}"
            raise InvalidRequestError(
                f"{blamed} asks for {count} answers at once, and never more than max_queue_size={limit} can wait; "
                "ask for fewer, or raise max_queue_size"
            )
        single = len(inputs) == 1
        prompts = [self._check_prompt(ids, params, None if single else i) for i, ids in enumerate(inputs)]
        families = [
            self._family(request_id or self._fresh_id(), *prompt, terms, streaming, record_timestamps)
            for prompt in prompts
        ]
        names = [[request.request_id for request in family] for family in families]
        if len(families) > 1 and self.config.allow_block_sharing:
            families.sort(key=lambda family: family[0].prompt_ids)
        accepted = self._enqueue([request for family in families for request in family], tokenizer, handler, limit)
        return names if accepted else []

    def _fresh_id(self) -> str:
        """An id that no request has, a caller's own ids among them."""
        return next(name for number in self._ids if not self._router.expects(name := f"req_{number}"))

    def _check_prompt(self, input_ids: Sequence[int], params: SamplingParams, index: int | None) -> _Checked:
        """The prompt as plain integers, its own parameters, and its most tokens with the answer. Raises with the
        input's number, what is wrong and the remedy."""
        name = "input_ids" if index is None else f"inputs[{index}]"
        tokens = _plain_tokens(input_ids, name)
        if not tokens:
            raise InvalidRequestError(f"{name} is empty; a prompt needs at least one token (the BOS token, say)")
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self._model.vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequestError(
                f"{name} holds token id {bad}, outside the model's vocabulary 0..{self._model.vocab_size - 1}"
            )
        params = params.for_prompt(len(tokens))
        return tokens, params, self._max_length(len(tokens), params, name)

    def _max_length(self, num_prompt: int, params: SamplingParams, name: str) -> int:
        """Tokens of prompt and answer together, at most. The last token of an answer needs no room in the cache."""
        config, asked = self.config, params.max_new_tokens
        limit = min(config.max_sequence_length + 1, config.max_model_length)
        most = limit - (asked != 0)
        if params.prompt_logprobs is not None:
            most = min(most, config.max_sequence_length)  # its last token is computed, too
        if num_prompt > most:
            remedy = "shorten it" if limit == config.max_model_length else "shorten it or raise num_blocks"
            raise InvalidRequestError(
                f"{name}: the prompt is too long, {num_prompt} tokens; it may have {most} at most here "
                f"(the cache holds {config.max_sequence_length}, the model {config.max_model_length}); {remedy}"
            )
        if asked is None:
            return limit
        wanted = min(num_prompt + asked, config.max_model_length)
        if wanted > limit:
            raise InvalidRequestError(
                f"{name} has {num_prompt} tokens and max_new_tokens={asked} asks for {num_prompt + asked} in all, but "
                f"the cache holds {config.max_sequence_length}; lower max_new_tokens or raise num_blocks"
            )
        return wanted

    def _family(
        self,
        parent: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        max_length: int,
        terms: Terms,
        streaming: bool,
        timestamps: bool,
    ) -> list[Request]:
        """The requests of one prompt: itself and, for `num_return_sequences`, its children."""
        share = self.config.allow_block_sharing
        own = b"" if share else os.urandom(16)
        if terms.cache_salt is not None:
            own += b"\0" + terms.cache_salt.encode(errors="surrogatepass")
        salt = self._model.prefix_salt(len(prompt)) + own
        restart_length = self._model.restart_length
        restart = None
        if restart_length is not None and len(prompt) <= restart_length:
            restart = restart_length, self._model.prefix_salt(restart_length + 1) + own
        seed = params.seed if params.seed is not None else self._next_seed()
        now = time.perf_counter()
        return [
            Request(
                request_id=parent if child == 0 else f"{parent}__child#{child - 1}",
                parent_id=None if child == 0 else parent,
                prompt_ids=prompt,
                params=params,
                max_length=max_length,
                seed=child_seed(seed, child),
                salt=salt,
                restart=restart,
                share_prefix=share,
                match_prefix=params.prompt_logprobs is None and (share or params.num_return_sequences > 1),
                streaming=streaming,
                record_timestamps=timestamps,
                priority=terms.priority,
                tenant=terms.tenant,
                created_time=now,
                deadline=None if terms.deadline_s is None else now + terms.deadline_s,
            )
            for child in range(params.num_return_sequences)
        ]

    def _next_seed(self) -> int:
        """For a request without a seed: fresh, or the next of the configured seed's."""
        if self.config.seed is None:
            return int.from_bytes(os.urandom(8), "little")
        return fold_seed(-1 - (fold_seed(self.config.seed) + (next(self._seeds) << 64)))

    def _enqueue(self, requests: list[Request], tokenizer: Any, handler: Callback | None, limit: int) -> bool:
        """Hand requests to the engine, all or, once the manager has been told to stop, none."""
        with self._lock:
            self.check()
            if not self._accepting:
                logger.warning("the manager has been stopped; %d requests were not accepted", len(requests))
                return False
            queued = self._num_unseen + len(self._engine.scheduler.waiting)
            if limit and queued + len(requests) > limit:
                raise QueueFullError(
                    f"{queued} requests are waiting and max_queue_size is {limit}; {len(requests)} more do not fit, "
                    "try again later"
                )
            self._router.expect([request.request_id for request in requests], handler)
            self._num_unseen += len(requests)
            self._inbox.put(partial(self._do_add, requests, tokenizer))
        return True

    def cancel_request(self, request_id: str) -> None:
        """End a request, and its children, with one output each of status CANCELLED. Unknown or finished ids are
        ignored."""
        self._inbox.put(partial(self._do_cancel, request_id))

    # ------------------------------------------------------------------ results

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The next output of any request, or of that one; see `Router.take`."""
        return self._router.take(request_id, timeout)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Outputs as they come, until no request is queued or running."""
        while (output := self._router.take(until_idle=True)) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Outputs of one request, until its terminal one."""
        while (output := self._router.take(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callback) -> None:
        """Send a request's outputs to `callback` instead; see `Router.register`."""
        self._router.register(request_id, callback)

    def stream(self, request_id: str) -> AsyncIterator[GenerationOutput]:
        """Outputs of one request for asyncio, until its terminal one."""
        return self._router.stream(request_id)

    # ------------------------------------------------------------------ weights, cache, numbers

    @contextmanager
    def pause(self, weights_changed: bool = False) -> Iterator[None]:
        """Park the engine between steps, so that the caller may change the model in place.

        Requests under way go on afterwards. Changed parameters are noticed by identity and version; writes through
        `.data` are not: say `weights_changed=True`. Then what requests under way had cached is computed again.
        Several threads may pause at once; the engine goes on when the last one leaves. The deadlines of requests that
        it has taken in are kept meanwhile; what is sent during a pause is taken in afterwards.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("pause() inside the engine's own thread would wait for itself")
        with self._pause:
            self._pausers.append(threading.get_ident())
        try:
            self._inbox.put(None)
            with self._pause:
                self._pause.wait_for(lambda: self._parked or not self.is_running())
            yield
        finally:
            with self._pause:
                self._pausers.remove(threading.get_ident())
                self._weights_said_changed |= weights_changed
                self._pause.notify_all()

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes, and what was derived from the weights: requests queued later compute anew."""
        self._inbox.put(self._do_reset)

    def stats(self) -> Stats:
        """What the engine does now and has done."""
        scheduler = self._engine.scheduler
        usage = scheduler.cache.usage
        return self._engine.recorder.snapshot(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + self._num_unseen,
            free_blocks=usage.free,
            cached_blocks=usage.cached,
            used_blocks=usage.used,
            total_blocks=usage.total,
            preemptions=scheduler.num_preemptions,
            swaps=scheduler.num_swaps,
            prefix_hit_tokens=usage.hit_tokens,
            prefix_queried_tokens=usage.queried_tokens,
            paths=self._model.paths,
        )

    def watch(self, callback: Callable[[EngineView], object], interval_s: float = 0.1) -> Callable[[], None]:
        """Call `callback` with a view of the engine: now, after a step but at most every `interval_s` seconds, and when
        the engine comes to rest. Returns what ends it.

        The engine's thread calls, and goes on when the callback returns: hand the view over and be gone. One that
        raises is dropped, with a warning. While nobody watches it costs nothing.
        """
        watcher = _Watcher(callback, interval_s)
        with self._lock:
            self._watchers = (*self._watchers, watcher)
        self._inbox.put(partial(self._show, [watcher]))
        return partial(self._unwatch, watcher)

    def _unwatch(self, watcher: _Watcher) -> None:
        with self._lock:
            self._watchers = tuple(each for each in self._watchers if each is not watcher)

    # ------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        try:
            self._loop()
            self._end()
        except BaseException as cause:
            self._crash(cause)

    def _loop(self) -> None:
        was_idle = True
        while not self._hard_stopping:
            is_idle = not self._engine.has_work
            if is_idle and not was_idle and self._watchers:
                self._show(self._watchers)
            was_idle = was_idle or is_idle
            self._obey(sleep=is_idle and not self._stopping and not self._pausers)
            if self._pausers:
                self._park()
                continue
            if not self._engine.has_work:
                if self._stopping and self._inbox.empty():
                    return
                continue
            if was_idle:
                self._check_weights()
                was_idle = False
            if self._engine.scheduler.next_deadline is not None:
                self._expire()
            self._deliver(self._engine.step())
            if self._watchers:
                now = time.perf_counter()
                self._show([watcher for watcher in self._watchers if watcher.due <= now])

    def _show(self, watchers: Iterable[_Watcher]) -> None:
        """Build a view for these watchers, if there are any."""
        view: EngineView | None = None
        for watcher in watchers:
            if watcher not in self._watchers:
                continue
            view = view or self._engine.view(self._num_unseen)
            watcher.due = view.time + watcher.interval_s
            try:
                watcher.callback(view)
            except Exception:
                logger.warning("a watcher raised and is dropped", exc_info=True)
                self._unwatch(watcher)

    def _obey(self, sleep: bool = False) -> None:
        """Carry out the commands in the inbox; with `sleep` wait for one first."""
        while True:
            try:
                command = self._inbox.get(block=sleep)
            except queue.Empty:
                return
            sleep = False
            if command is not None:
                command()

    def _do_add(self, requests: list[Request], tokenizer: Any) -> None:
        outputs: list[GenerationOutput] = []
        for request in requests:
            params = request.params
            if params.stop_strings:
                self._filters[request.request_id] = StopStringFilter(
                    tokenizer,
                    params.stop_strings,
                    min_new_tokens=params.min_new_tokens,
                    streaming=request.streaming,
                )
        with self._lock:  # so that nobody counts a waiting request twice
            for request in requests:
                outputs += self._engine.scheduler.add(request)
            self._num_unseen -= len(requests)
        self._deliver(outputs)

    def _do_cancel(self, request_id: str) -> None:
        self._deliver(self._engine.scheduler.abort(request_id))

    def _expire(self) -> None:
        self._deliver(self._engine.scheduler.expire(time.perf_counter()))

    def _do_reset(self) -> None:
        self._drain()
        self._model.refresh_weights(force=True)
        self._engine.scheduler.cache.forget()

    def _drain(self) -> None:
        for outputs in self._engine.drain():
            self._deliver(outputs)

    def _deliver(self, outputs: Iterable[Outgoing]) -> None:
        if self._filters:
            outputs = [shown for output in outputs if (shown := self._filter(output)) is not None]
        if outputs:
            self._router.deliver(outputs)

    def _filter(self, outgoing: Outgoing) -> Outgoing | None:
        """Pass an output by its request's stop strings, if it has any."""
        request_id = outgoing.request_id
        if (stopping := self._filters.get(request_id)) is None:
            return outgoing
        output = written(outgoing)
        try:
            shown, ended = stopping.apply(output)
        except Exception as fault:  # the request's own tokenizer raised
            shown, ended = output.failed(fault), True
        if ended and not output.is_finished():
            self._engine.scheduler.end(request_id)
            if shown is not None:
                shown = replace(shown, lifespan=(shown.lifespan[0], time.perf_counter()))
        if ended or output.is_finished():
            del self._filters[request_id]
        return shown

    def _park(self) -> None:
        self._drain()
        with self._pause:
            self._parked = True
            self._pause.notify_all()
        while self._is_held():
            self._expire()
        if not self._hard_stopping:
            self._check_weights()

    def _is_held(self) -> bool:
        """Wait until nobody pauses any more, then False, or until a deadline has come, then True."""
        deadline = self._engine.scheduler.next_deadline
        timeout = None if deadline is None else max(0.0, deadline - time.perf_counter())
        with self._pause:
            if not self._pause.wait_for(lambda: not self._pausers or self._hard_stopping, timeout):
                return True
            self._parked = False
            return False

    def _check_weights(self) -> None:
        with self._pause:
            said, self._weights_said_changed = self._weights_said_changed, False
        if self._model.refresh_weights(force=said):
            self._drain()
            self._engine.scheduler.recompute_all()

    def _end(self) -> None:
        if self._hard_stopping:
            self._obey()
            self._drain()
            self._deliver(self._engine.scheduler.fail_all(RuntimeError("the manager was stopped (hard_stop=True)")))
        with self._lock:  # `start()` may follow at once
            self._router.close()
            self._wake_pausers()
            self._thread = None
        logger.info("stopped: %s", self.config.model)

    def _crash(self, cause: BaseException) -> None:
        logger.error("the engine stopped on a fault", exc_info=cause)
        with self._lock:
            self._cause, self._accepting = cause, False
        self._router.fail(cause)
        self._wake_pausers()

    def _wake_pausers(self) -> None:
        with self._pause:
            self._parked = True  # nothing will move while they change the model
            self._pause.notify_all()


def _guided(params: SamplingParams, tokenizer: Any) -> SamplingParams:
    """With the grammar compiled."""
    assert params.grammar is not None
    if not params.stop_ids:
        raise InvalidRequestError(
            "grammar= needs a token that ends the answer where the grammar does, and neither the request nor the model "
            "has one: give eos_token_id or stop_token_ids"
        )
    try:
        from chairlift.sample.grammar import compile_grammar
    except ModuleNotFoundError as missing:
        if missing.name != "llguidance":
            raise
        raise InvalidRequestError(
            "grammar= needs llguidance, which is not installed: pip install 'chairlift[grammar]'"
        ) from missing
    return replace(params, guide=compile_grammar(params.grammar, tokenizer))


def _plain_tokens(input_ids: object, name: str) -> tuple[int, ...]:
    """Token ids as a tuple of int, from a list, a tuple, or a one-dimensional array or tensor."""
    if hasattr(input_ids, "tolist"):
        input_ids = input_ids.tolist()
    if not isinstance(input_ids, (list, tuple)):
        raise TypeError(f"{name} must be a list of token ids, got {type(input_ids).__name__}: {input_ids!r:.80}")
    tokens = tuple(input_ids)
    if set(map(type, tokens)) <= {int}:
        return tokens
    return tuple(_plain_token(token, name) for token in tokens)


def _plain_token(token: object, name: str) -> int:
    if not isinstance(token, bool) and hasattr(token, "__index__"):
        try:
            return int(token.__index__())
        except TypeError:  # a tensor of floats has the method, too
            pass
    raise TypeError(f"{name} must hold integers only, got {token!r:.80} ({type(token).__name__})")


_started: "weakref.WeakSet[ContinuousBatchingManager]" = weakref.WeakSet()


@atexit.register
def _stop_at_exit() -> None:
    """End the threads before the interpreter takes the libraries away under them."""
    for manager in list(_started):
        thread = manager._thread
        if thread is not None and manager.is_running():
            manager.stop(block=False, hard_stop=True)
            thread.join(10.0)
