"""A pool's status message as Rich renderables or as one line. Pure.

Text from messages is never interpreted as markup. Used by `equipoise status` and the demo.
"""

import math
from collections.abc import Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from equipoise.cli.display import NO_DATA, format_time
from equipoise.cli.live.handovers import handovers_text
from equipoise.cli.live.ranks import (
    balance_style,
    format_duration,
    ranks_view,
    worst_first,
)
from equipoise.planning.topology import expert_text
from equipoise.settings.sizes import format_bytes
from equipoise_api.v1 import status_pb2, worker_link_pb2

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_LOW = 0.4  # balancedness of the lowest bar
_NUM_WINDOWS = 64
_NUM_SWITCHES = 3
_NUM_TROUBLES = 5
_NUM_NAMED = 8
"""Ranks that a line names one by one."""
_NUM_FRAME_LINES = 4
"""Lines of the frame, of a note below it, and of the cursor."""
NUM_DECISIONS = 5
"""Number of decisions to show."""

_HEALTH_STYLES = {
    status_pb2.POOL_HEALTH_SERVING: "green",
    status_pb2.POOL_HEALTH_WAITING: "yellow",
    status_pb2.POOL_HEALTH_DEGRADED: "red",
    status_pb2.POOL_HEALTH_DOWN: "red",
}


def pool_view(
    status: status_pb2.PoolStatus,
    *,
    tokens_per_s: Mapping[int, float] | None = None,
    decisions: Sequence[status_pb2.Decision] = (),
    fits: bool = False,
    framed: bool = True,
) -> RenderableType:
    """The whole pool: what is wrong, what is being done and decided, balance, then ranks.

    `tokens_per_s` is by rank, from a `RateMeter`. `decisions` are the latest, newest first; the
    default is the last one in the status. If it `fits`, the worst ranks take the lines that the
    rest leaves of the terminal.
    """
    parts: list[RenderableType] = []
    if status.health_reason:
        parts.append(Text(status.health_reason, style=health_style(status.health)))
    parts += [
        Text(line, style="yellow") for line in (hold_text(status), _policy_fault(status)) if line
    ]
    parts += [_troubles(status), _progress(status, decisions), balance_view(status)]
    engines = sorted({_engine_text(rank) for rank in status.ranks if rank.engine})
    parts += [Text(engine, style="dim") for engine in engines]
    body = _AboveRanks(parts, status, tokens_per_s=tokens_per_s or {}, fits=fits)
    title = Text.assemble(
        ("pool ", "dim"),
        (status.pool, "bold"),
        "  ",
        (health_name(status.health), f"bold {health_style(status.health)}"),
        (f"  {status.phase}" if status.phase else "", "dim"),
    )
    experts = experts_text(status.model.num_experts, shared=shared_expert(status.model))
    subtitle = Text(
        f"generation {status.generation} · epoch {status.epoch} · "
        f"{status.model.num_layers} layers x {experts}"
    )
    if not framed:
        return Group(title, subtitle, body)
    return Panel(body, title=title, subtitle=subtitle, title_align="left", subtitle_align="right")


class _AboveRanks:
    """Parts of a pool's picture, and below them the ranks for which there is room."""

    def __init__(
        self,
        parts: Sequence[RenderableType],
        status: status_pb2.PoolStatus,
        *,
        tokens_per_s: Mapping[int, float],
        fits: bool,
    ) -> None:
        self._parts = parts
        self._status = status
        self._tokens_per_s = tokens_per_s
        self._fits = fits

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = None
        if self._fits:
            above = console.render_lines(Group(*self._parts), options.update(height=None))
            room = max(0, console.height - len(above) - _NUM_FRAME_LINES)
        yield from self._parts
        yield ranks_view(
            self._status, tokens_per_s=self._tokens_per_s, room=room, width=options.max_width
        )


