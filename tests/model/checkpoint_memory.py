"""Loads a checkpoint in a separate process, and prints how much memory each part took.

Usage: python checkpoint_memory.py FOLDER. Prints a JSON object: for each part of the work, the peak
of the resident set above what it was before, in bytes.
"""

import json
import re
import sys
from pathlib import Path

import torch

from equipoise_model.checkpoint import Checkpoint
from equipoise_model.plain.transformer import Transformer

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident(field):
    """VmRSS (now) or VmHWM (the peak), in bytes."""
    return int(re.search(rf"{field}:\s+(\d+) kB", STATUS.read_text())[1]) * 1024


def growth(work):
    """Most bytes in use while `work` runs, beyond those before."""
    before = resident("VmRSS")
    CLEAR.write_text("5")
    work()
    return resident("VmHWM") - before


def main():
    torch.set_num_threads(1)
    checkpoint = Checkpoint.open(Path(sys.argv[1]))
    config = checkpoint.config
    num_slots = 2
    model = Transformer(config, num_slots=num_slots).requires_grad_(requires_grad=False)
    for parameter in model.parameters():
        parameter.zero_()  # its memory is there before anything is measured
    table = [[config.n_routed_experts - 1 - slot for slot in range(num_slots)]]
    table *= config.num_moe_layers

    def read_all():
        for layer in range(config.num_moe_layers):
            for expert in range(config.n_routed_experts):
                checkpoint.read_expert(layer, expert)

    growth_of = {
        name: growth(work)
        for name, work in (
            ("dense", lambda: checkpoint.load_dense(model)),
            ("slots", lambda: checkpoint.load_slots(model, table)),
            ("experts", read_all),
        )
    }
    print(json.dumps(growth_of))


if __name__ == "__main__":
    main()
