"""The rollout protocol: a balancer, its store, and ranks that switch by agreement.

The balancer runs the table of `planning/rollout.py` and, after a restart, `reconcile`; ranks agree
by the rule of `worker/header.py`. Messages may wait for any time; streams break and lose what is
in flight; the balancer crashes between any two events; a write to the store may take effect and its
answer be lost; any timeout may fire; the store may forget.

Restated here, because it lives in objects with more state: whether a rank may stage a generation
(`_handle_at_rank`; `check_stage`, `Engine.offer` and `drop`), the order of writes and messages
(`_command`; `Rollouts`), and when ranks' reports become the truth (`_settled`; `Agreement`).
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from equipoise.planning.layout import Layout
from equipoise.planning.policy import Policy
from equipoise.planning.reconcile import reconcile
from equipoise.planning.rollout import (
    Commands,
    DeadlineCheck,
    Event,
    PersistCommitted,
    Persisted,
    PersistProposed,
    RankLost,
    RankRejected,
    RankRuns,
    RankStaged,
    RankSwitched,
    SendAbort,
    SendStage,
    State,
    Wave,
)
from equipoise.worker.errors import GroupError
from equipoise.worker.header import (
    StepHeader,
    agreed_generation,
    check_group,
    digest_word,
)
from tests.model_checking.explorer import Model

NUM_RANKS = 2
NAMES = ("rank 0", "rank 1")
TOO_LATE_S = 1e6
"""A time at which every timeout of a wave has passed."""

_POLICY = Policy()
_TABLES = ([[0, 1, 0, 1]], [[0, 1, 1, 0]], [[1, 0, 0, 1]])


class Content(NamedTuple):
    """A layout: its number, and which table it has."""

    generation: int
    table: int


class Staged(NamedTuple):
    """A rank staged a layout."""

    generation: int


class Rejected(NamedTuple):
    """A rank cannot stage a layout."""

    generation: int


class Switched(NamedTuple):
    """A rank switched at a step."""

    generation: int
    step: int


class Stage(NamedTuple):
    """Stage a layout on top of a generation."""

    layout: Content
    base: int


class Abort(NamedTuple):
    """Drop what is staged of a generation."""

    generation: int


class Rank(NamedTuple):
    """A rank that serves, and its stream."""

    running: Content
    staged: Content | None = None
    header: tuple[Content, Content | None] | None = None
    """What its header of the coming step says it runs and has staged; None before it is sent."""
    connected: bool = True
    inbox: tuple[Stage | Abort, ...] = ()
    outbox: tuple[Staged | Rejected | Switched, ...] = ()
    latest: Switched | None = None
    """Its latest switch, which it repeats after it reconnected."""


class WaveKey(NamedTuple):
    """A wave, without its texts and times."""

    base: Content
    target: Content
    state: State
    staged_ranks: frozenset[int]
    switched_ranks: frozenset[int]
    denying_ranks: frozenset[int]
    disproved_ranks: frozenset[int]
    lost_ranks: frozenset[int]
    switch_step: int | None


class Balancer(NamedTuple):
    """The balancer's memory; it loses all of it in a crash."""

    current: Content | None
    """What its ranks run, as it knows."""
    next_generation: int
    wave: WaveKey | None = None
    writes: tuple[PersistProposed | PersistCommitted, ...] = ()
    """Writes that the store has not answered, first in, first out."""
    heard: tuple[tuple[Content, Content | None] | None, ...] = (None,) * NUM_RANKS
    """What each rank last reported to run and to have staged; None while it is not connected."""
    must_reconcile: bool = False
    """Whether ranks served without this balancer, and it has not compared them with the store."""


class Store(NamedTuple):
    """The records of the pool."""

    committed: Content | None
    proposed: Content | None
    highest: int