def status_line(status: status_pb2.PoolStatus) -> str:
    """The pool in one line, for logs and pipes."""
    parts = [
        f"pool {status.pool}",
        health_name(status.health),
        f"generation {status.generation}",
    ]
    if status.windows_closed:
        parts.append(
            f"window {status.windows_closed}: balancedness {balance_text(status.balancedness)} "
            f"on {status.window_assignments:,} assignments"
        )
    if status.HasField("rollout"):
        parts.append(f"generation {status.rollout.generation} {status.rollout.state}")
    if status.health_reason:
        parts.append(status.health_reason)
    parts += filter(None, (hold_text(status), _policy_fault(status)))
    if status.HasField("last_decision"):
        parts.append(decision_text(status.last_decision))
    return " · ".join(parts)


def hold_text(status: status_pb2.PoolStatus) -> str:
    """Who or what paused or pinned the pool; empty if nothing did."""
    hold = status.hold
    parts = [f"paused by {hold.paused}"] if hold.paused else []
    if status.policy.is_paused:
        parts.append("paused by the policy")
    if hold.pinned:
        where = f" to the placement of generation {hold.pinned_generation}"
        parts.append(
            f"pinned{where if hold.pinned_generation else ''} by {hold.pinned}"
            + ("" if hold.at_pin else " (not reached yet)")
        )
    return "; ".join(parts)


def _policy_fault(status: status_pb2.PoolStatus) -> str:
    """Why the newest policy was rejected, and which one is in force; empty if it was not."""
    policy = status.policy
    if not policy.rejection:
        return ""
    return f"policy {policy.hash} stays in force, the newest was rejected: {policy.rejection}"


def balance_view(status: status_pb2.PoolStatus) -> RenderableType:
    """Balancedness of recent windows, marked where traffic shifted or the layout changed."""
    if not status.windows_closed:
        return Text("no window has closed yet", style="dim")
    windows = status.windows[-_NUM_WINDOWS:]
    picture = sparkline([window.balancedness if window.assignments else None for window in windows])
    facts = Text.assemble(
        ("balancedness ", "dim"),
        balance_text(status.balancedness),
        (f"  worst layer {balance_text(status.balancedness_min_layer)}", "dim"),
        (f"  window {status.windows_closed}: {status.window_assignments:,} assignments", "dim"),
        (f" in {status.interval_s:g} s", "dim"),
    )
    views: list[RenderableType] = [facts, picture, window_marks(windows)]
    if status.HasField("imbalance"):
        views.append(Text(imbalance_text(status.imbalance)))
    if status.HasField("node_traffic"):
        views.append(Text(node_traffic_text(status.node_traffic), style="dim"))
    if status.HasField("shares") and status.shares.uneven_layers:
        views.append(Text(shares_text(status.shares, model=status.model), style="dim"))
    return Group(*views)


def imbalance_text(imbalance: status_pb2.ImbalanceStatus) -> str:
    """What imbalance costs, measured or at most, and what that is based on."""
    at_most = "" if imbalance.is_measured else "at most "
    share = f"{imbalance.share:.0%}"
    if imbalance.step_s:
        error = f" ± {imbalance.error_s * 1e3:.2g}" if imbalance.error_s else ""
        cost = f"{imbalance.cost_s * 1e3:.3g}{error} ms of {imbalance.step_s * 1e3:.3g} ms a step, "
    else:
        cost, share = "", f"{share} of a step"
    return f"imbalance costs {at_most}{cost}{share} ({imbalance.reason})"


def node_traffic_text(traffic: status_pb2.NodeTrafficStatus) -> str:
    """How many rows travel between nodes, and what the other way would send."""
    way, other, would = "one hop", "two hops", traffic.remote_nodes
    if traffic.is_two_hop:
        way, other, would = other, way, traffic.direct_rows
    return (
        f"between nodes, per token and layer: {traffic.sent_rows:.2f} rows by {way} ({other}: "
        f"{would:.2f}), {traffic.sent_outputs:.2f} outputs; a token reaches {traffic.nodes:.2f} "
        f"nodes, at most {traffic.most_nodes}"
    )


def shared_expert(model: worker_link_pb2.ModelShape) -> int | None:
    """The number of the shared expert among the logical ones; None if it is not in slots."""
    return model.num_experts - 1 if model.has_shared_expert else None


def experts_text(num_experts: int, *, shared: int | None) -> str:
    """How many experts a layer has in slots, such as "256 experts and the shared one"."""
    return f"{num_experts} experts" if shared is None else f"{shared} experts and the shared one"


