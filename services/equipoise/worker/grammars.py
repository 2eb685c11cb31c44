"""`Grammars`: what an output must match, compiled; `Constraint`: which tokens may follow one.

llguidance does both (github.com/microsoft/llguidance): grammars become parsers over bytes, and a
mask says which tokens keep the output valid. Masks depend on the output's tokens alone, so they are
the same in any batch and on any rank.
"""

import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.formats.end_tokens import read_end_tokens
from equipoise.formats.errors import FormatError
from equipoise.wire.inference_messages import Grammar, GrammarKind

Mask = npt.NDArray[np.int32]
"""Bits of tokens in words of 32, the lowest first: 1 for those that may be sampled."""

Masks = npt.NDArray[np.int32]
"""Several masks, [rows, words]."""

MAX_COMPILED = 16
"""Grammars that are kept compiled, with all states that outputs have reached."""

# Of llguidance. Its default for the first bounds neither the time nor the memory of the first mask
# where a long text is repeated: a second and 120 MB. A state takes about a kilobyte.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 100_000,
    "max_lexer_states": 100_000,
    "verbose_errors": False,
}
# A mask may take time that grows with the square of a grammar's symbols, and all ranks wait for it.
# Schemas, which have more symbols, become grammars that need less time. The largest that clients
# send, of 128 tools, have 20,000.
_MAX_SYMBOLS = {
    GrammarKind.JSON_SCHEMA: 20_000,
    GrammarKind.REGEX: 20_000,
    GrammarKind.GRAMMAR: 4_000,
}

MAX_MASK_S = 0.1
"""Processor time of a mask, seconds: all ranks wait for it. Ambiguous grammars take ever more, the
longer the output is, however small they are."""

# Models may indent; without a bound they may also write white space only.
_JSON_SPACE = r"[\x20\x0A\x0D\x09]{0,20}"

_NUM_BYTES = 256

# Of llguidance's errors: no token may follow, what stands for the parser's state, and what follows
# a fault of its own.
_DEAD_END, _NO_DETAILS, _BACKTRACE = "NoExtensionBias", "<non-verbose/>", "<backtrace>"


class GrammarError(ValueError):
    """A grammar cannot be used; the message says why."""


class GrammarLimitError(GrammarError):
    """A grammar became too complex after the output so far, or that does not match."""


