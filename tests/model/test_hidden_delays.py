"""How much of the time of exchanges two micro-batches hide: on a virtual clock, and a real one."""

from pathlib import Path

import pytest
import torch

from tests.model.overlap_rank import CONFIG, HALF_S, NUM_RANKS, SHARES
from tests.support.rank_processes import run_ranks

PROGRAM = Path(__file__).with_name("overlap_rank.py")

KINDS = ("fixed", "per byte")

LEAST_HIDDEN = {"virtual": 0.9, "real": 0.85}
"""Of delays up to the computation beside them; a busy machine adds to real steps."""

CLOCKS = ["virtual", pytest.param("real", marks=pytest.mark.benchmark)]


@pytest.fixture(scope="module", params=CLOCKS)
def times(request, tmp_path_factory):
    """Seconds of a step, and of all its delays: by order, kind of delay, and share of `HALF_S`."""
    folder = tmp_path_factory.mktemp("overlap")
    run_ranks(
        PROGRAM,
        [(rank, folder / "meet", folder / str(rank), request.param) for rank in range(NUM_RANKS)],
        timeout_s=500,
    )
    return torch.load(folder / "0", weights_only=False)


def hidden(times, name, kind, share):
    """The share of all delays that costs the step no time."""
    step_s, delays_s = times[name, kind, share]
    return 1 - (step_s - times[name, "none", 0.0][0]) / delays_s


def test_delays_up_to_the_computation_beside_them_are_hidden(times, request):
    least = LEAST_HIDDEN["real" if "real" in request.node.callspec.id else "virtual"]
    for name, kind, share in times:
        if kind != "none":
            step_s, delays_s = times[name, kind, share]
            print(
                f"{name}, {kind}, {1e3 * share * HALF_S:.0f} ms: step {1e3 * step_s:.0f} ms, "
                f"delays {1e3 * delays_s:.0f} ms, hidden {hidden(times, name, kind, share):.2f}"
            )
    for kind in KINDS:
        # Beside an exchange in prefill: attention, or the experts, of the other half.
        for share in SHARES:
            assert hidden(times, "prefill", kind, share) >= least
        # In decode: a half of that attention.
        assert hidden(times, "decode", kind, 0.5) >= least


def test_nothing_is_hidden_without_a_cut_or_when_the_schedule_is_serial(times):
    for kind in KINDS:
        for name in ("whole", "serial"):
            assert abs(hidden(times, name, kind, 1.0)) < 0.1


def test_delays_per_byte_are_halved_by_a_cut_and_fixed_ones_are_not(times):
    (_, whole_s), (_, cut_s) = (times[name, "per byte", 1.0] for name in ("whole", "prefill"))
    assert cut_s == pytest.approx(whole_s, rel=0.01)
    (_, whole_s), (_, cut_s) = (times[name, "fixed", 1.0] for name in ("whole", "prefill"))
    assert cut_s == pytest.approx(2 * whole_s, rel=0.01)


def test_a_cut_step_takes_as_long_as_the_ideal_schedule(times, request):
    if "real" in request.node.callspec.id:
        pytest.skip("exact on the virtual clock only")
    layers = CONFIG.num_moe_layers
    for kind in KINDS:
        for share in SHARES:
            # Every delay lies beside computation that takes as long, or longer; but the last one.
            computation_s, delay_s = 4 * layers * HALF_S, share * HALF_S
            step_s, _ = times["prefill", kind, share]
            assert step_s == pytest.approx(computation_s + delay_s)
            # Of a layer: the sum over halves of max(d, A0) + experts + max(d, A1), where A0 and A1
            # are halves of its attention. The first attention has nothing beside it.
            step_s, _ = times["decode", kind, share]
            layer_s = 2 * (2 * max(delay_s, HALF_S / 2) + HALF_S)
            assert step_s == pytest.approx(layers * layer_s + HALF_S)
