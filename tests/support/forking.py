"""Processes that start with torch and gRPC imported."""

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

# Nothing of ours: the server would import it from where it is installed, not from this checkout.
_PRELOADED = ["numpy", "grpc.aio", "torch.distributed", "triton", "pytest"]


def forking() -> ForkServerContext:
    """Start processes by forking one that has only imported: two seconds of CPU less for each.

    They do not inherit what runs in this process (threads, event loops, servers), and have its
    environment as of the first call, but, as workers do, do not interpret Triton's kernels.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    interpret = os.environ.pop("TRITON_INTERPRET", None)
    forkserver.ensure_running()
    if interpret is not None:
        os.environ["TRITON_INTERPRET"] = interpret
    return context
