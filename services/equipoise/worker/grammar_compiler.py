"""`GrammarCompiler`: compiles grammars that clients send, whatever they are.

llguidance is native code. A grammar of a few kilobytes can make it recurse until the stack
overflows, or compute for hours; no thread survives the one, and none can be ended for the other. So
another process, which may die, compiles each grammar first. What succeeds there is compiled here.
"""

import asyncio
import json
import os
import resource
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar

from equipoise.wire.inference_messages import Grammar, GrammarKind
from equipoise.worker.grammars import Constraint, GrammarError, GrammarLimitError, Grammars

MAX_COMPILING = 2
"""Grammars that are compiled at a time; others wait."""

TRIAL_CPU_S = 10
"""Processor time that the other process may take for one, seconds. The largest grammars that
clients send take two."""

TRIAL_TIMEOUT_S = 60.0
"""Time that it may take for one, seconds, on a busy machine: ranks have a higher priority."""

STACK_BYTES = 256 * 2**20
"""Stack of threads that compile. 32 MiB is enough for the deepest known grammar of the allowed
size, and pages that are never touched cost nothing."""

_NICENESS = 10

_Result = TypeVar("_Result")


class GrammarCompiler:
    """Compiles grammars for the model whose checkpoint is in `folder`; used from the event loop."""

    def __init__(self, folder: Path, *, vocab_size: int) -> None:
        """Processes start with the first grammars."""
        self._grammars = Grammars(folder, vocab_size=vocab_size)
        self._command = (sys.executable, "-m", __name__, str(folder), str(vocab_size))
        self._permits = asyncio.Semaphore(MAX_COMPILING)
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
        """
        if not self._grammars.has_compiled(grammar):
            async with self._permits:
                await self._try(grammar)
        return await self._run(
            partial(self._grammars.constraint, grammar, output=output, stop_tokens=stop_tokens)
        )

    def close(self) -> None:
        """End the other processes."""
        while self._idle:
            _end(self._idle.pop())

    async def _run(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _try(self, grammar: Grammar) -> None:
        """Compile in another process, which serves again unless that kills it."""
        process = self._idle.pop() if self._idle else await self._start()
        is_alive = False
        try:
            async with asyncio.timeout(TRIAL_TIMEOUT_S):
                answer = json.loads(await _ask(process, asdict(grammar)))
            is_alive = True
        except (TimeoutError, ValueError, OSError):
            raise GrammarLimitError("too complex: compiling it takes too much") from None
        finally:
            self._idle.append(process) if is_alive else _end(process)
        if answer["error"]:
            raise (GrammarLimitError if answer["is_limit"] else GrammarError)(answer["error"])

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=2**20
        )
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
        return process


async def _ask(process: Process, question: object) -> bytes:
    """Send a line; returns the line that answers it, or nothing if the process ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(question).encode() + b"\n")
    await process.stdin.drain()
    return await process.stdout.readline()


def _end(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()


def _deep_threads() -> ThreadPoolExecutor:
    """Threads with `STACK_BYTES` each: the size applies to those that start while it is set."""
    before = threading.stack_size(STACK_BYTES)
    threads, started = (
        ThreadPoolExecutor(MAX_COMPILING, "grammar"),
        threading.Barrier(MAX_COMPILING),
    )
    try:
        for waiting in [threads.submit(started.wait) for _ in range(MAX_COMPILING)]:
            waiting.result()
    finally:
        threading.stack_size(before)
    return threads


def _main(folder: str, vocab_size: str) -> None:
    """Compile one grammar per line of the input, and write the fault of each."""
    grammars = Grammars(Path(folder), vocab_size=int(vocab_size))
    grammars.load()
    threads = _deep_threads()
    for line in sys.stdin:
        _bound_processor_time()
        values = json.loads(line)
        grammar = Grammar(**values | {"kind": GrammarKind(values["kind"])})
        fault = threads.submit(_fault, grammars, grammar).result()
        error, is_limit = str(fault or ""), isinstance(fault, GrammarLimitError)
        sys.stdout.write(json.dumps({"error": error, "is_limit": is_limit}) + "\n")
        sys.stdout.flush()


def _fault(grammars: Grammars, grammar: Grammar) -> GrammarError | None:
    try:
        grammars.compile(grammar)
    except GrammarError as error:
        return error
    return None


def _bound_processor_time() -> None:
    """Let the system end this process after `TRIAL_CPU_S`, also if nobody waits for it any more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime) + TRIAL_CPU_S + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
