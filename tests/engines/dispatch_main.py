"""`python -m tests.engines.dispatch_main`: compares the ranks' dispatch rule with vLLM's kernel.

The kernel runs in Triton's interpreter, on a CPU: too slow for the ranks.
"""

import importlib
import inspect
import os

import numpy as np
import torch

from tests.engines import stubs

EXPERTS, SLOTS, TOKENS, TOP_K = 32, 40, 300, 4


def main():
    os.environ["TRITON_INTERPRET"] = "1"
    stubs.install()
    import triton
    import triton.language
    from vllm import platforms, triton_utils
    from vllm.distributed.eplb.eplb_state import EplbLayerState

    from tests.engines import vllm_rank

    # vLLM defines the kernel for GPUs only.
    type(platforms.current_platform).is_cuda_alike = lambda _platform: True
    triton_utils.triton, triton_utils.tl = triton, triton.language
    router = importlib.import_module("vllm.model_executor.layers.fused_moe.router.base_router")
    kernel = importlib.reload(router).eplb_map_to_physical_and_record
    wanted = inspect.signature(kernel).parameters
    draw = np.random.default_rng(3)
    seen = []
    for enabled in (True, False):
        state = EplbLayerState()
        table = draw.permutation([*range(EXPERTS), *draw.integers(0, EXPERTS, SLOTS - EXPERTS)])
        state.logical_replica_count = torch.from_numpy(np.bincount(table, minlength=EXPERTS))
        state.logical_to_physical_map = torch.full((EXPERTS, SLOTS), -1)
        for expert in range(EXPERTS):
            slots = np.flatnonzero(table == expert)
            state.logical_to_physical_map[expert, : len(slots)] = torch.from_numpy(slots)
        if "record_enabled" in wanted:
            state.should_record_tensor = torch.tensor([enabled])
        topk = torch.from_numpy(draw.random((TOKENS, EXPERTS)).argsort(axis=1)[:, :TOP_K].copy())
        found = []
        for rule in (vllm_rank.dispatch, None):
            state.expert_load_view = torch.zeros(SLOTS, dtype=torch.int32)
            if rule is not None:
                slot = rule(state, topk)
            else:
                known = {
                    "topk_ids": topk,
                    "record_enabled": getattr(state, "should_record_tensor", None),
                    **vars(state),
                }
                slot = kernel(**{name: known[name] for name in wanted if name in known})
            found.append((slot.tolist(), state.expert_load_view.tolist()))
        assert found[0] == found[1], found
        seen.append(sum(found[0][1]))
    assert seen[0] == TOKENS * TOP_K
    print(f"the same, {seen} counted")


if __name__ == "__main__":
    main()
