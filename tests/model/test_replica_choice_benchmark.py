"""How even the ranks' loads of single steps are, by how replicas are chosen.

This file alone: `pytest -m benchmark -s tests/model/test_replica_choice_benchmark.py`. Loads are
those of `planner_loads` (`EQUIPOISE_LOADS` names others). A row's experts are distinct, and drawn
so that each is chosen as often as its load says.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.planning.layout import Layout
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm, Weighting
from equipoise.planning.realised import realised_shares
from equipoise.planning.topology import ModelShape, Topology
from equipoise.planning.warm_up import warm_up
from equipoise.worker.placement import placement_of
from equipoise_kernels.replica_balance import balanced_replicas, count_experts, replica_ends
from equipoise_kernels.replica_choice import choose_replicas
from tests.support.least_maximum import least_maximum
from tests.support.planner_loads import as_recorded, loads_to_measure
from tests.support.rank_processes import run_ranks

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

EXPERTS, TOP_K, RANKS_PER_NODE, DRAWN_TOGETHER = 256, 8, 8, 64
LAYERS = range(1, 58, 8)
MOST_RANKS_ONE_BY_ONE = 32
"""Of groups in which each rank solves a problem of its own."""


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    warm_up()


def drawn(load, num_tokens, rng):
    """Distinct experts of each row, [T, K], each in as many rows as its load says."""
    ends = TOP_K * load / load.sum()
    assert ends.max() <= 1
    parts = []
    for first in range(0, num_tokens, DRAWN_TOGETHER):
        count = min(DRAWN_TOGETHER, num_tokens - first)
        order = rng.permutation(EXPERTS)
        points = rng.random((count, 1)) + np.arange(TOP_K)
        index = np.searchsorted(ends[order].cumsum(), points, side="right")
        parts.append(order[index.clip(max=EXPERTS - 1)])
    return torch.from_numpy(np.concatenate(parts))


class Layer:
    """One layer of a planned layout."""

    def __init__(self, tables, layer, load):
        self.layer, self.load = layer, load
        self.slots, self.count, self.ends = tables.of_layer(layer)
        self.num_ranks, self.per_rank = tables.num_ranks, tables.slots_per_rank

    def hashed(self, ids_RTK, step):
        num_ranks, tokens, _ = ids_RTK.shape
        turns = torch.arange(tokens) + step * tokens
        tokens_RT = turns * num_ranks + torch.arange(num_ranks).unsqueeze(1)
        ids = ids_RTK.flatten(0, 1)
        replicas = choose_replicas(
            ids, tokens_RT.flatten(), self.count, layer=self.layer, share_ends_ER=self.ends
        )
        return self.slots[ids, replicas]

    def split_by_sender(self, counts_RE, step):
        """Each rank splits its own assignments evenly; remainders begin elsewhere each time."""
        counts, served = counts_RE.numpy(), np.zeros(self.num_ranks)
        turn = np.arange(self.num_ranks) + 7 * step + 13 * self.layer
        for expert, number in enumerate(self.count.tolist()):
            each, rest = np.divmod(counts[:, expert], number)
            for place in range(number):
                extra = (place - turn - 5 * expert) % number < rest
                served[self.slots[expert, place] // self.per_rank] += (each + extra).sum()
        return served

    def balanced(self, ids_RTK, counts_RE):
        return torch.cat(
            [
                self.slots[
                    ids,
                    balanced_replicas(
                        ids,
                        counts_RE,
                        self.slots,
                        self.count,
                        rank=rank,
                        slots_per_rank=self.per_rank,
                        share_ends_ER=self.ends,
                    ),
                ]
                for rank, ids in enumerate(ids_RTK)
            ]
        )

    def by_the_others_mean(self, counts_RE, planned):
        """Each rank levels its own assignments on top of what others are expected to have."""
        served = np.zeros(self.num_ranks)
        for own in counts_RE:
            others = torch.from_numpy(planned) * int(counts_RE.sum() - own.sum())
            load = (others + own).round().to(torch.int64)
            ends = replica_ends(
                load, self.slots, self.count, num_ranks=self.num_ranks, slots_per_rank=self.per_rank
            )
            parts = ends.diff(dim=1, prepend=torch.zeros(EXPERTS, 1, dtype=torch.int64))
            parts = parts / load.clamp(min=1).unsqueeze(1) * own.unsqueeze(1)
            used = parts > 0
            np.add.at(served, (self.slots[used] // self.per_rank).numpy(), parts[used].numpy())
        return served


def balancedness(load):
    return float(load.mean() / load.max())


def planned_layout(load, num_ranks, num_slots, *, weighted=Weighting.OFF):
    made = plan(
        load,
        model=ModelShape(num_layers=len(load), num_experts=EXPERTS, num_groups=8, expert_bytes=1),
        topology=Topology(
            node_of_rank=tuple(f"n{rank // RANKS_PER_NODE}" for rank in range(num_ranks)),
            slots_per_rank=num_slots // num_ranks,
        ),
        algorithm=Algorithm.GLOBAL,
        weighted=weighted,
    )
    return Layout(
        generation=1,
        num_experts=EXPERTS,
        num_ranks=num_ranks,
        expert_of_slot=made.expert_of_slot,
        share_of_slot=made.share_of_slot,
    )


def planned_tables(load, num_ranks, num_slots):
    return placement_of(planned_layout(load, num_ranks, num_slots))


def one_step(layer, num_tokens, step, rng):
    """Balancedness of each way, and the share of assignments that stay on their sender's node."""
    ids = drawn(layer.load, num_tokens * layer.num_ranks, rng).view(layer.num_ranks, num_tokens, -1)
    counts = torch.stack([count_experts(one, num_experts=EXPERTS) for one in ids])
    slots = {"hashed": layer.hashed(ids, step), "balanced": layer.balanced(ids, counts)}
    chosen = {name: of_rows // layer.per_rank for name, of_rows in slots.items()}
    found = {
        name: balancedness(np.bincount(ranks.flatten(), minlength=layer.num_ranks))
        for name, ranks in chosen.items()
    }
    found["split by sender"] = balancedness(layer.split_by_sender(counts, step))
    if layer.num_ranks <= MOST_RANKS_ONE_BY_ONE:
        expected = layer.load / layer.load.sum()
        found["by the others' mean"] = balancedness(layer.by_the_others_mean(counts, expected))
    load = counts.sum(0)
    least = least_maximum(load, layer.slots, layer.count, layer.num_ranks, layer.per_rank)
    found["exact"] = float(load.sum()) / layer.num_ranks / least
    senders = torch.arange(layer.num_ranks).repeat_interleave(num_tokens).unsqueeze(1)
    for name, ranks in chosen.items():
        stays = ranks // RANKS_PER_NODE == senders // RANKS_PER_NODE
        found[f"{name}, same node"] = float(stays.double().mean())
    return found


def mean_of(found):
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}