class Constraint:
    """Which tokens may follow one output. Used by one thread at a time."""

    def __init__(self, matcher: Any, *, vocab_size: int, max_mask_s: float = MAX_MASK_S) -> None:
        self._matcher = matcher
        self._max_mask_s = max_mask_s
        self._is_slow = False
        # Until a mask behind a draft takes too much.
        self._looks_ahead = True
        self._num_words = -(-vocab_size // 32)

    def accept(self, tokens: Sequence[int]) -> bool:
        """Append tokens to the output; False if it no longer matches."""
        return bool(self._matcher.consume_tokens(list(tokens)))

    @property
    def trouble(self) -> str:
        """Why no token may follow any more; empty while one may."""
        if self._is_slow:
            return f"a mask took more than {self._max_mask_s:g} s"
        return _in_one_line(self._matcher.get_error()) if self._matcher.is_error() else ""

    def masks(self, drafts: Sequence[int] = ()) -> Masks:
        """What may follow the output, and what may follow after each draft, [1 + drafts, words].

        After a draft that may not follow, every token may: it is rejected in any case. Where
        the grammar got too complex, no token may. Behind a draft that says nothing of the output:
        it may be wrong, and `trouble` does not tell.
        """
        masks = np.full((1 + len(drafts), self._num_words), -1, dtype=np.int32)
        self._is_slow |= self._compute(self._matcher, masks[0])
        if self._is_slow or self._matcher.is_error():
            masks[:] = 0
        elif drafts:
            self._compute_ahead(drafts, masks[1:])
        return masks

    def mask_ahead(self, tokens: Sequence[int]) -> Mask | None:
        """What may follow the output and these tokens; None if they may not, or it is too complex.

        Like masks behind drafts, it makes no `trouble`.
        """
        matcher = self._matcher.deep_copy()
        if matcher.try_consume_tokens(list(tokens)) < len(tokens):
            return None
        mask = np.full(self._num_words, -1, dtype=np.int32)
        return mask if self._can_compute_ahead(matcher, mask) else None

    def _compute_ahead(self, drafts: Sequence[int], masks: Masks) -> None:
        """Compute the masks behind each draft."""
        # An error is for good, and a draft that is wrong must not cause one.
        matcher = self._matcher.deep_copy()
        for index, draft in enumerate(drafts):
            is_allowed = matcher.try_consume_tokens([draft])
            if not is_allowed and not matcher.is_error():
                return
            if not self._can_compute_ahead(matcher, masks[index]):
                masks[index:] = 0
                return

    def _can_compute_ahead(self, matcher: Any, mask: Mask) -> bool:
        """Compute a mask that the output may never need; False if it takes too much.

        One that takes long is the last one: all ranks have waited for it.
        """
        if self._looks_ahead and not matcher.is_error():
            self._looks_ahead = not self._compute(matcher, mask)
        return self._looks_ahead and not matcher.is_error()

    def _compute(self, matcher: Any, mask: Mask) -> bool:
        """Compute what may follow; returns whether it took too long."""
        began_s = time.thread_time()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return time.thread_time() - began_s > self._max_mask_s


class Grammars:
    """Compiles grammars for the model whose checkpoint is in `folder`; used from any thread."""

    def __init__(self, folder: Path, *, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._end_tokens: frozenset[int] = frozenset()
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()

    def load(self) -> None:
        """Load the tokenizer if grammars can be used here; otherwise constraints say why not.

        A large one takes about a second, in which no other thread runs: better before any serves.
        """
        with self._lock, suppress(GrammarError):
            self._load_tokenizer()

    def has_compiled(self, grammar: Grammar) -> bool:
        """Whether a grammar is still known."""
        with self._lock:
            return grammar in self._compiled

    def constraint(
        self, grammar: Grammar, *, output: Sequence[int], stop_tokens: frozenset[int]
    ) -> Constraint:
        """Return what may follow an output; compiling takes up to seconds.

        Raises:
            GrammarError: the grammar is invalid, matches nothing or is too complex, this
                installation or model lacks what it takes, or the output does not match.
        """
        with self._lock:
            matcher = self._compiled.get(grammar)
        # Several at a time: one that takes long holds up no other.
        matcher = matcher or self.compile(grammar)
        with self._lock:
            self._compiled[grammar] = matcher
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            if not self._end_tokens & stop_tokens:
                raise GrammarError("the model's end token must be a stop token")
            constraint = Constraint(matcher.deep_copy(), vocab_size=self._vocab_size)
        if output and not constraint.accept(output):
            raise GrammarLimitError(f"after {len(output)} tokens: {constraint.trouble}")
        return constraint

    def compile(self, grammar: Grammar) -> Any:
        """Return llguidance's matcher of a grammar at the start of its output.

        Raises:
            GrammarError: as in `constraint`.
        """
        with self._lock:
            self._load_tokenizer()
        from llguidance import (  # noqa: PLC0415 - optional
            LLMatcher,
            LLParserLimits,
            grammar_from,
        )

        try:
            match grammar.kind:
                case GrammarKind.JSON_SCHEMA:
                    text = LLMatcher.grammar_from_json_schema(
                        grammar.text, defaults={"whitespace_pattern": _JSON_SPACE}
                    )
                case GrammarKind.REGEX:
                    text = LLMatcher.grammar_from_regex(grammar.text)
                case GrammarKind.GRAMMAR:
                    text = grammar_from("grammar", grammar.text)
        # It raises no narrower error for text that it cannot convert.
        except (ValueError, RecursionError) as error:
            raise GrammarError(_in_one_line(str(error))) from None
        if grammar.after:
            text = _following(grammar.after, text)
        limits = LLParserLimits(**_LIMITS, max_grammar_size=_MAX_SYMBOLS[grammar.kind])
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(_in_one_line(matcher.get_error()))
        # The first mask takes longest, and steps would wait for it. Copies share what it finds.
        first = Constraint(matcher.deep_copy(), vocab_size=self._vocab_size, max_mask_s=math.inf)
        first.masks()
        if first.trouble.startswith(_DEAD_END):
            raise GrammarError("it matches no text")
        if first.trouble:
            raise GrammarLimitError(f"too complex: {first.trouble}")
        return matcher

    def _load_tokenizer(self) -> None:
        if self._tokenizer is not None:
            return
        try:
            from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415 - optional
        except ImportError:
            raise GrammarError("this worker lacks llguidance: pip install llguidance") from None
        try:
            self._end_tokens = read_end_tokens(self._folder, vocab_size=self._vocab_size)
        except FormatError as error:
            raise GrammarError(str(error)) from None
        if not self._end_tokens:
            raise GrammarError("the model has no end token (eos_token_id)")
        ends, path = sorted(self._end_tokens), self._folder / "tokenizer.json"
        source = str(path) if path.exists() else TokenizerWrapper(_Bytes(self._vocab_size, ends[0]))
        try:
            self._tokenizer = LLTokenizer(source, n_vocab=self._vocab_size, eos_token=ends)
        # It raises no narrower error for a file that it cannot use.
        except Exception as error:  # noqa: BLE001
            raise GrammarError(f"{path}: {_in_one_line(str(error))}") from None


class _Bytes:
    """A vocabulary whose first tokens are the bytes, in the form that llguidance takes."""

    bos_token_id = None

    def __init__(self, vocab_size: int, end_token: int) -> None:
        self.eos_token_id = end_token
        self.special_token_ids = list(range(_NUM_BYTES, vocab_size))
        self.tokens = [bytes([byte]) for byte in range(_NUM_BYTES)]
        self.tokens += [b""] * (vocab_size - _NUM_BYTES)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _following(end: str, text: str) -> str:
    """The grammar of anything up to `end`, white space, and then what `text` describes."""
    inner = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
    outer = (
        "start: before space? @answer\n"
        f"before[suffix={json.dumps(end)}]: /(.|\\n)*/\n"
        "space: /[ \\n\\r\\t]{1,20}/"
    )
    return json.dumps({"grammars": [{"lark_grammar": outer}, {**inner, "name": "answer"}]})


def _in_one_line(text: str) -> str:
    return " ".join(text.partition(_BACKTRACE)[0].removesuffix(_NO_DETAILS).split())[:300]
