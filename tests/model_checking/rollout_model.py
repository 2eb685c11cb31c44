"""The rollout protocol: a balancer, its store, and ranks that switch by agreement.

The balancer runs the table of `planning/rollout.py` and, after a restart, `reconcile`; ranks agree
by the rule of `worker/header.py`. Messages may wait for any time; streams break and lose what is
in flight; the balancer crashes between any two events; a write to the store may take effect and its
answer be lost; any timeout may fire; the store may forget.

Whether a rank may stage a generation is restated in `_handle_at_rank` (`check_stage`,
`Engine.offer` and `drop`); what the balancer restates is named in `rollout_balancer.py`.
"""

from collections.abc import Iterator
from functools import cache

from equipoise.planning.rollout import (
    DeadlineCheck,
    State,
)
from equipoise.rank.errors import GroupError
from equipoise.rank.header import (
    StepHeader,
    agreed_generation,
    check_group,
    digest_word,
)
from tests.model_checking.explorer import Model
from tests.model_checking.rollout_balancer import (
    beat,
    connect,
    cut,
    cut_all,
    give,
    hear,
    plan,
    runs_only,
    settled,
    started,
    write,
)
from tests.model_checking.rollout_world import (
    NAMES,
    NUM_RANKS,
    TABLES,
    Abort,
    Balancer,
    Content,
    Rank,
    Rejected,
    Stage,
    Staged,
    Store,
    Switched,
    WaveKey,
    World,
    layout_of,
    put,
    wave_of,
)


def rollout_model(
    *,
    plans: int,
    crashes: int,
    breaks: int,
    forgets: int = 0,
    lies: int = 0,
) -> Model[World]:
    """Return the model: how many plans are made, and how often what may fail."""
    first = Content(1, 0)
    return Model(
        initial=World(
            balancer=Balancer(
                current=first,
                next_generation=2,
                heard=((first, None),) * NUM_RANKS,
            ),
            store=Store(committed=first, proposed=None, highest=1),
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
        yield "a balancer starts", started(world)
    else:
        yield from _at_balancer(world, balancer)
    if world.forgets_left:
        forgotten = world._replace(
            store=Store(None, None, 0), forgets_left=world.forgets_left - 1, balancer=None
        )
        yield "the store forgets, and the balancer ends", cut_all(forgotten)


def _at_ranks(world: World) -> Iterator[tuple[str, World]]:
    for index, rank in enumerate(world.ranks):
        if rank.inbox:
            message = rank.inbox[0]
            after = _handle_at_rank(rank._replace(inbox=rank.inbox[1:]), message)
            yield f"rank {index} handles {message}", put(world, index, after)
        if world.lies_left and rank.connected and rank.staged is not None:
            lie = Switched(rank.staged.generation, world.steps + 1)
            lying = put(world, index, rank._replace(outbox=_sent(rank, lie)))
            yield f"rank {index} falsely reports a switch", lying._replace(lies_left=0)
        if rank.header is None:
            header = (rank.running, rank.staged)
            yield f"rank {index} sends its header", put(world, index, rank._replace(header=header))
    if all(rank.header is not None for rank in world.ranks):
        yield "the ranks step", _stepped(world)


def _at_balancer(world: World, balancer: Balancer) -> Iterator[tuple[str, World]]:
    for index, rank in enumerate(world.ranks):
        if rank.connected and rank.outbox:
            message = rank.outbox[0]
            read = put(world, index, rank._replace(outbox=rank.outbox[1:]))
            yield f"the balancer hears {message} of rank {index}", hear(read, index, message)
        elif rank.connected and not rank.inbox:
            beaten = beat(world, index)
            if beaten != world:
                yield f"the balancer hears a heartbeat of rank {index}", beaten
        elif not rank.connected:
            yield f"rank {index} connects", connect(world, index)
        if rank.connected and world.breaks_left:
            yield f"the stream of rank {index} breaks", cut(world, index)
    if balancer.writes:
        yield "the store writes", write(world, confirmed=True)
        if world.crashes_left:
            yield "the store writes, its answer is lost", write(world, confirmed=False)
    yield from _at_wave(world, balancer)
    if world.crashes_left:
        crashed = world._replace(balancer=None, crashes_left=world.crashes_left - 1)
        yield "the balancer crashes", cut_all(crashed)


def _at_wave(world: World, balancer: Balancer) -> Iterator[tuple[str, World]]:
    wave = balancer.wave
    is_free = wave is None or wave.state in {State.ACTIVE, State.ABORTED}
    # A commit is retried after the store answered or timed out; and a timeout is longer than the
    # time between heartbeats, so every connected rank has confirmed or denied a switch before it.
    waits = not is_free and wave.state is State.SWITCHED and balancer.writes
    if not is_free and not waits and not _awaits_heartbeats(world, wave):
        yield "a timeout fires", settled(give(world, DeadlineCheck()))
    current = balancer.current
    if is_free and world.plans_left and current is not None and runs_only(balancer, current):
        for table in range(len(TABLES)):
            if table != current.table:
                yield f"a plan of table {table} is accepted", plan(world, table)


def _awaits_heartbeats(world: World, wave: WaveKey) -> bool:
    connected = {index for index, rank in enumerate(world.ranks) if rank.connected}
    answered = wave.switched_ranks | wave.denying_ranks | wave.disproved_ranks
    return wave_of(wave).awaits_reports and not connected <= answered


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
        num_drafts=0,
        generation=running.generation,
        staged_generation=staged.generation if staged else 0,
        leaving=0,
        peers_digest=1,
        layout_digest=digest_word(layout_of(running).digest()),
        staged_digest=digest_word(layout_of(staged).digest()) if staged else 0,
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
