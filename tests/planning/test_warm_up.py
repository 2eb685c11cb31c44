import importlib
import pkgutil
import subprocess
import sys

import numpy as np

import equipoise.planning
from equipoise.planning.balance import compare
from equipoise.planning.layout import Layout
from equipoise.planning.placing.compiled import compiled
from equipoise.planning.planner import plan
from equipoise.planning.policy import Algorithm
from equipoise.planning.topology import ModelShape, Topology
from equipoise.planning.warm_up import warm_up


def test_after_warming_up_a_plan_and_its_judgement_compile_nothing():
    warm_up()
    before = signatures()
    assert len(before) > 30
    model = ModelShape(num_layers=2, num_experts=16, num_groups=4, expert_bytes=1)
    topology = Topology(node_of_rank=("a", "a", "b", "b"), slots_per_rank=6)
    loads = np.random.default_rng(0).lognormal(size=(2, 2, 16)).astype(np.float32)
    for algorithm in Algorithm:
        made = plan(loads[0], model=model, topology=topology, algorithm=algorithm)
        current = Layout(
            generation=1, num_experts=16, num_ranks=4, expert_of_slot=made.expert_of_slot
        )
        chosen = {"model": model, "topology": topology, "algorithm": algorithm}
        plan(loads[1], current=current, samples=1e6, **chosen)
        compare(current, current, *loads)
        plan(loads[1], current=current, exclude_ranks=frozenset({1}), **chosen)
    assert signatures() == before


def test_without_a_folder_for_the_cache_functions_compile_all_the_same():
    namespace = {}
    # A function without a source file has no folder to be cached in.
    exec("def double(value):\n    return 2 * value", namespace)
    double = compiled(namespace["double"])
    assert double(21) == 42
    assert double.nopython_signatures


def test_the_cache_can_be_filled_by_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "equipoise.planning.warm_up"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def signatures():
    """What every compiled function of planning was compiled for."""
    found = {}
    for module in pkgutil.walk_packages(equipoise.planning.__path__, "equipoise.planning."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if hasattr(value, "nopython_signatures"):
                found[module.name, name] = [str(known) for known in value.nopython_signatures]
    return found
