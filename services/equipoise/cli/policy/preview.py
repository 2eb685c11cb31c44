"""`equipoise policy preview`: what a policy would decide on current loads. It changes nothing.

Loads and layout come from a running balancer, or from files. The decision is made here, by the
balancer's own code.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from equipoise.cli.display import bytes_words, console
from equipoise.cli.live.access import explained
from equipoise.cli.offline.inputs import pool_topology, read_case, read_current
from equipoise.cli.offline.settings import LoadsSettings, PoolSettings, ToolInputError
from equipoise.cli.policy.files import policies_by_pool, read_file
from equipoise.planning.arrays import Load
from equipoise.planning.layout import Layout, contiguous_layout
from equipoise.planning.load import assignments_per_layer, detect_shift
from equipoise.planning.policy import Policy
from equipoise.planning.proposal import Proposal, ProposalRequest, propose
from equipoise.planning.topology import ModelShape, Topology
from equipoise.policy.digest import digest
from equipoise.trust.credentials import Credentials
from equipoise.wire.layouts import layout_from_proto, model_from_proto
from equipoise.wire.limits import MAX_STATUS_BYTES
from equipoise_api.v1 import status_pb2 as pb
from equipoise_api.v1 import status_pb2_grpc


class PreviewError(RuntimeError):
    """A balancer cannot be asked, or has no loads yet; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Situation:
    """What a decision rests on besides the policy; loads are [layers, experts].

    `slow` and `fast` are in assignments per second, `window` in assignments.
    """

    pool: str
    current: Layout
    model: ModelShape
    topology: Topology
    slow: Load
    fast: Load
    window: Load
    last_switch_s: float | None


def preview_running(
    file: Path,
    *,
    pool: str,
    address: str,
    credentials: Credentials,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Preview on the loads of a pool of a running balancer.

    Raises:
        ToolInputError: the file cannot be read.
        PolicyError: it is refused.
        PreviewError: the balancer cannot be asked, or the pool has no loads yet.
    """
    read = read_file(file)
    limit = (("grpc.max_receive_message_length", MAX_STATUS_BYTES),)
    with (
        credentials.blocking_channel(address, options=limit) as channel,
        explained(address, credentials),
    ):
        situation = _ask(
            status_pb2_grpc.StatusStub(channel), credentials, pool=pool, timeout_s=timeout_s
        )
    (policy,) = policies_by_pool(read, situation.pool).values()
    return _show(situation, policy, as_json=as_json)


def preview_recorded(
    file: Path, *, pool: str, source: LoadsSettings, seats: PoolSettings, as_json: bool
) -> int:
    """Preview on recorded loads: planned for all windows, judged on the last one.

    Raises:
        ToolInputError: a file cannot be read, or they contradict each other.
        FormatError: a file of loads or of a layout makes no sense.
        PolicyError: the policy is refused.
    """
    read = read_file(file)
    case = read_case(source)
    topology = pool_topology(seats, case.model)
    current = read_current(seats, case=case, topology=topology)
    window = case.recording.windows[-1].astype(np.float64)
    situation = Situation(
        pool=pool or "default",
        current=current.layout
        if current is not None
        else contiguous_layout(
            num_layers=case.model.num_layers,
            num_experts=case.model.num_experts,
            num_ranks=topology.num_ranks,
            slots_per_rank=topology.slots_per_rank,
        ),
        model=case.model,
        topology=topology,
        slow=case.recording.total().astype(np.float64),
        fast=window,
        window=window,
        last_switch_s=None,
    )
    (policy,) = policies_by_pool(read, pool or "default").values()
    return _show(situation, policy, as_json=as_json)


def decided(situation: Situation, policy: Policy, *, now: float) -> Proposal:
    """What the balancer would decide under `policy` if a window closed `now`."""
    shift = detect_shift(
        situation.fast,
        situation.slow,
        assignments=assignments_per_layer(situation.window),
        threshold=policy.shift_threshold,
    )
    return propose(
        ProposalRequest(
            current=situation.current,
            average=situation.slow,
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


def _show(situation: Situation, policy: Policy, *, as_json: bool) -> int:
    proposal = decided(situation, policy, now=time.time())
    verdict = proposal.verdict
    document = {
        "pool": situation.pool,
        "policy_hash": digest(policy),
        "accepted": verdict.accepted,
        "reason": verdict.reason,
        "algorithm": proposal.plan.algorithm.value,
        "balancedness_current": verdict.balancedness_current,
        "balancedness_proposed": verdict.balancedness_proposed,
        "moves": verdict.moves,
        "bytes": verdict.bytes,
        "waves": len(proposal.waves),
    }
    if as_json:
        print(json.dumps(document, indent=2))
        return 0
    out = console()
    word = "would move" if verdict.accepted else "would move nothing"
    out.print(f"pool {situation.pool}, policy {document['policy_hash']}: {word}")
    out.print(f"  {verdict.reason}")
    if verdict.accepted:
        out.print(
            f"  {verdict.moves:,} moves, {bytes_words(verdict.bytes)}, in {len(proposal.waves)} "
            "generation(s)"
        )
    return 0


def _ask(
    stub: status_pb2_grpc.StatusStub, credentials: Credentials, *, pool: str, timeout_s: float
) -> Situation:
    shown = credentials.metadata()
    answer = stub.GetStatus(pb.GetStatusRequest(pool=pool), timeout=timeout_s, metadata=shown)
    status = answer.status
    loads = stub.GetLoads(pb.GetLoadsRequest(pool=status.pool), timeout=timeout_s, metadata=shown)
    layout = stub.GetLayout(
        pb.GetLayoutRequest(pool=status.pool), timeout=timeout_s, metadata=shown
    )
    if not loads.window_assignments:
        raise PreviewError(f"pool {status.pool} has closed no window yet: ask again in a moment")
    if not layout.node_of_rank:
        raise PreviewError(f"pool {status.pool} is changing its ranks: ask again in a moment")
    current = layout_from_proto(layout.layout)
    shape = (loads.num_layers, loads.num_experts)
    slow, fast, window = (
        _load(cells, shape)
        for cells in (
            loads.slow_assignments_per_s,
            loads.fast_assignments_per_s,
            loads.window_assignments,
        )
    )
    return Situation(
        pool=status.pool,
        current=current,
        model=model_from_proto(status.model),
        topology=Topology(
            node_of_rank=tuple(layout.node_of_rank), slots_per_rank=current.slots_per_rank
        ),
        slow=slow,
        fast=fast,
        window=window,
        last_switch_s=status.switches[0].time_unix_s if status.switches else None,
    )


def _load(cells: bytes, shape: tuple[int, int]) -> Load:
    if len(cells) != 8 * shape[0] * shape[1]:
        raise ToolInputError("the balancer sent loads of another shape than it says: update it")
    table: Load = np.frombuffer(cells, dtype="<f8").reshape(shape).astype(np.float64)
    return table
