"""Conversion of the messages of workers, except those of `reports`."""

from dataclasses import replace

import numpy as np

from equipoise.planning.arrays import EMPTY, ExpertTable
from equipoise.planning.moves import CHECKSUM_BYTES
from equipoise.planning.phase import Phase
from equipoise.planning.topology import ModelShape
from equipoise.wire import checks, layouts
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.messages import (
    PROTOCOL_VERSION,
    GroupLost,
    Hello,
    LayoutRejected,
    Leaving,
    RunningState,
    Serving,
    Staged,
    Switched,
)
from equipoise.wire.reports import PHASE_NUMBERS, PHASES
from equipoise_api.v1 import worker_link_pb2 as pb

MAX_OPERATIONS = 64
"""Most kernel operations in `Hello.backends`."""


def hello_to_proto(hello: Hello) -> pb.Hello:
    """Convert the first message of a stream."""
    return pb.Hello(
        **layouts.fields_of(hello, but=("model", "running", "group_lost", "phase")),
        phase=PHASE_NUMBERS[hello.phase],
        model=layouts.model_to_proto(hello.model),
        protocol_version=PROTOCOL_VERSION,
        running=None if hello.running is None else _running_to_proto(hello.running),
        group_lost=None if hello.group_lost is None else group_lost_to_proto(hello.group_lost),
    )


def hello_from_proto(message: pb.Hello) -> Hello:
    """Check and convert the first message of a stream.

    Raises:
        InvalidMessageError: a field is missing or out of range, or the worker uses another protocol
            version.
    """
    check_protocol_version(message)
    model = layouts.model_from_proto(message.model, kind="hello")
    _check_pool_size(message, model)
    hello = Hello(
        **checks.names(
            "hello", message, "pool", "worker", "boot_id", "node", "checkpoint_fingerprint"
        ),
        **checks.names("hello", message, "host", "zone", "device", "kernels", optional=True),
        **checks.names("hello", message, "engine", "latent_form", optional=True),
        **checks.counts("hello", message, "cache_token_bytes", "block_tokens"),
        **checks.counts("hello", message, "highest_epoch", "highest_generation"),
        **checks.counts("hello", message, "max_replicas", "weights_version"),
        highest_term=checks.term("hello", "highest_term", message.highest_term),
        address=checks.address("hello", "address", message.address),
        rendezvous_address=checks.address(
            "hello", "rendezvous_address", message.rendezvous_address
        ),
        model=model,
        slots_per_rank=message.slots_per_rank,
        num_places=message.num_places,
        num_ranks=message.num_ranks,
        backends=_backends(message),
        phase=_phase(message),
        experts_digest=_experts_digest(message),
    )
    if message.HasField("group_lost"):
        return replace(hello, group_lost=group_lost_from_proto(message.group_lost, hello=hello))
    if not message.HasField("running"):
        return hello
    return replace(hello, running=_running_from_proto(message.running, hello=hello))


def check_protocol_version(message: pb.Hello) -> None:
    """Raises InvalidMessageError: the worker uses another version than this balancer."""
    if message.protocol_version != PROTOCOL_VERSION:
        raise InvalidMessageError(
            "hello_protocol_version",
            f"hello: the worker uses protocol version {message.protocol_version}, the balancer "
            f"{PROTOCOL_VERSION}: run the same release on both sides",
        )


def serving_to_proto(serving: Serving) -> pb.Serving:
    """Convert a Serving."""
    return pb.Serving(
        **layouts.fields_of(serving, but=("checksums", "expert_checksums")),
        slot_checksums=layouts.checksums_to_bytes(serving.checksums),
        expert_checksums=_expert_checksums(serving),
    )


def serving_from_proto(message: pb.Serving, *, hello: Hello) -> Serving:
    """Raises InvalidMessageError: a number is out of range, or the checksums have another shape."""
    return Serving(
        **checks.place("serving", message),
        checksums=layouts.slot_checksums_from_proto("serving", message, hello=hello),
        steps=message.steps and checks.reason(message.steps),
        layout_digest=checks.layout_digest("serving", message.layout_digest),
        expert_checksums=layouts.expert_checksums_from_proto("serving", message, hello=hello),
    )


def staged_from_proto(message: pb.Staged) -> Staged:
    """Raises InvalidMessageError: a number is out of range."""
    return Staged(
        **checks.place("staged", message),
        **checks.counts("staged", message, "peer_bytes", "checkpoint_bytes", "duration_us"),
        layout_digest=checks.layout_digest("staged", message.layout_digest),
    )


