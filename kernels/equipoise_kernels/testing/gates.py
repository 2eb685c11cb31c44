"""What compiled kernels must look like, and a command that compiles and judges all of them.

    python -m equipoise_kernels.testing.gates

prints one JSON line per kernel, {"name", "violations", figures}, and fails if any has violations.
It needs no GPU, and must run without TRITON_INTERPRET: a process either compiles or interprets.
"""

from __future__ import annotations

import json
import sys

from equipoise_kernels.specialization import Specialization
from equipoise_kernels.testing.codegen import SHARED_BYTES_PER_CTA, Code, compile_for_hopper
from equipoise_kernels.testing.committed import committed_specializations

# Products on the older path of the tensor cores, without asynchronous warp groups.
_OLD_PRODUCTS = ("HMMA", "IMMA", "QMMA", "DMMA")


def violations(what: Specialization, code: Code) -> list[str]:
    """What is wrong with a compiled kernel, in words; nothing if it is as it should be."""
    found = []
    if code.stack_bytes > 0 or code.count("LDL", "STL") > 0:
        found.append(f"spills: {code.stack_bytes} bytes of stack, {code.count('LDL', 'STL')} uses")
    if code.shared_bytes > SHARED_BYTES_PER_CTA:
        found.append(f"needs {code.shared_bytes} bytes of shared memory, a program can have 227 KB")
    if code.ctas_per_sm < what.ctas_per_sm:
        found.append(
            f"only {code.ctas_per_sm} programs fit on a multiprocessor, {what.ctas_per_sm} are "
            f"claimed ({code.num_registers} registers, {code.shared_bytes} bytes shared)"
        )
    if what.min_accumulators > 0:
        found += _violations_of_product(what, code)
    return found


def _violations_of_product(what: Specialization, code: Code) -> list[str]:
    found = []
    if code.count("QGMMA") == 0:
        found.append("has no FP8 warp-group product (QGMMA): the tile is too small")
    if code.count(*_OLD_PRODUCTS) > 0:
        found.append(f"has {code.count(*_OLD_PRODUCTS)} products on the old path")
    if code.count("UTMALDG") == 0 or "cp.async.bulk.tensor" not in code.ptx:
        found.append("does not load weights by TMA")
    if code.count("FFMA") < what.min_accumulators:
        found.append(
            f"has {code.count('FFMA')} FFMA, fewer than its {what.min_accumulators} sums a thread: "
            "sums are not promoted at every 128 of K"
        )
    return found


def main() -> int:
    """Compile every committed kernel; 1 if any is not as it should be."""
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
        }
        line = {"name": what.name, "violations": found, **figures}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
