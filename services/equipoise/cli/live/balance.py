"""How balanced a pool is and was, and what that costs, as Rich renderables. Pure."""

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from equipoise.cli.display import NO_DATA
from equipoise.cli.live.ranks import balance_style
from equipoise.planning.topology import expert_text
from equipoise.settings.numbers import format_number
from equipoise_api.v1 import status_pb2, worker_link_pb2

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_LOW = 0.4  # balancedness of the lowest bar
_NUM_WINDOWS = 42
"""Windows shown, so that marks and their meaning fit 80 columns."""


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
        error = (
            f" ± {format_number(imbalance.error_s * 1e3, digits=2)}" if imbalance.error_s else ""
        )
        step = format_number(imbalance.step_s * 1e3)
        cost = f"{format_number(imbalance.cost_s * 1e3)}{error} ms of {step} ms a step, "
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


def balance_text(balancedness: float, *, digits: int = 3) -> Text:
    """A balancedness; `no data` if it is not a number, as without traffic."""
    if math.isnan(balancedness):
        return Text(NO_DATA, style="dim")
    return Text(f"{balancedness:.{digits}f}", style=f"bold {balance_style(balancedness)}")