def layout_rejected_from_proto(message: pb.LayoutRejected) -> LayoutRejected:
    """Raises InvalidMessageError: a number is out of range."""
    return LayoutRejected(
        **checks.place("rejected", message),
        **checks.counts("rejected", message, "highest_epoch"),
        reason=checks.reason(message.reason),
    )


def switched_to_proto(switched: Switched) -> pb.Switched:
    """Convert a Switched."""
    return pb.Switched(
        **layouts.fields_of(switched, but=("checksums",)),
        slot_checksums=layouts.checksums_to_bytes(switched.checksums),
    )


def switched_from_proto(message: pb.Switched, *, hello: Hello) -> Switched:
    """Raises InvalidMessageError: a number is out of range, or the checksums have another shape."""
    return Switched(
        **checks.place("switched", message),
        **checks.counts("switched", message, "step", "stall_us", "median_step_us"),
        checksums=layouts.slot_checksums_from_proto("switched", message, hello=hello),
        layout_digest=checks.layout_digest("switched", message.layout_digest),
    )


def leaving_from_proto(message: pb.Leaving) -> Leaving:
    """Convert a Leaving. Never raises."""
    return Leaving(reason=checks.reason(message.reason), failed=message.failed)


def group_lost_to_proto(lost: GroupLost) -> pb.GroupLost:
    """Convert a GroupLost."""
    held = lost.expert_of_slot
    return pb.GroupLost(
        **layouts.fields_of(lost, but=("expert_of_slot",)),
        expert_of_slot=b"" if held is None else held.astype("<i4").tobytes(),
    )


def group_lost_from_proto(message: pb.GroupLost, *, hello: Hello) -> GroupLost:
    """Raises InvalidMessageError: a number or an expert is out of range."""
    return GroupLost(
        epoch=checks.count("group_lost", "epoch", message.epoch, least=1),
        reason=checks.reason(message.reason),
        expert_of_slot=_held_from_proto(message, hello=hello) if message.expert_of_slot else None,
        generation=checks.count("group_lost", "generation", message.generation),
        unreached=_unreached(message, hello=hello),
    )


def _unreached(message: pb.GroupLost, *, hello: Hello) -> tuple[str, ...]:
    """The peers that a worker could not connect to. Whether they are ranks is for the pool."""
    workers = message.unreached
    if len(workers) > checks.MAX_RANKS or hello.worker in workers:
        raise InvalidMessageError(
            "group_lost_unreached",
            f"group_lost: unreached lists {len(workers)} workers, but must be at most "
            f"{checks.MAX_RANKS} peers, without {hello.worker} itself",
        )
    return tuple(checks.name("group_lost", "unreached", worker) for worker in workers)


def _held_from_proto(message: pb.GroupLost, *, hello: Hello) -> ExpertTable:
    shape = (hello.model.num_layers, hello.slots_per_rank)
    table = checks.table("group_lost", message, "expert_of_slot", dtype="<i4", shape=shape).astype(
        np.int32
    )
    least = EMPTY if hello.num_places else 0
    if table.min() < least or table.max() >= hello.model.num_experts:
        raise InvalidMessageError(
            "group_lost_shape",
            f"group_lost: experts must be from {least} to {hello.model.num_experts - 1}, "
            f"not {table.min()} to {table.max()}",
        )
    used = np.count_nonzero(table != EMPTY)
    if hello.num_places and used > hello.num_places:
        raise InvalidMessageError(
            "group_lost_places",
            f"group_lost: {hello.worker} holds {used} experts, but has {hello.num_places} places",
        )
    return table


def _check_pool_size(message: pb.Hello, model: ModelShape) -> None:
    num_slots = message.num_ranks * message.slots_per_rank
    own = model.num_layers * message.slots_per_rank
    if message.num_ranks > checks.MAX_RANKS or own > checks.MAX_EXPERT_CELLS:
        raise InvalidMessageError(
            "hello_slots",
            f"hello: a pool has at most {checks.MAX_RANKS} ranks, not {message.num_ranks}, and a "
            f"rank at most {checks.MAX_EXPERT_CELLS} slots over all layers, not "
            f"{model.num_layers} layers x {message.slots_per_rank}",
        )
    if not model.num_experts <= num_slots or model.num_layers * num_slots > checks.MAX_CELLS:
        raise InvalidMessageError(
            "hello_slots",
            f"hello: {message.num_ranks} ranks x {message.slots_per_rank} slots must be at least "
            f"the model's {model.num_experts} experts, and at most {checks.MAX_CELLS} over its "
            f"{model.num_layers} layers",
        )
    _check_places(message, model)


