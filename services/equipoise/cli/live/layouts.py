"""`equipoise layout ...`: show, compare, export and import a pool's layouts."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from rich.table import Table
from rich.text import Text

from equipoise.cli.display import console, print_fault, print_json
from equipoise.cli.live.balance import experts_text, shared_expert
from equipoise.cli.live.client import BalancerClient, connected, watch_leader
from equipoise.cli.live.operations import operate
from equipoise.cli.live.settings import (
    LayoutDiffSettings,
    LayoutExportSettings,
    LayoutImportSettings,
    LayoutShowSettings,
)
from equipoise.formats.expected import Expected
from equipoise.formats.files import read_placement, write_placement
from equipoise.formats.placement import ExpertPlacement
from equipoise.planning.arrays import EMPTY
from equipoise.planning.errors import InvalidLayoutError
from equipoise.planning.layout import Layout, is_moved
from equipoise.planning.shares import WHOLE
from equipoise.planning.topology import expert_name
from equipoise.settings.errors import InvalidSettingsError
from equipoise.wire.layouts import layout_from_proto, layout_to_proto
from equipoise_api.v1 import admin_pb2 as pb
from equipoise_api.v1 import status_pb2

EXIT_DIFFERENT = 3
"""Exit status of `diff`."""

ExpertName = Callable[[int], str]
"""What operators call a logical expert."""

_NUM_NAMED = 6


def show(settings: LayoutShowSettings) -> int:
    """Print a layout: one line per layer, or one layer rank by rank.

    Raises:
        BalancerRejectedError: the balancer is unreachable or has no such layout.
        InvalidSettingsError: the layout has no such layer.
    """
    with connected(settings) as client:
        response = client.layout(settings.generation)
        model = client.status().model
    layout = layout_from_proto(response.layout)
    if settings.layer is not None and not 0 <= settings.layer < layout.num_layers:
        raise InvalidSettingsError(
            f"--layer must be from 0 to {layout.num_layers - 1}, not {settings.layer}"
        )
    if settings.json:
        print_json(_document(layout, list(response.node_of_rank), shared=shared_expert(model)))
        return 0
    out = console()
    experts = experts_text(layout.num_experts, shared=shared_expert(model))
    out.print(
        f"generation {layout.generation}: {layout.num_layers} layers x {experts} in "
        f"{layout.num_slots} slots on {layout.num_ranks} ranks"
    )
    name = partial(expert_name, shared=shared_expert(model))
    table = _layers_table(layout, name)
    if settings.layer is not None:
        table = _ranks_table(layout, settings.layer, list(response.node_of_rank), name)
    out.print(table)
    return 0


def diff(settings: LayoutDiffSettings) -> int:
    """Print the moves between two layouts; return 3 if they differ.

    Raises:
        BalancerRejectedError: the balancer is unreachable or has no such layout.
        FormatError: a file cannot be read.
        InvalidSettingsError: the layouts have different shapes.
    """
    with connected(settings) as client:
        after = _either(settings.after, client)
        before = _either(settings.before, client, like=after)
        name = partial(expert_name, shared=shared_expert(client.status().model))
    if before.expert_of_slot.shape != after.expert_of_slot.shape:
        raise InvalidSettingsError(
            f"cannot compare {settings.before} with {settings.after}: {_shape(before)} against "
            f"{_shape(after)}"
        )
    changed = is_moved(before.expert_of_slot, after.expert_of_slot)
    shares = before.shares() != after.shares()
    is_same = before.same_placement(after)
    document = {
        "same": is_same,
        "moves": int(changed.sum()),
        "changed_shares": int((shares & ~changed).sum()),
        "moves_of_layer": changed.sum(axis=1).tolist(),
        "moves_of_rank": changed.sum(axis=0).reshape(after.num_ranks, -1).sum(axis=1).tolist(),
    }
    if settings.json:
        print_json(document)
    else:
        _print_diff(before, after, document, name)
    return 0 if is_same else EXIT_DIFFERENT


def export(settings: LayoutExportSettings) -> int:
    """Write a layout to a file in an engine's format.

    Raises:
        BalancerRejectedError: the balancer is unreachable or has no such layout.
        FormatError: the file cannot be written, or the format cannot represent the layout.
    """
    with connected(settings) as client:
        written = _write(client.layout(settings.generation), settings)
    if settings.watch:
        _write_changes(settings, written=written)
    return 0


def _write_changes(settings: LayoutExportSettings, *, written: int) -> NoReturn:
    """Write every layout that is committed, until Ctrl-C, whichever balancer leads."""
    latest = written

    def take(client: BalancerClient, status: status_pb2.PoolStatus) -> None:
        nonlocal latest
        if status.generation not in {0, latest}:
            latest = _write(client.layout(), settings)

    watch_leader(settings, take, report=print_fault)


def _write(response: status_pb2.GetLayoutResponse, settings: LayoutExportSettings) -> int:
    """Write a layout to the file; returns its generation."""
    layout = layout_from_proto(response.layout)
    placement = ExpertPlacement(
        expert_of_slot=layout.expert_of_slot,
        num_experts=layout.num_experts,
        num_ranks=layout.num_ranks,
        first_moe_layer=settings.first_moe_layer,
        share_of_slot=layout.share_of_slot,
    )
    write_placement(placement, settings.file, form=settings.format)
    if settings.json:
        written = {"file": str(settings.file), "format": settings.format}
        print_json({"generation": layout.generation, **written})
    else:
        print(
            f"wrote generation {layout.generation} to {settings.file} ({settings.format} format)",
            flush=True,
        )
    return layout.generation


def import_(settings: LayoutImportSettings) -> int:
    """Pin the pool to the layout in a file; return 3 if the balancer rejects it.

    Raises:
        BalancerRejectedError: the balancer is unreachable.
        FormatError: the file cannot be read, or does not fit the pool.
    """
    with connected(settings) as client:
        running = layout_from_proto(client.layout().layout)
    layout = _read(
        settings.file,
        like=running,
        first_moe_layer=settings.first_moe_layer,
        form=settings.file_format,
    )
    reason = settings.reason or f"imported from {settings.file.name}"
    return operate(
        settings,
        lambda stub: stub.Pin,
        pb.PinRequest,
        reason=reason,
        layout=layout_to_proto(layout),
    )


def _either(name: str, client: BalancerClient, *, like: Layout | None = None) -> Layout:
    """The layout of a generation or of a file."""
    if name.isdigit():
        return layout_from_proto(client.layout(int(name)).layout)
    return _read(Path(name), like=like or layout_from_proto(client.layout().layout))


def _read(
    path: Path, *, like: Layout, first_moe_layer: int | None = None, form: Any = None
) -> Layout:
    """The layout in a file, for the ranks of `like`."""
    expected = Expected(
        num_layers=like.num_layers,
        num_experts=like.num_experts,
        num_ranks=like.num_ranks,
        first_moe_layer=first_moe_layer,
    )
    placement = read_placement(path, form=form, expected=expected)
    try:
        return Layout(
            generation=like.generation,
            num_experts=placement.num_experts,
            num_ranks=like.num_ranks,
            expert_of_slot=placement.expert_of_slot,
            share_of_slot=placement.share_of_slot,
        )
    except InvalidLayoutError as error:
        raise InvalidSettingsError(f"{path}: {error}") from None


def _layers_table(layout: Layout, name: ExpertName) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("layer", "most replicas", "replicated", "experts with the most replicas"):
        table.add_column(title, justify="left" if title.startswith("experts") else "right")
    for layer, counts in enumerate(layout.replica_counts()):
        chosen = [int(e) for e in np.argsort(-counts, kind="stable")[:_NUM_NAMED] if counts[e] > 1]
        replicas = "  ".join(f"{name(expert)} x{counts[expert]}" for expert in chosen)
        table.add_row(str(layer), str(counts.max()), str(int((counts > 1).sum())), replicas)
    return table


def _ranks_table(layout: Layout, layer: int, nodes: list[str], name: ExpertName) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("rank", justify="right")
    if nodes:
        table.add_column("node")
    table.add_column(f"experts in the slots of layer {layer} (bold: replicated)")
    counts, shares = layout.replica_counts()[layer], layout.share_of_slot
    for rank in range(layout.num_ranks):
        cell = Text()
        for slot in range(layout.first_slot[rank], layout.first_slot[rank + 1]):
            expert = int(layout.expert_of_slot[layer, slot])
            if expert == EMPTY:
                continue
            cell.append(f" {name(expert):>3}", style="bold cyan" if counts[expert] > 1 else "")
            if shares is not None and counts[expert] > 1:
                cell.append(f" ({shares[layer, slot] / WHOLE:.0%})", style="dim")
        table.add_row(str(rank), *([Text(nodes[rank])] if nodes else []), cell)
    return table


def _print_diff(before: Layout, after: Layout, document: dict[str, Any], name: ExpertName) -> None:
    if document["same"]:
        print("the layouts place experts identically")
        return
    print(f"{document['moves']:,} moves; {document['changed_shares']:,} other slots change share")
    counts_before, counts_after = before.replica_counts(), after.replica_counts()
    for layer, moves in enumerate(document["moves_of_layer"]):
        if not moves:
            continue
        gained = counts_after[layer] - counts_before[layer]
        changes = [int(e) for e in np.argsort(-np.abs(gained), kind="stable") if gained[e]]
        named = "  ".join(f"{name(expert)} {gained[expert]:+d}" for expert in changes[:_NUM_NAMED])
        more = f"  and {len(changes) - _NUM_NAMED} more" if len(changes) > _NUM_NAMED else ""
        replicas = f"; replicas per expert: {named}{more}" if named else ""
        print(f"  layer {layer}: {moves:,} moves{replicas}")


def _document(layout: Layout, nodes: list[str], *, shared: int | None) -> dict[str, Any]:
    shares = layout.share_of_slot
    return {
        "generation": layout.generation,
        "num_experts": layout.num_experts,
        "shared_expert": shared,
        "num_ranks": layout.num_ranks,
        "node_of_rank": nodes,
        "expert_of_slot": layout.expert_of_slot.tolist(),
        "share_of_slot": None if shares is None else (shares / WHOLE).tolist(),
    }


def _shape(layout: Layout) -> str:
    return f"{layout.num_layers} layers x {layout.num_slots} slots"
