"""`unreached_peers`: which peers a rank cannot connect to, found when its group did not form.

The rank that others wait for is not always the one at fault, and neither torch's store nor gloo
names it. So each rank dials its peers and reports what it found: the balancer compares the reports
of several ranks (`equipoise.pool.reachability`).
"""

import asyncio
import threading
import time

from equipoise.settings.address import parse_address
from equipoise.wire.balancer_messages import JoinEpoch

TIMEOUT_S = 2.0
"""How long a peer gets to accept a connection: TCP repeats a lost packet after a second."""

_POLL_S = 0.05


async def unreached_peers(join_epoch: JoinEpoch, *, abandoned: threading.Event) -> tuple[str, ...]:
    """Return the peers of an epoch that accept no connection, in rank order.

    A worker is reached if it accepts one at its address and, as rank 0, at its rendezvous. Takes
    at most `TIMEOUT_S`; returns shortly after `abandoned` is set, with no names.
    """
    own = join_epoch.rank
    addresses = [(one.worker, one.address) for one in join_epoch.peers if one.rank != own]
    if own != 0:
        addresses.append((join_epoch.peers[0].worker, join_epoch.rendezvous_address))
    dials = [(name, asyncio.create_task(_accepts(address))) for name, address in addresses]
    end_s = time.monotonic() + TIMEOUT_S
    waiting = {dial for _, dial in dials}
    while waiting and not abandoned.is_set() and time.monotonic() < end_s:
        _, waiting = await asyncio.wait(waiting, timeout=_POLL_S)
    for dial in waiting:
        dial.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    if abandoned.is_set():
        return ()
    unreached = {name for name, dial in dials if dial in waiting or not dial.result()}
    return tuple(peer.worker for peer in join_epoch.peers if peer.worker in unreached)


async def _accepts(address: str) -> bool:
    """Whether a connection to an address opens; it is closed at once."""
    try:
        _, writer = await asyncio.open_connection(*parse_address(address))
    except OSError:
        return False
    writer.close()
    return True