@pytest.mark.parametrize(
    ("num_ranks", "num_slots"), [(16, 288), (32, 288), (32, 320), (72, 288), (144, 288)]
)
@pytest.mark.parametrize("num_tokens", [32, 128, 1024])
def test_balanced_steps_are_nearly_as_even_as_the_exact_optimum(
    capsys, num_ranks, num_slots, num_tokens
):
    loads = list(as_recorded(loads_to_measure()).values())
    rng, found = np.random.default_rng(5), []
    for number, load in enumerate(loads[:2]):
        tables = planned_tables(load, num_ranks, num_slots)
        layers = LAYERS[number :: 2 if num_ranks * num_tokens < 40_000 else 4]
        found += [
            one_step(Layer(tables, layer, load[layer]), num_tokens, number, rng) for layer in layers
        ]
    mean = mean_of(found)
    with capsys.disabled():
        figures = ", ".join(f"{name} {value:.4f}" for name, value in mean.items())
        print(f"\n{num_ranks} ranks, {num_slots} slots, {num_tokens} tokens per rank: {figures}")
    assert mean["hashed"] <= mean["balanced"] <= mean["exact"] + 1e-9
    # At least two thirds of what is possible.
    assert mean["exact"] - mean["balanced"] <= (mean["exact"] - mean["hashed"]) / 3
    assert mean["balanced, same node"] > mean["hashed, same node"]


def test_a_layout_for_other_traffic_gains_too(capsys):
    first, *_, last = as_recorded(loads_to_measure()).values()
    tables, rng = planned_tables(first, 32, 288), np.random.default_rng(5)
    mean = mean_of([one_step(Layer(tables, layer, last[layer]), 128, 0, rng) for layer in LAYERS])
    with capsys.disabled():
        figures = ", ".join(f"{name} {value:.4f}" for name, value in mean.items())
        print(f"\n32 ranks, 288 slots, 128 tokens per rank, planned for other traffic: {figures}")
    assert mean["hashed"] <= mean["balanced"] <= mean["exact"] + 1e-9


def test_steps_as_planned_keep_uneven_shares_on_average(capsys):
    load = next(iter(as_recorded(loads_to_measure()).values()))[:6]
    layout = planned_layout(load, 32, 288, weighted=Weighting.ON)
    tables, rng = placement_of(layout), np.random.default_rng(1)
    served = {name: np.zeros(layout.expert_of_slot.shape) for name in ("hashed", "balanced")}
    for step in range(40):
        for number, of_layer in enumerate(load):
            layer = Layer(tables, number, of_layer)
            ids = drawn(of_layer, 128 * 32, rng).view(32, 128, -1)
            counts = torch.stack([count_experts(own, num_experts=EXPERTS) for own in ids])
            for name, slots in (
                ("hashed", layer.hashed(ids, step)),
                ("balanced", layer.balanced(ids, counts)),
            ):
                served[name][number] += np.bincount(slots.flatten(), minlength=288)
    found = {name: realised_shares(slots, layout).misplaced for name, slots in served.items()}
    with capsys.disabled():
        print(f"\nassignments elsewhere than planned: {found}")
    assert found["balanced"] < 0.015


def test_layers_are_faster_where_the_busiest_rank_sets_their_time(capsys, tmp_path):
    num_ranks, num_rows, turns, pace_s = 8, 32, 8, 4e-3
    load = next(iter(as_recorded(loads_to_measure()).values()))[:1]
    layout = planned_layout(load, num_ranks, 288)
    rng = np.random.default_rng(3)
    ids = drawn(load[0], turns * num_ranks * num_rows, rng).view(turns, num_ranks, num_rows, -1)
    torch.save((layout.expert_of_slot, ids), tmp_path / "case")
    run_ranks(
        Path(__file__).with_name("paced_choice_rank.py"),
        [
            (rank, pace_s, tmp_path / "case", tmp_path / "meet", tmp_path / f"result-{rank}")
            for rank in range(num_ranks)
        ],
    )
    took = torch.load(tmp_path / "result-0", weights_only=False)
    with capsys.disabled():
        print(
            f"\n{num_ranks} ranks in processes, {num_rows} rows, {pace_s * 1e3} ms per assignment: "
            f"hashed {took[False]:.3f} s, balanced {took[True]:.3f} s a layer"
        )
    assert took[True] < took[False]
