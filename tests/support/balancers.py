"""Balancers for tests: plans are made on threads, with defaults for what a test leaves out."""

from opentelemetry.trace import NoOpTracer

from equipoise.balancer import server
from equipoise.daemon_thread import in_daemon_thread
from equipoise.planning import proposal as planner
from equipoise.trust.credentials import Credentials


class ThreadPlanner:
    """A thread for each plan."""

    async def propose(self, request, *, pool, begins):
        begins()
        return await in_daemon_thread(lambda: planner.propose(request), name=f"planner of {pool}")


def serving(store, **parts):
    """`server.serving` with the collaborators that tests have no use for."""
    plain = {
        "planner": ThreadPlanner(),
        "tracer": NoOpTracer(),
        "credentials": Credentials(),
        "term_offset": 1,
    }
    return server.serving(server.BalancerParts(store=store, **plain | parts))
