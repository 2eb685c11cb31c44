"""`WorkerParts`: what one worker process has, whatever its rank."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from equipoise.rank.transfer import ExpertPuller, ExpertTransferService
from equipoise.rank.waits import Waits
from equipoise.trust.credentials import Credentials
from equipoise.wire.balancer_messages import JoinEpoch
from equipoise.wire.messages import WorkerMessage
from equipoise.worker.core import ModelCore
from equipoise.worker.health import WorkerHealth
from equipoise.worker.inference import InferenceService
from equipoise.worker.latents.puller import LatentPuller
from equipoise.worker.latents.service import LatentTransferService
from equipoise.worker.placement import HeldSlots
from equipoise.worker.profile import StepProfiler
from equipoise.worker.reading import CheckpointReader
from equipoise.worker.scheduler import Scheduler
from equipoise.worker.settings import WorkerSettings
from equipoise.worker.spans import RankSpans
from equipoise.worker.timings import Timings


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerParts:
    """Collaborators that outlive epochs."""

    settings: WorkerSettings
    boot_id: str
    core: ModelCore
    scheduler: Scheduler
    """Has the worker's requests, waiting and active."""
    inference: InferenceService
    latents: LatentTransferService
    """Sends latents to ranks of peer pools."""
    latent_puller: LatentPuller
    """Fetches latents from ranks of peer pools."""
    transfer: ExpertTransferService
    reader: CheckpointReader
    health: WorkerHealth
    credentials: Credentials
    send: Callable[[WorkerMessage], object]
    """Sends a message to the balancer, or drops it if no stream is open."""
    waits: Waits
    timings: Timings
    spans: RankSpans
    profiler: StepProfiler = field(default_factory=StepProfiler)
    """Profiles some steps of one epoch, if the settings ask for it."""

    def puller(
        self, join_epoch: JoinEpoch, *, held: HeldSlots | None, bytes_per_s: float = math.inf
    ) -> ExpertPuller:
        """Return a puller of experts from the peers of an epoch."""
        return ExpertPuller(
            join_epoch,
            pool=self.settings.pool,
            held=held,
            read_checkpoint=self.reader.read,
            checksums=self.core.payload_checksums,
            expert_bytes=self.core.shape.expert_bytes,
            credentials=self.credentials,
            waits=self.waits,
            bytes_per_s=bytes_per_s,
        )
