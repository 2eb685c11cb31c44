"""A pool's state as the Status service shows it. Read-only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.balancer.failures import Failures
from equipoise.balancer.pools import PoolViews
from equipoise.planning.expected_gain import ExpectedGain, RealisedGain
from equipoise.planning.layout import Layout
from equipoise.planning.node_traffic import NodeTraffic
from equipoise.planning.redundancy import Redundancy
from equipoise.planning.slowness import slowdowns
from equipoise.pool.counters import Timeout
from equipoise.pool.decisions import MAX_JUDGED
from equipoise.pool.health import Health
from equipoise.pool.loads import ClosedWindow
from equipoise.pool.member import Member
from equipoise.pool.pool import Pool
from equipoise.pool.records import AuditRecord, DecisionRecord
from equipoise.wire.checks import total
from equipoise.wire.layouts import fields_of, layout_to_proto, model_to_proto
from equipoise_api.v1 import status_pb2 as pb

_HEALTH = {
    Health.WAITING: pb.POOL_HEALTH_WAITING,
    Health.SERVING: pb.POOL_HEALTH_SERVING,
    Health.DEGRADED: pb.POOL_HEALTH_DEGRADED,
    Health.DOWN: pb.POOL_HEALTH_DOWN,
}

_HANDOVERS = tuple(field.name for field in pb.HandoverStatus.DESCRIPTOR.fields)
"""Fields of `RankStats` that are summed over the ranks."""

_NOT_SHOWN = ("steps", "busy_us", "step_us", "timeouts", "nodes", *_HANDOVERS)
"""Fields of `RankStats` that `RankStatus` has in another form, or not."""


def pool_status(
    pool: Pool,
    *,
    now: float,
    election: Sequence[Timeout] = (),
    redundancy: Redundancy | None = None,
) -> pb.PoolStatus:
    """The whole state of one pool; `election` are waits that belong to no pool.

    `redundancy` is a number of redundant slots that would suit it better.
    """
    diagnosis = pool.diagnosis()
    latest, used_places = _LatestWindow.of(pool), _used_places(pool)
    status = pb.PoolStatus(
        pool=pool.name,
        health=_HEALTH[diagnosis.health],
        health_reason=diagnosis.reason,
        phase=pool.roster.phase or "",
        epoch=pool.roster.epoch,
        generation=pool.layouts.stored_generation or 0,
        ranks=[
            _rank_status(pool, member, latest, used_places=used_places, now=now)
            for member in pool.roster.seated()
        ],
        intended_ranks=pool.roster.intended_ranks,
        windows_closed=pool.windows.num_closed,
        interval_s=pool.policy.values.interval_s,
        rejections=[pb.RejectionStatus(**fields_of(one)) for one in pool.counters.rejections.all()],
        switches=[
            pb.SwitchStatus(**fields_of(switch, but=("time_s",)), time_unix_s=switch.time_s)
            for switch in pool.rollouts.switches
        ],
        revision=pool.revision,
        rollouts_completed=pool.rollouts.completed,
        rollouts_aborted=pool.rollouts.aborted,
        windows=[_window_status(window) for window in pool.windows.closed],
        timeouts=[
            pb.TimeoutStatus(**fields_of(one)) for one in (*pool.counters.timeouts.all(), *election)
        ],
        policy=_policy_status(pool),
        poison_requests=pool.counters.poison.total,
        epochs=[
            pb.EpochStatus(**fields_of(record, but=("opened_s",)), opened_unix_s=record.opened_s)
            for record in pool.membership.epochs
        ],
        audit=[audit_to_proto(record) for record in pool.journal.audit],
        gains=_gains(pool),
        handovers=_handovers(pool),
        redundancy=_redundancy_status(redundancy),
        quarantined=[
            pb.QuarantineStatus(**fields_of(one, but=("since_s",)), since_unix_s=one.since_s)
            for one in sorted(pool.quarantine.workers, key=lambda one: one.worker)
        ],
    )
    if pool.roster.shape is not None:
        status.model.CopyFrom(model_to_proto(pool.roster.shape.model))
    window = pool.windows.latest
    status.balancedness = status.balancedness_min_layer = math.nan
    if window is not None:
        status.balancedness = measured(window.balancedness, window)
        status.balancedness_min_layer = measured(window.balancedness_min_layer, window)
        status.window_assignments = total(window.assignments)
        if window.shares is not None:
            status.shares.CopyFrom(pb.ShareStatus(**fields_of(window.shares)))
    imbalance = _imbalance_status(pool)
    if imbalance is not None:
        status.imbalance.CopyFrom(imbalance)
    if window is not None and window.nodes is not None:
        status.node_traffic.CopyFrom(_node_traffic_status(window.nodes))
    if pool.windows.advice is not None:
        status.advice.CopyFrom(pb.AdviceStatus(**fields_of(pool.windows.advice)))
    rollout = _rollout_status(pool, now=now)
    if rollout is not None:
        status.rollout.CopyFrom(rollout)
    if pool.journal.last_decision is not None:
        status.last_decision.CopyFrom(decision_to_proto(pool.journal.last_decision))
    if pool.journal.hold.reason:
        status.hold.CopyFrom(_hold_status(pool))
    return status


def measured(value: float, window: ClosedWindow) -> float:
    """A measure of a window; not a number for one without traffic, which measures nothing."""
    return value if window.assignments else math.nan


def pool_summaries(pools: PoolViews, failures: Failures) -> list[pb.PoolSummary]:
    """A summary of every pool, sorted by name; one that fails does not hide the others."""
    found, unreadable = [], dict(pools.unreadable)
    for name in pools.names():
        unreadable[name] = (
            f"pool {name} cannot be shown because of a bug in the balancer: see its log"
        )
        with failures.confined(name):
            found.append(pool_summary(pools.find(name).pool))
            del unreadable[name]
    found += [
        pb.PoolSummary(
            pool=name, health=pb.POOL_HEALTH_DEGRADED, balancedness=math.nan, unreadable=reason
        )
        for name, reason in unreadable.items()
    ]
    return sorted(found, key=lambda summary: summary.pool)


def pool_summary(pool: Pool) -> pb.PoolSummary:
    """A summary of one pool."""
    latest, advice = pool.windows.latest, pool.windows.advice
    return pb.PoolSummary(
        pool=pool.name,
        health=_HEALTH[pool.diagnosis().health],
        generation=pool.layouts.stored_generation or 0,
        ranks_serving=sum(
            member.connected and member.serving and member.rank not in pool.attendance.silent
            for member in pool.roster.seated()
        ),
        num_ranks=max(pool.roster.num_ranks, pool.roster.intended_ranks),
        balancedness=math.nan if latest is None else measured(latest.balancedness, latest),
        phase=pool.roster.phase or "",
        latent_forms=sorted({one.hello.latent_form for one in pool.roster.seated()} - {""}),
        advised_ranks=0 if advice is None else advice.ranks,
        handovers=_handovers(pool),
    )


def _handovers(pool: Pool) -> pb.HandoverStatus:
    stats = [one.stats for one in pool.roster.seated() if one.stats is not None]
    return pb.HandoverStatus(
        **{name: total(*(getattr(one, name) for one in stats)) for name in _HANDOVERS}
    )


def decision_to_proto(decision: DecisionRecord) -> pb.Decision:
    """A decision as it was recorded, with what was not measured as not a number."""
    status = pb.Decision(**fields_of(decision))
    for name in ("balancedness_current", "balancedness_proposed", "balancedness_realised"):
        setattr(status, name, getattr(decision, name) or math.nan)
    return status


def audit_to_proto(record: AuditRecord) -> pb.AuditRecord:
    """An audit record."""
    return pb.AuditRecord(**fields_of(record))


def loads_response(pool: Pool) -> pb.GetLoadsResponse | None:
    """The loads that decisions are based on; None before all ranks of the pool serve."""
    if pool.windows.loads is None or pool.roster.shape is None:
        return None
    model = pool.roster.shape.model
    response = pb.GetLoadsResponse(
        num_layers=model.num_layers,
        num_experts=model.num_experts,
        slow_assignments_per_s=pool.windows.loads.slow.per_second().astype("<f8").tobytes(),
        fast_assignments_per_s=pool.windows.loads.fast.per_second().astype("<f8").tobytes(),
        slow_samples=pool.windows.loads.slow.samples(),
        slow_half_life_s=pool.policy.values.slow_half_life_s,
        fast_half_life_s=pool.policy.values.fast_half_life_s,
    )
    latest = pool.windows.latest
    if latest is not None and latest.load.shape == (model.num_layers, model.num_experts):
        response.window_assignments = latest.load.astype("<f8").tobytes()
        response.num_ranks = latest.rank_load.shape[1]
        response.window_rank_assignments = latest.rank_load.astype("<f8").tobytes()
        response.window_generation = latest.generation
    return response


def layout_response(pool: Pool, layout: Layout) -> pb.GetLayoutResponse:
    """A layout, with the nodes of its ranks if they are those of the current epoch."""
    nodes = [peer.node for peer in pool.roster.peers]
    return pb.GetLayoutResponse(
        layout=layout_to_proto(layout),
        node_of_rank=nodes if len(nodes) == layout.num_ranks else [],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LatestWindow:
    """What the latest window shows of each rank; empty if unknown."""

    load_shares: Sequence[float] = ()
    busy_step_us: Sequence[float] = ()
    slowdowns: Sequence[float] = ()

    @classmethod
    def of(cls, pool: Pool) -> "_LatestWindow":
        window = pool.windows.latest
        if window is None:
            return cls()
        rank_load = window.rank_load.sum(axis=0)
        total = float(rank_load.sum())
        factors = None if window.pace is None else slowdowns(window.pace)
        return cls(
            load_shares=(rank_load / total).tolist() if total > 0 else (),
            busy_step_us=() if window.pace is None else window.pace.busy_us.tolist(),
            slowdowns=() if factors is None else [float(factor) for factor in factors],
        )


def _used_places(pool: Pool) -> Sequence[int]:
    """Places of each rank that the layout fills; empty without one, or if each slot has one."""
    layout = pool.layouts.current
    return layout.used_places if layout is not None and pool.roster.places_of_rank else ()


def _rank_status(
    pool: Pool, member: Member, latest: _LatestWindow, *, used_places: Sequence[int], now: float
) -> pb.RankStatus:
    assert member.rank is not None, "seated members have a rank"
    status = pb.RankStatus(
        rank=member.rank,
        worker=member.name,
        node=member.hello.node,
        host=member.hello.host,
        zone=member.hello.zone,
        device=member.hello.device,
        kernels=member.hello.kernels,
        engine=member.hello.engine,
        max_replicas=member.hello.max_replicas,
        weights_version=max(member.hello.weights_version, member.weights_version),
        idle=member.idle,
        cache_token_bytes=member.hello.cache_token_bytes,
        boot_id=member.hello.boot_id,
        latent_form=member.hello.latent_form,
        num_places=member.hello.num_places,
        used_places=round(_of_rank(used_places, member.rank)),
        block_tokens=member.hello.block_tokens,
        steps=member.steps,
        address=member.hello.address,
        state=_rank_state(pool, member),
        generation=member.generation,
        staged_generation=member.staged_generation,
        silent_s=max(0.0, now - member.last_heard_s),
        load_share=_of_rank(latest.load_shares, member.rank, unknown=math.nan),
        busy_step_us=round(_of_rank(latest.busy_step_us, member.rank)),
        slowdown=_of_rank(latest.slowdowns, member.rank),
        **({} if member.stats is None else fields_of(member.stats, but=_NOT_SHOWN)),
    )
    if member.rank in pool.windows.slow:
        status.trouble = pool.windows.slow[member.rank].reason
    return status


def _rank_state(pool: Pool, member: Member) -> str:
    if not member.connected:
        return "gone"
    if member.rank in pool.attendance.silent:
        return "silent"
    return "leaving" if member.draining else "connected"


def _of_rank(values: Sequence[float], rank: int, *, unknown: float = 0.0) -> float:
    """A rank's value; `unknown` for a rank without one."""
    return values[rank] if rank < len(values) else unknown


