"""Machine code for Hopper, made and read on a machine without a GPU.

Kernels are interpreted in this process, so another one compiles them.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="kernels need the extra `kernels`")

from equipoise_kernels.fp8.testing.codegen import Code
from equipoise_kernels.fp8.testing.committed import (
    TUNABLES,
    committed_configs,
    committed_specializations,
)
from equipoise_kernels.fp8.testing.gates import violations

# Half a minute on an idle machine of two cores, or nothing if the cache of Triton has all.
_TIMEOUT_S = 550
pytestmark = pytest.mark.timeout(600)

# Too few rows without a swap, more sums than registers, more programs than fit, no prefetch; and
# attention whose products wait for the copies of their own step.
BAD_CONFIGS = """
import json
from dataclasses import replace
from equipoise_kernels.fp8.attention import mla_decode
from equipoise_kernels.fp8.attention.mla_decode import MlaDecodeConfig
from equipoise_kernels.fp8.gemm.dense import GemmConfig, specializations
from equipoise_kernels.fp8.testing.codegen import compile_for_hopper
from equipoise_kernels.fp8.testing.gates import violations
good = GemmConfig(block_m=64, block_n=128, swap_ab=False, split_k=1, group_m=8, num_warps=4,
                  num_stages=3, ctas_per_sm=3)
for change in ({"block_m": 16}, {"block_m": 128, "ctas_per_sm": 1}, {"ctas_per_sm": 4},
               {"num_stages": 2}):
    what = specializations(replace(good, **change))[0]
    print(json.dumps(violations(what, compile_for_hopper(what))))
