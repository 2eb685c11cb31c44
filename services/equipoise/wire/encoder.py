"""`Encoder`: serialises the balancer's messages to the ranks of a pool.

The messages of a push have the same peers and layout for all ranks, which are serialised once.
"""

from dataclasses import fields, replace
from typing import Any

from equipoise.wire.balancer_messages import BalancerMessage, JoinEpoch, Stage
from equipoise.wire.convert import to_worker
from equipoise.wire.responses import add_moves
from equipoise_api.v1 import worker_link_pb2 as pb


class Encoder:
    """Serialises messages as ConnectResponse; caches the shared part of the latest push by type."""

    def __init__(self) -> None:
        self._latest: dict[type[BalancerMessage], tuple[BalancerMessage, bytes]] = {}

    def encode(self, value: BalancerMessage) -> bytes:
        """Serialise the message to one worker.

        Protobuf merges concatenated messages, so a push is the shared bytes followed by those of
        this rank.
        """
        match value:
            case Stage():
                own = pb.ConnectResponse()
                add_moves(value.moves, to=own.stage)
                return self._for_all(value, moves=()) + own.SerializeToString()
            case JoinEpoch():
                own = pb.ConnectResponse(join_epoch=pb.JoinEpoch(rank=value.rank))
                add_moves(value.moves, to=own.join_epoch)
                return self._for_all(value, rank=0, moves=()) + own.SerializeToString()
            case _:
                return to_worker(value).SerializeToString()

    def _for_all(self, value: JoinEpoch | Stage, **own: Any) -> bytes:
        """The bytes of a push with the receiver's fields replaced by `own`."""
        known, data = self._latest.get(type(value), (None, b""))
        # Layouts compare by identity, so this compares no tables.
        if known is None or any(
            getattr(known, name) != getattr(value, name)
            for name in _FIELDS[type(value)]
            if name not in own
        ):
            shared = replace(value, **own)
            data = to_worker(shared).SerializeToString()
            self._latest[type(value)] = (shared, data)
        return data


_FIELDS = {kind: tuple(field.name for field in fields(kind)) for kind in (JoinEpoch, Stage)}