def _check_places(message: pb.Hello, model: ModelShape) -> None:
    """One place for an expert of each layer at least, and none beyond the slots.

    Whether the workers of a pool have enough places in all is for the pool to check.
    """
    least, most = model.num_layers, model.num_layers * message.slots_per_rank
    if message.num_places and not least <= message.num_places <= most:
        raise InvalidMessageError(
            "hello_places",
            f"hello: {message.num_places} places must be from {least}, one for each layer, to "
            f"{most}, one in each of {message.slots_per_rank} slots of {model.num_layers} layers",
        )


def _running_to_proto(running: RunningState) -> pb.RunningState:
    return pb.RunningState(
        **layouts.fields_of(running, but=("layout", "checksums", "expert_checksums")),
        generation=running.generation,
        layout=layouts.layout_to_proto(running.layout),
        slot_checksums=layouts.checksums_to_bytes(running.checksums),
        expert_checksums=_expert_checksums(running),
    )


def _expert_checksums(sent: RunningState | Serving) -> bytes:
    table = sent.expert_checksums
    return b"" if table is None else layouts.checksums_to_bytes(table)


def _running_from_proto(message: pb.RunningState, *, hello: Hello) -> RunningState:
    layout = layouts.layout_from_proto(message.layout, kind="running")
    layouts.check_layout_suits("running", layout, hello=hello)
    rank = checks.rank("running", message.rank, num_ranks=layout.num_ranks)
    layouts.check_places("running", layout, hello=hello, rank=rank)
    if layout.generation != message.generation:
        raise InvalidMessageError(
            "running_generation",
            f"running: generation {message.generation} differs from the layout's generation "
            f"{layout.generation}",
        )
    return RunningState(
        epoch=checks.count("running", "epoch", message.epoch, least=1),
        rank=rank,
        workers=_workers(message, hello=hello, num_ranks=layout.num_ranks),
        staged_generation=checks.staged_generation(
            "running", message.staged_generation, generation=layout.generation
        ),
        layout=layout,
        checksums=layouts.slot_checksums_from_proto("running", message, hello=hello),
        steps=message.steps and checks.reason(message.steps),
        expert_checksums=layouts.expert_checksums_from_proto("running", message, hello=hello),
    )


def _workers(message: pb.RunningState, *, hello: Hello, num_ranks: int) -> tuple[str, ...]:
    """The workers of the epoch that a worker runs in, itself at its rank."""
    is_whole = len(message.workers) == num_ranks <= checks.MAX_RANKS
    workers = tuple(message.workers) if is_whole else ()
    if not is_whole or len(set(workers)) < num_ranks or workers[message.rank] != hello.worker:
        raise InvalidMessageError(
            "running_workers",
            f"running: the {len(message.workers)} workers of the epoch must be those of the "
            f"layout's {num_ranks} ranks, at most {checks.MAX_RANKS}, each once, with "
            f"{hello.worker} at rank {message.rank}",
        )
    return tuple(checks.name("running", "workers", worker) for worker in workers)


def _experts_digest(message: pb.Hello) -> bytes:
    if len(message.experts_digest) != CHECKSUM_BYTES:
        raise InvalidMessageError(
            "hello_experts_digest",
            f"hello: experts_digest must have {CHECKSUM_BYTES} bytes, not "
            f"{len(message.experts_digest)}: run the same release on both sides",
        )
    return message.experts_digest


def _phase(message: pb.Hello) -> Phase:
    if message.phase == pb.PHASE_UNSPECIFIED:
        return Phase.MIXED
    if message.phase not in PHASES:
        raise InvalidMessageError(
            "hello_phase", f"hello: phase must be prefill, decode or mixed, not {message.phase}"
        )
    return PHASES[message.phase]


def _backends(message: pb.Hello) -> tuple[str, ...]:
    some = message.backends[: MAX_OPERATIONS + 1]
    found = tuple(checks.name("hello", "backends", one) for one in some)
    if len(found) > MAX_OPERATIONS or not all("=" in one for one in found):
        raise InvalidMessageError(
            "hello_backends",
            f"hello: backends must be at most {MAX_OPERATIONS} of operation=backend|backend, "
            f"not {checks.shorten(' '.join(found))}",
        )
    return found
