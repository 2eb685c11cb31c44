"""`Encoder`: what the balancer tells the ranks of a pool, as bytes.

Ranks are told nearly the same: who is who, and one layout. That is serialised once for all of them.
"""

from dataclasses import replace

from equipoise.wire.convert import to_worker
from equipoise.wire.messages import Assignment, BalancerMessage, Stage
from equipoise.wire.responses import moves_to_proto
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
                own = pb.ConnectResponse(stage=pb.Stage(moves=moves_to_proto(value.moves)))
                return self._for_all(replace(value, moves=())) + own.SerializeToString()
            case Assignment():
                seat = pb.Assignment(rank=value.rank, moves=moves_to_proto(value.moves))
                own = pb.ConnectResponse(assignment=seat)
                return self._for_all(replace(value, rank=0, moves=())) + own.SerializeToString()
            case _:
                return to_worker(value).SerializeToString()

    def _for_all(self, value: BalancerMessage) -> bytes:
        # Layouts are equal if they are the same object, so this compares no tables.
        known, data = self._latest.get(type(value), (None, b""))
        if known != value:
            data = to_worker(value).SerializeToString()
            self._latest[type(value)] = (value, data)
        return data
