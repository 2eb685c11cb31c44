"""`GrammarCompiler`: compiles grammars that clients send, whatever they are.

llguidance is native code. A grammar of a few kilobytes can make it recurse until the stack
overflows, or compute for hours; no thread survives the one, and none can be ended for the other. So
another process, which may die, compiles each grammar first. What succeeds there is compiled here.
"""

import asyncio
import json
import os
import resource
import signal
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from equipoise.wire.inference_messages import Grammar, GrammarKind
from equipoise.worker.errors import QueueFullError
from equipoise.worker.grammars import Constraint, GrammarError, GrammarLimitError, Grammars

MAX_COMPILING = 2
"""Grammars that are compiled at a time."""

MAX_WAIT_S = 25.0
"""How long a grammar waits for its turn, seconds; gateways take a silent rank for lost after 60."""

TRIAL_CPU_S = 4
"""Processor time that the other process may take for one, seconds. A schema of 110 tools takes less
than half a second."""

TRIAL_TIMEOUT_S = 25.0
"""Time that it may take for one, seconds. On a busy machine that is no fault of the grammar's."""

TRIAL_BYTES = 2**30
"""Memory that the other process may take, beside its stacks."""

MAX_COMPILED_BYTES = 64 * 2**20
"""Memory that a compiled grammar may take; ranks keep several."""

STACK_BYTES = 256 * 2**20
"""Stack of threads that compile. 32 MiB is enough for the deepest known grammar of the allowed
size, and pages that are never touched cost nothing."""

_NICENESS = 5
"""Of the other process while it compiles; it starts like any other."""

_FATAL = {signal.SIGXCPU, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT}
"""By which a grammar ends the process that compiles it."""

_TOO_MUCH = "too complex: compiling it takes too much"

_Result = TypeVar("_Result")


class GrammarCompiler:
    """Compiles grammars for the model whose checkpoint is in `folder`; used from the event loop."""

    def __init__(self, folder: Path, *, vocab_size: int) -> None:
        """Processes start with the first grammars."""
        self._grammars = Grammars(folder, vocab_size=vocab_size)
        self._command = (sys.executable, "-m", __name__, str(folder), str(vocab_size))
        self._permits = asyncio.Semaphore(MAX_COMPILING)
        # Of grammars that are being compiled: other choices of a request wait for the first one.
        self._locks: WeakValueDictionary[Grammar, asyncio.Lock] = WeakValueDictionary()
        self._idle: list[Process] = []
        self._threads = _deep_threads()

    async def load(self) -> None:
        """Load what compiling takes; better than with the first one, while others are served."""
        await self._run(self._grammars.load)

    async def constraint(
        self, grammar: Grammar, *, output: Sequence[int], stop_tokens: frozenset[int]
    ) -> Constraint:
        """Return what may follow an output; compiling takes up to seconds.

        Raises:
            GrammarError: as `Grammars.constraint` does, or compiling it takes too much.
            QueueFullError: others take long, or no process can be started.
        """
        constraint = partial(
            self._grammars.constraint, grammar, output=output, stop_tokens=stop_tokens
        )
        if self._grammars.has_compiled(grammar):
            return await self._run(constraint)
        lock = self._locks.setdefault(grammar, asyncio.Lock())
        async with AsyncExitStack() as turn:
            try:
                async with asyncio.timeout(MAX_WAIT_S):
                    await turn.enter_async_context(lock)
                    await turn.enter_async_context(self._permits)
            except TimeoutError:
                num = len(self._locks)
                raise QueueFullError(f"{num} grammars are being compiled: try again") from None
            if not self._grammars.has_compiled(grammar):
                await self._try(grammar)
            return await self._run(constraint)

    def close(self) -> None:
        """End the idle processes; those that compile, or start later, end with this process."""
        while self._idle:
            _kill(self._idle.pop())

    async def _run(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _try(self, grammar: Grammar) -> None:
        """Compile in another process. One that ended before, or is ended, says nothing of it."""
        code = 0
        for _ in range(MAX_COMPILING + 1):  # So many may be idle.
            process = self._idle.pop() if self._idle else await self._start()
            if line := await self._ask(process, asdict(grammar)):
                answer = json.loads(line)
                if answer["error"]:
                    fault = GrammarLimitError if answer["is_limit"] else GrammarError
                    raise fault(answer["error"])
                return
            code = await process.wait()
            if -code in _FATAL:
                raise GrammarLimitError(_TOO_MUCH)
        raise QueueFullError(f"the process that compiles grammars ended with {code}: try again")

    async def _start(self) -> Process:
        try:
            return await asyncio.create_subprocess_exec(
                *self._command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                limit=2**20,
                start_new_session=True,  # Signals to this process are not for it.
            )
        except OSError as error:
            raise QueueFullError(f"no process can compile the grammar: {error}") from None

    async def _ask(self, process: Process, question: object) -> bytes:
        """Send a line; returns the line that answers it, or nothing if the process has ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        line: bytes | None = None
        try:
            async with asyncio.timeout(TRIAL_TIMEOUT_S):
                with suppress(ConnectionError):
                    process.stdin.write(json.dumps(question).encode() + b"\n")
                    await process.stdin.drain()
                line = await process.stdout.readline()
        except TimeoutError:
            raise QueueFullError("this machine is too busy to compile the grammar") from None
        finally:
            if line is None:
                _kill(process)
            elif line:
                self._idle.append(process)
        return line


def _kill(process: Process) -> None:
    """End a process, unless it has ended: the system ends these first if memory runs out."""
    with suppress(ProcessLookupError):
        process.kill()


def _deep_threads() -> ThreadPoolExecutor:
    """Threads with `STACK_BYTES` each: the size applies to those that start while it is set."""
    before = threading.stack_size(STACK_BYTES)
    threads = ThreadPoolExecutor(MAX_COMPILING, "grammar")
    started = threading.Barrier(MAX_COMPILING)
    try:
        for waiting in [threads.submit(started.wait) for _ in range(MAX_COMPILING)]:
            waiting.result()
    except BaseException:
        started.abort()
        raise
    finally:
        threading.stack_size(before)
    return threads


def _main(folder: str, vocab_size: str) -> None:
    """Compile one grammar per line of the input, and write the fault of each."""
    grammars = Grammars(Path(folder), vocab_size=int(vocab_size))
    grammars.load()
    threads = _deep_threads()
    _bound_memory()
    os.nice(_NICENESS)
    for line in sys.stdin:
        _bound_processor_time()
        values = json.loads(line)
        grammar = Grammar(**values | {"kind": GrammarKind(values["kind"])})
        fault = threads.submit(_fault, grammars, grammar).result()
        error, is_limit = str(fault or ""), isinstance(fault, GrammarLimitError)
        sys.stdout.write(json.dumps({"error": error, "is_limit": is_limit}) + "\n")
        sys.stdout.flush()


def _fault(grammars: Grammars, grammar: Grammar) -> GrammarError | None:
    before = _memory()
    try:
        compiled = grammars.compile(grammar)
    except GrammarError as error:
        return error
    more = _memory() - before
    del compiled
    return GrammarLimitError(_TOO_MUCH) if more > MAX_COMPILED_BYTES else None


def _memory() -> int:
    """Bytes of this process that are in memory; 0 if the system does not say."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def _bound_memory() -> None:
    """Let memory run out here first."""
    most = TRIAL_BYTES + MAX_COMPILING * STACK_BYTES
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _bound_processor_time() -> None:
    """Let the system end this process after `TRIAL_CPU_S`, also if nobody waits for it any more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime) + TRIAL_CPU_S + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
