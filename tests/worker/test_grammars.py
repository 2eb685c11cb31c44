"""Outputs match their grammars: sampled, in any batch, with drafts, and continued elsewhere."""

import json
import random
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jsonschema
import numpy as np
import psutil
import pytest

from equipoise.formats.packaged import packaged_checkpoint
from equipoise.planning.layout import contiguous_layout
from equipoise.wire.inference_messages import FinishReason, Grammar, GrammarKind
from equipoise.worker.core import ModelCore
from equipoise.worker.grammars import Constraint, GrammarError, GrammarLimitError, Grammars
from equipoise.worker.scheduler import Scheduler
from equipoise.worker.sequence import Request
from equipoise.worker.settings import WorkerSettings
from equipoise_model.sampling_params import SamplingParams
from tests.support.held_slots import held_by
from tests.support.json_schemas import random_regex, random_schema
from tests.support.lone_engine import lone_engine

VOCAB_SIZE, END = 272, 257
STOPS = frozenset({END})
MAX_TOKENS = 120


@pytest.fixture(scope="module")
def grammars():
    return Grammars(packaged_checkpoint(), vocab_size=VOCAB_SIZE)


def schema(value):
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(value))


def regex(text):
    return Grammar(kind=GrammarKind.REGEX, text=text)


def allowed(mask):
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return set(np.flatnonzero(bits).tolist())


def masks_of(grammars, grammar, *, output=(), drafts=()):
    constraint = grammars.constraint(grammar, output=tuple(output), stop_tokens=STOPS)
    return [allowed(mask) for mask in constraint.masks(tuple(drafts))]


def test_masks_follow_the_output_and_its_drafts(grammars):
    grammar = regex("ab|ac/d")
    assert masks_of(grammars, grammar) == [{97}]
    assert masks_of(grammars, grammar, drafts=b"ac/") == [{97}, {98, 99}, {47}, {100}]
    assert masks_of(grammars, grammar, output=b"ab") == [{END}]
    assert masks_of(grammars, grammar, output=b"a", drafts=[98, END])[:2] == [{98, 99}, {END}]
    wrong, *rest = masks_of(grammars, grammar, output=b"a", drafts=b"xb")
    assert wrong == {98, 99}
    assert all(len(one) == VOCAB_SIZE for one in rest)


@pytest.mark.parametrize(
    "grammar",
    [
        schema({"enum": ["ab"]}),
        regex('"ab"'),
        Grammar(kind=GrammarKind.GRAMMAR, text='start: "\\"ab\\""'),
        Grammar(kind=GrammarKind.GRAMMAR, text='root ::= "\\"ab\\""'),
    ],
)
def test_a_grammar_may_begin_after_a_text(grammars, grammar):
    grammar = replace(grammar, after="</end>")
    quote, a, newline = b'"a\n'
    before = masks_of(grammars, grammar, output=b'w "ab" <end> \n', drafts=b"</end>")
    assert all(END not in mask and quote in mask and a in mask for mask in before[:-1])
    assert quote in before[-1]
    assert newline in before[-1]
    assert a not in before[-1]
    (mask,) = masks_of(grammars, grammar, output=b'</end>\n"ab')
    assert mask == {quote}
    (mask,) = masks_of(grammars, grammar, output=b'</end>"ab"')
    assert mask == {END}


def test_a_grammar_that_takes_long_holds_up_no_other(grammars, monkeypatch):
    compiling, go, compile_ = threading.Event(), threading.Event(), grammars.compile

    def slow(grammar):
        if grammar.text == "slow":
            compiling.set()
            assert go.wait(60)
        return compile_(grammar)

    monkeypatch.setattr(grammars, "compile", slow)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(masks_of, grammars, regex("slow"))
        assert compiling.wait(60)
        try:
            assert masks_of(grammars, regex("quick")) == [{ord("q")}]
            assert not waiting.done()
        finally:
            go.set()
        assert waiting.result(60) == [{ord("s")}]


