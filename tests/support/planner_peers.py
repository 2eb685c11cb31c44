"""Other planners, as functions of the same form, to compare ours with.

`published` is our own plain rendition of DeepSeek's description (github.com/deepseek-ai/EPLB), one
loop per sentence, as the program it describes is. SGLang's vectorised planner comes from its wheel,
if that is installed; it needs torch and nothing else of it: `pip install --no-deps sglang`.
"""

import importlib.util
from pathlib import Path

import numpy as np

VECTORISED = "srt/eplb/eplb_algorithms/deepseek_vec.py"


def sglang_planner():
    """SGLang's vectorised planner as a function like `published`, or None without its wheel."""
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        return None
    # Its packages import what only the whole of SGLang needs; this file needs torch alone.
    path = Path(package.submodule_search_locations[0]) / VECTORISED
    spec = importlib.util.spec_from_file_location("deepseek_vec", path)
    if not path.exists():
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import torch

    def planned(load, *, num_slots, num_groups, num_nodes, num_ranks):
        tables, _, _ = module.rebalance_experts(
            tokens_per_expert=torch.from_numpy(load)[None],
            num_physical_experts=num_slots,
            num_local_physical_experts=num_slots // num_ranks,
            num_groups=num_groups,
            num_nodes=num_nodes,
            enable_hierarchical=num_nodes > 1,
        )
        return tables.reshape(len(load), num_slots).numpy().astype(np.int32)

    return planned


def published(load, *, num_slots, num_groups, num_nodes, num_ranks):
    """The description, one layer, one item, one comparison at a time."""
    return np.array(
        [
            _published_layer(
                row.tolist(),
                num_slots=num_slots,
                num_groups=num_groups,
                num_nodes=num_nodes,
                num_ranks=num_ranks,
            )
            for row in load
        ],
        dtype=np.int32,
    )


def _published_layer(load, *, num_slots, num_groups, num_nodes, num_ranks):
    size = len(load) // num_groups
    groups = [list(range(group * size, (group + 1) * size)) for group in range(num_groups)]
    weights = [float(np.sum([load[expert] for expert in group])) for group in groups]
    slots = []
    for of_node in _pack(weights, num_nodes):
        experts = [expert for group in of_node for expert in groups[group]]
        replicas, carried = _replicate([load[expert] for expert in experts], num_slots // num_nodes)
        for of_rank in _pack(carried, num_ranks // num_nodes):
            slots += [experts[replicas[item]] for item in of_rank]
    return slots


def _replicate(load, num_slots):
    replicas, counts = list(range(len(load))), [1] * len(load)
    while len(replicas) < num_slots:
        hottest = max(range(len(load)), key=lambda expert: load[expert] / counts[expert])
        replicas.append(hottest)
        counts[hottest] += 1
    return replicas, [load[expert] / counts[expert] for expert in replicas]


def _pack(weights, num_packs):
    room = len(weights) // num_packs
    if room == 1:
        return [[item] for item in range(len(weights))]
    packs, totals = [[] for _ in range(num_packs)], [0.0] * num_packs
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        lightest = min(
            (pack for pack in range(num_packs) if len(packs[pack]) < room), key=totals.__getitem__
        )
        packs[lightest].append(item)
        totals[lightest] += weights[item]
    return packs
