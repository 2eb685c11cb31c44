"""The cluster, and the pods' state and last log lines in the report of a failed test."""

from contextlib import closing

import pytest

from tests.support.clusters import cluster_at_hand

NUM_LINES = 40


@pytest.fixture(scope="module")
def cluster():
    """The cluster, with a namespace for the module's tests alone."""
    found = cluster_at_hand()
    with found.own_namespace(), closing(found):
        yield found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    cluster = item.funcargs.get("cluster")
    if call.excinfo is not None and cluster is not None:
        report.sections += _pods(cluster)
    return report


def _pods(cluster):
    """Return sections of a report; an error here must not hide the failure itself."""
    try:
        table = cluster.kubectl("get", "pods", "-o", "wide")
        logs = {pod: cluster.log(pod) for pod in sorted(cluster.objects("pods"))}
    except (AssertionError, OSError) as error:
        return [("pods", f"unavailable: {error}")]
    ends = {pod: "\n".join(log.splitlines()[-NUM_LINES:]) for pod, log in logs.items()}
    return [("pods", table), *((f"end of {pod}'s log", end) for pod, end in ends.items())]