class World(NamedTuple):
    """A state of the model."""

    balancer: Balancer | None
    """None while no balancer leads."""
    store: Store
    ranks: tuple[Rank, ...]
    plans_left: int
    crashes_left: int
    breaks_left: int
    forgets_left: int
    lies_left: int
    """How often a rank may report a switch that did not happen."""
    believes_a_liar: bool = False
    """Whether a rank may report a false switch that no other rank is connected to deny: what is
    committed may then be wrong until the ranks' heartbeats correct it."""
    steps: int = 0
    """Switches so far: the step at which the next one happens."""
    broken: str = ""


def rollout_model(
    *,
    plans: int,
    crashes: int,
    breaks: int,
    forgets: int = 0,
    lies: int = 0,
    first_generation: int = 1,
) -> Model[World]:
    """Return the model: how many plans are made, and how often what may fail."""
    first = Content(first_generation, 0)
    return Model(
        initial=World(
            balancer=Balancer(
                current=first,
                next_generation=first_generation + 1,
                heard=((first, None),) * NUM_RANKS,
            ),
            store=Store(committed=first, proposed=None, highest=first_generation),
            ranks=tuple(Rank(running=first) for _ in range(NUM_RANKS)),
            plans_left=plans,
            crashes_left=crashes,
            breaks_left=breaks,
            forgets_left=forgets,
            lies_left=lies,
            believes_a_liar=lies > 0 and breaks > 0,
        ),
        transitions=_transitions,
        violation=_violation,
        converges=_converges,
    )


# What may happen. -------------------------------------------------------------------------------


def _transitions(world: World) -> Iterator[tuple[str, World]]:
    if world.broken:
        return
    yield from _at_ranks(world)
    balancer = world.balancer
    if balancer is None:
        yield "a balancer starts", _started(world)
    else:
        yield from _at_balancer(world, balancer)
    if world.forgets_left:
        forgotten = world._replace(
            store=Store(None, None, 0), forgets_left=world.forgets_left - 1, balancer=None
        )
        yield "the store forgets, and the balancer ends", _cut_all(forgotten)


def _at_ranks(world: World) -> Iterator[tuple[str, World]]:
    for index, rank in enumerate(world.ranks):
        if rank.inbox:
            message = rank.inbox[0]
            after = _handle_at_rank(rank._replace(inbox=rank.inbox[1:]), message)
            yield f"rank {index} handles {message}", _put(world, index, after)
        if world.lies_left and rank.connected and rank.staged is not None:
            lie = Switched(rank.staged.generation, world.steps + 1)
            lying = _put(world, index, rank._replace(outbox=_sent(rank, lie)))
            yield f"rank {index} falsely reports a switch", lying._replace(lies_left=0)
        if rank.header is None:
            header = (rank.running, rank.staged)
            yield f"rank {index} sends its header", _put(world, index, rank._replace(header=header))
    if all(rank.header is not None for rank in world.ranks):
        yield "the ranks step", _stepped(world)


def _at_balancer(world: World, balancer: Balancer) -> Iterator[tuple[str, World]]:
    for index, rank in enumerate(world.ranks):
        if rank.connected and rank.outbox:
            message = rank.outbox[0]
            read = _put(world, index, rank._replace(outbox=rank.outbox[1:]))
            yield f"the balancer hears {message} of rank {index}", _hear(read, index, message)
        elif rank.connected and not rank.inbox:
            beaten = _beat(world, index)
            if beaten != world:
                yield f"the balancer hears a heartbeat of rank {index}", beaten
        elif not rank.connected:
            yield f"rank {index} connects", _connect(world, index)
        if rank.connected and world.breaks_left:
            yield f"the stream of rank {index} breaks", _cut(world, index)
    if balancer.writes:
        yield "the store writes", _write(world, confirmed=True)
        if world.crashes_left:
            yield "the store writes, its answer is lost", _write(world, confirmed=False)
    yield from _at_wave(world, balancer)
    if world.crashes_left:
        crashed = world._replace(balancer=None, crashes_left=world.crashes_left - 1)
        yield "the balancer crashes", _cut_all(crashed)


