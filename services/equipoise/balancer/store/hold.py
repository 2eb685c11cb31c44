"""How stores write a `Hold`: as JSON."""

import base64
import json

from equipoise.pool.records import Hold
from equipoise.wire.layouts import layout_from_proto, layout_to_proto
from equipoise_api.v1 import worker_link_pb2 as pb


def pack_hold(hold: Hold) -> str:
    """Return one line of JSON; the layout in it is the protobuf message, in base64."""
    packed = None
    if hold.pin is not None:
        packed = base64.b64encode(layout_to_proto(hold.pin).SerializeToString()).decode()
    return json.dumps(
        {
            "paused": hold.paused,
            "pinned": hold.pinned,
            "pin": packed,
            "pinned_generation": hold.pinned_generation,
        }
    )


def unpack_hold(packed: str | bytes) -> Hold:
    """Read what `pack_hold` wrote.

    Raises:
        ValueError, LookupError, TypeError: it is not valid.
    """
    record = json.loads(packed)
    pin = None
    if record["pin"] is not None:
        pin = layout_from_proto(pb.Layout.FromString(base64.b64decode(record["pin"])), kind="pin")
    return Hold(
        paused=record["paused"],
        pinned=record["pinned"],
        pin=pin,
        pinned_generation=record["pinned_generation"],
    )