def test_a_tokenizer_that_grammars_cannot_use_is_named_and_harms_nothing_else(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    (tmp_path / "tokenizer.json").write_text("{}")
    grammars = Grammars(tmp_path, vocab_size=VOCAB_SIZE)
    grammars.load()
    with pytest.raises(GrammarError, match=r"tokenizer\.json"):
        grammars.constraint(regex("a"), output=(), stop_tokens=STOPS)


def test_masks_change_nothing(grammars):
    constraint = grammars.constraint(schema({"type": "integer"}), output=(), stop_tokens=STOPS)
    before = constraint.masks()
    for drafts in (b"12", b"1x", [49, END], b"-"):
        constraint.masks(tuple(drafts))
        assert (constraint.masks() == before).all()
    assert constraint.accept(b"12")
    assert allowed(constraint.masks()[0]) == {*b"0123456789", END}


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (schema({"type": "wrong"}), "Invalid type: wrong"),
        (schema([1]), "Expecting object schema"),
        (regex("("), "unclosed group"),
        (regex("(?=a)b"), "look-around"),
        (Grammar(kind=GrammarKind.GRAMMAR, text="start: foo"), "foo"),
        (Grammar(kind=GrammarKind.GRAMMAR, text="start: start"), "it matches no text"),
        (Grammar(kind=GrammarKind.GRAMMAR, text="start:" + ' ("a"|"b")*' * 4500), "size"),
        (Grammar(kind=GrammarKind.GRAMMAR, text="start: <|end|>"), "panic"),
        (schema({"$ref": "#"}), "it matches no text"),
        (regex(r"[^\s\S]"), "it matches no text"),
        (Grammar(kind=GrammarKind.GRAMMAR, text="root ::= x"), "'x'"),
        (Grammar(kind=GrammarKind.GRAMMAR, text="start: " + 9999 * "("), "nested"),
        (Grammar(kind=GrammarKind.GRAMMAR, text="root ::= " + 9999 * "("), "recursion"),
    ],
)
def test_an_invalid_grammar_is_rejected_with_the_reason(grammars, grammar, words):
    with pytest.raises(GrammarError, match=re.escape(words)) as caught:
        grammars.constraint(grammar, output=(), stop_tokens=STOPS)
    assert "\n" not in str(caught.value)
    assert "<unknown>" not in str(caught.value)


def test_a_grammar_needs_its_end_token_and_an_output_that_matches(grammars):
    with pytest.raises(GrammarError, match="end token must be a stop token"):
        grammars.constraint(regex("a"), output=(), stop_tokens=frozenset({5}))
    with pytest.raises(GrammarLimitError, match="after 1 tokens"):
        grammars.constraint(regex("a"), output=(98,), stop_tokens=STOPS)


def test_a_grammar_that_gets_too_complex_allows_no_token(grammars):
    grammar = Grammar(kind=GrammarKind.GRAMMAR, text='start: ("a"{1000}){1000}')
    assert masks_of(grammars, grammar, drafts=b"a") == [{97}, set()]
    constraint = grammars.constraint(grammar, output=(), stop_tokens=STOPS)
    assert allowed(constraint.masks()[0]) == {97}, "the draft did no harm"
    assert not constraint.accept(b"a")
    assert not constraint.masks().any()


def test_an_ambiguous_grammar_ends_a_request_before_its_masks_delay_steps(grammars):
    """Each token takes longer than the one before, and no limit of the library applies."""
    grammar = Grammar(kind=GrammarKind.GRAMMAR, text='start: s\ns: s s | "a" | s s s |')
    constraint = grammars.constraint(grammar, output=(), stop_tokens=STOPS)
    constraint._max_mask_s = 0.01  # As a vocabulary of usual size takes 0.1 s.
    slowest_s = 0.0
    for _ in range(2000):
        began_s = time.thread_time()
        mask = constraint.masks()
        slowest_s = max(slowest_s, time.thread_time() - began_s)
        if not mask.any():
            break
        assert constraint.accept(b"a")
    assert constraint.trouble == "a mask took more than 0.01 s"
    assert slowest_s < 1.0