def _at_wave(world: World, balancer: Balancer) -> Iterator[tuple[str, World]]:
    wave = balancer.wave
    is_free = wave is None or wave.state in {State.ACTIVE, State.ABORTED}
    # A commit is retried after the store answered or timed out; and a timeout is longer than the
    # time between heartbeats, so every connected rank has confirmed or denied a switch before it.
    waits = not is_free and wave.state is State.SWITCHED and balancer.writes
    if not is_free and not waits and not _awaits_heartbeats(world, wave):
        yield "a timeout fires", _settled(_give(world, DeadlineCheck()))
    current = balancer.current
    if is_free and world.plans_left and current is not None and _runs_only(balancer, current):
        for table in range(len(_TABLES)):
            if table != current.table:
                yield f"a plan of table {table} is accepted", _plan(world, table)


def _awaits_heartbeats(world: World, wave: WaveKey) -> bool:
    connected = {index for index, rank in enumerate(world.ranks) if rank.connected}
    answered = wave.switched_ranks | wave.denying_ranks | wave.disproved_ranks
    return _wave(wave).awaits_reports and not connected <= answered


# Ranks. -----------------------------------------------------------------------------------------


def _handle_at_rank(rank: Rank, message: Stage | Abort) -> Rank:
    if isinstance(message, Abort):
        staged = rank.staged
        if staged is not None and staged.generation == message.generation:
            return rank._replace(staged=None)
        return rank
    layout = message.layout
    is_next = message.base == rank.running.generation < layout.generation
    answer = Staged(layout.generation) if is_next else Rejected(layout.generation)
    staged = layout if is_next else None
    return rank._replace(staged=staged, outbox=_sent(rank, answer))


def _stepped(world: World) -> World:
    """Headers are exchanged; every rank applies the same rule to them."""
    headers = tuple(_header(rank.header, world.steps) for rank in world.ranks if rank.header)
    try:
        check_group(headers, names=NAMES)
    except GroupError as error:
        return world._replace(broken=f"ranks run one layout: {error}")
    if agreed_generation(headers) is None:
        return world._replace(ranks=tuple(rank._replace(header=None) for rank in world.ranks))
    step, ranks = world.steps + 1, []
    for rank in world.ranks:
        assert rank.header is not None, "all have sent one"
        layout = rank.header[1]
        assert layout is not None, "all have staged one"
        switched = Switched(layout.generation, step)
        ranks.append(
            rank._replace(
                running=layout,
                staged=None,
                header=None,
                latest=switched,
                outbox=_sent(rank, switched),
            )
        )
    return world._replace(ranks=tuple(ranks), steps=step)


def _sent(
    rank: Rank, message: Staged | Rejected | Switched
) -> tuple[Staged | Rejected | Switched, ...]:
    """What waits in its stream; a broken stream carries nothing."""
    return (*rank.outbox, message) if rank.connected else ()


@cache
def _header(says: tuple[Content, Content | None], steps: int) -> StepHeader:
    running, staged = says
    return StepHeader(
        epoch=1,
        step=steps,
        num_tokens=1,
        generation=running.generation,
        staged_generation=staged.generation if staged else 0,
        leaving=0,
        peers_digest=1,
        layout_digest=digest_word(_layout(running).digest()),
        staged_digest=digest_word(_layout(staged).digest()) if staged else 0,
    )


# The balancer. ----------------------------------------------------------------------------------


def _hear(world: World, index: int, message: Staged | Rejected | Switched) -> World:
    generation = message.generation
    if isinstance(message, Rejected):
        return _settled(_give(world, RankRejected(rank=index, generation=generation, reason="")))
    event: Event
    if isinstance(message, Staged):
        event = RankStaged(rank=index, generation=generation)
    else:
        event = RankSwitched(rank=index, generation=generation, step=message.step, stall_us=0)
    return _settled(_drop_stray(_give(_noted(world, index, message), event), index))


def _runs_only(balancer: Balancer, layout: Content) -> bool:
    """Whether every rank is connected and reported to run this layout."""
    is_alike = all(one is not None and one[0] == layout for one in balancer.heard)
    return is_alike and not balancer.must_reconcile