def shares_text(shares: status_pb2.ShareStatus, *, model: worker_link_pb2.ModelShape) -> str:
    """Planned and realised shares, for layouts with uneven shares."""
    expert = expert_text(shares.expert, shared=shared_expert(model))
    return (
        f"uneven shares in {shares.uneven_layers} layers: {shares.misplaced:.1%} of replicated "
        f"experts' assignments misplaced; worst: layer {shares.layer}, slot {shares.slot} served "
        f"{shares.realised:.3f} of {expert}, planned {shares.planned:.3f}"
    )


def sparkline(values: Sequence[float | None]) -> Text:
    """Balancedness values, oldest first, one coloured bar each; a dot stands for no traffic."""
    line = Text()
    for value in values:
        if value is None:
            line.append("·", style="dim")
            continue
        height = (min(max(value, _SPARK_LOW), 1.0) - _SPARK_LOW) / (1.0 - _SPARK_LOW)
        line.append(_BLOCKS[round(height * (len(_BLOCKS) - 1))], style=balance_style(value))
    return line


def window_marks(windows: Sequence[status_pb2.WindowStatus]) -> Text:
    """Events below the sparkline of the same windows: ◆ a traffic shift, ↑ a new layout."""
    line = Text(style="dim")
    for position, window in enumerate(windows):
        switched = position and window.generation != windows[position - 1].generation
        if window.shift_detected:
            line.append("◆", style="magenta")
        else:
            line.append("↑" if switched else " ", style="cyan")
    line.append("  ◆ traffic shifted  ↑ new layout")
    return line


def decision_text(decision: status_pb2.Decision) -> str:
    """A decision with its reason, as one line."""
    return f"decision {decision.sequence} {'yes' if decision.accepted else 'no'}: {decision.reason}"


def health_name(health: status_pb2.PoolHealth.ValueType) -> str:
    """A health as one word, such as "serving"."""
    return status_pb2.PoolHealth.Name(health).removeprefix("POOL_HEALTH_").lower()


def balance_text(balancedness: float, *, digits: int = 3) -> Text:
    """A balancedness; `no data` if it is not a number, as without traffic."""
    if math.isnan(balancedness):
        return Text(NO_DATA, style="dim")
    return Text(f"{balancedness:.{digits}f}", style=f"bold {balance_style(balancedness)}")


def _troubles(status: status_pb2.PoolStatus) -> RenderableType:
    """Quarantined workers, ranks in trouble, poison, timeouts, rejections: a row each, if any."""
    table = _rows()
    for one in status.quarantined:
        table.add_row("quarantined", Text(_quarantine_text(one), style="red"))
    in_trouble = [rank for rank in worst_first(status.ranks) if rank.trouble]
    for rank in in_trouble[:_NUM_TROUBLES]:
        table.add_row(f"rank {rank.rank}", Text(f"{rank.worker}: {rank.trouble}", style="red"))
    if len(in_trouble) > _NUM_TROUBLES:
        more = len(in_trouble) - _NUM_TROUBLES
        table.add_row("", Text(f"and {more} more ranks", style="red"))
    if status.poison_requests:
        text = f"{status.poison_requests} requests rejected: ranks failed while running them"
        table.add_row("poison", Text(text, style="yellow"))
    for timeout in status.timeouts:
        if timeout.reached:
            table.add_row(
                "timeout",
                Text(
                    f"{timeout.reached} x {timeout.name}, {timeout.timeout_s:g} s: {timeout.latest}"
                ),
                style="yellow",
            )
    for rejection in status.rejections:
        table.add_row(
            "rejected",
            Text(f"{rejection.count} x {rejection.kind}: {rejection.latest}", style="yellow"),
        )
    return table


