"""Select kernel backends for the length of one test."""

from equipoise_kernels.fp8 import selection


def works(_operation, _backend):
    """An obstacle function that finds none."""
    return


def use_backends(monkeypatch, chosen):
    """Run the rest of a test with a selection, or with what EQUIPOISE_KERNELS=`chosen` selects."""
    if isinstance(chosen, str):
        chosen = selection.resolve(chosen, works)
    process = selection._Process(own=chosen, current=chosen)
    monkeypatch.setattr(selection, "_process", process)
