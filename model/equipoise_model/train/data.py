"""Text of three domains, split into a training part and a held-out part.

`code` is the standard library's source without comments and docstrings, `english` the prose of
those docstrings and of the language reference (`pydoc_data.topics`), `arithmetic` is generated. The
hash of a file, topic or problem assigns it to one split permanently, so that training never sees
held-out text. Text differs between Python versions; within one it depends only on the seed. Must
not import torch: the demo takes its prompts from here.
"""

import ast
import functools
import hashlib
import importlib
import inspect
import os
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

Domain = Literal["code", "english", "arithmetic"]
Split = Literal["train", "heldout"]
Text = npt.NDArray[np.uint8]

DOMAINS: tuple[Domain, ...] = ("code", "english", "arithmetic")

_HELDOUT_SHARE = 10  # one part in ten is held out
_ARITHMETIC_BYTES: dict[Split, int] = {"train": 1_000_000, "heldout": 100_000}
_SKIPPED_FOLDERS = frozenset(
    # Installed packages, tests, and files that are tables or topics rather than source.
    {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data", "lib2to3"}
)
_SHORTEST_PARAGRAPH = 80  # characters
_PROSE_SHARE = 0.95  # letters, spaces and commas in prose; Markdown, calls and options have fewer
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class CorpusError(RuntimeError):
    """This Python installation has too little text; the message names what is missing."""


@functools.cache
def text(domain: Domain, split: Split) -> Text:
    """Return all text of a domain's split as one read-only uint8 array, one byte per token.

    Skips files that are missing or cannot be read or parsed.

    Raises:
        CorpusError: nothing is left.
    """
    documents = {"code": _code, "english": _english, "arithmetic": _arithmetic}[domain](split)
    joined = np.frombuffer("\n".join(documents).encode(), dtype=np.uint8)
    if joined.size < 4096:
        raise CorpusError(
            f"found {joined.size} bytes of {split} text for {domain!r} in "
            f"{sysconfig.get_path('stdlib')}: install Python with its standard-library source"
        )
    return joined


def heldout_prompts(
    domain: Domain, *, num_prompts: int, seed: int, min_bytes: int = 48, max_bytes: int = 96
) -> list[bytes]:
    """Return distinct prompts that start at a line of held-out text, reproducible by seed.

    Lengths are uniform in [min_bytes, max_bytes]; each byte is one token.

    Raises:
        CorpusError: there are fewer different prompts than requested.
    """
    assert 1 <= min_bytes <= max_bytes
    source = text(domain, "heldout").tobytes()
    rng = np.random.default_rng([seed, DOMAINS.index(domain)])
    line_starts = np.flatnonzero(np.frombuffer(source, dtype=np.uint8) == ord("\n")) + 1
    prompts: dict[bytes, None] = {}
    for start in rng.permutation(line_starts):
        if len(prompts) == num_prompts:
            break
        prompt = source[start : start + int(rng.integers(min_bytes, max_bytes + 1))]
        if len(prompt) >= min_bytes and not prompt[:1].isspace() and prompt.isascii():
            prompts[prompt] = None
    if len(prompts) < num_prompts:
        raise CorpusError(
            f"held-out text for {domain!r} has {len(prompts)} different prompts, not {num_prompts}"
        )
    return list(prompts)


def sample_batch(
    rng: np.random.Generator, *, num_sequences: int, num_tokens: int, split: Split = "train"
) -> npt.NDArray[np.int64]:
    """Draw random windows of text, int64 [num_sequences, num_tokens]; domains alternate by row.

    A sequence has one domain, like a request.
    """
    return np.stack(
        [
            sample_window(rng, DOMAINS[row % len(DOMAINS)], num_tokens=num_tokens, split=split)
            for row in range(num_sequences)
        ]
    )


def sample_window(
    rng: np.random.Generator, domain: Domain, *, num_tokens: int, split: Split
) -> npt.NDArray[np.int64]:
    """Draw one random window of a domain's text, int64 [num_tokens]."""
    source = text(domain, split)
    start = int(rng.integers(source.size - num_tokens + 1))
    return source[start : start + num_tokens].astype(np.int64)


def split_of(name: str) -> Split:
    """Assign a file, topic or problem to a split, by its name's hash."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "little") % _HELDOUT_SHARE == 0 else "train"


def _code(split: Split) -> Iterator[str]:
    for code, _ in _library(split):
        yield code


def _english(split: Split) -> Iterator[str]:
    for name, topic in sorted(_topics().items()):
        if split_of(f"topic {name}") == split:
            yield from _prose(topic)
    for _, docstrings in _library(split):
        for docstring in docstrings:
            yield from _prose(inspect.cleandoc(docstring))


def _prose(document: str) -> Iterator[str]:
    """Return paragraphs that read as sentences, in lines of even width.

    Skips examples, signatures and lists of arguments: these are nearly code, which has its own
    domain.
    """
    for paragraph in document.split("\n\n"):
        num_plain = sum(char.isalpha() or char in " \n,.'" for char in paragraph)
        if len(paragraph) >= _SHORTEST_PARAGRAPH and num_plain >= _PROSE_SHARE * len(paragraph):
            yield textwrap.fill(paragraph, width=96) + "\n"


def _arithmetic(split: Split) -> Iterator[str]:
    """Generate problems with their answers, one per line: `417 + 58 = 475`."""
    rng = np.random.default_rng(0)
    num_bytes = 0
    while True:
        # Drawn many at a time: one by one takes seconds.
        for left, right, kind in rng.integers(0, [1000, 1000, 3], size=(4096, 3)).tolist():
            sign = "+-*"[kind]
            problem = f"{left} {sign} {right}"
            if split_of(problem) != split:
                continue
            answer = {"+": left + right, "-": left - right, "*": left * right}[sign]
            line = f"{problem} = {answer}"
            num_bytes += len(line) + 1
            yield line
            if num_bytes >= _ARITHMETIC_BYTES[split]:
                return


@functools.lru_cache(maxsize=2)
def _library(split: Split) -> tuple[tuple[str, list[str]], ...]:
    """Yield each standard-library file as its code and its docstrings, in path order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(_source_files(root)):
        if split_of(path.relative_to(root).as_posix()) != split:
            continue
        try:
            files.append(_without_docstrings(path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
            continue
    return tuple(files)


def _source_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _without_docstrings(source: str) -> tuple[str, list[str]]:
    lines: list[str | None] = list(source.split("\n"))
    docstrings = []
    for node in _documented(ast.parse(source)):
        docstring = ast.get_docstring(node, clean=False)
        if docstring is not None:
            docstrings.append(docstring)
            first, last = node.body[0].lineno, node.body[0].end_lineno
            lines[first - 1 : last] = [None] * (1 + (last or first) - first)
    code = (line for line in lines if line is not None and not line.lstrip().startswith("#"))
    return "\n".join(code), docstrings


def _documented(node: ast.AST) -> Iterator[_Documented]:
    """Yield nodes that can have a docstring, without looking into expressions."""
    if isinstance(node, _Documented):
        yield node
    for block in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, block, ()):
            yield from _documented(child)


def _topics() -> dict[str, str]:
    try:
        module = importlib.import_module("pydoc_data.topics")
    except ImportError:
        return {}
    return dict(module.topics)
