"""Builders for a worker's classes, with defaults for what a test is not about."""

from equipoise.rank.transfer import ExpertPuller, ExpertTransferService
from equipoise.rank.waits import Waits
from equipoise.telemetry.histogram import SHORT_S, Histogram
from equipoise.trust.credentials import Credentials
from equipoise.wire.balancer_messages import JoinEpoch, Peer
from equipoise.worker.health import WorkerHealth
from equipoise.worker.inference import InferenceService
from equipoise.worker.latents.puller import LatentPuller
from equipoise.worker.latents.service import LatentTransferService
from equipoise.worker.latents.store import LatentStore
from equipoise.worker.parts import WorkerParts
from equipoise.worker.reading import CheckpointReader
from equipoise.worker.spans import RankSpans
from equipoise.worker.timings import Timings
from equipoise.worker.waits import waits_of


def join_epoch_of(*addresses, epoch=1, rank=0, layout=None, **changes):
    """A JoinEpoch whose peers have these addresses, in rank order, and names worker-RANK."""
    peers = tuple(
        Peer(rank=number, address=address, node="n", worker=f"worker-{number}")
        for number, address in enumerate(addresses)
    )
    fields = {
        "rendezvous_address": "127.0.0.1:2",
        "report_interval_s": 1.0,
        "heartbeat_interval_s": 1.0,
    }
    return JoinEpoch(epoch=epoch, rank=rank, peers=peers, layout=layout, **fields | changes)


def puller_of(core, held, join_epoch, **changes):
    """A puller of experts; keyword arguments replace its collaborators."""
    fields = {
        "pool": "blue",
        "held": held,
        "read_checkpoint": changes.pop("read_checkpoint", core.checkpoint.read_expert),
        "checksums": core.payload_checksums,
        "expert_bytes": core.shape.expert_bytes,
        "credentials": Credentials(),
        "waits": Waits({}),
    }
    reader = CheckpointReader(fields["read_checkpoint"], waits=Waits({}))
    return ExpertPuller(join_epoch, **fields | {"read_checkpoint": reader.read} | changes)


def inference_of(**changes):
    """An inference service of the small model that fetches no latents."""
    fields = {
        "vocab_size": 64,
        "context_length": 96,
        "itl_s": Histogram(SHORT_S),
        "boot_id": "boot-1",
        "latents": None,
    }
    return InferenceService(**fields | changes)


def parts_of(settings, *, core=None, scheduler=None, **changes):
    """The parts of a worker that has no balancer."""
    timings, waits = Timings(), waits_of(settings)
    store = core and LatentStore(
        cache=core.cache, form=core.latent_form(settings), boot_id="boot-1"
    )
    puller = LatentPuller(
        store, peer_pools=settings.peer_pools, credentials=Credentials(), waits=waits
    )
    inference = inference_of(itl_s=timings.itl_s, latents=puller)
    fields = {
        "settings": settings,
        "boot_id": "boot-1",
        "core": core,
        "scheduler": scheduler or core.scheduler(settings),
        "inference": inference,
        "latents": LatentTransferService(store, visit=inference.visit),
        "latent_puller": puller,
        "transfer": ExpertTransferService(),
        "health": WorkerHealth(),
        "credentials": Credentials(),
        "send": lambda message: None,
        "waits": waits,
        "reader": core and CheckpointReader(core.checkpoint.read_expert, waits=waits),
        "timings": timings,
        "spans": RankSpans(None, pool="p", worker="w"),
    }
    return WorkerParts(**fields | changes)
