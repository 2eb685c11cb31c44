"""`equipoise whatif`: how many GPUs and redundant slots for recorded loads, and what each costs."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from equipoise.cli.display import bytes_words, console
from equipoise.cli.offline.inputs import Case, numbers, read_case
from equipoise.cli.offline.policies import policies_of
from equipoise.cli.offline.settings import ToolInputError
from equipoise.cli.offline.whatif_run import Choice, choose, evaluate, topologies
from equipoise.cli.offline.whatif_settings import WhatIfSettings

MAX_CHOICES = 1000
_GIB = 1024**3


def run(settings: WhatIfSettings) -> int:
    """Try every pool, print a line for each and which one to take.

    Raises:
        FormatError: a file cannot be read.
        ToolInputError: an option cannot be understood, or asks for too much.
    """
    case = read_case(settings.source)
    choices = _evaluated(settings, case)
    memory_bytes = None if settings.memory_gib is None else settings.memory_gib * _GIB
    chosen, reason = choose(choices, tolerance=settings.tolerance, memory_bytes=memory_bytes)
    if settings.json:
        document = {
            "choices": [asdict(one) for one in choices],
            "chosen": None if chosen is None else asdict(chosen),
            "reason": reason,
            "expert_bytes": case.model.expert_bytes,
            "expert_bytes_origin": case.expert_bytes_origin,
        }
        print(json.dumps(document, indent=2))
    else:
        _show(choices, chosen, reason, case)
    return 0


def _evaluated(settings: WhatIfSettings, case: Case) -> tuple[Choice, ...]:
    ((_, policy),) = policies_of([settings.policy]).items()
    rank_counts = numbers("--ranks", settings.ranks)
    if not rank_counts or min(rank_counts) < 1:
        raise ToolInputError("--ranks must name numbers of 1 or more")
    num_experts = case.model.num_experts
    most = num_experts // 4 if settings.max_redundant is None else settings.max_redundant
    tried = list(
        topologies(
            num_experts,
            rank_counts=rank_counts,
            ranks_per_node=settings.ranks_per_node,
            max_redundant=most,
        )
    )
    if len(tried) > MAX_CHOICES:
        raise ToolInputError(
            f"{len(tried)} pools are too many to try, {MAX_CHOICES} are the most: name fewer "
            f"--ranks or a smaller --max-redundant"
        )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    screen = console(stderr=True)
    with Progress(
        *columns, console=screen, transient=True, disable=not screen.is_terminal
    ) as progress:
        return tuple(
            evaluate(
                case.recording,
                topology=topology,
                model=case.model,
                algorithm=settings.algorithm,
                policy=policy,
                window_s=settings.window_s,
            )
            for topology in progress.track(tried, description="pools")
        )


def _show(choices: Sequence[Choice], chosen: Choice | None, reason: str, case: Case) -> None:
    out = console()
    model = case.model
    out.print(
        f"{model.num_layers} layers x {model.num_experts} experts of "
        f"{bytes_words(model.expert_bytes)} ({case.expert_bytes_origin}), "
        f"{case.recording.num_windows} window(s) of loads\n"
    )
    replayed = case.recording.num_windows > 1
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    columns = ["ranks", "redundant", "balance", "worst layer", "GPU memory"]
    for name in columns + (["replayed", "moves/h", "bytes/h"] if replayed else []):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for one in choices:
        cells = [
            str(one.num_ranks),
            str(one.num_redundant),
            f"{one.balancedness:.4f}",
            f"{one.balancedness_min_layer:.4f}",
            bytes_words(one.memory_bytes),
        ]
        if replayed:
            cells += [
                f"{one.balancedness_replayed:.4f}",
                f"{one.moves_per_hour:,.0f}",
                bytes_words(one.bytes_per_hour or 0.0),
            ]
        is_chosen = one is chosen
        table.add_row(*cells, "◀" if is_chosen else "", style="bold" if is_chosen else "")
    out.print(table)
    out.print(f"\n{reason}")