def _give(world: World, event: Event) -> World:
    """Give an event to the wave, if there is one."""
    balancer = world.balancer
    assert balancer is not None, "only a balancer hears events"
    if balancer.wave is None:
        return world
    now = TOO_LATE_S if isinstance(event, DeadlineCheck) else 0.0
    wave, commands = _wave(balancer.wave).step(event, now=now)
    return _command(world._replace(balancer=balancer._replace(wave=_key(wave))), commands)


def _command(world: World, commands: Commands) -> World:
    balancer, ranks = world.balancer, world.ranks
    assert balancer is not None, "only a balancer commands"
    for command in commands:
        match command:
            case PersistProposed():
                balancer = balancer._replace(writes=(*balancer.writes, command))
            case PersistCommitted():
                layout = _content(command.layout)
                writes = (*balancer.writes, command)
                balancer = balancer._replace(writes=writes, current=layout)
            case SendStage():
                stage = Stage(_content(command.layout), command.base_generation)
                ranks = tuple(_received(rank, stage) for rank in ranks)
            case SendAbort():
                ranks = tuple(_received(rank, Abort(command.generation)) for rank in ranks)
    return world._replace(balancer=balancer, ranks=ranks)


def _received(rank: Rank, message: Stage | Abort) -> Rank:
    return rank._replace(inbox=(*rank.inbox, message)) if rank.connected else rank


def _plan(world: World, table: int) -> World:
    balancer = world.balancer
    assert balancer is not None, "only a balancer plans"
    assert balancer.current is not None, "only a layout is changed"
    target = Content(balancer.next_generation, table)
    wave, commands = Wave.begin(
        base=_layout(balancer.current),
        target=_layout(target),
        num_ranks=NUM_RANKS,
        policy=_POLICY,
        now=0.0,
    )
    planned = balancer._replace(wave=_key(wave), next_generation=target.generation + 1)
    following = world._replace(balancer=planned, plans_left=world.plans_left - 1)
    return _command(following, commands)


def _write(world: World, *, confirmed: bool) -> World:
    balancer, store = world.balancer, world.store
    assert balancer is not None, "only a balancer writes"
    write, left = balancer.writes[0], balancer.writes[1:]
    layout = _content(write.layout)
    if isinstance(write, PersistProposed):
        if layout.generation <= store.highest and store.proposed != layout:
            return world._replace(broken=f"a generation is used once: {layout} after {store}")
        store = store._replace(proposed=layout, highest=layout.generation)
    else:
        store = store._replace(committed=layout)
        is_unused = all(rank.running.generation < layout.generation for rank in world.ranks)
        if is_unused and not world.believes_a_liar:
            return world._replace(broken=f"only what ranks switched to is committed: {layout}")
    written = world._replace(store=store, balancer=balancer._replace(writes=left))
    if not confirmed:
        return written._replace(crashes_left=world.crashes_left - 1)
    return _give(written, Persisted(generation=layout.generation))


# Streams and restarts. --------------------------------------------------------------------------


def _cut(world: World, index: int) -> World:
    rank = world.ranks[index]._replace(connected=False, inbox=(), outbox=())
    following = _put(world, index, rank)._replace(breaks_left=world.breaks_left - 1)
    return _give(_heard(following, index, None), RankLost(rank=index, reason=""))


def _cut_all(world: World) -> World:
    ranks = tuple(rank._replace(connected=False, inbox=(), outbox=()) for rank in world.ranks)
    return world._replace(ranks=ranks)


def _connect(world: World, index: int) -> World:
    """A rank's Hello says what it runs and has staged; its latest switch is sent again."""
    rank = world.ranks[index]
    following = _put(world, index, rank._replace(connected=True))
    following = _heard(following, index, (rank.running, rank.staged))
    if rank.latest is not None:
        event = RankSwitched(
            rank=index, generation=rank.latest.generation, step=rank.latest.step, stall_us=0
        )
        following = _give(following, event)
    return _settled(_drop_stray(following, index))