class SlowAhead:
    """A matcher of any text. The masks of its copies, which look ahead, take long from one on."""

    def __init__(self, first_slow, counts=None):
        self.first_slow, self.is_ahead = first_slow, counts is not None
        self.counts = Counter() if counts is None else counts

    def deep_copy(self):
        return SlowAhead(self.first_slow, self.counts)

    def try_consume_tokens(self, tokens):
        return len(tokens)

    def consume_tokens(self, _):
        return True

    def unsafe_compute_mask_ptr(self, *_):
        self.counts[self.is_ahead] += 1
        if self.is_ahead and self.counts[True] >= self.first_slow:
            until_s = time.thread_time() + 0.02
            while time.thread_time() < until_s:
                pass

    def is_error(self):
        return False


def looking(*, first_slow):
    return Constraint(SlowAhead(first_slow), vocab_size=VOCAB_SIZE, max_mask_s=0.01)


def test_a_mask_behind_a_draft_never_ends_a_request_and_a_slow_one_is_the_last():
    constraint = looking(first_slow=2)
    for expected in ([1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]):
        masks = constraint.masks((97, 98, 99))
        assert masks.all(axis=1).tolist() == masks.any(axis=1).tolist() == expected
        assert constraint.mask_ahead((97,)) is None
        assert not constraint.trouble
    assert constraint._matcher.counts[True] == 2


@pytest.mark.parametrize("first_slow", [1, 2, 4, 7])
def test_masks_behind_drafts_that_take_long_change_no_token(core, first_slow):
    def tokens(num_drafts):
        constraint = looking(first_slow=first_slow)
        request = Request(
            key=0, prompt=tuple(b"def f("), max_tokens=20, stop_tokens=STOPS, constraint=constraint
        )
        made, _, stats = run(core, [request], num_drafts=num_drafts)
        return made, constraint._matcher.counts[True], stats

    made, num_ahead, stats = tokens(num_drafts=1)
    assert made == tokens(num_drafts=0)[0]
    assert num_ahead == first_slow
    assert bool(stats.drafts) == (first_slow > 1)


def test_the_parameters_of_as_many_tools_as_a_request_may_have_are_a_grammar(grammars):
    tools = [
        {
            "type": "object",
            "properties": {f"name {at} {of}": {"type": "string"} for at in range(10)},
        }
        for of in range(128)
    ]
    (mask,) = masks_of(grammars, schema({"type": "array", "items": {"anyOf": tools}}), output=b"[")
    assert mask >= {*b"{]"}


@pytest.mark.parametrize("repeated", ["b{1000000}", "(abc){200000}"])
def test_a_long_repetition_takes_no_memory_for_good(grammars, repeated):
    """Eight of them once took 0.7 GB, and a second of a step each."""
    before = psutil.Process().memory_info().rss
    for number in range(8):
        constraint = grammars.constraint(regex(f"{number}{repeated}"), output=(), stop_tokens=STOPS)
        if constraint.masks().any():
            constraint.accept(str(number).encode())
        assert constraint.trouble == "lexer error: too many expressions constructed"
    assert psutil.Process().memory_info().rss - before < 256 * 2**20


def walk(grammars, grammar, dice):
    """An output that ends, of tokens drawn from the masks alone."""
    constraint = grammars.constraint(grammar, output=(), stop_tokens=STOPS)
    output = []
    while len(output) < 4000:
        (mask,) = constraint.masks()
        tokens = sorted(allowed(mask))
        assert tokens, (grammar, bytes(output))
        if END in tokens and (tokens == [END] or dice.random() < 0.3):
            return bytes(output).decode()
        output.append(dice.choice([token for token in tokens if token != END]))
        assert constraint.accept(output[-1:])
    return None


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.benchmark)])
def test_whatever_masks_allow_matches(grammars, count):
    dice, ended = random.Random(11), 0
    for grammar, matches in drawn(seed=count, count=count):
        text = walk(grammars, grammar, dice)
        if text is not None:
            ended += 1
            assert matches(text), (grammar, text)
    print(f"{ended} of {count} outputs ended, all valid")
    assert ended >= 0.95 * count


