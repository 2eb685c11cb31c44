"""`Encoder`: what the balancer tells the ranks of a pool, as bytes.

Ranks are told nearly the same: who is who, and one layout. That is serialised once for all of them.
"""

from dataclasses import fields, replace
from typing import Any

from equipoise.wire.convert import to_worker
from equipoise.wire.messages import BalancerMessage, JoinEpoch, Stage
from equipoise.wire.responses import add_moves
from equipoise_api.v1 import worker_link_pb2 as pb


class Encoder:
    """Messages as bytes of a ConnectResponse; keeps those of the latest push of each kind."""

    def __init__(self) -> None:
        self._latest: dict[type[BalancerMessage], tuple[BalancerMessage, bytes]] = {}

    def encode(self, value: BalancerMessage) -> bytes:
        """The message for one worker.

        Protobuf merges what follows on each other, so a push is the bytes for all ranks, and after
        them those for this one.
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
        """The bytes of a push without what is the receiver's `own`."""
        known, data = self._latest.get(type(value), (None, b""))
        # Layouts are equal if they are the same object, so this compares no tables.
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
