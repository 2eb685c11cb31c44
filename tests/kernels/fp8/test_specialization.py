import pytest

from equipoise_kernels.fp8.jit import jit, tl
from equipoise_kernels.fp8.specialization import Specialization

pytest.importorskip("triton", reason="kernels need the extra `kernels`")


@jit
def add_kernel(x_ptr: tl.tensor, out_ptr: tl.tensor, size: int, stride: int, BLOCK: tl.constexpr):
    pass


def of_add(**changes):
    types = {"x_ptr": "*bf16", "out_ptr": "*fp32"}
    options = {"BLOCK": 8, "num_warps": 1}
    arguments = {"types": types, "multiples_of_16": "stride", "options": options}
    return Specialization(kernel=add_kernel, name="add", **arguments | changes)


def test_types_and_alignment_are_keyed_by_argument_name():
    made = of_add()
    assert made.signature == {
        "x_ptr": "*bf16",
        "out_ptr": "*fp32",
        "size": "i32",
        "stride": "i32",
        "BLOCK": "constexpr",
    }
    assert made.aligned == ("x_ptr", "out_ptr", "stride")


def test_a_name_the_kernel_lacks_and_a_constant_without_a_value_are_errors():
    with pytest.raises(AssertionError, match=r"\['y_ptr'\] are not arguments"):
        of_add(types={"y_ptr": "*bf16"})
    with pytest.raises(AssertionError, match=r"no value for the constants \['BLOCK'\]"):
        of_add(options={"num_warps": 1})
