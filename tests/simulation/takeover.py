"""`StoreLosses`: the store loses contents at the worst moments, during changes of leader and epoch.

A suspended leader wakes after another one has led and the store lost that. By its own clock no time
has passed, so that it still leads. Or balancers die, and no rank that they meet knows the latest
epoch.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import permutations
from typing import Any

from tests.simulation.fleet import POOL
from tests.simulation.loop import outside
from tests.simulation.schedule import BALANCERS, NUM_PATTERNS

BACK = ("goes back", "goes far back")

LOOK_S = 0.1
TAKEOVER_S = 20.0
"""Seconds within which another balancer takes over, or the first wakes without one."""

JOINING_S = 6.0
"""Seconds within which ranks join a group, or the control plane is lost without that."""

SPLIT_S = 16.0
"""Seconds within which a part of the workers begins an epoch without the others."""

WAVE_S, NUM_WAVES = 16.0, 3
"""Seconds within which ranks switch to another layout after a shift of traffic; how often, until
they might have the generation of others that switched once."""


class StoreLosses:
    """A part of the `Faults` of a world."""

    def do_lose_store_behind_leader(self: Any, how: str, loss_s: float, wake_s: float) -> None:
        """The store is emptied while a leader is suspended and another one takes over."""
        kind = "lose_store_behind_leader"
        self._lose(kind, _lose_behind_leader, how, loss_s, wake_s, lasts_s=TAKEOVER_S)

    def do_set_store_back_behind_leader(self: Any, loss_s: float, wake_s: float) -> None:
        """The store goes back to what it was when a leader was suspended; another one has led."""
        kind, how = "set_store_back_behind_leader", self.rng.choice(BACK)
        self._lose(kind, _lose_behind_leader, how, loss_s, wake_s, lasts_s=TAKEOVER_S)

    def do_set_store_back_behind_split(
        self: Any, one: str, other: str, loss_s: float, wake_s: float
    ) -> None:
        """The same, while two workers reach no balancer but the suspended leader.

        The others begin an epoch with the next one.
        """
        kind, lasts_s = "set_store_back_behind_split", TAKEOVER_S + SPLIT_S
        self._lose(kind, _set_back_behind_split, (one, other), loss_s, wake_s, lasts_s=lasts_s)

    def do_set_store_back_behind_epoch(
        self: Any, one: str, other: str, back_after_s: float
    ) -> None:
        """All balancers die, and the store goes back to before an epoch without two workers.

        Its ranks serve on, but reach no balancer until these two have begun the next one.
        """
        lasts_s = 2 * SPLIT_S + back_after_s
        self._lose(
            "set_store_back_behind_epoch",
            *(_set_back_behind_epoch, (one, other), back_after_s),
            lasts_s=lasts_s,
        )

    def do_set_store_back_behind_group(
        self: Any, one: str, other: str, back_after_s: float
    ) -> None:
        """The same, but the next leader takes over the earlier epoch of two workers that serve.

        The later group runs generations that nobody then knows.
        """
        lasts_s = 2 * SPLIT_S + (1 + NUM_WAVES) * WAVE_S + TAKEOVER_S + back_after_s
        self._lose(
            "set_store_back_behind_group",
            *(_set_back_behind_group, (one, other), back_after_s),
            lasts_s=lasts_s,
        )

    def do_lose_control_plane(self: Any, back_after_s: float) -> None:
        """Both balancers die while ranks join a group, and the store is emptied."""
        lasts_s = JOINING_S + back_after_s
        self._lose("lose_control_plane", _lose_control_plane, back_after_s, lasts_s=lasts_s)

    def _lose(self: Any, kind: str, how: Any, *args: Any, lasts_s: float) -> None:
        async def lose() -> None:
            if await how(self, *args):
                self.effects.add(kind)

        self.loop.create_task(lose(), context=outside())
        self._until(lasts_s + sum(arg for arg in args if isinstance(arg, float)), lambda: None)


async def _lose_control_plane(world: Any, back_after_s: float) -> bool:
    is_joining = await _until(world, _is_joining, JOINING_S)
    is_lost = world.lose_records(world.store.forget)
    return world.kill_balancers(back_after_s) and is_lost and is_joining


def _is_joining(world: Any) -> bool:
    """Whether a worker has taken up an epoch in which it does not step yet."""
    workers = [one for one in world.workers.values() if one.process.alive]
    return any(one.epochs.state.has_begun and one.rank is None for one in workers)


async def _lose_behind_leader(world: Any, how: str, loss_s: float, wake_s: float) -> bool:
    """Suspend a leader, its clock included, until another has led and the store lost contents.

    The store is emptied `loss_s` after the suspension ("emptied first"), or `loss_s` after another
    balancer leads ("emptied"), or returns then to what it had before ("goes back"), or to what it
    had before the fence of that leader ("goes far back"). The first wakes `wake_s` after both.
    Returns whether all of that came about.
    """
    leader, began_s, before = world.leader(), world.loop.time(), world.store.data
    if how == "goes far back":
        before = world.store.before_term
    if not _suspend(world, leader):
        return False
    is_led = _is_led_without(leader)
    has_led = how == "emptied first" or await _until(world, is_led, TAKEOVER_S)
    await asyncio.sleep(loss_s)
    goes_back = how in BACK
    is_lost = _set_back(world, before) if goes_back else world.lose_records(world.store.forget)
    if how == "emptied first":
        has_led = await _until(world, is_led, began_s + TAKEOVER_S - world.loop.time())
    await asyncio.sleep(wake_s)
    return world.wake(leader, since_s=began_s) and is_lost and has_led


async def _set_back_behind_split(
    world: Any, left: tuple[str, ...], loss_s: float, wake_s: float
) -> bool:
    leader, began_s, before = world.leader(), world.loop.time(), world.store.data
    if not world.wanted.issuperset(left) or not _suspend(world, leader, besides=left):
        return False
    others = sorted((world.wanted | {*BALANCERS}) - {*left, leader.process.name})
    with _Cuts(world, left, others):
        has_led = await _until(world, _is_led_without(leader), TAKEOVER_S)
        has_begun = await _until(world, _has_epoch_without(left), SPLIT_S)
        await asyncio.sleep(loss_s)
        is_lost = _set_back(world, before)
        await asyncio.sleep(wake_s)
        is_awake = world.wake(leader, since_s=began_s)
        await asyncio.sleep(1.0)
    return is_awake and has_led and has_begun and is_lost


async def _set_back_behind_epoch(world: Any, left: tuple[str, ...], back_after_s: float) -> bool:
    before, others = world.store.data, sorted(world.wanted.difference(left))
    if not world.wanted.issuperset(left):
        return False
    with _Cuts(world, left, (*others, *BALANCERS)):
        has_begun = await _until(world, _has_epoch_without(left), SPLIT_S)
    with _Cuts(world, others, (*left, *BALANCERS)):
        is_lost = _set_back(world, before)
        are_killed = world.kill_balancers(back_after_s)
        follows = await _until(world, _has_epoch_without(others), SPLIT_S + back_after_s)
        await asyncio.sleep(1.0)
    return has_begun and is_lost and are_killed and follows


async def _set_back_behind_group(world: Any, first: tuple[str, ...], back_after_s: float) -> bool:
    others = sorted(world.wanted.difference(first))
    if not world.wanted.issuperset(first) or len(others) < len(first):
        return False
    with ExitStack() as alone:
        with _Cuts(world, others, (*first, *BALANCERS)):
            has_begun = await _until(world, _has_epoch_without(others), SPLIT_S)
            before = world.store.data
            alone.enter_context(_Cuts(world, first, (*others, *BALANCERS)))
        follows = await _until(world, _has_epoch_without(first), SPLIT_S)
        has_moved = await _until(world, _moving(world, others), WAVE_S)
        with _Cuts(world, others, (*first, *BALANCERS)):
            is_lost = _set_back(world, before)
            are_killed = world.kill_balancers(back_after_s)
            alone.close()
            follows &= await _until(world, _has_epoch_without(others), TAKEOVER_S + back_after_s)
            for _ in range(NUM_WAVES):
                await _until(world, _moving(world, first), WAVE_S)
    return has_begun and follows and has_moved and is_lost and are_killed


class _Cuts:
    """A context in which no message passes between some processes and others."""

    def __init__(self, world: Any, some: Iterable[str], others: Iterable[str]) -> None:
        self._network = world.network
        pairs = [(one, other) for one in some for other in others]
        self._ways = [way for pair in pairs for way in permutations(pair)]

    def __enter__(self) -> None:
        for way in self._ways:
            self._network.cut(*way)

    def __exit__(self, *_: object) -> None:
        for way in self._ways:
            if self._network.is_cut(*way):  # Unless all faults have ended.
                self._network.heal(*way)


def _suspend(world: Any, leader: Any, *, besides: Iterable[str] = ()) -> bool:
    """Suspend a leader with its clock; False if there is none, or it is paused."""
    if leader is None or leader.process.paused:
        return False
    leader.process.pause()
    leader.suspended_at_s = world.loop.time()
    for name in world.workers.keys() - {*besides}:
        # They need not wait for their timeout to find another leader.
        world.network.reset(name, leader.process.name)
    return True


def _set_back(world: Any, data: Any) -> bool:
    return bool(world.lose_records(lambda: world.store.fail_over(data)))


def _is_led_without(leader: Any) -> Callable[[Any], bool]:
    def is_led(world: Any) -> bool:
        others = [one for one in world.living_balancers() if one is not leader]
        return any(one.seat.led is not None for one in others)

    return is_led


def _has_epoch_without(workers: Iterable[str]) -> Callable[[Any], bool]:
    """Whether the store's latest epoch has none of these workers, and its ranks have it."""

    def holds(world: Any) -> bool:
        members = world.store.data.get(("members", POOL))
        names = set() if members is None else {*members.workers}
        if not names or names - world.workers.keys() or not names.isdisjoint(workers):
            return False  # Or one of them is no worker of the world, but a liar.
        ranks = [world.workers[name].epochs.state for name in names]
        return all(state.highest_epoch == members.epoch for state in ranks)

    return holds


def _moving(world: Any, workers: Iterable[str]) -> Callable[[Any], bool]:
    """Shift traffic; whether these workers then run another layout than their first one."""
    first = dict.fromkeys(workers, -1)
    world.do_shift((world.pattern + 1) % NUM_PATTERNS)

    def have_moved(world: Any) -> bool:
        for name, generation in first.items():
            if generation < 0:
                first[name] = _generation(world, name)
        return all(_generation(world, name) > one >= 0 for name, one in first.items())

    return have_moved


def _generation(world: Any, name: str) -> int:
    """The generation that a worker runs; -1 without a rank."""
    rank = world.workers[name].rank
    return -1 if rank is None else int(rank.held.contents.layout.generation)


async def _until(world: Any, holds: Callable[[Any], bool], within_s: float) -> bool:
    """Wait until something holds of the world; False if it does not in time."""
    ends_s = world.loop.time() + within_s
    while world.loop.time() < ends_s:
        if holds(world):
            return True
        await asyncio.sleep(LOOK_S)
    return False
