"""Adds the pods' state and last log lines to the report of a failed test."""

import pytest

NUM_LINES = 40


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
