"""The store loses contents at the worst moments: during a takeover, and while a group forms.

`lose_store_behind`: a leader is suspended, another takes over, and the store loses contents. Then
the first wakes. By its own clock no time has passed, so that it still leads.

`lose_control_plane`: ranks have taken up an epoch that nobody else remembers.
"""

import asyncio
from collections.abc import Callable
from typing import Any

LOOK_S = 0.1
TAKEOVER_S = 20.0
"""Seconds within which another balancer takes over, or the first wakes without one."""

JOINING_S = 6.0
"""Seconds within which ranks join a group, or the control plane is lost without that."""


async def lose_control_plane(world: Any, back_after_s: float) -> None:
    """Empty the store and kill all balancers, if possible while ranks join a group."""
    is_joining = await _until(world, _is_joining, world.loop.time() + JOINING_S)
    is_lost = world.lose_records(world.store.forget)
    if world.kill_balancers(back_after_s) and is_lost and is_joining:
        world.effects.add("lose_control_plane")


def _is_joining(world: Any) -> bool:
    """Whether a worker has taken up an epoch in which it does not step yet."""
    workers = [one for one in world.workers.values() if one.process.alive]
    return any(one.epochs.state.has_begun and one.rank is None for one in workers)


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

    def is_led(_world: Any) -> bool:
        others = [one for one in world.living_balancers() if one is not leader]
        return any(one.seat.led is not None for one in others)

    has_led = how == "emptied first" or await _until(world, is_led, began_s + TAKEOVER_S)
    await asyncio.sleep(loss_s)
    goes_back = how == "goes back"
    is_lost = world.lose_records(lambda: store.fail_over(before) if goes_back else store.forget())
    if how == "emptied first":
        has_led = await _until(world, is_led, began_s + TAKEOVER_S)
    await asyncio.sleep(wake_s)
    if world.wake(leader, since_s=began_s) and is_lost and has_led:
        world.effects.add(kind)


async def _until(world: Any, holds: Callable[[Any], bool], ends_s: float) -> bool:
    """Wait until something holds of the world; False if it does not in time."""
    while world.loop.time() < ends_s:
        if holds(world):
            return True
        await asyncio.sleep(LOOK_S)
    return False