def _beat(world: World, index: int) -> World:
    """A heartbeat says what a rank runs and has staged."""
    rank = world.ranks[index]
    heard = _heard(world, index, (rank.running, rank.staged))
    given = _give(heard, RankRuns(rank=index, running=rank.running.generation))
    return _settled(_drop_stray(given, index))


def _noted(world: World, index: int, message: Staged | Switched) -> World:
    """Remember what a rank runs and has staged."""
    balancer, rank = world.balancer, world.ranks[index]
    assert balancer is not None, "only a balancer hears"
    before = balancer.heard[index]
    assert before is not None, "its Hello came first"
    if isinstance(message, Switched):
        running = rank.running if rank.running.generation == message.generation else before[0]
        return _heard(world, index, (running, None))
    wave = balancer.wave
    if wave is None or wave.target.generation != message.generation:
        return _heard(world, index, (before[0], Content(message.generation, 0)))
    return _heard(world, index, (before[0], wave.target))


def _heard(world: World, index: int, says: tuple[Content, Content | None] | None) -> World:
    balancer = world.balancer
    assert balancer is not None, "only a balancer hears"
    heard = (*balancer.heard[:index], says, *balancer.heard[index + 1 :])
    known = [content.generation + 1 for content in says or () if content is not None]
    return world._replace(
        balancer=balancer._replace(
            heard=heard, next_generation=max([balancer.next_generation, *known])
        )
    )


def _drop_stray(world: World, index: int) -> World:
    """Abort what a rank has staged if that is not being rolled out."""
    balancer = world.balancer
    assert balancer is not None, "only a balancer aborts"
    says, wave = balancer.heard[index], balancer.wave
    if says is None or says[1] is None or balancer.must_reconcile:
        return world
    is_current = wave is not None and wave.state not in {State.ACTIVE, State.ABORTED}
    if is_current and wave is not None and wave.target.generation == says[1].generation:
        return world
    return _put(world, index, _received(world.ranks[index], Abort(says[1].generation)))


def _started(world: World) -> World:
    store = world.store
    return world._replace(
        balancer=Balancer(
            current=store.committed, next_generation=store.highest + 1, must_reconcile=True
        )
    )


def _settled(world: World) -> World:
    """Once all ranks have reported, and nothing is rolled out, what they run is the truth."""
    balancer = world.balancer
    assert balancer is not None, "only a balancer settles"
    heard = [one for one in balancer.heard if one is not None]
    wave = balancer.wave
    is_free = wave is None or wave.state in {State.ACTIVE, State.ABORTED}
    if len(heard) < NUM_RANKS or not is_free:
        return world
    running = {content for content, _ in heard}
    if balancer.must_reconcile and world.store.committed is not None:
        return _reconciled(world, heard, world.store.committed)
    if len(running) > 1:
        return world
    balancer = balancer._replace(must_reconcile=False)
    layout = running.pop()
    if layout == world.store.committed or any(
        isinstance(write, PersistCommitted) for write in balancer.writes
    ):
        return world._replace(balancer=balancer)
    store = world.store
    adopted = store._replace(committed=layout, highest=max(store.highest, layout.generation))
    return world._replace(balancer=balancer._replace(current=layout), store=adopted)


def _reconciled(
    world: World, heard: list[tuple[Content, Content | None]], committed: Content
) -> World:
    balancer, proposed = world.balancer, world.store.proposed
    assert balancer is not None, "only a balancer reconciles"
    result = reconcile(
        generations_of_ranks={rank: one.generation for rank, (one, _) in enumerate(heard)},
        staged_of_ranks={rank: one.generation if one else 0 for rank, (_, one) in enumerate(heard)},
        proposed=proposed and _layout(proposed),
        committed=_layout(committed),
        policy=_POLICY,
        now=0.0,
    )
    if result.generation is None:
        return world
    current = next(one for one, _ in heard if one.generation == result.generation)
    wave = None if result.wave is None else _key(result.wave)
    resumed = balancer._replace(current=current, must_reconcile=False, wave=wave)
    return _settled(_command(world._replace(balancer=resumed), result.commands))


# Values. ----------------------------------------------------------------------------------------