def _progress(
    status: status_pb2.PoolStatus, decisions: Sequence[status_pb2.Decision]
) -> RenderableType:
    """Rollout, decisions, switches, rollouts, gain, advice, handovers: a row each, if any."""
    table = _rows()
    if status.HasField("rollout"):
        table.add_row("rollout", _rollout_text(status.rollout, ranks=range(len(status.ranks))))
    latest = [status.last_decision] if status.HasField("last_decision") else []
    for decision in (decisions or latest)[:NUM_DECISIONS]:
        table.add_row("decision", _decision_row(decision))
    for switch in status.switches[:_NUM_SWITCHES]:
        table.add_row("switch", _switch_text(switch))
    if status.rollouts_completed or status.rollouts_aborted:
        table.add_row(
            "rollouts", f"{status.rollouts_completed} completed, {status.rollouts_aborted} aborted"
        )
    if status.gains:
        table.add_row("gain", _gain_text(status.gains[0]))
    if status.HasField("advice"):
        table.add_row("advice", _advice_text(status.advice, num_ranks=len(status.ranks)))
    if handovers := handovers_text(status.handovers):
        table.add_row("handovers", handovers)
    return table


def _rows() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1)
    return table


def _decision_row(decision: status_pb2.Decision) -> Text:
    verdict = ("yes", "bold green") if decision.accepted else ("no", "bold")
    text = Text.assemble((f"{decision.sequence} ", "dim"), verdict, f"  {decision.reason}")
    if decision.plan_ms:
        text.append(f"  (planned in {decision.plan_ms:.1f} ms)", style="dim")
    return text


def _rollout_text(rollout: status_pb2.RolloutStatus, *, ranks: range) -> Text:
    waves = f", {rollout.waves_left} waves left" if rollout.waves_left else ""
    return Text(
        f"generation {rollout.generation} {rollout.state} for {rollout.state_age_s:.1f} s: "
        f"{rollout.moves} moves, {format_bytes(rollout.bytes)}, "
        f"staged by {_ranks_text(rollout.staged_ranks, ranks)}, "
        f"switched by {_ranks_text(rollout.switched_ranks, ranks)}{waves}",
        style="cyan",
    )


def _engine_text(rank: status_pb2.RankStatus) -> str:
    """The engine of another project that a rank is part of, and what that means for planning."""
    most = f", at most {rank.max_replicas} of an expert" if rank.max_replicas else ""
    return (
        f"{rank.engine}: ranks keep their group; replicas share their expert's load evenly{most}; "
        f"experts come from ranks, not from a checkpoint; weights version {rank.weights_version}"
    )


def _quarantine_text(one: status_pb2.QuarantineStatus) -> str:
    until = "until it restarts" if one.until_restart else "until it fits the pool"
    since = format_time(one.since_unix_s)
    return f"{one.worker} (boot {one.boot_id}) since {since}, {until}: {one.reason}"


def _gain_text(expected: status_pb2.GainStatus) -> Text:
    if expected.reason:
        return Text(expected.reason, style="" if expected.outcome == "kept" else "yellow")
    return Text(
        f"generation {expected.generation} is expected to gain {expected.gain_expected:.3f} over "
        f"generation {expected.before_generation}; to be checked on the next windows"
    )


def _advice_text(advice: status_pb2.AdviceStatus, *, num_ranks: int) -> Text:
    if not advice.ranks:
        return Text(f"no number of ranks yet: {advice.reason}", style="dim")
    if advice.ranks == num_ranks:
        return Text(f"{num_ranks} ranks, as now: {advice.reason}")
    text = f"{advice.ranks} ranks instead of {num_ranks}: {advice.reason}"
    return Text(text, style="yellow" if advice.ranks > num_ranks else "")


def _switch_text(switch: status_pb2.SwitchStatus) -> str:
    return (
        f"generation {switch.generation} at step {switch.step:,}: {switch.moves} moves staged in "
        f"{switch.staging_s:.2f} s, longest stall {format_duration(switch.max_stall_us)} "
        f"(median step {format_duration(switch.median_step_us)})"
    )


def _ranks_text(done: Sequence[int], ranks: range) -> str:
    """Which ranks have done something, or of many how many, and the few that have not."""
    if len(done) <= _NUM_NAMED:
        return " ".join(map(str, done)) if done else "none"
    left = sorted(set(ranks) - set(done))
    few = f" (not by {' '.join(map(str, left))})" if 0 < len(left) <= _NUM_NAMED else ""
    return f"{len(done)} of {len(ranks)} ranks{few}"


def health_style(health: status_pb2.PoolHealth.ValueType) -> str:
    """The style of a health's name."""
    return _HEALTH_STYLES.get(health, "dim")
