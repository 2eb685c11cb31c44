"""The waits of our worker, by its settings."""

from equipoise.rank.waits import ACK_TIMEOUT_S, SOURCE_TIMEOUT_S, Waits
from equipoise.wire.messages import Wait
from equipoise.worker.latents.puller import PULL_TIMEOUT_S
from equipoise.worker.settings import WorkerSettings

READ_TIMEOUT_S = 60.0
"""Timeout for reading an expert from the checkpoint while joining an epoch."""


def waits_of(settings: WorkerSettings) -> Waits:
    """Return the waits of a worker with these settings; one of 0 s is left out."""
    timeouts_s = {
        Wait.STEP: settings.step_timeout_s,
        Wait.PULL: SOURCE_TIMEOUT_S,
        Wait.READ: READ_TIMEOUT_S,
        Wait.ACK: ACK_TIMEOUT_S,
        Wait.OUTAGE: settings.outage_timeout_s,
        Wait.DRAIN: settings.drain_timeout_s,
        Wait.LATENTS: PULL_TIMEOUT_S,
    }
    return Waits({wait: timeout_s for wait, timeout_s in timeouts_s.items() if timeout_s > 0})
