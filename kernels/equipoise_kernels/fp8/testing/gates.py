"""Requirements on compiled kernels, and a command that compiles and checks all of them.

    python -m equipoise_kernels.fp8.testing.gates

prints one JSON line per kernel, {"name", "violations", figures}, and fails if any has violations.
It needs no GPU, and must run without TRITON_INTERPRET: a process either compiles or interprets.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict

from equipoise_kernels.fp8.specialization import Specialization
from equipoise_kernels.fp8.testing.codegen import (
    OLD_PRODUCTS,
    SHARED_BYTES_PER_CTA,
    STACK_USES,
    Code,
    compile_for_hopper,
)
from equipoise_kernels.fp8.testing.committed import committed_specializations

# The assembler itself expands these into fused products, even with fusion disabled.
_EXACT = re.compile(r"\b(?:div|sqrt|rcp)\.rn\.f32\b")
_FUSED = re.compile(r"\bfma\.rn\.f32\b")
# Reading a flag by adding 0 becomes an acquiring load.
_ATOMIC = re.compile(
    r"\b(?:atom|red|ld)\.global\.(?:[a-z.]*\.)?(?:acquire|release|acq_rel|relaxed)\."
)


def violations(what: Specialization, code: Code) -> list[str]:
    """Return the violations of a compiled kernel as messages."""
    found = _violations_of_stack(what, code)
    if code.shared_bytes > SHARED_BYTES_PER_CTA:
        found.append(f"needs {code.shared_bytes} bytes of shared memory, a program can have 227 KB")
    if code.ctas_per_sm < what.ctas_per_sm:
        found.append(
            f"only {code.ctas_per_sm} programs fit on a multiprocessor, {what.ctas_per_sm} are "
            f"claimed ({code.num_registers} registers, {code.shared_bytes} bytes shared)"
        )
    if what.min_accumulators > 0:
        found += _violations_of_product(what, code)
    if what.flags:
        found += _violations_of_flags(what.flags, code.ptx)
    if not what.fuses_products and (fused := _fused_products(code)) > 0:
        found.append(f"has {fused} products fused into sums, unlike torch")
    if what.has_wide_products:
        found += _violations_of_wide_product(code)
    if what.is_product:
        found += _violations_of_prefetch(code)
    return found


def _violations_of_stack(what: Specialization, code: Code) -> list[str]:
    """Violations of the rule that registers suffice, or nearly, for a step of products."""
    uses = code.count(*STACK_USES)
    if what.max_stack_share > 0 and code.step:
        in_step = sum(code.step.get(name, 0) for name in STACK_USES)
        share = in_step / sum(code.step.values())
        if share <= what.max_stack_share:
            return []
        return [f"spills: {in_step} uses of the stack in a step, {share:.1%} of its instructions"]
    if code.stack_bytes > 0 or uses > 0:
        return [f"spills: {code.stack_bytes} bytes of stack, {uses} uses"]
    return []


def _violations_of_prefetch(code: Code) -> list[str]:
    """Violations of the rule that a product waits for no memory but the previous steps' copies."""
    loop = code.product_loop
    if loop is None:
        return ["has no loop of products"]
    found = []
    if loop.awaited_loads > 0:
        found.append(f"waits for {loop.awaited_loads} loads before every product: prefetch them")
    if loop.copies_in_flight < max(loop.copies, 1):
        found.append(
            f"has {loop.copies_in_flight} copies in flight during a product, fewer than the "
            f"{loop.copies} of one step: start them earlier, or take more stages"
        )
    return found


def _fused_products(code: Code) -> int:
    """Counts in the machine code, or in PTX where exact divisions or roots hide them."""
    return len(_FUSED.findall(code.ptx)) if _EXACT.search(code.ptx) else code.count("FFMA")


def _violations_of_flags(kind: str, ptx: str) -> list[str]:
    """Violations that only show between devices."""
    lines = ptx.splitlines()
    atomics = [n for n, line in enumerate(lines) if _ATOMIC.search(line)]
    found = []
    if not any(f".{kind}." in lines[n] for n in atomics):
        found.append(f"has no flag with {kind}")
    if any(".sys." not in lines[n] for n in atomics):
        found.append("has a flag that is not at system scope")
    stores = [n for n, line in enumerate(lines) if "st.global" in line]
    for signal in (n for n in atomics if "release" in lines[n] or "acq_rel" in lines[n]):
        last = max((n for n in stores if n < signal), default=0)
        if not any("bar.sync" in line for line in lines[last:signal]):
            found.append("has no barrier between its last row and the flag")
    return found


def _violations_of_wide_product(code: Code) -> list[str]:
    found = []
    if code.count("HGMMA") == 0:
        found.append("has no 16-bit warp-group product (HGMMA): the tile is too small")
    if code.count(*OLD_PRODUCTS) > 0:
        found.append(f"has {code.count(*OLD_PRODUCTS)} products on the old path")
    return found


def _violations_of_product(what: Specialization, code: Code) -> list[str]:
    found = []
    if code.count("QGMMA") == 0:
        found.append("has no FP8 warp-group product (QGMMA): the tile is too small")
    if code.count(*OLD_PRODUCTS) > 0:
        found.append(f"has {code.count(*OLD_PRODUCTS)} products on the old path")
    if code.count("UTMALDG") == 0 or "cp.async.bulk.tensor" not in code.ptx:
        found.append("does not load weights by TMA")
    if code.count("FFMA") < what.min_accumulators:
        found.append(
            f"has {code.count('FFMA')} FFMA, fewer than its {what.min_accumulators} sums a thread: "
            "sums are not promoted at every 128 of K"
        )
    return found


def main() -> int:
    """Compile every committed kernel; return 1 if any has violations."""
    failed = False
    for what in committed_specializations():
        code = compile_for_hopper(what)
        found = violations(what, code)
        failed |= bool(found)
        figures = {
            "registers": code.num_registers,
            "shared_bytes": code.shared_bytes,
            "ctas_per_sm": code.ctas_per_sm,
            "qgmma": code.count("QGMMA"),
            "step": sum(code.step.values()),
            "stack_uses_in_step": sum(code.step.get(name, 0) for name in STACK_USES),
            "loop": None if code.product_loop is None else asdict(code.product_loop),
        }
        line = {"name": what.name, "violations": found, **figures}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
