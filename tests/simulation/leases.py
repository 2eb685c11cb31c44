"""The timing of the simulated election."""

from equipoise.balancer.leadership.lease import LeaseTiming

TIMING = LeaseTiming(duration_s=4.0, renew_deadline_s=2.5, retry_s=0.9, request_timeout_s=1.0)
