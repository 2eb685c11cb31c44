"""`hello_of`: what a rank inside an engine tells the balancer of itself, with each stream."""

from equipoise.engines.seat import EngineSeat
from equipoise.engines.settings import EngineSettings
from equipoise.planning.moves import checksums_digest
from equipoise.rank.held import Contents
from equipoise.wire.messages import Hello, RunningState


def hello_of(
    seat: EngineSeat,
    contents: Contents,
    *,
    settings: EngineSettings,
    boot_id: str,
    address: str,
    staged_generation: int,
) -> Hello:
    """Return the Hello of a seat that is ready and whose slots hold `contents`.

    `address` is its host:port for peers; `staged_generation` is 0 if none is staged.
    """
    model, layout = seat.model, contents.layout
    digest = checksums_digest(seat.table)
    return Hello(
        pool=settings.pool,
        worker=seat.worker,
        boot_id=boot_id,
        node=settings.node,
        host=settings.node,
        device=str(model.slots[0].device),
        engine=model.engine,
        max_replicas=model.max_replicas,
        weights_version=seat.hashed_weights,
        kernels=model.engine,
        address=address,
        rendezvous_address=address,
        model=model.shape,
        slots_per_rank=layout.slots_per_rank,
        num_ranks=seat.num_ranks,
        checkpoint_fingerprint=digest.hex(),
        experts_digest=digest,
        running=RunningState(
            epoch=seat.epoch,
            rank=seat.rank,
            workers=seat.workers,
            staged_generation=staged_generation,
            layout=layout,
            checksums=contents.checksums,
            steps=model.engine,
            expert_checksums=None if seat.rank else seat.table,
        ),
        highest_epoch=seat.epoch,
        highest_generation=max(layout.generation, staged_generation),
    )
