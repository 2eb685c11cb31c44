"""No grammar ends the process that compiles it, or keeps it busy for good."""

import asyncio
import json
import signal
import sys

import pytest

from equipoise.formats.packaged import packaged_checkpoint
from equipoise.wire.inference_messages import Grammar, GrammarKind
from equipoise.worker import grammar_compiler
from equipoise.worker.errors import QueueFullError
from equipoise.worker.grammar_compiler import GrammarCompiler
from equipoise.worker.grammars import GrammarError, GrammarLimitError

VOCAB_SIZE, END = 272, 257
STOPS = frozenset({END})
DEEP = Grammar(
    kind=GrammarKind.GRAMMAR,
    text="\n".join(("start: r0", *(f"r{n}: r{n + 1}" for n in range(3500)), 'r3500: "a"')),
)
"""It overflows a stack of 8 MiB."""

ENDLESS = Grammar(
    kind=GrammarKind.JSON_SCHEMA, text=json.dumps({"type": "integer", "multipleOf": 1_000_003})
)


@pytest.fixture
def started():
    """The processes that the compiler has started."""
    return []


@pytest.fixture
async def compiler(started, monkeypatch):
    made = GrammarCompiler(packaged_checkpoint(), vocab_size=VOCAB_SIZE)
    start = made._start

    async def starting():
        started.append(await start())
        return started[-1]

    monkeypatch.setattr(made, "_start", starting)
    yield made
    made.close()
    async with asyncio.timeout(60):
        for process in started:
            await process.wait()


def with_limit(compiler, limit):
    """Its other processes start with another limit."""
    code = f"import sys; from equipoise.worker import grammar_compiler as one; one.{limit}"
    arguments = compiler._command[-2:]
    compiler._command = (sys.executable, "-c", f"{code}; one._main(*sys.argv[1:])", *arguments)


async def constraint_of(compiler, grammar):
    async with asyncio.timeout(120):
        return await compiler.constraint(grammar, output=(), stop_tokens=STOPS)


async def test_a_grammar_may_be_as_deep_as_its_size_allows(compiler):
    assert (await constraint_of(compiler, DEEP)).masks().any()


@pytest.mark.parametrize(
    ("limit", "grammar"),
    [
        ("TRIAL_CPU_S = 0", ENDLESS),
        ("STACK_BYTES = 2**18", DEEP),
    ],
)
async def test_a_grammar_that_takes_too_much_is_rejected_and_later_ones_are_not(
    compiler, limit, grammar
):
    with_limit(compiler, limit)
    with pytest.raises(GrammarLimitError, match="too complex: compiling it takes too much"):
        await constraint_of(compiler, grammar)
    with_limit(compiler, "TRIAL_CPU_S = 4")
    simple = Grammar(kind=GrammarKind.REGEX, text="a")
    assert (await constraint_of(compiler, simple)).masks().any()
    with pytest.raises(GrammarError, match="it matches no text"):
        await constraint_of(compiler, Grammar(kind=GrammarKind.REGEX, text="[^\\s\\S]"))
    (alive,) = compiler._idle
    assert alive.returncode is None, "it serves again"
    compiler.close()
    await asyncio.wait_for(alive.wait(), 60)


async def test_a_compiler_that_was_closed_serves_again_with_one_process(compiler):
    await constraint_of(compiler, Grammar(kind=GrammarKind.REGEX, text="a"))
    (ended,) = compiler._idle
    compiler.close()
    await asyncio.wait_for(ended.wait(), 60)
    await constraint_of(compiler, Grammar(kind=GrammarKind.REGEX, text="b"))
    (first,) = compiler._idle
    await constraint_of(compiler, Grammar(kind=GrammarKind.REGEX, text="c"))
    assert compiler._idle == [first]
    assert first.returncode is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_process_that_ended_before_says_nothing_of_a_grammar(compiler, number):
    await constraint_of(compiler, Grammar(kind=GrammarKind.REGEX, text="a"))
    (process,) = compiler._idle
    await end(process, number)
    grammar = Grammar(kind=GrammarKind.REGEX, text="b")
    assert (await constraint_of(compiler, grammar)).masks().any()


async def test_a_process_that_ended_before_does_not_keep_the_compiler_open(compiler):
    await constraint_of(compiler, Grammar(kind=GrammarKind.REGEX, text="a"))
    (process,) = compiler._idle
    await end(process, signal.SIGKILL)
    compiler.close()
    assert not compiler._idle


async def end(process, number):
    """End a process, and let its pipes be closed, too."""
    process.send_signal(number)
    await process.wait()
    assert await process.stdout.read() == b""
    await asyncio.sleep(0.1)


@pytest.mark.parametrize("command", [("/nowhere",), (sys.executable, "-c", "pass")])
async def test_a_rank_that_cannot_compile_is_not_to_blame_on_the_grammar(compiler, command):
    compiler._command = command
    with pytest.raises(QueueFullError, match="process"):
        await constraint_of(compiler, Grammar(kind=GrammarKind.REGEX, text="a"))


async def test_a_grammar_does_not_wait_for_long_and_the_same_one_is_compiled_once(
    compiler, monkeypatch
):
    tried, go, try_ = [], asyncio.Event(), compiler._try

    async def slow(grammar):
        tried.append(grammar.text)
        await go.wait()
        await try_(grammar)

    monkeypatch.setattr(compiler, "_try", slow)
    waiting = [
        asyncio.create_task(constraint_of(compiler, Grammar(kind=GrammarKind.REGEX, text=text)))
        for text in [*"abcdef"] * 3
    ]
    await asyncio.sleep(0.1)
    other = Grammar(kind=GrammarKind.REGEX, text="g")
    with monkeypatch.context() as impatient:
        impatient.setattr(grammar_compiler, "MAX_WAIT_S", 0.1)
        with pytest.raises(QueueFullError, match="7 grammars are being compiled: try again"):
            await constraint_of(compiler, other)
    go.set()
    assert all([(await task).masks().any() for task in waiting])
    assert sorted(tried) == [*"abcdef"]
    await constraint_of(compiler, other)


async def test_a_busy_machine_is_no_fault_of_a_grammar(compiler, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "TRIAL_TIMEOUT_S", 0.0)
    with pytest.raises(QueueFullError, match="too busy to compile the grammar"):
        await constraint_of(compiler, Grammar(kind=GrammarKind.REGEX, text="a"))
    assert not compiler._idle


async def test_a_grammar_that_takes_much_memory_for_good_is_rejected(compiler):
    with_limit(compiler, "MAX_COMPILED_BYTES = 2**16")
    with pytest.raises(GrammarLimitError, match="compiling it takes too much"):
        await constraint_of(compiler, DEEP)


async def test_a_request_that_is_cancelled_leaves_no_process_behind(compiler, started, monkeypatch):
    start, has_started = compiler._start, asyncio.Event()

    async def starting():
        process = await start()
        has_started.set()
        return process

    monkeypatch.setattr(compiler, "_start", starting)
    waiting = asyncio.create_task(constraint_of(compiler, ENDLESS))
    async with asyncio.timeout(60):
        await has_started.wait()
        await asyncio.sleep(0.5)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert not compiler._idle
        (process,) = started
        assert await process.wait() == -signal.SIGKILL
