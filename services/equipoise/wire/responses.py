"""Conversion of the messages of the balancer."""

from collections.abc import Iterable

from equipoise.planning.change import LayoutChange
from equipoise.planning.layout import Layout
from equipoise.planning.moves import CHECKSUM_BYTES, CheckpointSource, Move, RankSource, Source
from equipoise.wire import checks, layouts
from equipoise.wire.balancer_messages import (
    JOIN_TIMEOUT_S,
    Abort,
    HeartbeatAck,
    JoinEpoch,
    Peer,
    Rejection,
    Stage,
    TermConfirmed,
)
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.messages import Hello
from equipoise_api.v1 import worker_link_pb2 as pb


def join_epoch_to_proto(join_epoch: JoinEpoch) -> pb.JoinEpoch:
    """Convert a JoinEpoch."""
    message = pb.JoinEpoch(
        **layouts.fields_of(join_epoch, but=("peers", "layout", "moves")),
        peers=[pb.Peer(**layouts.fields_of(peer)) for peer in join_epoch.peers],
        layout=layouts.layout_to_proto(join_epoch.layout),
    )
    add_moves(join_epoch.moves, to=message)
    return message


def join_epoch_from_proto(message: pb.JoinEpoch, *, hello: Hello) -> JoinEpoch:
    """Check and convert a JoinEpoch.

    Raises:
        InvalidMessageError: a number is out of range, the layout is invalid or another model's, or
            the peers are not the layout's ranks in order with the receiver at its rank.
    """
    layout = layouts.layout_from_proto(message.layout, kind="join_epoch")
    layouts.check_layout_suits("join_epoch", layout, hello=hello)
    rank = checks.rank("join_epoch", message.rank, num_ranks=layout.num_ranks)
    layouts.check_places("join_epoch", layout, hello=hello, rank=rank)
    return JoinEpoch(
        epoch=checks.count("join_epoch", "epoch", message.epoch, least=1),
        rank=rank,
        peers=_peers_from_proto(message, num_ranks=layout.num_ranks, hello=hello),
        rendezvous_address=checks.address(
            "join_epoch", "rendezvous_address", message.rendezvous_address
        ),
        layout=layout,
        **{
            name: checks.duration_s("join_epoch", name, getattr(message, name))
            for name in ("report_interval_s", "heartbeat_interval_s", "meet_timeout_s")
        },
        join_timeout_s=checks.duration_s(
            "join_epoch", "join_timeout_s", message.join_timeout_s or JOIN_TIMEOUT_S
        ),
        term=checks.term("join_epoch", "term", message.term),
        moves=_moves_from_proto("join_epoch", message.moves, layout=layout),
    )


def stage_to_proto(stage: Stage) -> pb.Stage:
    """Convert a Stage, with the layout as a change from its base if that is shorter."""
    message = pb.Stage(**layouts.fields_of(stage, but=("layout", "base", "moves")))
    add_moves(stage.moves, to=message)
    layout = layouts.layout_to_proto(stage.layout)
    if stage.base is not None:
        change = layouts.change_to_proto(LayoutChange.between(stage.base, stage.layout))
        if change.ByteSize() < layout.ByteSize():
            message.change.CopyFrom(change)
            return message
    message.layout.CopyFrom(layout)
    return message


def stage_from_proto(message: pb.Stage, *, hello: Hello, running: Layout | None) -> Stage:
    """Check and convert a Stage.

    `running` is the receiver's layout, to which a change is applied. Whether the moves cover the
    receiver's changed slots, and whether it has the places, is for the receiver to check.

    Raises:
        InvalidMessageError: a number is out of range, the layout is invalid or another model's, it
            is a change from a generation that is not running, or a move contradicts the layout, has
            no source or fills a slot twice.
    """
    base_generation = checks.count("stage", "base_generation", message.base_generation, least=1)
    base = None
    if message.HasField("change"):
        base = _base(base_generation, running=running, hello=hello)
        layout = layouts.changed_from_proto(message.change, kind="stage", base=base)
    else:
        layout = layouts.layout_from_proto(message.layout, kind="stage")
    layouts.check_layout_suits("stage", layout, hello=hello)
    if base_generation >= layout.generation:
        raise InvalidMessageError(
            "stage_generation",
            f"stage: generation {layout.generation} must be above the base generation "
            f"{base_generation}",
        )
    return Stage(
        epoch=checks.count("stage", "epoch", message.epoch, least=1),
        layout=layout,
        base_generation=base_generation,
        base=base,
        moves=_moves_from_proto("stage", message.moves, layout=layout),
        timeout_s=checks.duration_s("stage", "timeout_s", message.timeout_s),
        term=checks.term("stage", "term", message.term),
        traceparent=checks.traceparent(message.traceparent),
    )


def abort_from_proto(message: pb.Abort) -> Abort:
    """Raises InvalidMessageError: a number is out of range."""
    return Abort(
        **checks.counts("abort", message, "epoch", "generation", least=1),
        reason=checks.reason(message.reason),
        term=checks.term("abort", "term", message.term),
    )


