"""`equipoise policy preview`: what a policy would decide for current or recorded loads.

The decision is made in this process, with the balancer's code. Nothing changes.
"""

import time
from dataclasses import dataclass

import numpy as np

from equipoise.cli.display import console, format_count, print_json
from equipoise.cli.live.client import BalancerClient, BalancerRejectedError, connected
from equipoise.cli.live.loads import load_table
from equipoise.cli.offline.inputs import pool_topology, read_case, starting_layout
from equipoise.cli.offline.settings import PoolSettings, RecordingSettings
from equipoise.cli.policy.files import policy_of, read_file
from equipoise.cli.policy.settings import PolicyPreviewSettings
from equipoise.planning.arrays import Load
from equipoise.planning.layout import Layout
from equipoise.planning.load import assignments_per_layer, detect_shift
from equipoise.planning.phase import Phase
from equipoise.planning.policy import Policy
from equipoise.planning.proposal import Proposal, ProposalRequest, propose
from equipoise.planning.topology import ModelShape, Topology
from equipoise.policy.digest import digest
from equipoise.settings.numbers import format_bytes
from equipoise.wire.layouts import layout_from_proto, model_from_proto


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Situation:
    """What a decision depends on other than the policy."""

    pool: str
    """Name of the pool."""

    current: Layout
    """The current layout."""

    model: ModelShape
    """The model's shape."""

    topology: Topology
    """The pool's ranks."""

    slow: Load
    """Slow average, assignments per second, [layers, experts]."""

    slow_samples: float
    """Assignments per layer that the slow average is as precise as."""

    fast: Load
    """Fast average, assignments per second, [layers, experts]."""

    window: Load
    """The latest window, assignments, [layers, experts]."""

    last_switch_s: float | None
    """Unix time of the latest switch, if any."""

    phase: Phase | None = None
    """Phase that the pool serves; None if unknown."""


def run(settings: PolicyPreviewSettings) -> int:
    """Print what the policy would decide.

    Raises:
        InvalidSettingsError: a file cannot be read, files and options contradict each other, or
            the phase of recorded loads decides and is missing.
        FormatError: a file of loads or of a layout is invalid.
        PolicyError: the policy is invalid.
        BalancerRejectedError: the balancer is unreachable, or the pool has no loads yet.
    """
    read = read_file(settings.file)
    if settings.loads:
        situation = recorded_situation(settings)
        policy = policy_of(read, situation.pool, situation.phase, file=settings.file)
    else:
        with connected(settings) as client:
            situation = _current_situation(client)
        policy = read.of(situation.pool, situation.phase)
    _show(situation, policy, as_json=settings.json)
    return 0


def recorded_situation(settings: PolicyPreviewSettings) -> Situation:
    """Recorded loads: all windows together for planning, the last one for the verdict."""
    case = read_case(
        RecordingSettings(
            loads=settings.loads, groups=settings.groups, model_config=settings.model_config
        )
    )
    assert settings.ranks is not None, "the settings require it"
    pool = PoolSettings(
        current=settings.current,
        current_format=settings.current_format,
        nodes=settings.nodes,
        ranks=settings.ranks,
        slots=settings.slots,
    )
    topology = pool_topology(pool, case.model)
    window = case.recording.windows[-1].astype(np.float64)
    total = case.recording.total().astype(np.float64)
    return Situation(
        pool=settings.pool or "default",
        current=starting_layout(pool, case=case, topology=topology),
        model=case.model,
        topology=topology,
        slow=total,
        slow_samples=assignments_per_layer(total),
        fast=window,
        window=window,
        last_switch_s=None,
        phase=settings.phase,
    )


def decided(situation: Situation, policy: Policy, *, now: float) -> Proposal:
    """The decision under `policy` if a window closed at `now`, Unix seconds."""
    shift = detect_shift(
        situation.fast,
        situation.slow,
        assignments=assignments_per_layer(situation.window),
        factor=policy.shift_factor,
    )
    return propose(
        ProposalRequest(
            current=situation.current,
            average=situation.slow,
            samples=situation.slow_samples,
            window=situation.window,
            shift=shift,
            model=situation.model,
            topology=situation.topology,
            policy=policy,
            policy_hash=digest(policy),
            first_generation=situation.current.generation + 1,
            now=now,
            last_switch_s=situation.last_switch_s,
        )
    )


def _show(situation: Situation, policy: Policy, *, as_json: bool) -> None:
    proposal = decided(situation, policy, now=time.time())
    verdict, has_traffic = proposal.verdict, situation.window.any()
    document = {
        "pool": situation.pool,
        "policy_hash": digest(policy),
        "accepted": verdict.accepted,
        "reason": verdict.reason,
        "algorithm": proposal.plan.algorithm.value,
        "balancedness_current": verdict.balancedness_current if has_traffic else None,
        "balancedness_proposed": verdict.balancedness_proposed if has_traffic else None,
        "moves": verdict.moves,
        "bytes": verdict.bytes,
        "waves": len(proposal.waves),
    }
    if as_json:
        print_json(document)
        return
    out = console()
    action = "would adopt the plan" if verdict.accepted else "would move nothing"
    out.print(f"pool {situation.pool}, policy {document['policy_hash']}: {action}")
    out.print(f"  {verdict.reason}")
    if verdict.accepted:
        out.print(
            f"  {format_count(verdict.moves, 'move')} ({format_bytes(verdict.bytes)}) in "
            f"{format_count(len(proposal.waves), 'generation')}"
        )


def _current_situation(client: BalancerClient) -> Situation:
    status, loads, layout = client.status(), client.loads(), client.layout()
    if not loads.window_assignments:
        raise BalancerRejectedError(
            f"pool {status.pool} has closed no window yet: retry in a moment"
        )
    if not layout.node_of_rank:
        raise BalancerRejectedError(f"pool {status.pool} is changing its ranks: retry in a moment")
    current = layout_from_proto(layout.layout)
    shape = (loads.num_layers, loads.num_experts)
    slow, fast, window = (
        load_table(cells, shape)
        for cells in (
            loads.slow_assignments_per_s,
            loads.fast_assignments_per_s,
            loads.window_assignments,
        )
    )
    return Situation(
        pool=status.pool,
        phase=Phase(status.phase) if status.phase else None,
        current=current,
        model=model_from_proto(status.model),
        topology=Topology(
            node_of_rank=tuple(layout.node_of_rank),
            slots_per_rank=current.slots_per_rank,
            places_of_rank=tuple(rank.num_places for rank in status.ranks if rank.num_places),
        ),
        slow=slow,
        slow_samples=loads.slow_samples,
        fast=fast,
        window=window,
        last_switch_s=status.switches[0].time_unix_s if status.switches else None,
    )
