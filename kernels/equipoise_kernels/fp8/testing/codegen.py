"""Compiles kernels for Hopper on a machine without a GPU, and reads the result.

Turns a `Specialization` into machine code for sm_90a and extracts the figures that gates check.
Says nothing about speed, which only a GPU shows.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import get_cache_manager

from equipoise_kernels.fp8.specialization import Specialization

HOPPER = GPUTarget("cuda", 90, 32)
REGISTERS_PER_SM = 65536
THREADS_PER_SM = 2048
SHARED_BYTES_PER_CTA = 227 * 1024
# Every CTA takes 1 KB of the multiprocessor's 228 KB for the system.
SHARED_BYTES_PER_SM = 228 * 1024
SYSTEM_BYTES_PER_CTA = 1024

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_DUMP_TIMEOUT_S = 300
# An address as a comment, an optional predicate, and the instruction.
_INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([A-Z0-9_]+)([^;]*);", re.MULTILINE
)
_ADDRESS = re.compile(r"\b0x([0-9a-f]+)")
# Products of the tensor cores: of warp groups, and on the older path.
WIDE_PRODUCTS = ("HGMMA", "QGMMA", "IGMMA")
OLD_PRODUCTS = ("HMMA", "IMMA", "QMMA", "DMMA")
STACK_USES = ("LDL", "STL")

_LABEL = re.compile(r"^\s*(\$\w+):")
_JUMP = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+);")
_COPY = re.compile(
    r"cp\.async\.wait_group\s+(?P<wait>\d+)|(?P<commit>cp\.async\.commit_group)"
    r"|(?P<product>wgmma\.mma_async|mma\.sync)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductLoop:
    """What one step of a loop of products waits for."""

    awaited_loads: int
    """Loads from global memory into registers; a step needs their values, so it waits for them."""
    copies: int
    """Groups of asynchronous copies that a step starts."""
    copies_in_flight: int
    """The fewest groups under way at any product of a step."""

    @classmethod
    def of_ptx(cls, body: str) -> Self:
        """Follow the body of a loop, once to fill the pipeline and once to see what is in it."""
        copies = body.count("cp.async.commit_group")
        under_way, at_products = 0, []
        for turn in range(2):
            for found in _COPY.finditer(body):
                if found["wait"]:
                    under_way = min(under_way, int(found["wait"]))
                elif found["commit"]:
                    under_way += 1
                elif turn == 1:
                    at_products.append(under_way)
        return cls(
            awaited_loads=len(re.findall(r"\bld\.global\b", body)),
            copies=copies,
            copies_in_flight=min(at_products, default=0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Figures of one compiled kernel."""

    num_registers: int
    """Registers per thread."""
    num_threads: int
    """Threads per program, including those added by warp specialisation."""
    shared_bytes: int
    """Shared memory per program."""
    stack_bytes: int
    """Stack per thread; more than 0 means spills."""
    instructions: Mapping[str, int]
    """Occurrences of each SASS instruction, by its name up to the first dot."""
    step: Mapping[str, int] = field(default_factory=dict)
    """The same of the innermost loop of products, if there is one."""
    ptx: str
    """The PTX text."""

    @property
    def ctas_per_sm(self) -> int:
        """Programs that fit on one multiprocessor at a time."""
        # Registers are allocated in units of 8 per thread.
        registers = -(-self.num_registers // 8) * 8
        by_registers = REGISTERS_PER_SM // (registers * self.num_threads)
        by_shared = SHARED_BYTES_PER_SM // (self.shared_bytes + SYSTEM_BYTES_PER_CTA)
        return min(by_registers, by_shared, THREADS_PER_SM // self.num_threads)

    @property
    def product_loop(self) -> ProductLoop | None:
        """The innermost loop of products, or None."""
        lines = self.ptx.splitlines()
        labels = {found[1]: n for n, line in enumerate(lines) if (found := _LABEL.match(line))}
        jumps = ((n, found[1]) for n, line in enumerate(lines) if (found := _JUMP.search(line)))
        loops = ("\n".join(lines[labels[to] : n]) for n, to in jumps if labels.get(to, n) < n)
        bodies = [body for body in loops if any(f["product"] for f in _COPY.finditer(body))]
        return ProductLoop.of_ptx(min(bodies, key=len)) if bodies else None

    def count(self, *names: str) -> int:
        """Occurrences of instructions with these names."""
        return sum(self.instructions.get(name, 0) for name in names)


def compile_for_hopper(what: Specialization) -> Code:
    """Compile; takes 1 to 2 seconds, or nothing if Triton's cache has it.

    Raises:
        RuntimeError: the compiler rejects the configuration.
    """
    compiled = triton.compile(_source(what), target=HOPPER, options=_options(what))
    dump = _dump(compiled.asm["cubin"])
    figures = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", dump)}
    instructions = [(int(at, 16), name, rest) for at, name, rest in _INSTRUCTION.findall(dump)]
    ptx = compiled.asm["ptx"]
    num_warps = getattr(compiled.metadata, "num_warps", what.options["num_warps"])
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", ptx)
    return Code(
        num_registers=figures["REG"],
        num_threads=int(threads.group(1)) if threads else 32 * num_warps,
        shared_bytes=compiled.metadata.shared,
        stack_bytes=figures["STACK"],
        instructions=Counter(name for _, name, _ in instructions),
        step=_step_of_products(instructions),
        ptx=ptx,
    )


def _step_of_products(instructions: Sequence[tuple[int, str, str]]) -> Mapping[str, int]:
    """Count instructions, (address, name, operands), of the shortest loop of products."""
    products = {*WIDE_PRODUCTS, *OLD_PRODUCTS}
    steps = []
    for end, name, rest in instructions:
        target = _ADDRESS.search(rest) if name == "BRA" else None
        if target is not None and int(target[1], 16) < end:
            start = int(target[1], 16)
            step = Counter(name for at, name, _ in instructions if start <= at <= end)
            if products & {*step}:
                steps.append(step)
    return min(steps, key=Counter.total, default={})


def _source(what: Specialization) -> Any:
    arguments = list(what.signature)
    aligned = {(arguments.index(name),): [["tt.divisibility", 16]] for name in what.aligned}
    return ASTSource(
        what.kernel,
        signature=dict(what.signature),
        constexprs={(arguments.index(n),): value for n, value in what.constants.items()},
        attrs=aligned,
    )


def _options(what: Specialization) -> dict[str, int | bool]:
    return {
        "num_warps": what.options["num_warps"],
        "enable_fp_fusion": what.fuses_products,
    }


def _dump(cubin: bytes) -> str:
    """Resources and instructions of a compiled kernel, as text; from Triton's cache, if it has it.

    The tool takes half a second for the smallest kernel. The key has its build in it.
    """
    tool = f"{_CUOBJDUMP} {_CUOBJDUMP.stat().st_mtime_ns}".encode()
    cache = get_cache_manager(hashlib.sha256(tool + cubin).hexdigest())
    cached = cache.get_file("dump.sass")
    if cached is not None:
        return Path(cached).read_text()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [str(_CUOBJDUMP), "-res-usage", "-sass", file.name],
            capture_output=True,
            text=True,
            check=True,
            timeout=_DUMP_TIMEOUT_S,
        )
    cache.put(done.stdout, "dump.sass", binary=False)
    return done.stdout
