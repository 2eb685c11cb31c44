"""What a worker runs before it serves, so that no step waits for a compiler."""

from dataclasses import replace

import pytest
import torch

from equipoise_kernels.fp8 import configurations
from equipoise_kernels.fp8.attention.mla_prefill import PrefillInputs
from equipoise_kernels.fp8.moe.replica_balance import REPLICA_BALANCE
from equipoise_kernels.fp8.testing.committed import TUNABLES
from equipoise_model.config import Fp8Config
from equipoise_model.fp8 import warm_up as warm_up_module
from equipoise_model.fp8.transformer import Fp8Transformer
from equipoise_model.fp8.warm_up import warm_up, warm_up_balance, warm_up_sizes
from equipoise_model.latent_cache import LatentCache
from tests.support.fp8_models import NARROW
from tests.support.kernel_backends import use_backends


@pytest.fixture(autouse=True)
def twins(monkeypatch):
    use_backends(monkeypatch, "reference")


@pytest.mark.parametrize("max_rows", [1, 2, 64, 100, 4096, 5000])
@pytest.mark.parametrize("rows_per_row", [1, 8 / 32, 8 / 9])
def test_no_step_has_a_configuration_that_a_warm_up_step_did_not_have(max_rows, rows_per_row):
    """`rows_per_row` is what a row brings to a group of the grouped product."""
    sizes = warm_up_sizes(max_rows)
    assert sizes[-1] == max_rows
    for name in TUNABLES:
        for entries in configurations.committed(name).values():
            shapes = {shape for entry in entries for shape in entry.shapes or ()} | {()}
            for shape in shapes:

                def chosen(rows, entries=entries, shape=shape):
                    expected = -(-rows * rows_per_row // 1)
                    return next(e for e in entries if e.fits(expected, shape))

                warm = [chosen(rows) for rows in sizes]
                assert all(chosen(rows) in warm for rows in range(1, max_rows + 1, 7))


def launches(monkeypatch):
    """Rows of every call of an operation, by name."""
    seen = {}
    for name, operation in TUNABLES.items():
        run = operation.backends.get("reference")

        def call(*arguments, _run=run, _name=name, **options):
            first = arguments[0]
            if isinstance(first, PrefillInputs):
                first = first.plain_THn
            if isinstance(first, tuple):
                first = first[0]
            rows = first if isinstance(first, torch.Tensor) else first.codes
            seen.setdefault(_name, set()).add(tuple(rows.shape))
            return _run(*arguments, **options)

        if run is not None:
            monkeypatch.setitem(operation.backends, "reference", call)
    return seen


@pytest.mark.parametrize("shared_as_routed", [False, True])
def test_a_warm_up_launches_every_operation_at_every_size_and_changes_no_latent(
    monkeypatch, shared_as_routed
):
    torch.manual_seed(3)
    config = replace(
        NARROW,
        quantization_config=Fp8Config(),
        num_nextn_predict_layers=1,
        shared_as_routed=shared_as_routed,
    )
    model = Fp8Transformer(config, num_slots=3, num_spare=1, mtp=True)
    for name, tensor in model.state_dict().items():
        if tensor.dtype is torch.bfloat16:
            tensor.normal_(std=0.2)
        elif tensor.dtype is torch.float32:
            tensor.fill_(0.01 if "scale" in name else 0.0)
    cache = LatentCache(config, num_blocks=5, max_len=64, mtp=True, dtype=torch.bfloat16)
    before = cache.latents(0).latents_BPC.clone()
    seen = launches(monkeypatch)
    # This model is too small for the expanded form to pay.
    monkeypatch.setattr(warm_up_module, "expands", lambda config, **sizes: True)
    warm_up(model, cache, max_rows=5)
    assert seen["mla_prefill"] == {(5, 2, 16)}
    assert set(seen) == set(TUNABLES) - {"all_to_all"}
    for name in ("rms_norm_quant", "route", "mla_decode"):
        assert {shape[0] for shape in seen[name]} == {1, 2, 4, 5}, name
    assert torch.equal(cache.latents(0).latents_BPC, before)


def test_balancing_is_launched_with_and_without_shares_for_few_and_many_replicas(monkeypatch):
    run, seen = REPLICA_BALANCE.backends["reference"], []

    def call(ids_TK, counts_RE, tables, **options):
        seen.append((*tables.slots_of_expert_ER.shape, tables.share_ends_ER is not None))
        run(ids_TK, counts_RE, tables, **options)
        assert options["out_TK"].tolist() == [[-1]]

    monkeypatch.setitem(REPLICA_BALANCE.backends, "reference", call)
    warm_up_balance(num_experts=6, num_ranks=3, slots_per_rank=4, device=torch.device("cpu"))
    assert seen == [(6, 8, False), (6, 8, True), (6, 16, False), (6, 16, True)]