config = MlaDecodeConfig(heads=64, tokens=64, tokens_per_split=512, num_warps=8, num_stages=2)
what = mla_decode.specializations(config, rank=512, rotary=64, block_tokens=64)[0]
what = replace(what, options=what.options | {"HAS_WIDE_PRODUCTS": False})
print(json.dumps(violations(what, compile_for_hopper(what))))
"""


def compiled_by(*arguments):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    assert done.stdout, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiled():
    returncode, lines = compiled_by("-m", "equipoise_kernels.fp8.testing.gates")
    return returncode, {line["name"]: line for line in lines}


def test_the_command_compiles_and_reports_all_committed_kernels(compiled):
    returncode, lines = compiled
    assert returncode == 0
    assert set(lines) == {what.name for what in committed_specializations()}


@pytest.mark.parametrize("name", [what.name for what in committed_specializations()])
def test_a_committed_kernel_passes_every_gate(name, compiled):
    line = compiled[1][name]
    assert line["violations"] == []
    assert line["registers"] > 0


def test_the_gates_catch_violations_in_compiled_code():
    _, (small, spilling, crowded, waiting, late) = compiled_by("-c", BAD_CONFIGS)
    assert any("QGMMA" in violation for violation in small)
    assert any("spills" in violation for violation in spilling)
    assert crowded == [crowded[0]]
    assert "4 are claimed" in crowded[0]
    assert any("in flight" in violation for violation in waiting)
    assert any("0 copies in flight" in violation for violation in late)


@pytest.mark.parametrize(("operation", "config"), committed_configs())
def test_what_is_committed_is_something_that_tuning_may_choose(operation, config):
    space = TUNABLES[operation].configs
    if operation == "gemm":
        # What fits on a multiprocessor follows from the rest: it is claimed, not chosen.
        space = [replace(choice, ctas_per_sm=config.ctas_per_sm) for choice in space]
    assert config in space


LOOP = """
$L__BB0_3: // a step multiplies while copies for the next ones arrive
cp.async.wait_group 3;
wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {%r1}, %rd1, %rd2;
wgmma.wait_group.sync.aligned 0;
cp.async.cg.shared.global [ %r2 ], [ %rd3 ];
cp.async.commit_group;
cp.async.bulk.tensor.3d.shared::cta.global [%r3], [%rd4];
cp.async.commit_group;
cp.async.commit_group;
@%p1 bra $L__BB0_3;
ld.global.b32 %r9, [ %rd9 ];
"""
# As in attention: a step waits for its copies, and starts the next ones before it multiplies.
EARLY_LOOP = """
$L__BB0_3:
cp.async.wait_group 0;
bar.sync 0;
cp.async.cg.shared.global [ %r2 ], [ %rd3 ];
cp.async.commit_group;
wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%r1}, %rd1, %rd2;
wgmma.wait_group.sync.aligned 0;
wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%r1}, %rd1, %rd2;
@%p1 bra $L__BB0_3;
"""
LATE_LOOP = EARLY_LOOP.replace("cp.async.commit_group;\n", "").replace(
    "@%p1", "cp.async.commit_group;\n@%p1"
)
GOOD = Code(
    num_registers=168,
    num_threads=128,
    shared_bytes=73752,
    stack_bytes=0,
    instructions={"QGMMA": 4, "FFMA": 64, "UTMALDG": 3},
    ptx=LOOP,
)


def product():
    return next(what for what in committed_specializations() if what.min_accumulators == 64)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"stack_bytes": 8}, "spills"),
        ({"instructions": {**GOOD.instructions, "STL": 2}}, "spills"),
        ({"shared_bytes": 240_000}, "227 KB"),
        ({"num_registers": 255, "num_threads": 256}, "claimed"),
        ({"instructions": {**GOOD.instructions, "QGMMA": 0}}, "QGMMA"),
        ({"instructions": {**GOOD.instructions, "HMMA": 1}}, "old path"),
        ({"instructions": {**GOOD.instructions, "UTMALDG": 0}}, "TMA"),
        ({"instructions": {**GOOD.instructions, "FFMA": 63}}, "promoted"),
        (
            {"ptx": LOOP.replace("wgmma.wait", "ld.global.b32 %r5;\nwgmma.wait")},
            "waits for 1 loads",
        ),
        ({"ptx": LOOP.replace("wait_group 3", "wait_group 2")}, "2 copies in flight"),
        ({"ptx": LOOP.replace("bra $L__BB0_3", "bra $L__BB0_9")}, "no loop"),
    ],
)
def test_a_gate_names_what_it_finds(change, named):
    what = replace(product(), ctas_per_sm=2)
    assert violations(what, GOOD) == []
    assert any(named in violation for violation in violations(what, replace(GOOD, **change)))


RELEASES = """
st.global.b32 [ %rd1 + 0 ], { %r1 };
bar.sync 0;
@%p1 atom.global.sys.acq_rel.add.u32 %r2, [ %rd2 + 0 ], %r3;
st.global.b32 [ %rd2 + 0 ], { %r4 };
bar.sync 0;
@%p1 atom.global.sys.release.exch.b64 %rd3, [ %rd4 + 0 ], %rd5;
st.shared.b32 [ %r5 + 0 ], %r6;
"""
ACQUIRES = "@%p1 ld.global.sys.acquire.b64 %rd3, [ %rd4 + 0 ];"


@pytest.mark.parametrize(
    ("kind", "ptx", "named"),
    [
        ("release", RELEASES, None),
        ("release", RELEASES.replace("bar.sync 0;", "", 1), "no barrier"),
        ("release", RELEASES.replace("sys.release", "gpu.release"), "not at system scope"),
        ("release", RELEASES.replace(".release.", ".relaxed."), "no flag with release"),
        ("acquire", ACQUIRES, None),
        ("acquire", ACQUIRES.replace("sys.acquire", "volatile"), "no flag with acquire"),
        ("acquire", ACQUIRES.replace("sys", "gpu"), "not at system scope"),
    ],
)
def test_a_kernel_whose_flags_other_devices_may_misread_is_noticed(kind, ptx, named):
    what = next(what for what in committed_specializations() if what.flags == kind)
    found = violations(what, replace(GOOD, ptx=ptx))
    assert found == [] if named is None else any(named in violation for violation in found)


@pytest.mark.parametrize(
    ("ptx", "is_fused"),
    [
        ("", True),
        ("div.rn.f32 %r1, %r2, %r3;", False),
        ("div.rn.f32 %r1, %r2, %r3; fma.rn.f32 %r4, %r5, %r6, %r7;", True),
    ],
)
def test_a_product_that_is_fused_into_a_sum_against_its_description_is_noticed(ptx, is_fused):
    what = next(what for what in committed_specializations() if not what.fuses_products)
    found = violations(replace(what, flags=""), replace(GOOD, ptx=ptx))
    assert any("fused" in violation for violation in found) is is_fused


@pytest.fixture
def attention():
    """A kernel that multiplies 16-bit matrices by warp groups, and may use the stack a little."""
    return next(what for what in committed_specializations() if what.max_stack_share > 0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, None),
        ({"instructions": {}}, "HGMMA"),
        ({"instructions": {"HGMMA": 8, "HMMA": 1}}, "old path"),
        ({"stack_bytes": 40, "step": {"HGMMA": 8, "FMUL": 190, "LDL": 2}}, None),
        ({"stack_bytes": 40, "step": {"HGMMA": 8, "FMUL": 82, "LDL": 8, "STL": 2}}, "10 uses"),
        ({"stack_bytes": 40, "step": {}}, "spills: 40 bytes"),
        ({"ptx": LATE_LOOP}, "0 copies in flight"),
        ({"ptx": ""}, "no loop"),
    ],
)
def test_attention_is_checked_for_what_a_step_waits_for(change, named, attention):
    what = replace(attention, has_wide_products=True, ctas_per_sm=1)
    found = violations(
        what, replace(GOOD, **{"instructions": {"HGMMA": 8}, "ptx": EARLY_LOOP} | change)
    )
    assert found == [] if named is None else any(named in violation for violation in found)
