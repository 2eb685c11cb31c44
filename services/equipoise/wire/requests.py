"""Conversion of the messages of workers, except those of `reports`."""

from dataclasses import replace

import numpy as np

from equipoise.planning.arrays import ExpertTable
from equipoise.planning.topology import ModelShape
from equipoise.wire import checks, layouts
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.messages import (
    PROTOCOL_VERSION,
    GroupLost,
    Hello,
    Leaving,
    Refused,
    RunningState,
    Serving,
    Staged,
    Switched,
)
from equipoise_api.v1 import worker_link_pb2 as pb

MAX_OPERATIONS = 64
"""Most kernel operations in `Hello.backends`."""


def hello_to_proto(hello: Hello) -> pb.Hello:
    """Convert the first message of a stream."""
    return pb.Hello(
        pool=hello.pool,
        worker=hello.worker,
        boot_id=hello.boot_id,
        node=hello.node,
        address=hello.address,
        rendezvous_address=hello.rendezvous_address,
        model=layouts.model_to_proto(hello.model),
        slots_per_rank=hello.slots_per_rank,
        num_ranks=hello.num_ranks,
        checkpoint_fingerprint=hello.checkpoint_fingerprint,
        protocol_version=PROTOCOL_VERSION,
        running=None if hello.running is None else _running_to_proto(hello.running),
        highest_term=hello.highest_term,
        group_lost=None if hello.group_lost is None else group_lost_to_proto(hello.group_lost),
        host=hello.host,
        zone=hello.zone,
        device=hello.device,
        kernels=hello.kernels,
        backends=hello.backends,
        cache_token_bytes=hello.cache_token_bytes,
    )


def hello_from_proto(message: pb.Hello) -> Hello:
    """Check and convert the first message of a stream.

    Raises:
        InvalidMessageError: a field is missing or out of range, or the worker uses another protocol
            version.
    """
    if message.protocol_version != PROTOCOL_VERSION:
        raise InvalidMessageError(
            "hello_protocol_version",
            f"hello: the worker uses protocol version {message.protocol_version}, the balancer "
            f"{PROTOCOL_VERSION}: run the same release on both sides",
        )
    model = layouts.model_from_proto(message.model, kind="hello")
    _check_pool_size(message, model)
    hello = Hello(
        pool=checks.name("hello", "pool", message.pool),
        worker=checks.name("hello", "worker", message.worker),
        boot_id=checks.name("hello", "boot_id", message.boot_id),
        node=checks.name("hello", "node", message.node),
        address=checks.address("hello", "address", message.address),
        rendezvous_address=checks.address(
            "hello", "rendezvous_address", message.rendezvous_address
        ),
        model=model,
        slots_per_rank=message.slots_per_rank,
        num_ranks=message.num_ranks,
        checkpoint_fingerprint=checks.name(
            "hello", "checkpoint_fingerprint", message.checkpoint_fingerprint
        ),
        highest_term=checks.count("hello", "highest_term", message.highest_term),
        host=message.host and checks.name("hello", "host", message.host),
        zone=message.zone and checks.name("hello", "zone", message.zone),
        device=message.device and checks.name("hello", "device", message.device),
        kernels=message.kernels and checks.name("hello", "kernels", message.kernels),
        backends=_backends(message),
        cache_token_bytes=checks.count("hello", "cache_token_bytes", message.cache_token_bytes),
    )
    if message.HasField("group_lost"):
        return replace(hello, group_lost=group_lost_from_proto(message.group_lost, hello=hello))
    if not message.HasField("running"):
        return hello
    return replace(hello, running=_running_from_proto(message.running, hello=hello))


def serving_to_proto(serving: Serving) -> pb.Serving:
    """Convert a Serving."""
    return pb.Serving(
        epoch=serving.epoch,
        rank=serving.rank,
        generation=serving.generation,
        slot_checksums=layouts.checksums_to_bytes(serving.checksums),
        steps=serving.steps,
    )


def serving_from_proto(message: pb.Serving, *, hello: Hello) -> Serving:
    """Raises InvalidMessageError: a number is out of range, or the checksums have another shape."""
    return Serving(
        epoch=checks.count("serving", "epoch", message.epoch, least=1),
        rank=checks.rank("serving", message.rank),
        generation=checks.count("serving", "generation", message.generation, least=1),
        checksums=layouts.checksums_from_bytes(
            "serving",
            message.slot_checksums,
            model=hello.model,
            slots_per_rank=hello.slots_per_rank,
        ),
        steps=message.steps and checks.reason(message.steps),
    )


def staged_to_proto(staged: Staged) -> pb.Staged:
    """Convert a Staged."""
    return pb.Staged(
        epoch=staged.epoch,
        rank=staged.rank,
        generation=staged.generation,
        peer_bytes=staged.peer_bytes,
        checkpoint_bytes=staged.checkpoint_bytes,
        duration_us=staged.duration_us,
    )


def staged_from_proto(message: pb.Staged) -> Staged:
    """Raises InvalidMessageError: a number is out of range."""
    return Staged(
        epoch=checks.count("staged", "epoch", message.epoch, least=1),
        rank=checks.rank("staged", message.rank),
        generation=checks.count("staged", "generation", message.generation, least=1),
        peer_bytes=checks.count("staged", "peer_bytes", message.peer_bytes),
        checkpoint_bytes=checks.count("staged", "checkpoint_bytes", message.checkpoint_bytes),
        duration_us=checks.count("staged", "duration_us", message.duration_us),
    )


def refused_to_proto(refused: Refused) -> pb.Refused:
    """Convert a Refused."""
    return pb.Refused(
        epoch=refused.epoch,
        rank=refused.rank,
        generation=refused.generation,
        reason=refused.reason,
    )