def _put(world: World, index: int, rank: Rank) -> World:
    ranks = world.ranks
    return world._replace(ranks=(*ranks[:index], rank, *ranks[index + 1 :]))


@cache
def _layout(content: Content) -> Layout:
    return Layout(
        generation=content.generation,
        num_experts=2,
        num_ranks=NUM_RANKS,
        expert_of_slot=np.array(_TABLES[content.table], dtype=np.int32),
    )


def _content(layout: Layout) -> Content:
    return Content(layout.generation, _TABLES.index(layout.expert_of_slot.tolist()))


def _key(wave: Wave) -> WaveKey:
    return WaveKey(
        _content(wave.base),
        _content(wave.target),
        wave.state,
        wave.staged_ranks,
        wave.switched_ranks,
        wave.denying_ranks,
        wave.disproved_ranks,
        wave.lost_ranks,
        wave.switch_step,
    )


@cache
def _wave(key: WaveKey) -> Wave:
    return Wave(
        base=_layout(key.base),
        target=_layout(key.target),
        num_ranks=NUM_RANKS,
        policy=_POLICY,
        state=key.state,
        entered_s=0.0,
        staged_ranks=key.staged_ranks,
        switched_ranks=key.switched_ranks,
        denying_ranks=key.denying_ranks,
        disproved_ranks=key.disproved_ranks,
        lost_ranks=key.lost_ranks,
        switch_step=key.switch_step,
        reason="",
    )


# What must hold. --------------------------------------------------------------------------------


def _violation(world: World) -> str:
    if world.broken:
        return world.broken
    if len({rank.running for rank in world.ranks}) > 1:
        return f"ranks run one layout: {[rank.running for rank in world.ranks]}"
    wave = world.balancer.wave if world.balancer is not None else None
    if wave is not None and wave.state is State.ACTIVE and not world.believes_a_liar:
        behind = [one for one in world.ranks if one.running.generation < wave.target.generation]
        if behind:
            return f"an active layout is in use: {wave.target}, but ranks run {behind[0].running}"
    if wave is not None and wave.state is State.ABORTED and wave.switched_ranks:
        return "ranks switch at one step"
    return ""


def _converges(world: World) -> str:
    """Let everything in flight arrive, then let timeouts fire, until nothing changes."""
    world = world._replace(plans_left=0, crashes_left=0, breaks_left=0, forgets_left=0, lies_left=0)
    num_steps = 0
    for _ in range(200):
        moves = dict(_transitions(world))
        # Ranks exchange headers for ever, so a timeout has to fire meanwhile.
        num_steps = num_steps + 1 if "the ranks step" in moves else num_steps
        order = sorted(moves, key=lambda label: _priority(label, has_stepped=num_steps % 4 == 3))
        label = next((one for one in order if _is_progress(one, world)), None)
        if label is None:
            break
        world = moves[label]
        if broken := _violation(world):
            return broken
    return _unsettled(world)


def _priority(label: str, *, has_stepped: bool) -> int:
    if "timeout" in label:
        return 1 if has_stepped else 3
    return 2 if "header" in label or label == "the ranks step" else 0


def _is_progress(label: str, world: World) -> bool:
    """Whether a step can change anything: ranks without a staged layout step as before."""
    if "header" not in label and label != "the ranks step":
        return True
    return any(rank.staged or rank.header for rank in world.ranks)


def _unsettled(world: World) -> str:
    balancer = world.balancer
    if balancer is None or balancer.must_reconcile or balancer.writes:
        return f"the balancer learns what ranks run: {balancer}"
    if balancer.wave is not None and balancer.wave.state not in {State.ACTIVE, State.ABORTED}:
        return f"every wave ends: {balancer.wave}"
    running = {rank.running for rank in world.ranks}
    if running != {world.store.committed} or running != {balancer.current}:
        return f"ranks run what is committed: {running}, {world.store}, {balancer.current}"
    if any(rank.staged for rank in world.ranks):
        return f"staging memory is freed: {world.ranks}"
    return ""