def term_confirmed_from_proto(message: pb.TermConfirmed) -> TermConfirmed:
    """Raises InvalidMessageError: a term is out of range."""
    return TermConfirmed(
        term=checks.term("term_confirmed", "term", message.term),
        replaced_term=checks.term("term_confirmed", "replaced_term", message.replaced_term),
    )


def heartbeat_ack_from_proto(message: pb.HeartbeatAck) -> HeartbeatAck:
    """Raises InvalidMessageError: the sequence is out of range."""
    return HeartbeatAck(sequence=checks.count("heartbeat_ack", "sequence", message.sequence))


def rejection_from_proto(message: pb.Rejection) -> Rejection:
    """Raises InvalidMessageError: the leader's address is not host:port."""
    leader_address = None
    if message.leader_address:
        leader_address = checks.address("rejection", "leader_address", message.leader_address)
    return Rejection(
        reason=checks.reason(message.reason),
        fatal=message.fatal,
        not_leading=message.not_leading,
        leader_address=leader_address,
    )


def add_moves(moves: Iterable[Move], *, to: pb.JoinEpoch | pb.Stage) -> None:
    """Append moves to a message.

    In place, because building messages first would copy them twice, and moves are sent to
    thousands of ranks at a time.
    """
    for move in moves:
        message = to.moves.add()
        message.layer, message.slot, message.expert = move.layer, move.slot, move.expert
        message.checksum = move.checksum
        for source in move.sources:
            if isinstance(source, RankSource):
                message.sources.add().rank = source.rank
            else:
                message.sources.add().checkpoint = True


def _peers_from_proto(message: pb.JoinEpoch, *, num_ranks: int, hello: Hello) -> tuple[Peer, ...]:
    if [peer.rank for peer in message.peers] != list(range(num_ranks)):
        raise InvalidMessageError(
            "join_epoch_peers",
            f"join_epoch: the {len(message.peers)} peers must be the layout's {num_ranks} ranks, "
            "in order",
        )
    peers = tuple(
        Peer(
            rank=peer.rank,
            address=checks.address("join_epoch", f"address of rank {peer.rank}", peer.address),
            node=checks.name("join_epoch", f"node of rank {peer.rank}", peer.node),
            worker=checks.name("join_epoch", f"worker of rank {peer.rank}", peer.worker),
        )
        for peer in message.peers
    )
    if len({peer.worker for peer in peers}) < num_ranks:
        raise InvalidMessageError("join_epoch_peers", "join_epoch: a worker has two ranks")
    if peers[message.rank].worker != hello.worker:
        raise InvalidMessageError(
            "join_epoch_peers",
            f"join_epoch: rank {message.rank} is {peers[message.rank].worker}, but the receiver "
            f"is {hello.worker}",
        )
    return peers


def _base(generation: int, *, running: Layout | None, hello: Hello) -> Layout:
    if running is None or running.generation != generation:
        runs = "nothing yet" if running is None else f"generation {running.generation}"
        raise InvalidMessageError(
            "stage_base",
            f"stage: change starts from generation {generation}, but {hello.worker} runs {runs}",
        )
    return running


def _moves_from_proto(
    kind: str, messages: Iterable[pb.Move], *, layout: Layout
) -> tuple[Move, ...]:
    moves = tuple(_move_from_proto(kind, message, layout=layout) for message in messages)
    if len({(move.layer, move.slot) for move in moves}) < len(moves):
        raise InvalidMessageError(f"{kind}_move", f"{kind}: two moves fill one slot")
    return moves


def _move_from_proto(kind: str, message: pb.Move, *, layout: Layout) -> Move:
    where = f"{kind}: layer {message.layer}, slot {message.slot}"
    if message.layer >= layout.num_layers or message.slot >= layout.num_slots:
        raise InvalidMessageError(
            f"{kind}_move",
            f"{where} does not exist among {layout.num_layers} layers x {layout.num_slots} slots",
        )
    expert = int(layout.expert_of_slot[message.layer, message.slot])
    if message.expert != expert:
        raise InvalidMessageError(
            f"{kind}_move",
            f"{where} must get expert {expert} of the layout, not expert {message.expert}",
        )
    if len(message.checksum) != CHECKSUM_BYTES:
        raise InvalidMessageError(
            f"{kind}_checksum",
            f"{where}: checksum must have {CHECKSUM_BYTES} bytes, not {len(message.checksum)}",
        )
    sources = tuple(_source_from_proto(kind, source, where, layout) for source in message.sources)
    if not sources or len(set(sources)) < len(sources):
        raise InvalidMessageError(
            f"{kind}_source", f"{where}: sources must be distinct and at least one"
        )
    return Move(
        layer=message.layer,
        slot=message.slot,
        expert=message.expert,
        checksum=message.checksum,
        sources=sources,
    )


def _source_from_proto(kind: str, message: pb.Source, where: str, layout: Layout) -> Source:
    if message.WhichOneof("source") == "rank" and message.rank < layout.num_ranks:
        return RankSource(rank=message.rank)
    if message.checkpoint:
        return CheckpointSource()
    raise InvalidMessageError(
        f"{kind}_source",
        f"{where}: a source must be a rank from 0 to {layout.num_ranks - 1} or the checkpoint",
    )
