"""`WorkerParts`: what one worker process has, whatever its rank."""

from collections.abc import Callable
from dataclasses import dataclass

from equipoise.trust.credentials import Credentials
from equipoise.wire.messages import WorkerMessage
from equipoise.worker.core import ModelCore
from equipoise.worker.health import WorkerHealth
from equipoise.worker.inference import InferenceService
from equipoise.worker.scheduler import Scheduler
from equipoise.worker.settings import WorkerSettings
from equipoise.worker.spans import RankSpans
from equipoise.worker.timings import Timings
from equipoise.worker.transfer import ExpertTransferService
from equipoise.worker.waits import Waits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerParts:
    """Collaborators that outlive epochs."""

    settings: WorkerSettings
    boot_id: str
    core: ModelCore
    scheduler: Scheduler
    """Has the worker's requests, waiting and active."""
    inference: InferenceService
    transfer: ExpertTransferService
    health: WorkerHealth
    credentials: Credentials
    send: Callable[[WorkerMessage], None]
    """Sends a message to the balancer, or drops it if no stream is open."""
    waits: Waits
    timings: Timings
    spans: RankSpans
