"""`SimLoop`: an asyncio event loop on a virtual clock; `Process`: what dies, pauses and resumes.

Nothing waits: when no callback is ready, the clock jumps to the next timer. Callbacks run in the
order in which they were scheduled, and sets of futures and tasks iterate in the order in which
these were made, so a schedule is the same every time.
"""

import asyncio
import heapq
import inspect
import itertools
from asyncio import base_events, events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

EPOCH_S = 4096.0
"""The virtual clock at the start of a schedule.

Times of a schedule have one exponent, so that the difference to a clock that stood still is exact:
a wait of less than the smallest difference would never end.
"""

_PROCESS: ContextVar["Process | None"] = ContextVar("process", default=None)

MAX_EVENTS_AT_ONCE = 20_000

_NO_PROCESS = Context()

_BUGS = (AttributeError, TypeError, NameError, AssertionError, LookupError)
"""What no task of the product ends with, unless it has a bug."""


class _Ordered:
    """Hashes by the order in which a loop first hashed it, instead of by address."""

    def __hash__(self) -> int:
        try:
            return self._serial
        except AttributeError:
            self._serial = next(self.get_loop().serials)
            return self._serial


class _Future(_Ordered, asyncio.Future):
    pass


class _Task(_Ordered, asyncio.Task):
    pass


class _Handle(list[Any]):
    """A callback to be run: `[when_s, order, callback or None, args, context]`.

    A list is made and compared without a Python frame, and a schedule has thousands of them.
    """

    __slots__ = ()

    def cancel(self) -> None:
        self[2] = self[3] = None

    def cancelled(self) -> bool:
        return self[2] is None

    def when(self) -> float:
        return float(self[0])


class Process:
    """A simulated operating-system process: everything it scheduled stops when it is killed."""

    def __init__(self, loop: "SimLoop", name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.worker: Any = None
        """The `SimWorker` that it runs, if it is a worker's."""
        self._loop = loop
        self._parked: list[_Handle] = []
        self._on_death: dict[Callable[[], None], None] = {}
        self.context = copy_context()
        self.context.run(_PROCESS.set, self)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in this process."""
        return self._loop.create_task(coroutine, context=self.context.copy())

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Run a function in this process, soon."""
        self._loop.call_soon(function, *args, context=self.context)

    def call_at(self, when_s: float, function: Callable[..., Any], *args: Any) -> None:
        """Run a function in this process at a time, or when it resumes after that."""
        self._loop.call_at(when_s, function, *args, context=self.context)

    def on_death(self, function: Callable[[], None]) -> None:
        """Call a function, outside the process, when this dies."""
        self._on_death[function] = None

    def off_death(self, function: Callable[[], None]) -> None:
        """Take that back."""
        self._on_death.pop(function, None)

    def kill(self, *, with_machine: bool = False) -> None:
        """End at once, without cleanup. Connections close, unless its machine has gone too."""
        if not self.alive:
            return
        self.alive, self._parked = False, []
        for function in () if with_machine else tuple(self._on_death):
            function()
        self._on_death.clear()

    def pause(self) -> None:
        """Stop (SIGSTOP)."""
        self.paused = True

    def resume(self, *, stood_still_s: float = 0.0) -> None:
        """Continue (SIGCONT) with everything that became due meanwhile.

        If its clock stood still, no timer has become due: all are that much later.
        """
        self.paused = False
        parked, self._parked = self._parked, []
        self._loop.take_back(self, parked, stood_still_s=stood_still_s)

    def keep(self, handle: _Handle) -> None:
        """What a paused process would run waits until it resumes; a dead one drops it."""
        if self.alive:
            self._parked.append(handle)


class SimLoop(base_events.BaseEventLoop):
    """An event loop without sockets, threads or real time."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = EPOCH_S
        self._order = itertools.count()
        self._due: list[_Handle] = []
        self._ready: deque[_Handle] = deque()
        self.serials = itertools.count()
        self.num_events = self._moved_events = 0
        self.faults: list[str] = []
        """Exceptions that nobody caught."""
        self.set_exception_handler(self._note_fault)

    def time(self) -> float:
        """The virtual clock, seconds."""
        return self._now_s

    # Never in debug mode. Every future asks, so this is not worth a frame.
    get_debug = staticmethod(bool)

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def create_task(self, coro, *, name=None, context=None):
        task = _Task(coro, loop=self, name=name, context=context)
        task._serial = next(self.serials)
        # A dead process's tasks stay pending for ever; that is the point.
        task._log_destroy_pending = False
        task.add_done_callback(self._note_bug, context=_NO_PROCESS)
        return task

    def call_at(self, when, callback, *args, context=None):
        context = copy_context() if context is None else context
        timer = _Handle((when, next(self._order), callback, args, context))
        heapq.heappush(self._due, timer)
        return timer

    def call_later(self, delay, callback, *args, context=None):
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_soon(self, callback, *args, context=None):
        context = copy_context() if context is None else context
        handle = _Handle((0.0, 0, callback, args, context))
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def run_in_executor(self, executor, func, *args):
        """Run at once; a coroutine that the function returns is what would block its thread."""
        future = self.create_future()
        try:
            result = func(*args)
        except BaseException as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
            return future
        if inspect.iscoroutine(result):
            return self.create_task(result)
        future.set_result(result)
        return future

    def take_back(self, process: Process, handles: list[_Handle], *, stood_still_s: float) -> None:
        """Schedule what a paused process kept; if its clock stood still, timers are due later."""
        if not stood_still_s:
            self._ready.extend(handles)
            return
        for timer in self._due:
            if timer[4].get(_PROCESS) is process:
                timer[0] += stood_still_s
        for handle in handles:
            if handle[0]:
                handle[0] += stood_still_s
                self._due.append(handle)
            else:
                self._ready.append(handle)
        heapq.heapify(self._due)

    def run_until(self, until_s: float) -> None:
        """Run everything that is due up to a time."""
        events._set_running_loop(self)
        try:
            self._run(until_s)
        finally:
            events._set_running_loop(None)

    def _run(self, until_s: float) -> None:
        ready = self._ready
        while ready or self._advance(until_s):
            handle = ready.popleft()
            _, _, callback, args, context = handle
            if callback is None:
                continue
            process = context.get(_PROCESS)
            if process is not None and (process.paused or not process.alive):
                process.keep(handle)
                continue
            self.num_events += 1
            try:
                context.run(callback, *args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - as asyncio does
                self.faults.append(f"{callback!r}: {error!r}")
            if self.num_events > self._moved_events + MAX_EVENTS_AT_ONCE:
                self.faults.append(f"{MAX_EVENTS_AT_ONCE} events at one moment: something spins")
                if ready:
                    return

    def _advance(self, until_s: float) -> bool:
        """Let time pass until the next timer; returns whether one is due by `until_s`."""
        due = self._due
        while due and due[0][2] is None:
            heapq.heappop(due)
        if not due or due[0][0] > until_s:
            self._now_s = max(self._now_s, until_s)
            return False
        timer = heapq.heappop(due)
        if timer[0] > self._now_s:
            self._now_s, self._moved_events = timer[0], self.num_events
        self._ready.append(timer)
        return True

    def _note_bug(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, _BUGS):
            self.faults.append(f"{task.get_coro().__qualname__}: {error!r}")

    def _note_fault(self, _loop, about) -> None:
        error = about.get("exception")
        if "never retrieved" not in about["message"]:
            self.faults.append(f"{about['message']}: {error!r}")


def current_process() -> Process | None:
    """The process whose code runs now."""
    return _PROCESS.get()


def outside() -> Context:
    """A context that belongs to no process."""
    return Context()
