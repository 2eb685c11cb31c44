"""Processes that start with torch, gRPC and the worker imported."""

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

import pytest

_PRELOADED = ["triton", "pytest", "equipoise.worker.__main__", "equipoise.engines.lockstep"]


def forking() -> ForkServerContext:
    """Start processes by forking one that has only imported: three seconds of CPU less for each.

    They do not inherit what runs in this process (threads, event loops, servers), and have its
    environment as of the first call, but, as workers do, do not interpret Triton's kernels.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        # The server does not take over this process's import path.
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    return context