@pytest.mark.benchmark
def test_masks_cost_little_of_a_rank(core, grammars):
    """The same tokens with and without a mask: one that allows every text."""
    times = {False: [], True: []}
    for number in range(12):
        masked = number % 2 == 0
        requests = [
            Request(
                key=key,
                prompt=tuple(f"def f{key}(".encode()),
                max_tokens=40,
                stop_tokens=STOPS,
                sampling=SamplingParams(temperature=1, seed=key),
                constraint=grammars.constraint(regex(r"(?s:.)*"), output=(), stop_tokens=STOPS)
                if masked
                else None,
            )
            for key in range(8)
        ]
        began_s = time.process_time()
        tokens, _, _ = run(core, requests)
        times[masked].append((time.process_time() - began_s) / sum(map(len, tokens.values())))
    ratio = min(times[False]) / min(times[True])
    print(f"tokens per second with masks: {ratio:.2f} of those without")
    assert ratio >= 0.9


@pytest.fixture(scope="module")
def core():
    core = ModelCore.load(
        WorkerSettings(speculate=1, max_requests=32, context_length=512, max_step_tokens=128)
    )
    experts = range(core.shape.num_experts)
    core.checkpoint.load_slots(core.model, [experts] * core.shape.num_layers)
    return core


def run(core, requests, *, num_drafts=0, max_requests=32):
    """The tokens and finish of every request, by key, and the rank's counters."""
    layout = contiguous_layout(
        num_layers=core.shape.num_layers,
        num_experts=core.shape.num_experts,
        num_ranks=1,
        slots_per_rank=core.shape.num_experts,
    )
    tokens, finish = {one.key: [] for one in requests}, {}

    def publish(result):
        for emission in result.emissions:
            assert not emission.sampled.fault, emission
            tokens[emission.key].append(emission.token)
            if emission.finish:
                finish[emission.key] = emission.finish
        if len(finish) == len(requests):
            engine.leave()

    engine = lone_engine(
        core,
        held_by(core, layout),
        publish,
        scheduler=Scheduler(
            blocks=core.block_pool(),
            max_requests=max_requests,
            max_queued=len(requests),
            max_step_tokens=128,
            num_drafts=num_drafts,
        ),
        num_drafts=num_drafts,
    )
    for request in requests:
        engine.submit(request)
    engine.run()
    return tokens, finish, engine.progress().stats


def request_of(grammars, key, grammar, *, output=()):
    """Of each kind of grammar, every other request is sampled."""
    prompt = tuple(f"value {key} = ".encode())
    return Request(
        key=key,
        prompt=(*prompt, *output),
        max_tokens=MAX_TOKENS - len(output),
        stop_tokens=STOPS,
        sampling=SamplingParams(temperature=key // 2 % 2, seed=key),
        num_replayed=len(output),
        constraint=grammars.constraint(grammar, output=output, stop_tokens=STOPS),
    )


def drawn(seed, count):
    """Half schemas, half regexes, with a check of each."""
    dice = random.Random(seed)
    for number in range(count):
        if number % 2:
            pattern = random_regex(dice)
            yield regex(pattern), lambda text, pattern=pattern: re.fullmatch(pattern, text)
        else:
            # The tiny model would fill its tokens with white space, where JSON may have it.
            wanted = random_schema(dice) | {"x-guidance": {"whitespace_pattern": " ?"}}
            validator = jsonschema.Draft202012Validator(wanted)
            yield schema(wanted), lambda text, v=validator: v.is_valid(json.loads(text))


def test_outputs_match_and_are_the_same_alone_with_drafts_and_continued(core, grammars):
    cases = list(drawn(seed=3, count=8))

    def requests(outputs=None):
        return [
            request_of(grammars, key, grammar, output=tuple(outputs[key]) if outputs else ())
            for key, (grammar, _) in enumerate(cases)
        ]

    together, finish, _ = run(core, requests())
    for key, (grammar, matches) in enumerate(cases):
        *text, last = together[key]
        if finish[key] is FinishReason.STOP:
            assert last == END
            assert matches(bytes(text).decode()), (grammar, bytes(text))
    num_ended = sum(one is FinishReason.STOP for one in finish.values())
    assert num_ended >= 5, finish
    alone, _, _ = run(core, requests(), max_requests=1)
    assert alone == together
    speculated, _, stats = run(core, requests(), num_drafts=1)
    assert speculated == together
    assert stats.drafts_accepted > 0
    halves = {key: tokens[: len(tokens) // 2] for key, tokens in together.items()}
    rest, _, _ = run(core, requests(halves), num_drafts=1)
    assert {key: [*halves[key], *rest[key]] for key in rest} == together
