"""Conversion of the periodic messages: `Report` and `Heartbeat`."""

from dataclasses import fields

import numpy as np

from equipoise.planning.counters import LoadReport
from equipoise.planning.node_traffic import NodeCounts
from equipoise.planning.phase import Phase
from equipoise.planning.topology import ModelShape
from equipoise.wire import checks
from equipoise.wire.errors import InvalidMessageError
from equipoise.wire.layouts import fields_of
from equipoise.wire.messages import Heartbeat, RankStats, Report, WorkerTimeout
from equipoise_api.v1 import worker_link_pb2 as pb

MAX_TIMEOUTS = 16
"""Most timeouts in a report."""

MAX_NODES_OF_ROW = 64
"""Most nodes that a row may reach: it has a slot on each. Of published models Switch-C has 1 slot
per row, Qwen3.5-397B 10, and DeepSeek-V3 9."""

PHASES = {
    pb.PHASE_PREFILL: Phase.PREFILL,
    pb.PHASE_DECODE: Phase.DECODE,
    pb.PHASE_MIXED: Phase.MIXED,
}
"""Phases by number."""

PHASE_NUMBERS = {phase: number for number, phase in PHASES.items()}
"""Numbers by phase."""


def report_to_proto(report: Report) -> pb.LoadReport:
    """Convert a report."""
    load, beat, nodes = report.load, report.heartbeat, report.stats.nodes
    assert load.assignments.ndim == 2, load.assignments.shape
    return pb.LoadReport(
        epoch=load.epoch,
        rank=load.rank,
        generation=load.generation,
        phase=PHASE_NUMBERS[load.phase],
        assignments=load.assignments.astype("<u8", copy=False).tobytes(),
        timeouts=[pb.WorkerTimeout(**fields_of(timeout)) for timeout in report.stats.timeouts],
        heartbeat=None if beat is None else pb.Heartbeat(**fields_of(beat)),
        nodes=None if nodes is None else pb.NodeCounts(**fields_of(nodes)),
        **{name: getattr(report.stats, name) for name in _STAT_COUNTS},
    )


def report_from_proto(
    message: pb.LoadReport, *, model: ModelShape, slots_per_rank: int, boot_id: str
) -> Report:
    """Check and convert a report; its counters are uint64 [layers, slots_per_rank].

    Raises:
        InvalidMessageError: "report_shape", "report_phase", "report_rank" or "report_range"; the
            last also if the counters are floats, including NaN.
    """
    if message.phase not in PHASES:
        raise InvalidMessageError(
            "report_phase", f"report: phase must be prefill, decode or mixed, not {message.phase}"
        )
    shape = (model.num_layers, slots_per_rank)
    assignments = checks.table("report", message, "assignments", dtype="<u8", shape=shape).astype(
        np.uint64, copy=False
    )
    if assignments.max() > checks.MAX_COUNT:
        layer, slot = (int(index) for index in np.argwhere(assignments > checks.MAX_COUNT)[0])
        raise InvalidMessageError(
            "report_range",
            f"report: the counter of layer {layer}, own slot {slot} is "
            f"{int(assignments[layer, slot])}, above 2^53: send little-endian whole numbers",
        )
    load = LoadReport(
        boot_id=boot_id,
        **checks.place("report", message),
        phase=PHASES[message.phase],
        assignments=assignments,
    )
    beat = heartbeat_from_proto(message.heartbeat) if message.HasField("heartbeat") else None
    return Report(load=load, stats=_stats_from_proto(message), heartbeat=beat)


def heartbeat_from_proto(message: pb.Heartbeat) -> Heartbeat:
    """Check and convert a heartbeat. Raises InvalidMessageError: a number is out of range."""
    return Heartbeat(
        **checks.counts("heartbeat", message, "epoch", "generation", "sequence"),
        **checks.counts("heartbeat", message, "weights_version"),
        staged_generation=checks.staged_generation(
            "heartbeat", message.staged_generation, generation=message.generation
        ),
        draining=message.draining,
        idle=message.idle,
        layout_digest=checks.layout_digest("heartbeat", message.layout_digest),
    )


def _stats_from_proto(message: pb.LoadReport) -> RankStats:
    return RankStats(
        **checks.counts("report", message, *_STAT_COUNTS),
        timeouts=_timeouts_from_proto(message) if message.timeouts else (),
        nodes=_nodes_from_proto(message.nodes) if message.HasField("nodes") else None,
    )


def _timeouts_from_proto(message: pb.LoadReport) -> tuple[WorkerTimeout, ...]:
    if len(message.timeouts) > MAX_TIMEOUTS:
        raise InvalidMessageError(
            "report_timeouts",
            f"report: timeouts must be at most {MAX_TIMEOUTS}, not {len(message.timeouts)}",
        )
    names = [timeout.name for timeout in message.timeouts]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidMessageError(
            "report_timeouts", f"report: timeouts names {checks.shorten(twice)} twice"
        )
    return tuple(
        WorkerTimeout(
            name=checks.name("report", "timeout", timeout.name),
            timeout_s=checks.duration_s("report", "timeout_s", timeout.timeout_s),
            reached=checks.count("report", "reached", timeout.reached),
            latest=checks.reason(timeout.latest) if timeout.latest else "",
        )
        for timeout in message.timeouts
    )


def _nodes_from_proto(message: pb.NodeCounts) -> NodeCounts:
    if len(message.rows_by_nodes) > MAX_NODES_OF_ROW + 1:
        raise InvalidMessageError(
            "report_nodes",
            f"report: rows_by_nodes must have at most {MAX_NODES_OF_ROW + 1} counts, not "
            f"{len(message.rows_by_nodes)}",
        )
    checks.count("report", "the sum of rows_by_nodes", sum(message.rows_by_nodes))
    return NodeCounts(
        rows_by_nodes=tuple(message.rows_by_nodes),
        **checks.counts("report", message, *_NODE_COUNTS),
    )


_STAT_COUNTS = tuple(one.name for one in fields(RankStats) if one.name not in {"timeouts", "nodes"})
_NODE_COUNTS = tuple(one.name for one in fields(NodeCounts) if one.name != "rows_by_nodes")