def _rollout_status(pool: Pool, *, now: float) -> pb.RolloutStatus | None:
    rollout = pool.rollouts.current
    if rollout is None:
        return None
    expert_bytes = pool.roster.shape.model.expert_bytes if pool.roster.shape is not None else 0
    return pb.RolloutStatus(
        generation=rollout.target.generation,
        state=rollout.state.value,
        moves=pool.rollouts.moves,
        bytes=pool.rollouts.moves * expert_bytes,
        waves_left=pool.rollouts.waves_left,
        staged_ranks=sorted(rollout.staged_ranks),
        switched_ranks=sorted(rollout.switched_ranks),
        state_age_s=max(0.0, now - rollout.entered_s),
    )


def _redundancy_status(found: Redundancy | None) -> pb.RedundancyStatus | None:
    if found is None:
        return None
    return pb.RedundancyStatus(**fields_of(found), reason=found.reason)


def _imbalance_status(pool: Pool) -> pb.ImbalanceStatus | None:
    imbalance, cost = pool.windows.imbalance, pool.windows.step_cost
    if imbalance is None:
        return None
    constants = {} if cost is None else fields_of(cost, but=("spread",))
    return pb.ImbalanceStatus(**fields_of(imbalance), **constants)


def _node_traffic_status(traffic: NodeTraffic) -> pb.NodeTrafficStatus:
    return pb.NodeTrafficStatus(
        **fields_of(traffic, but=("rows_by_nodes",)),
        rows_by_nodes=map(total, traffic.rows_by_nodes),
        nodes=traffic.nodes,
        most_nodes=traffic.most_nodes,
        is_two_hop=traffic.is_two_hop,
    )