def refused_from_proto(message: pb.Refused) -> Refused:
    """Raises InvalidMessageError: a number is out of range."""
    return Refused(
        epoch=checks.count("refused", "epoch", message.epoch, least=1),
        rank=checks.rank("refused", message.rank),
        generation=checks.count("refused", "generation", message.generation, least=1),
        reason=checks.reason(message.reason),
    )


def switched_to_proto(switched: Switched) -> pb.Switched:
    """Convert a Switched."""
    return pb.Switched(
        epoch=switched.epoch,
        rank=switched.rank,
        generation=switched.generation,
        step=switched.step,
        stall_us=switched.stall_us,
        median_step_us=switched.median_step_us,
        slot_checksums=layouts.checksums_to_bytes(switched.checksums),
    )


def switched_from_proto(message: pb.Switched, *, hello: Hello) -> Switched:
    """Raises InvalidMessageError: a number is out of range, or the checksums have another shape."""
    return Switched(
        epoch=checks.count("switched", "epoch", message.epoch, least=1),
        rank=checks.rank("switched", message.rank),
        generation=checks.count("switched", "generation", message.generation, least=1),
        step=checks.count("switched", "step", message.step),
        stall_us=checks.count("switched", "stall_us", message.stall_us),
        median_step_us=checks.count("switched", "median_step_us", message.median_step_us),
        checksums=layouts.checksums_from_bytes(
            "switched",
            message.slot_checksums,
            model=hello.model,
            slots_per_rank=hello.slots_per_rank,
        ),
    )


def leaving_to_proto(leaving: Leaving) -> pb.Leaving:
    """Convert a Leaving."""
    return pb.Leaving(reason=leaving.reason)


def leaving_from_proto(message: pb.Leaving) -> Leaving:
    """Convert a Leaving. Never raises."""
    return Leaving(reason=checks.reason(message.reason))


def group_lost_to_proto(lost: GroupLost) -> pb.GroupLost:
    """Convert a GroupLost."""
    held = lost.expert_of_slot
    return pb.GroupLost(
        epoch=lost.epoch,
        reason=lost.reason,
        expert_of_slot=b"" if held is None else held.astype("<i4").tobytes(),
        generation=lost.generation,
    )


def group_lost_from_proto(message: pb.GroupLost, *, hello: Hello) -> GroupLost:
    """Raises InvalidMessageError: a number or an expert is out of range."""
    return GroupLost(
        epoch=checks.count("group_lost", "epoch", message.epoch, least=1),
        reason=checks.reason(message.reason),
        expert_of_slot=_held_from_proto(message, hello=hello) if message.expert_of_slot else None,
        generation=checks.count("group_lost", "generation", message.generation),
    )


def _held_from_proto(message: pb.GroupLost, *, hello: Hello) -> ExpertTable:
    table = checks.table(
        "group_lost",
        "expert_of_slot",
        message.expert_of_slot,
        dtype="<i4",
        shape=(hello.model.num_layers, hello.slots_per_rank),
    ).astype(np.int32)
    if table.min() < 0 or table.max() >= hello.model.num_experts:
        raise InvalidMessageError(
            "group_lost_shape",
            f"group_lost: experts must be from 0 to {hello.model.num_experts - 1}, "
            f"not {table.min()} to {table.max()}",
        )
    return table


def _check_pool_size(message: pb.Hello, model: ModelShape) -> None:
    num_slots = message.num_ranks * message.slots_per_rank
    if not model.num_experts <= num_slots or model.num_layers * num_slots > checks.MAX_CELLS:
        raise InvalidMessageError(
            "hello_slots",
            f"hello: {message.num_ranks} ranks x {message.slots_per_rank} slots must be at least "
            f"the model's {model.num_experts} experts, and at most 2^20 over its "
            f"{model.num_layers} layers",
        )


def _running_to_proto(running: RunningState) -> pb.RunningState:
    return pb.RunningState(
        epoch=running.epoch,
        rank=running.rank,
        generation=running.generation,
        staged_generation=running.staged_generation,
        layout=layouts.layout_to_proto(running.layout),
        slot_checksums=layouts.checksums_to_bytes(running.checksums),
        steps=running.steps,
    )


def _running_from_proto(message: pb.RunningState, *, hello: Hello) -> RunningState:
    layout = layouts.layout_from_proto(message.layout, kind="running")
    layouts.check_layout_suits("running", layout, hello=hello)
    if layout.generation != message.generation:
        raise InvalidMessageError(
            "running_generation",
            f"running: generation {message.generation} differs from the layout's generation "
            f"{layout.generation}",
        )
    return RunningState(
        epoch=checks.count("running", "epoch", message.epoch, least=1),
        rank=checks.rank("running", message.rank, num_ranks=layout.num_ranks),
        staged_generation=checks.staged_generation(
            "running", message.staged_generation, generation=layout.generation
        ),
        layout=layout,
        checksums=layouts.checksums_from_bytes(
            "running",
            message.slot_checksums,
            model=hello.model,
            slots_per_rank=hello.slots_per_rank,
        ),
        steps=message.steps and checks.reason(message.steps),
    )


def _backends(message: pb.Hello) -> tuple[str, ...]:
    found = tuple(checks.name("hello", "backends", one) for one in message.backends)
    if len(found) > MAX_OPERATIONS or not all("=" in one for one in found):
        raise InvalidMessageError(
            "hello_backends",
            f"hello: backends must be at most {MAX_OPERATIONS} of operation=backend|backend, "
            f"not {checks.shorten(' '.join(found))}",
        )
    return found
