"""Faults planted in the plugin are noticed by what `Run.records` checks on a real engine."""

import re

import pytest

from tests.engines.mutants import MUTANTS
from tests.engines.real import until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

BROKEN = re.compile(r"rank \d failed|no longer balanced|hashed the updated weights")
"""In the log of ranks whose weights nobody updates; others may wait for one that has failed."""


@pytest.mark.parametrize("mutant", ["", *MUTANTS], ids=["none", *MUTANTS])
def test_faults_planted_in_the_plugin_are_noticed_and_nothing_else(real_balancer, run_of, mutant):
    run = run_of(mutant=mutant)
    until(
        lambda: BROKEN.search(run.log) or real_balancer.status().rollouts_completed,
        lambda: run.log[-4000:],
    )
    fault = fault_of(run)
    print(run.options.engine, mutant or "none", "->", fault or "nothing")
    assert bool(fault) == bool(mutant)


def fault_of(run):
    """What the checks notice; empty if nothing."""
    try:
        passed = len(run.windows()) + 2
        run.until(lambda: BROKEN.search(run.log) or len(run.windows()) >= passed)
        if broken := BROKEN.search(run.log):
            return broken.group()
        run.records()
    except AssertionError as error:
        return f"{error!r}"[:200]
    return ""
