"""A balancer process dies in each phase of a rollout to ranks with real seats and links.

The same with real engines: tests/engines/test_real_faults.py.
"""

import pytest

from tests.engines.linked import LinkedEngine
from tests.engines.real import PHASES

pytestmark = pytest.mark.e2e


def test_a_balancer_that_dies_in_any_phase_of_a_rollout_is_succeeded(real_balancer):
    engine = LinkedEngine(real_balancer.port).start()
    try:
        engine.until(engine.has_switched)
        real_balancer.die_in_every_phase(lambda: engine.until_passes(100))
        assert len(engine.check()) > len(PHASES)
        assert not any(seat.stopped for seat in engine.seats)
    finally:
        engine.stop()
