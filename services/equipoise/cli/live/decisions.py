"""`equipoise decisions`, `equipoise audit` and `equipoise epochs`."""

import json
import math
from collections.abc import Iterable
from typing import NoReturn

from rich.table import Table
from rich.text import Text

from equipoise.cli.display import NO_DATA, format_time, print_fault, print_json, print_view
from equipoise.cli.live.client import BalancerClient, connected, watch_leader
from equipoise.cli.live.settings import (
    AuditSettings,
    BalancerClientSettings,
    DecisionsSettings,
)
from equipoise.settings.numbers import format_bytes, format_number
from equipoise.wire.plain import as_json
from equipoise_api.v1 import status_pb2 as pb


def run(settings: DecisionsSettings) -> int:
    """Print the latest decisions, newest first; with `follow` oldest first, then new ones.

    Raises:
        BalancerRejectedError: the balancer is unreachable or does not know the pool.
    """
    with connected(settings) as client:
        decisions = client.decisions(limit=settings.limit)
    if settings.follow:
        _follow(settings, decisions)
    if settings.json:
        print_json({"decisions": [as_json(one) for one in decisions]})
    elif decisions:
        print_view(decisions_table(decisions))
    else:
        print("no decision yet: the balancer plans at the end of each window that had traffic")
    return 0


def audit(settings: AuditSettings) -> int:
    """Print the latest audit records, newest first.

    Raises:
        BalancerRejectedError: the balancer is unreachable or does not know the pool.
    """
    with connected(settings) as client:
        records = client.audit(limit=settings.limit)
    if settings.json:
        print_json({"audit": [as_json(one) for one in records]})
    elif records:
        print_view(audit_table(records))
    else:
        print("no operator has requested anything yet")
    return 0


def epochs(settings: BalancerClientSettings) -> int:
    """Print the latest epochs, newest first.

    Raises:
        BalancerRejectedError: the balancer is unreachable or does not know the pool.
    """
    with connected(settings) as client:
        status = client.status()
    if settings.json:
        opened = [as_json(one) for one in status.epochs]
        print_json({"pool": status.pool, "epoch": status.epoch, "epochs": opened})
    elif status.epochs:
        print_view(epochs_table(status.epochs))
    else:
        print(
            f"pool {status.pool} is in epoch {status.epoch}; the leader has opened no epoch since "
            "it started"
        )
    return 0


def decisions_table(decisions: Iterable[pb.Decision]) -> Table:
    """One row per decision."""
    shown = list(decisions)
    has_steps = any(one.step_s_proposed for one in shown)
    table = Table(box=None, pad_edge=False, header_style="dim")
    steps = ("step",) if has_steps else ()
    for name in ("", "time", "verdict", "balancedness", *steps, "moves", "bytes", "reason"):
        right = name in {"moves", "bytes"}
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "reason")
    for one in shown:
        is_plan = one.kind == "plan"
        step = _step_change(one) if one.step_s_proposed else ""
        table.add_row(
            Text(str(one.sequence), style="dim"),
            format_time(one.time_unix_s),
            _verdict(one),
            _balance_change(one) if is_plan or one.kind == "outcome" else "",
            *([step] if has_steps else []),
            f"{one.moves:,}" if is_plan else "",
            format_bytes(one.bytes) if is_plan else "",
            Text(one.reason),
        )
    return table


def _balance_change(one: pb.Decision) -> str:
    """Balancedness now and under the plan, as far as there is traffic and a plan."""
    values = (one.balancedness_current, one.balancedness_proposed, one.balancedness_realised)
    return _change(one, *("" if math.isnan(value) else f"{value:.3f}" for value in values))


def _step_change(one: pb.Decision) -> str:
    values = (one.step_s_current, one.step_s_proposed, one.step_s_realised)
    return _change(one, *(f"{format_number(1e3 * value)} ms" for value in values))


def _change(one: pb.Decision, current: str, proposed: str, realised: str) -> str:
    """A measure before and, as predicted, after; of an outcome also as it turned out."""
    if one.kind == "outcome":
        return f"{current} → {realised} ({proposed} expected)"
    return " → ".join(filter(None, (current, proposed))) or NO_DATA


def audit_table(records: Iterable[pb.AuditRecord]) -> Table:
    """One row per audit record."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "time", "caller", "operation", "answer", "outcome"):
        table.add_column(name, no_wrap=name in {"", "time", "answer"}, overflow="fold")
    for one in records:
        table.add_row(
            Text(str(one.sequence), style="dim"),
            format_time(one.time_unix_s),
            Text(one.who),
            Text(one.what),
            Text("accepted", style="green") if one.accepted else Text("rejected", style="yellow"),
            Text(one.outcome),
        )
    return table


def epochs_table(epochs: Iterable[pb.EpochStatus]) -> Table:
    """One row per epoch."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("epoch", "opened", "ranks", "serving after", "reason"):
        right = name in {"epoch", "ranks", "serving after"}
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "reason")
    for one in epochs:
        after = f"{one.serving_after_s:.1f} s" if one.serving_after_s else "not yet"
        table.add_row(
            str(one.epoch),
            format_time(one.opened_unix_s),
            str(len(one.workers)),
            after,
            Text(one.reason),
        )
    return table


def _follow(settings: DecisionsSettings, decisions: list[pb.Decision]) -> NoReturn:
    """Print each decision once, whichever balancer leads."""
    newest = 0

    def show(latest: list[pb.Decision]) -> None:
        nonlocal newest
        for one in sorted(latest, key=lambda decision: decision.sequence):
            if one.sequence > newest:
                print(json.dumps(as_json(one)) if settings.json else _line(one), flush=True)
                newest = one.sequence

    def take(client: BalancerClient, status: pb.PoolStatus) -> None:
        missed = status.last_decision.sequence - newest
        if missed == 1:
            show([status.last_decision])
        elif missed > 1:
            show(client.decisions(limit=min(missed, 1000)))

    show(decisions)
    watch_leader(settings, take, report=print_fault)


def _line(one: pb.Decision) -> str:
    verdict = _verdict(one).plain
    return f"{format_time(one.time_unix_s)}  {one.sequence:>5}  {verdict:<6}  {one.reason}"


def _verdict(one: pb.Decision) -> Text:
    if one.kind == "policy":
        return Text("policy", style="cyan")
    if one.kind == "outcome":
        return Text("kept", style="green") if one.accepted else Text("worse", style="yellow")
    if one.kind == "quarantine":
        return Text("quarantine" if one.accepted else "release", style="red")
    return Text("yes", style="bold green") if one.accepted else Text("no", style="dim")
