"""The balancer of the rollout model: events for its wave, its commands, streams and restarts.

Restated here, because it lives in objects with more state: the order of writes and messages
(`_command`; `Rollouts`), and when ranks' reports become the truth (`settled`; `Agreement`).
"""

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
from tests.model_checking.rollout_world import (
    NUM_RANKS,
    POLICY,
    TOO_LATE_S,
    Abort,
    Balancer,
    Content,
    Rank,
    Rejected,
    Stage,
    Staged,
    Switched,
    World,
    content_of,
    key_of,
    layout_of,
    put,
    wave_of,
)

# The balancer. ----------------------------------------------------------------------------------


def hear(world: World, index: int, message: Staged | Rejected | Switched) -> World:
    generation = message.generation
    if isinstance(message, Rejected):
        return settled(give(world, RankRejected(rank=index, generation=generation, reason="")))
    event: Event
    if isinstance(message, Staged):
        event = RankStaged(rank=index, generation=generation)
    else:
        event = RankSwitched(rank=index, generation=generation, step=message.step, stall_us=0)
    return settled(_drop_stray(give(_noted(world, index, message), event), index))


def runs_only(balancer: Balancer, layout: Content) -> bool:
    """Whether every rank is connected and reported to run this layout."""
    is_alike = all(one is not None and one[0] == layout for one in balancer.heard)
    return is_alike and not balancer.must_reconcile


def give(world: World, event: Event) -> World:
    """Give an event to the wave, if there is one."""
    balancer = world.balancer
    assert balancer is not None, "only a balancer hears events"
    if balancer.wave is None:
        return world
    now = TOO_LATE_S if isinstance(event, DeadlineCheck) else 0.0
    wave, commands = wave_of(balancer.wave).step(event, now=now)
    return _command(world._replace(balancer=balancer._replace(wave=key_of(wave))), commands)


def _command(world: World, commands: Commands) -> World:
    balancer, ranks = world.balancer, world.ranks
    assert balancer is not None, "only a balancer commands"
    for command in commands:
        match command:
            case PersistProposed():
                balancer = balancer._replace(writes=(*balancer.writes, command))
            case PersistCommitted():
                layout = content_of(command.layout)
                writes = (*balancer.writes, command)
                balancer = balancer._replace(writes=writes, current=layout)
            case SendStage():
                stage = Stage(content_of(command.layout), command.base_generation)
                ranks = tuple(_received(rank, stage) for rank in ranks)
            case SendAbort():
                ranks = tuple(_received(rank, Abort(command.generation)) for rank in ranks)
    return world._replace(balancer=balancer, ranks=ranks)


def _received(rank: Rank, message: Stage | Abort) -> Rank:
    return rank._replace(inbox=(*rank.inbox, message)) if rank.connected else rank


def plan(world: World, table: int) -> World:
    balancer = world.balancer
    assert balancer is not None, "only a balancer plans"
    assert balancer.current is not None, "only a layout is changed"
    target = Content(balancer.next_generation, table)
    wave, commands = Wave.begin(
        base=layout_of(balancer.current),
        target=layout_of(target),
        num_ranks=NUM_RANKS,
        policy=POLICY,
        now=0.0,
    )
    planned = balancer._replace(wave=key_of(wave), next_generation=target.generation + 1)
    following = world._replace(balancer=planned, plans_left=world.plans_left - 1)
    return _command(following, commands)


def write(world: World, *, confirmed: bool) -> World:
    balancer, store = world.balancer, world.store
    assert balancer is not None, "only a balancer writes"
    write, left = balancer.writes[0], balancer.writes[1:]
    layout = content_of(write.layout)
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
    return give(written, Persisted(generation=layout.generation))


# Streams and restarts. --------------------------------------------------------------------------


def cut(world: World, index: int) -> World:
    rank = world.ranks[index]._replace(connected=False, inbox=(), outbox=())
    following = put(world, index, rank)._replace(breaks_left=world.breaks_left - 1)
    return give(_heard(following, index, None), RankLost(rank=index, reason=""))


def cut_all(world: World) -> World:
    ranks = tuple(rank._replace(connected=False, inbox=(), outbox=()) for rank in world.ranks)
    return world._replace(ranks=ranks)


def connect(world: World, index: int) -> World:
    """A rank's Hello says what it runs and has staged; its latest switch is sent again."""
    rank = world.ranks[index]
    following = put(world, index, rank._replace(connected=True))
    following = _heard(following, index, (rank.running, rank.staged))
    if rank.latest is not None:
        event = RankSwitched(
            rank=index, generation=rank.latest.generation, step=rank.latest.step, stall_us=0
        )
        following = give(following, event)
    return settled(_drop_stray(following, index))


def beat(world: World, index: int) -> World:
    """A heartbeat says what a rank runs and has staged."""
    rank = world.ranks[index]
    heard = _heard(world, index, (rank.running, rank.staged))
    given = give(heard, RankRuns(rank=index, running=rank.running.generation))
    return settled(_drop_stray(given, index))


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
    return put(world, index, _received(world.ranks[index], Abort(says[1].generation)))


def started(world: World) -> World:
    store = world.store
    return world._replace(
        balancer=Balancer(
            current=store.committed, next_generation=store.highest + 1, must_reconcile=True
        )
    )


def settled(world: World) -> World:
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
        proposed=proposed and layout_of(proposed),
        committed=layout_of(committed),
        policy=POLICY,
        now=0.0,
    )
    if result.generation is None:
        return world
    current = next(one for one, _ in heard if one.generation == result.generation)
    wave = None if result.wave is None else key_of(result.wave)
    resumed = balancer._replace(current=current, must_reconcile=False, wave=wave)
    return settled(_command(world._replace(balancer=resumed), result.commands))
