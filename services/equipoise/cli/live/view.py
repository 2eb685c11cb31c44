"""A pool's status message as Rich renderables or as one line. Pure.

Text from messages is never interpreted as markup. Used by `equipoise status` and the demo.
"""

from collections.abc import Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from equipoise.cli.display import format_count, format_time
from equipoise.cli.live.balance import balance_text, balance_view, experts_text, shared_expert
from equipoise.cli.live.handovers import handovers_text
from equipoise.cli.live.ranks import (
    format_duration,
    ranks_view,
    worst_first,
)
from equipoise.settings.numbers import format_bytes
from equipoise_api.v1 import status_pb2

_NUM_SWITCHES = 3
_NUM_TROUBLES = 5
_NUM_NAMED = 8
"""Ranks that a line names one by one."""
_FEW_RANKS = 4
"""Ranks for which decisions make room on a small terminal."""
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
    default is the last one in the status. If it `fits` the terminal, older decisions give way to a
    few ranks, and the worst ranks take the lines that the rest leaves.
    """
    latest = [status.last_decision] if status.HasField("last_decision") else []
    shown = (decisions or latest)[:NUM_DECISIONS]
    body = _Body(status, decisions=shown, tokens_per_s=tokens_per_s or {}, fits=fits)
    title = Text.assemble(
        ("pool ", "dim"),
        (status.pool, "bold"),
        "  ",
        (health_name(status.health), f"bold {health_style(status.health)}"),
        (f"  {status.phase} phase" if status.phase else "", "dim"),
    )
    experts = experts_text(status.model.num_experts, shared=shared_expert(status.model))
    # Unknown while no worker is connected.
    shape = f" · {status.model.num_layers} layers x {experts}" if status.model.num_layers else ""
    subtitle = Text(f"generation {status.generation} · epoch {status.epoch}{shape}")
    if not framed:
        return Group(title, subtitle, body)
    return Panel(body, title=title, subtitle=subtitle, title_align="left", subtitle_align="right")


class _Body:
    """A pool's picture. If it `fits`, the terminal's height limits the decisions and the ranks."""

    def __init__(
        self,
        status: status_pb2.PoolStatus,
        *,
        decisions: Sequence[status_pb2.Decision],
        tokens_per_s: Mapping[int, float],
        fits: bool,
    ) -> None:
        self._status = status
        self._decisions = decisions
        self._tokens_per_s = tokens_per_s
        self._fits = fits

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        above, room = self._above(len(self._decisions)), None
        if self._fits:
            few = min(len(self._status.ranks), _FEW_RANKS) + 2  # Heading, and the others' number.
            for number in range(len(self._decisions), -1, -1):
                above = self._above(number)
                lines = console.render_lines(Group(*above), options.update(height=None))
                room = console.height - len(lines) - _NUM_FRAME_LINES
                if room >= few or number == 1:
                    break
        yield from above
        yield ranks_view(
            self._status,
            tokens_per_s=self._tokens_per_s,
            room=None if room is None else max(0, room),
            width=options.max_width,
        )

    def _above(self, num_decisions: int) -> list[RenderableType]:
        """What stands above the ranks."""
        status, parts = self._status, list[RenderableType]()
        if status.health_reason:
            parts.append(Text(status.health_reason, style=health_style(status.health)))
        notes = filter(None, (hold_text(status), _policy_fault(status)))
        parts += [Text(line, style="yellow") for line in notes]
        parts += [_troubles(status), _progress(status, self._decisions[:num_decisions])]
        engines = sorted({_engine_text(rank) for rank in status.ranks if rank.engine})
        return [*parts, balance_view(status), *(Text(engine, style="dim") for engine in engines)]


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


def decision_text(decision: status_pb2.Decision) -> str:
    """A decision with its reason, as one line."""
    return f"decision {decision.sequence} {'yes' if decision.accepted else 'no'}: {decision.reason}"


def health_name(health: status_pb2.PoolHealth.ValueType) -> str:
    """A health as one word, such as "serving"."""
    return status_pb2.PoolHealth.Name(health).removeprefix("POOL_HEALTH_").lower()


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
                    f"{timeout.reached} x {timeout.name}, {timeout.timeout_s:g} s: "
                    f"{timeout.latest}",
                    style="yellow",
                ),
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
    """A row each, if any: rollout, decisions, switches, gain, advice, redundancy, handovers."""
    table = _rows()
    if status.HasField("rollout"):
        table.add_row("rollout", _rollout_text(status.rollout, ranks=range(len(status.ranks))))
    for decision in decisions:
        table.add_row("decision", _decision_row(decision))
    for switch in status.switches[:_NUM_SWITCHES]:
        table.add_row("switch", _switch_text(switch))
    if status.rollouts_completed or status.rollouts_aborted:
        table.add_row(
            "rollouts", f"{status.rollouts_completed} completed, {status.rollouts_aborted} aborted"
        )
    # An open one of a later generation is of a rollout in progress, or of one that was aborted.
    if status.gains and status.gains[0].generation <= status.generation:
        table.add_row("gain", _gain_text(status.gains[0]))
    if status.HasField("advice"):
        table.add_row("advice", _advice_text(status.advice, num_ranks=len(status.ranks)))
    if status.HasField("redundancy"):
        table.add_row("redundancy", _redundancy_text(status.redundancy))
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
    if decision.plan_ms and decision.accepted:
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
    most = f", at most {rank.max_replicas} per expert" if rank.max_replicas else ""
    return (
        f"{rank.engine}: its ranks form their group themselves; replicas share their expert's load "
        f"evenly{most}; experts come from ranks, not from a checkpoint; weights version "
        f"{rank.weights_version}"
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


def _redundancy_text(found: status_pb2.RedundancyStatus) -> Text:
    room = f"; {format_bytes(found.bytes_per_rank)} per rank" if found.bytes_per_rank else ""
    style = "yellow" if found.kind == "short" else ""
    return Text(f"{found.kind}: {found.reason}{room}", style=style)


def _advice_text(advice: status_pb2.AdviceStatus, *, num_ranks: int) -> Text:
    if not advice.ranks:
        return Text(f"no number of ranks yet: {advice.reason}", style="dim")
    if advice.ranks == num_ranks:
        return Text(f"{format_count(num_ranks, 'rank')}, as now: {advice.reason}")
    text = f"{format_count(advice.ranks, 'rank')} instead of {num_ranks}: {advice.reason}"
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
