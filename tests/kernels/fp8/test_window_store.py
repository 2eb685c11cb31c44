"""Ranks of different ages meet in torch's symmetric memory."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from equipoise_kernels.fp8.all_to_all import window
from equipoise_kernels.fp8.all_to_all.payload import Payload
from equipoise_kernels.fp8.all_to_all.shape import EpShape
from equipoise_kernels.fp8.all_to_all.window_store import RendezvousStore

TIMEOUT = timedelta(seconds=2)


def shared():
    store = dist.HashStore()
    store.set_timeout(TIMEOUT)
    return store


def rendezvous(store, *, rank, made_before):
    """What `StoreExchange` in CUDASymmetricMemoryUtils.hpp does: two exchanges and a barrier."""
    seen = []
    for number in (made_before, made_before + 1):
        keys = [f"CUDASymmetricMemory/{number}/{peer}" for peer in (0, 1)]
        store.set(keys[rank], f"{number - made_before} of rank {rank}")
        seen.append(store.multi_get(keys))
    barrier = f"CUDASymmetricMemory/{made_before + 2}"
    if store.add(barrier, 1) == 2:
        store.set(barrier + "/done", "1")
    store.wait([barrier + "/done"], TIMEOUT)
    assert store.check([barrier + "/done"])
    return seen


def met(stores, *, ages):
    with ThreadPoolExecutor(2) as pool:
        ranks = [
            pool.submit(rendezvous, store, rank=rank, made_before=age)
            for rank, (store, age) in enumerate(zip(stores, ages, strict=True))
        ]
        return [one.result() for one in ranks]


def test_a_rank_that_has_met_before_meets_one_that_has_not():
    everything = [[b"0 of rank 0", b"0 of rank 1"], [b"1 of rank 0", b"1 of rank 1"]]
    store = shared()
    stores = [RendezvousStore(store) for _ in range(2)]
    assert met(stores, ages=(6, 0)) == [everything, everything]
    # Torch calls it from C++.
    store = shared()
    stores = [RendezvousStore(store) for _ in range(2)]
    assert met([dist.PrefixStore("g", one) for one in stores], ages=(6, 0)) == 2 * [everything]


def test_torchs_own_keys_do_not_meet():
    """Remove `RendezvousStore` once they do."""
    store = shared()
    with pytest.raises(RuntimeError):
        met([store, store], ages=(6, 0))


def test_every_group_gets_a_name_and_a_store_of_its_own(tmp_path):
    file = f"file://{tmp_path / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=file, rank=0, world_size=1)
    try:
        shape = EpShape(
            rank=0, num_ranks=1, slots_per_rank=1, top_k=1, dim=128, max_tokens=1,
            payload=Payload.FP8,
        )  # fmt: skip
        names = []
        for _ in range(2):
            with window.rendezvous_group(shape, group=dist.group.WORLD) as name:
                store = _resolve_process_group(name).get_group_store()
                store.set("CUDASymmetricMemory/9/0", name)
                assert store.get("CUDASymmetricMemory/9/0") == name.encode()
                assert store.get("CUDASymmetricMemory/9/0") == name.encode()
            names.append(name)
            with pytest.raises(RuntimeError):
                _resolve_process_group(name)
        assert len(set(names)) == 2
    finally:
        dist.destroy_process_group()
    assert torch.distributed.is_available()


def test_a_rank_without_memory_for_its_window_leaves_out_no_collective(monkeypatch):
    done = []

    def no_memory(*_arguments):
        done.append("allocate")
        raise RuntimeError("out of memory")

    @contextmanager
    def agreed(_shape, *, group):
        done.append(f"agree in {group}")
        yield "name"

    monkeypatch.setattr(window._SymmetricMemory, "empty_strided_p2p", no_memory)
    monkeypatch.setattr(window, "rendezvous_group", agreed)
    shape = EpShape(
        rank=0, num_ranks=2, slots_per_rank=1, top_k=1, dim=128, max_tokens=1, payload=Payload.FP8
    )
    with pytest.raises(RuntimeError, match="out of memory"):
        window.symmetric_window(shape, group="group", device=torch.device("cuda", 0))
    assert done == ["agree in group", "allocate"]
