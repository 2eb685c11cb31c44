"""`lose_store_behind`: a leader is suspended, another takes over, and the store loses contents.

Then the first wakes. By its own clock no time has passed, so that it still leads.
"""

import asyncio
from typing import Any

LOOK_S = 0.1
TAKEOVER_S = 20.0
"""Seconds within which another balancer takes over, or the first wakes without one."""


async def lose_store_behind(
    world: Any, leader: Any, kind: str, how: str, *, loss_s: float, wake_s: float
) -> None:
    """Suspend a leader, its clock included, until another has led and the store lost contents.

    The store is emptied `loss_s` after the suspension ("emptied first"), or `loss_s` after another
    balancer leads ("emptied"), or returns then to what it had before ("goes back"). The first wakes
    `wake_s` after both.
    """
    loop, store = world.loop, world.store
    began_s, before = loop.time(), store.data
    leader.process.pause()
    leader.suspended_at_s = began_s
    for name in world.workers:  # They need not wait for their timeout to find another leader.
        world.network.reset(name, leader.process.name)
    has_led = how == "emptied first" or await _until_led(world, leader, began_s + TAKEOVER_S)
    await asyncio.sleep(loss_s)
    world.note_loss()
    is_lost = store.fail_over(before) if how == "goes back" else store.forget()
    if how == "emptied first":
        has_led = await _until_led(world, leader, began_s + TAKEOVER_S)
    await asyncio.sleep(wake_s)
    if world.wake(leader, since_s=began_s) and is_lost and has_led:
        world.effects.add(kind)


async def _until_led(world: Any, besides: Any, ends_s: float) -> bool:
    """Wait until another balancer leads, its pools included; False if none does in time."""
    while world.loop.time() < ends_s:
        if any(one.seat.led is not None for one in world.living_balancers() if one is not besides):
            return True
        await asyncio.sleep(LOOK_S)
    return False