def _hold_status(pool: Pool) -> pb.HoldStatus:
    hold, current = pool.journal.hold, pool.layouts.current
    return pb.HoldStatus(
        paused=hold.paused,
        pinned=hold.pinned,
        pinned_generation=hold.pinned_generation,
        at_pin=hold.pin is not None and current is not None and current.same_placement(hold.pin),
    )


def _policy_status(pool: Pool) -> pb.PolicyStatus:
    rejection = pool.policy.book.latest_rejection
    return pb.PolicyStatus(
        hash=pool.policy.in_force.digest,
        source=pool.policy.in_force.source,
        loaded_unix_s=pool.policy.in_force.loaded_s,
        num_rejected=pool.policy.book.num_rejected,
        rejection=rejection.reason if rejection is not None else "",
        rejected_unix_s=rejection.rejected_s if rejection is not None else 0.0,
        is_paused=pool.policy.values.pause,
    )


def _gains(pool: Pool) -> list[pb.GainStatus]:
    waiting = (
        [] if pool.decisions.watched is None else [_gain_status(pool.decisions.watched.expected)]
    )
    judged = [
        _gain_status(one.expected, realised=one.realised, judged_s=one.judged_s)
        for one in pool.decisions.judged
    ]
    return (waiting + judged)[:MAX_JUDGED]


def _gain_status(
    expected: ExpectedGain, *, realised: RealisedGain | None = None, judged_s: float = 0.0
) -> pb.GainStatus:
    status = pb.GainStatus(
        generation=expected.generation,
        before_generation=expected.before.generation,
        judged_unix_s=judged_s,
        outcome="open",
        balancedness_expected=expected.balancedness_expected,
        gain_expected=expected.gain,
    )
    if expected.step is not None:
        status.step_s_before = expected.step.current_s
        status.step_s_expected = expected.step.proposed_s
    if realised is not None:
        status.step_s_realised = realised.step_s
        status.outcome = realised.outcome.value
        status.balancedness_realised = realised.balancedness
        status.gain_realised = realised.gain
        status.reason = realised.reason
    return status


def _window_status(window: ClosedWindow) -> pb.WindowStatus:
    return pb.WindowStatus(
        window=window.number,
        closed_unix_s=window.closed_s,
        balancedness=measured(window.balancedness, window),
        max_over_mean=measured(window.max_over_mean, window),
        assignments=total(window.assignments),
        generation=window.generation,
        shift_detected=window.shift.detected,
    )
