"""Counts the memory of tensors while they live: what a call allocates, at its peak."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations within the block return, at most at once: `peak`.

    Results that share memory with an argument are no new ones, so weights and caches do not count.
    Counts the meta device's tensors too. What an operation allocates within itself does not show.
    """

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._live = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        # An address may be used again.
        self._live = {place: one for place, one in self._live.items() if not one[0].expired()}
        for storage in _storages(result):
            if storage._cdata not in given:
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


def _storages(values):
    leaves = tree_leaves(values)
    return [one.untyped_storage() for one in leaves if isinstance(one, torch.Tensor)]
