"""The ranks of the tests with vLLM's code dispatch as its kernel does: `make test-engines`."""

import pytest

from tests.engines.wheels import run

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


def test_the_ranks_dispatch_and_count_as_vllms_kernel_does(release):
    if release.startswith("sglang"):
        pytest.skip("the ranks call SGLang's own rule")
    run(release, "tests.engines.dispatch_main")
