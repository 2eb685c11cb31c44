"""`Hold`: what an operator holds a pool to until he takes it back, and how stores write it down."""

import base64
import json
from dataclasses import dataclass

from equipoise.planning.layout import Layout
from equipoise.wire.layouts import layout_from_proto, layout_to_proto
from equipoise_api.v1 import worker_link_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hold:
    """Nothing, unless told: the balancer then plans as its policy says.

    `paused` and `pinned` say who wanted it and why; empty when it is not so. `pin` is the layout
    whose placement is kept (its own number does not count), `pinned_generation` the committed one
    that had it, 0 if it was given as a table.
    """

    paused: str = ""
    pinned: str = ""
    pin: Layout | None = None
    pinned_generation: int = 0

    def __post_init__(self) -> None:
        assert bool(self.pinned) == (self.pin is not None), "a pin has a layout and a reason"

    @property
    def reason(self) -> str:
        """Why the balancer adopts no plan of its own; empty when it may."""
        words = [f"paused by {self.paused}"] if self.paused else []
        words += [f"pinned by {self.pinned}"] if self.pinned else []
        return ", ".join(words)


def pack_hold(hold: Hold) -> str:
    """One line of JSON; the layout in it is the contract's message, in base64."""
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
    """What `pack_hold` wrote.

    Raises:
        ValueError, LookupError, TypeError: it did not write that.
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
