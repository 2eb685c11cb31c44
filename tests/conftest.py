"""Set up the process that runs the tests, and the processes that it starts."""

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# Random examples are the same in each run: tests fail for changes only. `make fuzz` draws others.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")

# Triton decides at its first import whether it interprets kernels, and tests of other packages
# import it with torch before the kernel tests are collected.
os.environ["TRITON_INTERPRET"] = "1"

# Products this small lose time to a second thread, most of all on a busy machine: threads of OpenMP
# that wait for one that does not run burn the CPU that it waits for. torch reads it at its import.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# A sixth of the collection's time otherwise. It is enabled again in `pytest_collection_finish`.
gc.disable()


@pytest.fixture(scope="session", autouse=True)
def children_get_default_signals():
    """Start processes with default signal handling, whatever this process inherited.

    `nohup` and a shell's `&` start a process with SIGHUP or SIGINT ignored, and a process passes
    ignored signals on to its children. A handler is not passed on: children get the default, while
    this process still ignores the signal.
    """
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


LONGEST_FILES = (
    # Fleets.
    "chaos/test_chaos.py",
    "e2e/test_main_job.py",
    "balancer/test_high_availability.py",
    "e2e/test_restarts.py",
    # Packages. The first one mostly waits.
    "balancer/test_redis_failover.py",
    "kernels/fp8/test_codegen.py",
    "worker/test_two_ranks.py",
    "simulation/test_simulation.py",
    "cli/test_every_command.py",
    "model/fp8/test_ranks.py",
    "worker/test_group.py",
    "gateway/test_hostile_fields.py",
    "balancer/test_linearizability.py",
    "model/test_expert_parallel.py",
    "model/test_serving_paths.py",
    "model/test_checkpoint_memory.py",
    "kernels/fp8/test_bench.py",
    "kernels/fp8/test_all_to_all_processes.py",
)


def pytest_collection_modifyitems(items):
    """Start with the longest files, so that no worker is left alone with one at the end."""
    folder = Path(__file__).parent
    place = {folder / name: number for number, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_collection_finish():
    """Spare the garbage collector the objects of modules and tests, which live to the end.

    It runs as rarely as in a balancer, which saves a fiftieth of the tests' time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()
