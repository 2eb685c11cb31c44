"""`python -m equipoise_model.train --out DIR`: train the tiny preset and write a checkpoint.

Owns the command line, the progress bar and the record of a run, `training.json`; `loop` trains.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from equipoise_model import checkpoint
from equipoise_model.plain.transformer import Transformer
from equipoise_model.presets import TINY
from equipoise_model.train.data import DOMAINS, CorpusError
from equipoise_model.train.loads import Heldout, measure
from equipoise_model.train.loop import (
    DivergedError,
    StepRecord,
    TrainSettings,
    TrainSettingsError,
    new_model,
    settle_bias,
    train,
)

_CURVE_POINTS = 100  # of the loss curve kept in training.json
_HELDOUT_SEED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a training; return 0 after writing the checkpoint, 1 after a one-line error."""
    options = vars(_parser().parse_args(arguments))
    out, num_threads = options.pop("out"), options.pop("threads")
    console = Console(stderr=True)
    try:
        settings = TrainSettings(**options)
        out.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(num_threads)
        _run(settings, out=out, console=console)
    except (CorpusError, DivergedError, TrainSettingsError, OSError) as error:
        console.print(f"training failed: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted: nothing was written")
        return 130
    return 0


def _run(settings: TrainSettings, *, out: Path, console: Console) -> None:
    model = new_model(TINY, seed=settings.seed)
    started_s = time.monotonic()
    records = _train_with_progress(model, settings, console=console)
    console.print("settling the selection bias")
    _round_to_bf16(model)
    for _ in settle_bias(model, settings):
        pass
    wall_s = time.monotonic() - started_s
    console.print("measuring held-out text")
    heldout = measure(model, seed=_HELDOUT_SEED)
    checkpoint.save(model, out)
    heldout.trace.write(out / "loads.json")
    summary = _record(settings, records=records, heldout=heldout, wall_s=wall_s)
    (out / "training.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    for domain in DOMAINS:
        figures = summary["experts"][domain]
        console.print(
            f"{domain}: held-out loss {heldout.loss_of[domain]:.3f} nats per byte, "
            f"max/mean per expert {figures['mean']:.2f}"
        )
    console.print(f"mixed: max/mean per expert {summary['experts']['mixed']['mean']:.2f}")
    console.print(f"wrote {out}", markup=False)


def _train_with_progress(
    model: Transformer, settings: TrainSettings, *, console: Console
) -> list[StepRecord]:
    records = []
    started_s = time.monotonic()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("reading text", total=settings.steps, speed="")
        for record in train(model, settings):
            records.append(record)
            num_tokens = len(records) * settings.num_sequences * settings.sequence_tokens
            progress.update(
                task,
                advance=1,
                description=f"loss {record.loss:.3f}",
                speed=f"{num_tokens / (time.monotonic() - started_s):,.0f} tokens/s",
            )
    return records


@torch.no_grad()
def _round_to_bf16(model: Transformer) -> None:
    """Round the model to what its checkpoint will hold, so that figures are the checkpoint's."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


def _record(
    settings: TrainSettings, *, records: list[StepRecord], heldout: Heldout, wall_s: float
) -> dict[str, Any]:
    """The contents of `training.json`; losses in nats per byte."""
    every = -(-len(records) // _CURVE_POINTS)
    trace = heldout.trace
    pairs = [(a, b) for i, a in enumerate(DOMAINS) for b in DOMAINS[i + 1 :]]
    return {
        "command": _command(settings),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "wall_s": round(wall_s, 1),
        "settings": asdict(settings),
        "config": TINY.to_dict(),
        "heldout_loss": {name: round(loss, 4) for name, loss in heldout.loss_of.items()},
        "heldout_tokens": trace.window_tokens * len(trace.assignments_of["code"]),
        "experts": {
            "figure": "most loaded expert / mean, per MoE layer, on held-out text",
            **{name: _per_layer(trace.max_over_mean(name)) for name in DOMAINS},
            "mixed": _per_layer(trace.max_over_mean()),
        },
        "cosine": {f"{a}-{b}": _per_layer(trace.cosine(a, b)) for a, b in pairs},
        "curve": [
            {name: round(value, 4) for name, value in asdict(record).items()}
            for record in records
            if record.step % every == 0 or record is records[-1]
        ],
    }


def _per_layer(values_L: Any) -> dict[str, Any]:
    return {
        "mean": round(float(values_L.mean()), 4),
        "layers": [round(float(value), 4) for value in values_L],
    }


def _command(settings: TrainSettings) -> str:
    """The command that reproduces this checkpoint, even if defaults change."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(settings).items()]
    threads = f"--threads={torch.get_num_threads()}"
    return shlex.join(["python", "-m", "equipoise_model.train", "--out=DIR", threads, *options])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m equipoise_model.train",
        description="Train the tiny checkpoint on text that every Python installation has.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--threads", type=int, default=2, help="threads that torch computes with")
    for field in fields(TrainSettings):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=type(field.default),
            default=field.default,
            help=field.metadata["help"],
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
