"""`RendezvousStore`: a group's store for torch's symmetric memory, whose keys start at 0.

Torch numbers the keys of a rendezvous by all those that the process has made (`StoreExchange` in
CUDASymmetricMemoryUtils.hpp; pytorch issue 196082). Ranks of a new group would therefore wait for
each other's keys until the store's timeout if some of them had been in groups before. This store
counts from the first number that its process uses, so ranks of any age meet.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

# "CUDASymmetricMemory/12/0" for rank 0 of an exchange, "CUDASymmetricMemory/13" for a barrier.
_NUMBER = re.compile(r"(?<=/)\d+(?=/|$)")


class RendezvousStore(Store):
    """One rank's view of a store, for one rendezvous."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._first: int | None = None

    def set(self, key: str, value: str) -> None:
        """See `torch.distributed.Store`."""
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        """See `torch.distributed.Store`."""
        value: bytes = self._store.get(self._key(key))
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """See `torch.distributed.Store`."""
        return [self._store.get(self._key(key)) for key in keys]

    def add(self, key: str, value: int) -> int:
        """See `torch.distributed.Store`."""
        total: int = self._store.add(self._key(key), value)
        return total

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See `torch.distributed.Store`."""
        own = [self._key(key) for key in keys]
        if timeout is None:
            self._store.wait(own)
        else:
            self._store.wait(own, timeout)

    def check(self, keys: list[str]) -> bool:
        """See `torch.distributed.Store`."""
        exist: bool = self._store.check([self._key(key) for key in keys])
        return exist

    def _key(self, key: str) -> str:
        def renumbered(found: re.Match[str]) -> str:
            if self._first is None:
                self._first = int(found[0])
            return str(int(found[0]) - self._first)

        return _NUMBER.sub(renumbered, key, count=1)
